"""A tool the model must call. Copy this folder for an env with tools of its own."""

from dataclasses import dataclass, field
from typing import Annotated

from annotated_types import Interval

from torchtitan.experiments.rl.data.dataset import Dataset
from torchtitan.experiments.rl.data.made import MadeDataset
from torchtitan.experiments.rl.envs.renderer_env import RendererEnvConfig
from torchtitan.experiments.rl.errors import ConfigError
from torchtitan.experiments.rl.rollouts.policy import SamplingConfig
from torchtitan.experiments.rl.rollouts.types import DataSample
from torchtitan.experiments.rl.rubrics.rubric import Rubric
from torchtitan.experiments.rl.tasks.calculator.data import make_examples
from torchtitan.experiments.rl.tasks.calculator.env import CalculatorEnv
from torchtitan.experiments.rl.tasks.calculator.rubric import CalculatorRubric
from torchtitan.experiments.rl.tasks.task import Task

Operands = Annotated[int, Interval(ge=2, le=20)]
"""What stays within the calculator's bounds: 20 factors of 999 have 200 bits and 118 characters."""


class CalculatorDataset(MadeDataset):
    @dataclass(kw_only=True, slots=True)
    class Config(MadeDataset.Config):
        min_operands: Operands = 2
        max_operands: Operands = 4
        """Numbers in an expression."""
        max_operand: Annotated[int, Interval(ge=9, le=999)] = 999

        def validate(self, *, field: str) -> None:
            """Raises ConfigError where no example can be made."""
            if self.min_operands > self.max_operands:
                cure = f"must be at most max_operands = {self.max_operands}"
                raise ConfigError(f"{field}.min_operands", self.min_operands, cure)

    make = staticmethod(make_examples)


class CalculatorTask(Task):
    @dataclass(kw_only=True, slots=True)
    class Config(Task.Config):
        dataset: Dataset.Config = field(default_factory=CalculatorDataset.Config)
        validation: Dataset.Config | None = field(
            default_factory=lambda: CalculatorDataset.Config(split="validation", count=64, seed=1)
        )
        rubric: Rubric.Config = field(default_factory=CalculatorRubric.Config)
        env: RendererEnvConfig = field(default_factory=lambda: RendererEnvConfig(max_turns=4, max_rollout_tokens=1024))
        sampling: SamplingConfig = field(default_factory=lambda: SamplingConfig(max_tokens=128))

        def validate(self, *, field: str, policy_path: str | None = None) -> None:
            super(CalculatorTask.Config, self).validate(field=field, policy_path=policy_path)
            if self.env.max_turns < 2:
                raise ConfigError(f"{field}.env.max_turns", self.env.max_turns, "a call and an answer take 2 turns: raise this")

    def make_env(self, sample: DataSample) -> CalculatorEnv:
        return CalculatorEnv(sample.env_input)
