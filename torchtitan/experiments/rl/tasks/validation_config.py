"""When and how a task's held-out examples are tried."""

from dataclasses import dataclass

from torchtitan.experiments.rl.bounds import NonNegativeInt, PositiveInt
from torchtitan.experiments.rl.errors import ConfigError
from torchtitan.experiments.rl.rollouts.policy import Temperature


@dataclass(kw_only=True, slots=True)
class ValidationConfig:
    every: NonNegativeInt = 10
    """Steps between two evaluations; before the first step and after the last there always is one. 0 turns all off."""
    examples: PositiveInt = 128
    """Examples of the validation set, from its start; all of a smaller set."""
    attempts: PositiveInt = 1
    """Rollouts of each example: the k of avg@k and pass@k."""
    temperature: Temperature = 0.0
    """0 is greedy."""
    max_concurrency: PositiveInt = 64
    """Rollouts at once while training goes on: the engine serves requests in turn, and training's have to get theirs. The first
    and the last evaluation have the generators to themselves and no limit."""
    pass_reward: float = 1.0
    """Reward from which an attempt has passed."""

    def validate(self, *, field: str) -> None:
        """
        Raises:
            ConfigError: naming the field at fault, its value and the cure.
        """
        if self.attempts > 1 and self.temperature == 0:
            raise ConfigError(f"{field}.attempts", self.attempts, f"greedy attempts are all alike: set {field}.temperature")
