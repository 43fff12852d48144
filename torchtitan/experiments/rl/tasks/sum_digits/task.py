"""The smallest complete task; copy this folder to start your own."""

from dataclasses import dataclass, field
from typing import Literal

from torchtitan.experiments.rl.data.dataset import Dataset
from torchtitan.experiments.rl.envs.renderer_env import RendererEnvConfig
from torchtitan.experiments.rl.rollouts.policy import SamplingConfig
from torchtitan.experiments.rl.rollouts.types import DataSample
from torchtitan.experiments.rl.rubrics.rubric import Rubric
from torchtitan.experiments.rl.tasks.sum_digits.data import answer_text, make_examples
from torchtitan.experiments.rl.tasks.sum_digits.env import SumDigitsEnv
from torchtitan.experiments.rl.tasks.sum_digits.rubric import SumDigitsRubric
from torchtitan.experiments.rl.tasks.task import Task


class SumDigitsDataset(Dataset):
    @dataclass(kw_only=True, slots=True)
    class Config(Dataset.Config):
        split: Literal["train", "validation"] = "train"
        count: int = 10_000
        seed: int = 0
        min_digits: int = 2
        max_digits: int = 5

    def __init__(self, config: Config):
        self._lists = make_examples(
            config.count, split=config.split, seed=config.seed, min_digits=config.min_digits, max_digits=config.max_digits
        )

    def __len__(self) -> int:
        return len(self._lists)

    def __getitem__(self, index: int) -> DataSample:
        digits = self._lists[index]
        info = {"digits": len(digits), "demonstration": answer_text(digits)}
        return DataSample(sample_id=str(index), env_input=digits, info=info)


class SumDigitsTask(Task):
    @dataclass(kw_only=True, slots=True)
    class Config(Task.Config):
        dataset: Dataset.Config = field(default_factory=SumDigitsDataset.Config)
        validation: Dataset.Config | None = field(
            default_factory=lambda: SumDigitsDataset.Config(split="validation", count=64, seed=1)
        )
        rubric: Rubric.Config = field(default_factory=SumDigitsRubric.Config)
        env: RendererEnvConfig = field(default_factory=lambda: RendererEnvConfig(max_turns=1, max_rollout_tokens=128))
        sampling: SamplingConfig = field(default_factory=lambda: SamplingConfig(max_tokens=16))

    def make_env(self, sample: DataSample) -> SumDigitsEnv:
        return SumDigitsEnv(sample.env_input)
