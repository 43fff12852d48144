"""Environments of the verifiers package, which bring data, conversations, tools and rewards. For real models."""

from dataclasses import dataclass, field

from renderers import Renderer

from torchtitan.experiments.rl.data.dataset import Dataset
from torchtitan.experiments.rl.envs.message_env import MessageEnv
from torchtitan.experiments.rl.envs.renderer_env import RendererEnvConfig
from torchtitan.experiments.rl.errors import ConfigError
from torchtitan.experiments.rl.rollouts.policy import SamplingConfig
from torchtitan.experiments.rl.rollouts.types import DataSample
from torchtitan.experiments.rl.rubrics.rubric import Rubric, env_component
from torchtitan.experiments.rl.tasks.task import Task
from torchtitan.experiments.rl.tasks.verifiers.data import VerifiersDataset

__all__ = ["VerifiersDataset", "VerifiersTask"]


class VerifiersTask(Task):
    """A rollout that reaches sampling.max_tokens, env.max_turns or env.max_rollout_tokens is not scored by the environment: its
    reward is the rubric's truncation_reward, or 0. A rollout that reaches a limit of the environment, such as its max_turns, is
    completed and scored.
    """

    @dataclass(kw_only=True, slots=True)
    class Config(Task.Config):
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

    def make_env(self, sample: DataSample) -> MessageEnv:
        from torchtitan.experiments.rl.tasks.verifiers.env import VerifiersEnv  # imports verifiers

        return VerifiersEnv(self.environment, sample.env_input)
