"""Measures the seconds of the parts of a step."""

import time
from collections.abc import Iterator
from contextlib import contextmanager

from torchtitan.experiments.rl.process import trace


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
