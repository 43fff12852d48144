"""An exit stack in which no fault keeps another callback from being called."""

import logging
from collections.abc import Awaitable, Callable, Iterable
from contextlib import AsyncExitStack

from torchtitan.experiments.rl.ask.call import ask, sentence
from torchtitan.experiments.rl.errors import RunError, UserCodeError

logger = logging.getLogger(__name__)

CLOSE_TIMEOUT_S = 120.0
"""Seconds that one thing may take to close. Whatever it waits for itself has a shorter limit."""


Close = Callable[[], Awaitable[Iterable[str] | None]]
"""Function that closes something. It may return a line for each fault of the user's code."""


class Closing:
    """Closes things in the reverse order in which they were built, and keeps what went wrong."""

    def __init__(self) -> None:
        """Have nothing to close yet."""
        self.faults: list[RunError] = []
        """Errors of what could not be closed, in order."""
        self._stack = AsyncExitStack()

    def push(
        self,
        what: str,
        close: Close,
        *,
        timeout_s: float | None = CLOSE_TIMEOUT_S,
    ) -> None:
        """Add something to close. It is closed before all that was added earlier.

        Args:
            what: name of the thing, for people: "the recorder".
            close: function that closes the thing.
            timeout_s: limit of the call; None if ``close`` limits itself.
        """
        self._stack.push_async_callback(self.close_now, what, close, timeout_s=timeout_s)

    async def close(self) -> None:
        """Close everything that was added; a second call does nothing.

        Raises nothing but the caller's CancelledError. Each fault is logged at once.
        """
        await self._stack.aclose()

    async def close_now(self, what: str, close: Close, *, timeout_s: float | None) -> None:
        """Close something at once that was not added; the arguments are those of `push`."""

        async def closed() -> Iterable[str] | None:
            return await close()

        try:
            faults = await ask(closed, timeout_s=timeout_s)
        except UserCodeError as error:
            faults = [f"closing {what}: {sentence(error)}"]
        for fault in faults or ():
            logger.error("%s", fault)
            self.faults.append(RunError(fault))
