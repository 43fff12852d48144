"""Environments of the verifiers package, which bring data, conversations, tools and rewards. For real models.

This file imports no verifiers: `verifiers_env.py` does.
"""

import json
from dataclasses import dataclass, field
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from typing import Any, Literal

from renderers import Renderer

from torchtitan.experiments.rl.bounds import PositiveInt
from torchtitan.experiments.rl.data.dataset import Dataset
from torchtitan.experiments.rl.envs.renderer_env import RendererEnvConfig
from torchtitan.experiments.rl.errors import ConfigError, MissingError
from torchtitan.experiments.rl.gateway.server import Endpoint
from torchtitan.experiments.rl.rollouts.policy import SamplingConfig
from torchtitan.experiments.rl.rollouts.types import DataSample
from torchtitan.experiments.rl.rubrics.rubric import Rubric, env_component
from torchtitan.experiments.rl.tasks.agent import AgentTask
from torchtitan.experiments.rl.user_code.calls import cause_of

CURE = "pip install verifiers==0.3.1"
"""Later versions have no such environments (their tasks are played by programs in sandboxes, which is another adapter)."""


class VerifiersDataset(Dataset):
    @dataclass(kw_only=True, slots=True)
    class Config(Dataset.Config):
        environment: str
        """Name of the environment, as verifiers.load_environment takes it: its module, installed or on PYTHONPATH, with hyphens
        or underscores, and with or without an owner before a slash."""
        args: dict[str, Any] = field(default_factory=dict)
        """Arguments of the module's load_environment; plain JSON values."""
        split: Literal["train", "eval"] = "train"
        count: PositiveInt | None = None
        """The first so many rows. None: all."""

        @property
        def module(self) -> str:
            return self.environment.rpartition("/")[2].replace("-", "_")

        def validate(self, *, field: str) -> None:
            if not self.module.isidentifier():
                raise ConfigError(f"{field}.environment", self.environment, "name the environment's module")
            try:
                json.dumps(self.args)
            except TypeError as error:
                raise ConfigError(f"{field}.args", self.args, f"must be plain JSON values: {error}") from None

        def check_present(self, *, field: str) -> None:
            try:
                found = version("verifiers")
            except PackageNotFoundError:
                raise MissingError(f"{field}.environment", self.environment, f"needs verifiers: {CURE}") from None
            if tuple(map(int, found.split(".")[:2])) >= (0, 4):
                raise MissingError(f"{field}.environment", self.environment, f"verifiers {found} can't load it: {CURE}")
            if find_spec(self.module) is None:
                cure = f"no module {self.module!r}: install the environment's package, or put its folder on PYTHONPATH"
                raise MissingError(f"{field}.environment", self.environment, cure)

        def load(self) -> Any:
            """The environment; the same object for the same name and arguments.

            Raises:
                ConfigError: its code failed, or it can't be trained on here.
            """
            from torchtitan.experiments.rl.compat.verifiers import compares_rollouts
            from torchtitan.experiments.rl.tasks.verifiers_env import load_environment

            try:
                environment = load_environment(self.environment, json.dumps(self.args, sort_keys=True))
            except Exception as error:
                cure = f"can't be loaded: {cause_of(error.__cause__ or error)}"
                raise ConfigError("dataset.environment", self.environment, cure) from error
            if compares_rollouts(environment):
                cure = "its rubric compares rollouts: give each its reward, and leave comparing to the algorithm"
                raise ConfigError("dataset.environment", self.environment, cure)
            if not environment.score_rollouts:
                raise ConfigError("dataset.environment", self.environment, "it is set not to score rollouts (score_rollouts)")
            return environment

    def __init__(self, config: Config):
        super().__init__(config)
        environment = config.load()
        # Asked for an eval dataset it doesn't have, an environment gives the training rows.
        rows = environment.build_dataset() if config.split == "train" else environment.build_eval_dataset()
        if rows is None:
            cure = f"environment {config.environment} has no such dataset; validation = None goes without"
            raise ConfigError("dataset.split", config.split, cure)
        self._rows = rows if config.count is None else rows.select(range(min(config.count, len(rows))))

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, index: int) -> DataSample:
        row = self._rows[index]
        answer = row.get("answer")
        info = {"demonstration": answer} if isinstance(answer, str) and answer else {}
        return DataSample(sample_id=str(index), env_input=row, info=info)


__all__ = ["VerifiersDataset", "VerifiersTask"]


class VerifiersTask(AgentTask):
    """A rollout that reaches sampling.max_tokens, env.max_turns or env.max_rollout_tokens is not scored by the environment: its
    reward is the rubric's truncation_reward, or 0. A rollout that reaches a limit of the environment, such as its max_turns, is
    completed and scored.
    """

    @dataclass(kw_only=True, slots=True)
    class Config(AgentTask.Config):
        dataset: VerifiersDataset.Config
        validation: Dataset.Config | None = None
        """Of the same environment with the same arguments; split "eval" where it has one."""
        rubric: Rubric.Config = field(default_factory=lambda: Rubric.Config(reward_fns=[env_component("reward")]))
        """The environment's own reward; its functions' values are logged beside it. To weigh them otherwise, name them."""
        env: RendererEnvConfig = field(default_factory=lambda: RendererEnvConfig(max_turns=64, max_rollout_tokens=4096))
        sampling: SamplingConfig = field(default_factory=lambda: SamplingConfig(max_tokens=3072))

        def validate(self, *, field: str, policy_path: str | None = None) -> None:
            super(VerifiersTask.Config, self).validate(field=field, policy_path=policy_path)
            other = self.validation
            if isinstance(other, VerifiersDataset.Config) and (other.module, other.args) != (
                self.dataset.module,
                self.dataset.args,
            ):
                cure = f"must be {self.dataset.environment!r} with the same args: a task has one environment"
                raise ConfigError(f"{field}.validation.environment", other.environment, cure)

    def __init__(self, config: Config, *, name: str, renderer: Renderer, seed: int = 0):
        super().__init__(config, name=name, renderer=renderer, seed=seed)
        self.environment = config.dataset.load()

    async def run_agent(self, sample: DataSample, endpoint: Endpoint) -> dict[str, float]:
        """See AgentTask."""
        from torchtitan.experiments.rl.tasks.verifiers_env import play  # imports verifiers

        return await play(self.environment, sample.env_input, endpoint)

    async def run_rollout(self, env: Any, policy: Any) -> None:
        """See Task. The environment's rewards are those of the last turn, as an env's are."""
        await super().run_rollout(env, policy)
        if env.answer is not None and env.turns:
            env.turns[-1].reward_components = env.answer
