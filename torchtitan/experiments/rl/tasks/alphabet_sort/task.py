"""Several user turns: sort names, then merge more into the list. Copy this folder for a conversation that follows a script."""

from dataclasses import dataclass, field
from typing import Annotated, Any

from annotated_types import Ge

from torchtitan.experiments.rl.bounds import PositiveInt
from torchtitan.experiments.rl.data.dataset import Dataset
from torchtitan.experiments.rl.data.made import MadeDataset
from torchtitan.experiments.rl.envs.renderer_env import RendererEnvConfig
from torchtitan.experiments.rl.errors import ConfigError
from torchtitan.experiments.rl.rollouts.policy import SamplingConfig
from torchtitan.experiments.rl.rollouts.types import DataSample
from torchtitan.experiments.rl.rubrics.rubric import Rubric
from torchtitan.experiments.rl.tasks.alphabet_sort.data import NAMES, make_examples
from torchtitan.experiments.rl.tasks.alphabet_sort.env import AlphabetSortEnv
from torchtitan.experiments.rl.tasks.alphabet_sort.rubric import AlphabetSortRubric
from torchtitan.experiments.rl.tasks.task import Task


class AlphabetSortDataset(MadeDataset):
    @dataclass(kw_only=True, slots=True)
    class Config(MadeDataset.Config):
        min_rounds: PositiveInt = 2
        max_rounds: PositiveInt = 3
        """Lists of names in an example. The model has one turn for each."""
        min_names: Annotated[int, Ge(2)] = 2
        """At least 2: a single name needs no sorting, and there are too few single names for two splits."""
        max_names: Annotated[int, Ge(2)] = 5
        """Names in each list."""

        def validate(self, *, field: str) -> None:
            """Raises ConfigError where no example can be made."""
            for name, low, high in (("rounds", self.min_rounds, self.max_rounds), ("names", self.min_names, self.max_names)):
                if low > high:
                    raise ConfigError(f"{field}.min_{name}", low, f"must be at most max_{name} = {high}")
            if self.max_rounds * self.max_names > len(NAMES):
                cure = f"with max_rounds = {self.max_rounds} more than the {len(NAMES)} names there are; lower either"
                raise ConfigError(f"{field}.max_names", self.max_names, cure)

    make = staticmethod(make_examples)

    def info(self, rounds: list[list[str]]) -> dict[str, Any]:
        return {"rounds": len(rounds), "names": sum(map(len, rounds))}


class AlphabetSortTask(Task):
    @dataclass(kw_only=True, slots=True)
    class Config(Task.Config):
        dataset: Dataset.Config = field(default_factory=AlphabetSortDataset.Config)
        validation: Dataset.Config | None = field(
            default_factory=lambda: AlphabetSortDataset.Config(split="validation", count=64, seed=1)
        )
        rubric: Rubric.Config = field(default_factory=AlphabetSortRubric.Config)
        env: RendererEnvConfig = field(default_factory=lambda: RendererEnvConfig(max_turns=8, max_rollout_tokens=1024))
        sampling: SamplingConfig = field(default_factory=lambda: SamplingConfig(max_tokens=128))

        def validate(self, *, field: str, policy_path: str | None = None) -> None:
            super(AlphabetSortTask.Config, self).validate(field=field, policy_path=policy_path)
            for name, dataset in (("dataset", self.dataset), ("validation", self.validation)):
                if isinstance(dataset, AlphabetSortDataset.Config) and dataset.max_rounds > self.env.max_turns:
                    cure = f"{field}.{name} has up to {dataset.max_rounds} rounds, a turn each: raise this"
                    raise ConfigError(f"{field}.env.max_turns", self.env.max_turns, cure)

    def make_env(self, sample: DataSample) -> AlphabetSortEnv:
        return AlphabetSortEnv(sample.env_input)
