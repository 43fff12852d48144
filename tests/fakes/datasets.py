"""Datasets of numbers, and what a sampler draws of them."""

from dataclasses import dataclass
from typing import Protocol

from torchtitan.experiments.rl.data.dataset import Dataset
from torchtitan.experiments.rl.rollouts.types import DataSample


class Numbers(Dataset):
    """Dataset whose example i has the id "i" and the input i."""

    @dataclass(kw_only=True, slots=True)
    class Config(Dataset.Config):
        count: int = 4

    config: Config

    def __len__(self) -> int:
        return self.config.count

    def __getitem__(self, index: int) -> DataSample:
        if not 0 <= index < self.config.count:
            raise IndexError(index)
        return DataSample(sample_id=str(index), env_input=index)


class Sampler(Protocol):
    """Sampler that returns its examples at once."""

    def next(self) -> DataSample: ...


def draw(sampler: Sampler, count: int) -> list[DataSample]:
    """Return the next examples of a sampler."""
    return [sampler.next() for _ in range(count)]


def drawn_ids(sampler: Sampler, count: int) -> list[str]:
    """Return the ids of the next examples of a sampler."""
    return [sample.sample_id for sample in draw(sampler, count)]
