"""What the working thread of a process is doing, and since when: how another process sees that it hangs, or is idle."""

import contextlib
import time
from collections.abc import Iterator
from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True, slots=True)
class Pulse:
    doing: str
    """"" while the thread waits for work."""
    seconds: float
    """Since it began, or last made progress."""
    slow: bool
    """Whether what it does may take long: a build, a load of weights, a first step that compiles, a checkpoint."""


class Heartbeat:
    """Written by the working thread and read by the others; each write is one assignment, and so needs no lock."""

    def __init__(self) -> None:
        self._work: tuple[str, float, bool] = ("", time.monotonic(), False)
        self._used = False
        self._worked_s = 0.0
        """In blocks of ``work`` that have ended."""
        self._lapped = (0.0, time.monotonic())

    @contextlib.contextmanager
    def work(self, what: str, *, slow: bool = False) -> Iterator[None]:
        """The thread does ``what`` in the block."""
        began = time.monotonic()
        self._used = True
        self._work = (what, began, slow)
        try:
            yield
        finally:
            ended = time.monotonic()
            self._work = ("", ended, False)
            self._worked_s += ended - began

    def beat(self, what: str | None = None, *, slow: bool | None = None) -> None:
        """The work goes on: its time starts again. ``what`` and ``slow`` are of its next part; None: as before."""
        before, _, was_slow = self._work
        self._work = (before if what is None else what, time.monotonic(), was_slow if slow is None else slow)

    def pulse(self) -> Pulse:
        what, since, slow = self._work
        return Pulse(doing=what, seconds=time.monotonic() - since, slow=slow)

    def lap_busy(self) -> float | None:
        """Share of the time since the last call that the thread worked, from 0 to 1. Work under way counts when it ends.

        None where nothing was ever noted: the process has no working thread.
        """
        worked_s, now = self._worked_s, time.monotonic()
        before_s, then = self._lapped
        self._lapped = (worked_s, now)
        if not self._used:
            return None
        return min(1.0, (worked_s - before_s) / (now - then)) if now > then else 0.0
