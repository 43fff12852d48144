"""When a part of the run that has died is made again, and when one that hangs counts as dead."""

from dataclasses import dataclass
from typing import Annotated

from annotated_types import Ge

from torchtitan.experiments.rl.bounds import NonNegativeInt, PositiveFloat


@dataclass(kw_only=True, slots=True)
class SupervisionConfig:
    max_restarts: NonNegativeInt = 3
    """How often a part may be made again within ``window_s`` seconds: a generator, a hosted model, a rollout worker. Its next
    death ends the run."""
    window_s: PositiveFloat = 3600.0
    stall_s: Annotated[float, Ge(5)] = 120.0
    """A process that does not answer for so many seconds, or is at one engine step or one microbatch for so long, is reported
    and killed, and then made again like one that died."""
    slow_work_s: Annotated[float, Ge(5)] = 1800.0
    """The same for what may take long: a build, the first steps, which compile, a checkpoint, and user code that blocks the
    event loop of a rollout worker."""
