"""Datasets whose examples a function makes."""

import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Literal

from annotated_types import Ge, Le

from torchtitan.experiments.rl.bounds import Cure
from torchtitan.experiments.rl.data.dataset import Dataset
from torchtitan.experiments.rl.rollouts.types import DataSample

MADE_AT_ONCE = Cure("all examples are made when the run starts; for more, write a Dataset that makes each when it is asked for")


class MadeDataset(Dataset):
    """Makes all its examples when it is built, from its Config alone: the same Config gives the same examples.

    A subclass adds fields to the Config and defines ``make``, which gets every field by name:

        class SumDigitsDataset(MadeDataset):
            @dataclass(kw_only=True, slots=True)
            class Config(MadeDataset.Config):
                max_digits: int = 5

            make = staticmethod(make_examples)  # make_examples(split=, count=, seed=, max_digits=) -> list
    """

    @dataclass(kw_only=True, slots=True)
    class Config(Dataset.Config):
        split: Literal["train", "validation"] = "train"
        """No example of one split is ever in the other, whatever the seed."""
        count: Annotated[int, Ge(1), Le(10_000_000), MADE_AT_ONCE] = 10_000
        """Examples to make."""
        seed: int = 0

    def __init__(self, config: Config):
        super().__init__(config)
        self.examples = self.make(**{field.name: getattr(config, field.name) for field in dataclasses.fields(config)})

    make: Callable[..., Sequence[Any]]
    """A function: gets each field of the Config by name, and returns the examples. Each is the ``env_input`` of a data
    sample."""

    def info(self, example: Any) -> dict[str, Any]:
        """``DataSample.info`` of an example."""
        return {}

    def __len__(self) -> int:
        return len(self.examples)

    def __getitem__(self, index: int) -> DataSample:
        example = self.examples[index]
        return DataSample(sample_id=str(index), env_input=example, info=self.info(example))
