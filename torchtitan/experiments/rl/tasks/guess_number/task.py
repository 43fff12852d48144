"""A game of several turns with a reward only at its end. Copy this folder for an env that reacts to what the model does."""

from dataclasses import dataclass, field
from typing import Annotated

from annotated_types import Ge

from torchtitan.experiments.rl.bounds import PositiveInt
from torchtitan.experiments.rl.data.dataset import Dataset
from torchtitan.experiments.rl.data.made import MadeDataset
from torchtitan.experiments.rl.envs.renderer_env import RendererEnvConfig
from torchtitan.experiments.rl.errors import ConfigError
from torchtitan.experiments.rl.rollouts.policy import SamplingConfig
from torchtitan.experiments.rl.rollouts.types import DataSample
from torchtitan.experiments.rl.rubrics.rubric import Rubric
from torchtitan.experiments.rl.tasks.guess_number.data import first_numbers, make_examples
from torchtitan.experiments.rl.tasks.guess_number.env import GuessNumberEnv
from torchtitan.experiments.rl.tasks.guess_number.rubric import GuessNumberRubric
from torchtitan.experiments.rl.tasks.task import Task


class GuessNumberDataset(MadeDataset):
    @dataclass(kw_only=True, slots=True)
    class Config(MadeDataset.Config):
        numbers: Annotated[int, Ge(2)] = 100
        """Numbers in a game's range. Halving it finds every one of 2^g - 1 numbers within g guesses."""
        max_number: PositiveInt = 1000
        """Largest number of any range."""
        guesses: PositiveInt = 7

        def validate(self, *, field: str) -> None:
            """Raises ConfigError where no game can be made."""
            if not first_numbers(split=self.split, numbers=self.numbers, max_number=self.max_number):
                cure = f"leaves no range of {self.numbers} numbers to {self.split}: raise it"
                raise ConfigError(f"{field}.max_number", self.max_number, cure)

    make = staticmethod(make_examples)


class GuessNumberTask(Task):
    @dataclass(kw_only=True, slots=True)
    class Config(Task.Config):
        dataset: Dataset.Config = field(default_factory=GuessNumberDataset.Config)
        validation: Dataset.Config | None = field(
            default_factory=lambda: GuessNumberDataset.Config(split="validation", count=64, seed=1)
        )
        exact: bool = False
        """A guess is the only integer of its reply: what the tiny models have learned. False: the reply's final answer."""
        rubric: Rubric.Config = field(default_factory=GuessNumberRubric.Config)
        env: RendererEnvConfig = field(default_factory=lambda: RendererEnvConfig(max_turns=8, max_rollout_tokens=1024))
        sampling: SamplingConfig = field(default_factory=lambda: SamplingConfig(max_tokens=128))

        def validate(self, *, field: str, policy_path: str | None = None) -> None:
            super(GuessNumberTask.Config, self).validate(field=field, policy_path=policy_path)
            for name, dataset in (("dataset", self.dataset), ("validation", self.validation)):
                if isinstance(dataset, GuessNumberDataset.Config) and dataset.guesses > self.env.max_turns:
                    cure = f"{field}.{name} allows {dataset.guesses} guesses, a turn each: raise this"
                    raise ConfigError(f"{field}.env.max_turns", self.env.max_turns, cure)

    config: Config

    def make_env(self, sample: DataSample) -> GuessNumberEnv:
        return GuessNumberEnv(sample.env_input, exact=self.config.exact)
