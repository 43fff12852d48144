"""Measures the seconds of the parts of a step, and how long code blocks an event loop."""

import asyncio
import time
from collections.abc import Iterator
from contextlib import contextmanager

from torchtitan.experiments.rl.process import trace

INTERVAL_S = 0.01
"""Between two measurements. A shorter block may fall between them."""


class Stopwatch:
    """Adds up the seconds spent under each name, until the lap is read.

    Spans of one name add up; spans of different names may overlap, and then each counts its own seconds.
    """

    def __init__(self) -> None:
        self._seconds: dict[str, float] = {}

    @contextmanager
    def span(self, name: str) -> Iterator[None]:
        start = time.perf_counter()
        try:
            with trace.span(name):
                yield
        finally:  # a span that raised took its time too
            self._seconds[name] = self._seconds.get(name, 0.0) + time.perf_counter() - start

    def lap(self) -> dict[str, float]:
        """Seconds per name since the last lap, and a fresh start."""
        lap, self._seconds = self._seconds, {}
        return lap


class LoopLag:
    """Sleeps, and measures how late it wakes up. A measurement takes about 10 us of CPU."""

    def __init__(self) -> None:
        self._task: asyncio.Task | None = None
        self.lags_s: list[float] = []
        """Of each measurement since the last lap."""

    def start(self) -> None:
        self._task = asyncio.create_task(self._look(), name="loop-lag")

    def stop(self) -> None:
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
