"""Measures how long code blocks an event loop."""

import asyncio
import time

INTERVAL_S = 0.01
"""Between two measurements. A shorter block may fall between them."""


class LoopLag:
    """Sleeps, and measures how late it wakes up. A measurement takes about 10 us of CPU."""

    def __init__(self) -> None:
        self._task: asyncio.Task | None = None
        self.lags_s: list[float] = []
        """Of each measurement since the last lap."""

    def start(self) -> None:
        """Start to measure the running loop."""
        self._task = asyncio.create_task(self._look(), name="loop-lag")

    def stop(self) -> None:
        """Stop measuring."""
        if self._task is not None:
            self._task.cancel()

    def lap(self) -> float:
        """Longest lag in seconds since the last lap; 0 when it was not measuring."""
        longest = max(self.lags_s, default=0.0)
        self.lags_s = []
        return longest

    async def _look(self) -> None:
        while True:
            before = time.perf_counter()
            await asyncio.sleep(INTERVAL_S)
            self.lags_s.append(max(0.0, time.perf_counter() - before - INTERVAL_S))
