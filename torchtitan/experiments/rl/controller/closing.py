"""Closes the parts of a run, one after another: a part that fails or hangs does not keep the others from being closed."""

import logging
from collections.abc import Awaitable, Callable

from torchtitan.experiments.rl.errors import RunError
from torchtitan.experiments.rl.user_code.calls import UserCodeError, call_bounded
from torchtitan.experiments.rl.user_code.gate import sentence

logger = logging.getLogger(__name__)

PART_TIMEOUT_S = 120.0
"""Limit of a part. What parts wait for has limits of its own, all below this."""


class Closing:
    """``close`` each part; ``faults`` has what went wrong, in order."""

    def __init__(self) -> None:
        self.faults: list[RunError] = []

    async def close(self, part: str, close: Callable[[], Awaitable[object]], *, timeout_s: float = PART_TIMEOUT_S) -> None:
        """Await ``close()``. Raises nothing but CancelledError of the caller."""
        try:
            await call_bounded(close, timeout_s=timeout_s)
        except UserCodeError as error:
            self.add(f"closing {part}: {sentence(error)}")

    def add(self, fault: str) -> None:
        """One more fault; it is logged now."""
        logger.error("%s", fault)
        self.faults.append(RunError(fault))
