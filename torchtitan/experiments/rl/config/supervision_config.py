"""When a part of the run that has died is made again, and when one that is silent counts as dead."""

from dataclasses import dataclass

from torchtitan.experiments.rl.bounds import NonNegativeInt, PositiveFloat


@dataclass(kw_only=True, slots=True)
class SupervisionConfig:
    max_restarts: NonNegativeInt = 3
    """How often a part may be made again within ``window_s`` seconds: a generator, a hosted model, a rollout worker. Its next
    death ends the run."""
    window_s: PositiveFloat = 3600.0
