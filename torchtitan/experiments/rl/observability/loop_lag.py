"""How long an event loop was held up: by user code that blocks without awaiting, or by our own."""

import asyncio
import time

INTERVAL_S = 0.01
"""Between two looks. What holds the loop up for less may fall between them."""


class LoopLag:
    """Sleeps and looks how late it wakes. Costs some 10 us of CPU a look."""

    def __init__(self) -> None:
        self._task: asyncio.Task | None = None
        self.lags_s: list[float] = []
        """Of every look since the last lap."""

    def start(self) -> None:
        """Begin to look, on the running loop."""
        self._task = asyncio.create_task(self._look(), name="loop-lag")

    def stop(self) -> None:
        """Look no more."""
        if self._task is not None:
            self._task.cancel()

    def lap(self) -> float:
        """Longest lag in seconds since the last lap; 0 when nobody looked."""
        longest = max(self.lags_s, default=0.0)
        self.lags_s = []
        return longest

    async def _look(self) -> None:
        while True:
            before = time.perf_counter()
            await asyncio.sleep(INTERVAL_S)
            self.lags_s.append(max(0.0, time.perf_counter() - before - INTERVAL_S))
