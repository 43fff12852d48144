"""What an algorithm is: who gets credit for what, and which loss component the sampled tokens feed."""

from dataclasses import dataclass
from typing import ClassVar

from torchtitan.config import Configurable
from torchtitan.experiments.rl.errors import ConfigError
from torchtitan.experiments.rl.rollouts.policy import PolicyClient
from torchtitan.experiments.rl.rollouts.types import Rollout, RolloutGroup


class Algorithm(Configurable):
    """Gives credit to the tokens of a task's rollouts, by writing to the streams of their training samples.

    One instance per task. Rollouts arrive one by one, then as a whole group; the base does nothing with either. The trainer
    knows no algorithm: it sees advantages, component weights and reference log-probabilities.
    """

    action_component: ClassVar[str] = "rl"
    """Which loss component the sampled tokens feed: "rl", "ce" or "ref_kl"."""
    group_relative: ClassVar[bool] = False
    """Whether credit compares the rollouts of a group, so that a group of one teaches nothing."""

    @dataclass(kw_only=True, slots=True)
    class Config(Configurable.Config):
        def validate(self, *, field: str, group_size: int, temperature: float, frozen_source: bool = False) -> None:
            """Refuse what can't work, before any process starts.

            A subclass adds its checks after ``super(MyAlgorithm.Config, self).validate(...)``: a slotted dataclass is made
            anew by its decorator, which a bare ``super()`` doesn't know.

            Args:
                field: path of this config, such as "tasks.sum_digits.algorithm".
                group_size: rollouts per data sample.
                temperature: sampling temperature of training rollouts.
                frozen_source: rollouts are sampled from a frozen model instead of the policy.

            Raises:
                ConfigError: naming the field at fault, its value and the cure.
            """
            algorithm = self._owner
            if algorithm.group_relative and group_size < 2:
                raise ConfigError(
                    f"{field}: group_size",
                    group_size,
                    f"{algorithm.__name__} compares the rollouts of a group, and one alone has advantage 0: use 2 or more",
                )
            if algorithm.action_component == "ref_kl" and temperature != 1:
                raise ConfigError(
                    f"{field}: temperature",
                    temperature,
                    f"{algorithm.__name__} compares with reference log-probabilities at temperature 1: sample at 1",
                )
            if frozen_source and algorithm.action_component != "ce":
                raise ConfigError(
                    f"{field}: frozen source",
                    frozen_source,
                    f"{algorithm.__name__} needs an importance ratio, so the policy's own samples: sample from the policy, or "
                    "use an algorithm that feeds ce, such as SFT",
                )

    def __init_subclass__(cls, **kwargs):
        # Without a Config of its own a subclass would inherit one that builds its parent, and give no credit in silence.
        if "Config" not in cls.__dict__:
            namespace = {"__module__": cls.__module__, "__qualname__": f"{cls.__qualname__}.Config"}
            cls.Config = dataclass(kw_only=True, slots=True)(type("Config", (cls.Config,), namespace))
        super().__init_subclass__(**kwargs)

    def __init__(self, config: Config):
        self.config = config

    async def setup(self, policy: PolicyClient) -> None:
        """Before the first rollout: reach the models the algorithm needs."""

    async def score_rollout(self, rollout: Rollout) -> None:
        """When one rollout has arrived, with its reward and samples: rollout-local credit, calls to models."""

    def score_group(self, group: RolloutGroup) -> None:
        """When all of a group has arrived, before filters: credit relative to the group.

        Statistics are of ``group.scored`` alone. Rollouts without a reward are left as they are; nobody trains on them.
        """
