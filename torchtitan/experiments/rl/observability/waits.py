"""Says what a run waits for, and for how many seconds, where that takes long: start of processes, first weights, first step."""

import asyncio
import itertools
import time
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager

from torchtitan.experiments.rl.observability.console import WIDTH

LABEL = "waiting for "
FIRST_AT_S = (5.0, 15.0, 30.0)
"""Seconds after which a line is printed; after these it is every ``THEN_EVERY_S``."""
THEN_EVERY_S = 60.0


class Waits:
    """``begin`` and ``end`` each wait on the event loop; ``close`` at the end."""

    def __init__(
        self,
        say: Callable[[str], None],
        *,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
    ):
        """``say`` prints a line. ``clock`` gives seconds."""
        self._say, self._clock, self._sleep = say, clock, sleep
        self._began: dict[str, float] = {}
        self._saying: asyncio.Task[None] | None = None

    @contextmanager
    def wait(self, what: str) -> Iterator[None]:
        """The block waits for ``what``."""
        self.begin(what)
        try:
            yield
        finally:
            self.end(what)

    def begin(self, what: str) -> None:
        """``what`` completes the words "waiting for"."""
        self._began[what] = self._clock()
        if self._saying is None:
            self._saying = asyncio.create_task(self._say_again(self._began[what]))

    def end(self, what: str) -> None:
        """It is there, or nobody waits for it any more. What was never begun may end."""
        self._began.pop(what, None)
        if not self._began:
            self.close()

    def close(self) -> None:
        """Nothing is waited for."""
        self._began.clear()
        if self._saying is not None:
            self._saying.cancel()
            self._saying = None

    def line(self) -> str:
        """What is waited for, the longest wait first, in one line of at most 80 columns where one name is not longer. "" where
        that is nothing.
        """
        now, line = self._clock(), ""
        items = [f"{what} ({now - began:.0f} s)" for what, began in self._began.items()]
        for shown in range(len(items), 0, -1):
            more = len(items) - shown
            line = LABEL + ", ".join(items[:shown]) + (f" and {more} more" if more else "")
            if len(line) <= WIDTH:
                break
        return line

    async def _say_again(self, began: float) -> None:
        for at_s in itertools.chain(FIRST_AT_S, itertools.count(2 * FIRST_AT_S[-1], THEN_EVERY_S)):
            await self._sleep(max(0.0, began + at_s - self._clock()))
            self._say(self.line())
