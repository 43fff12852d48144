"""Digit sums in several turns: the smallest task whose env says something worth foreseeing, as Echo needs."""

from dataclasses import dataclass, field

from torchtitan.experiments.rl.data.dataset import Dataset
from torchtitan.experiments.rl.envs.renderer_env import RendererEnvConfig
from torchtitan.experiments.rl.rollouts.policy import SamplingConfig
from torchtitan.experiments.rl.rollouts.types import DataSample
from torchtitan.experiments.rl.rubrics.rubric import Rubric, env_component
from torchtitan.experiments.rl.tasks.sum_digits.task import SumDigitsDataset
from torchtitan.experiments.rl.tasks.sum_digits_rounds.env import SumDigitsRoundsEnv
from torchtitan.experiments.rl.tasks.task import Task


class SumDigitsRoundsDataset(SumDigitsDataset):
    """The lists of sum_digits, ``rounds`` after one another; a sample's ``env_input`` is a list of lists."""

    @dataclass(kw_only=True, slots=True)
    class Config(SumDigitsDataset.Config):
        rounds: int = 2

    def __init__(self, config: Config):
        super().__init__(config)
        self._rounds = config.rounds

    def __len__(self) -> int:
        return len(self._lists) // self._rounds

    def __getitem__(self, index: int) -> DataSample:
        if not -len(self) <= index < len(self):
            raise IndexError(index)
        start = index % len(self) * self._rounds
        return DataSample(sample_id=str(index), env_input=self._lists[start : start + self._rounds])


class SumDigitsRoundsTask(Task):
    @dataclass(kw_only=True, slots=True)
    class Config(Task.Config):
        dataset: Dataset.Config = field(default_factory=SumDigitsRoundsDataset.Config)
        validation: Dataset.Config | None = field(
            default_factory=lambda: SumDigitsRoundsDataset.Config(split="validation", count=256, seed=1)
        )
        rubric: Rubric.Config = field(default_factory=lambda: Rubric.Config(reward_fns=[env_component("right")]))
        env: RendererEnvConfig = field(default_factory=lambda: RendererEnvConfig(max_turns=2, max_rollout_tokens=192))
        sampling: SamplingConfig = field(default_factory=lambda: SamplingConfig(max_tokens=8))

    def make_env(self, sample: DataSample) -> SumDigitsRoundsEnv:
        return SumDigitsRoundsEnv(sample.env_input)
