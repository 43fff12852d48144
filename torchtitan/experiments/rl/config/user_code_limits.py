"""Time limits of code that users write and that the run calls outside rollouts."""

from dataclasses import dataclass

from torchtitan.experiments.rl.bounds import NonNegativeFloat, PositiveFloat


@dataclass(kw_only=True, slots=True)
class UserCodeLimits:
    """A call that takes longer ends the run, with an error that names its owner. Rollouts have limits of their own: ``env`` of
    each task."""

    call_timeout_s: PositiveFloat = 60.0
    """For each call of a sampler, a dataset, the task mix or a filter."""
    setup_timeout_s: PositiveFloat = 1800.0
    """For building a task with its dataset, and for its ``setup``."""
    close_timeout_s: PositiveFloat = 10.0
    """For the ``close`` of a task."""
    preflight_timeout_s: NonNegativeFloat = 10.0
    """For trying each task once before the run (config/preflight.py). A task that takes longer is warned of; the run begins.
    0: none is tried."""
