"""The smallest complete task; copy this folder to start your own."""

from dataclasses import dataclass, field
from typing import Annotated, Any

from annotated_types import Ge, Le

from torchtitan.experiments.rl.bounds import Cure
from torchtitan.experiments.rl.data.dataset import Dataset
from torchtitan.experiments.rl.data.made import MadeDataset
from torchtitan.experiments.rl.envs.renderer_env import RendererEnvConfig
from torchtitan.experiments.rl.errors import ConfigError
from torchtitan.experiments.rl.rollouts.policy import SamplingConfig
from torchtitan.experiments.rl.rollouts.types import DataSample
from torchtitan.experiments.rl.rubrics.rubric import Rubric
from torchtitan.experiments.rl.tasks.sum_digits.data import answer_text, make_examples
from torchtitan.experiments.rl.tasks.sum_digits.env import SumDigitsEnv
from torchtitan.experiments.rl.tasks.sum_digits.rubric import SumDigitsRubric
from torchtitan.experiments.rl.tasks.task import Task

INSTRUCTION = 'End your reply with the line "Answer: N", where N is the sum.'


class SumDigitsDataset(MadeDataset):
    @dataclass(kw_only=True, slots=True)
    class Config(MadeDataset.Config):
        min_digits: Annotated[int, Ge(2), Cure("lists of one digit are too few to split")] = 2
        max_digits: Annotated[int, Ge(2), Le(1000)] = 5

        def validate(self, *, field: str) -> None:
            """Raises ConfigError where no example can be made."""
            if self.min_digits > self.max_digits:
                raise ConfigError(f"{field}.min_digits", self.min_digits, f"must be at most max_digits = {self.max_digits}")

    make = staticmethod(make_examples)

    def info(self, digits: list[int]) -> dict[str, Any]:
        return {"digits": len(digits), "demonstration": answer_text(digits)}


class SumDigitsTask(Task):
    @dataclass(kw_only=True, slots=True)
    class Config(Task.Config):
        dataset: Dataset.Config = field(default_factory=SumDigitsDataset.Config)
        validation: Dataset.Config | None = field(
            default_factory=lambda: SumDigitsDataset.Config(split="validation", count=64, seed=1)
        )
        instruction: str = INSTRUCTION
        """Stands below the question and says how to write the answer. The tiny models have seen questions without ("")."""
        rubric: Rubric.Config = field(default_factory=SumDigitsRubric.Config)
        env: RendererEnvConfig = field(default_factory=lambda: RendererEnvConfig(max_turns=1, max_rollout_tokens=128))
        sampling: SamplingConfig = field(default_factory=lambda: SamplingConfig(max_tokens=16))

    config: Config

    def make_env(self, sample: DataSample) -> SumDigitsEnv:
        return SumDigitsEnv(sample.env_input, instruction=self.config.instruction)
