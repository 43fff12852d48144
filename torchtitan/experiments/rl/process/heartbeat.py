"""Tells other processes what the working thread of this one does, and since when.

The working thread is that of the engine, or of the trainer's computations. It is not to be held up,
so it only writes down what it does (`Heartbeat`). When another process asks, the event loop answers
with a reading (`Pulse`): so the supervisor sees a process that hangs, and how busy each one is.
"""

import contextlib
import time
from collections.abc import Iterator
from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True, slots=True)
class Pulse:
    """Reading of a process's `Heartbeat`."""

    doing: str
    """Work that the thread does; empty while it waits for some."""
    seconds: float
    """Seconds since that work, or the wait, began or last made progress."""
    slow: bool
    """True if the work may take long, such as a load of weights, a first step that compiles or a
    checkpoint."""


class Heartbeat:
    """Record of what the working thread of a process does.

    The working thread writes it and other threads read it. Each write is one assignment, and needs
    no lock.
    """

    def __init__(self) -> None:
        self._work: tuple[str, float, bool] = ("", time.monotonic(), False)
        """Work, when it began or last made progress, and whether it may take long."""
        self._used = False
        """True if the thread has ever noted work."""
        self._worked_s = 0.0
        """Seconds inside blocks of `work` that have ended."""
        self._last_lap = (0.0, time.monotonic())
        """Value of ``_worked_s`` at the last call of `lap_busy`, and the time of that call."""

    @contextlib.contextmanager
    def work(self, what: str, *, slow: bool = False) -> Iterator[None]:
        """Note that the thread does ``what`` in the block."""
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
        """Note that the work has made progress.

        Args:
            what: next part of the work; None if it is still the same.
            slow: True if that part may take long; None if that is still the same.
        """
        work, _, was_slow = self._work
        if what is not None:
            work = what
        self._work = (work, time.monotonic(), was_slow if slow is None else slow)

    def pulse(self) -> Pulse:
        """Return what the thread is doing."""
        what, since, slow = self._work
        return Pulse(doing=what, seconds=time.monotonic() - since, slow=slow)

    def lap_busy(self) -> float | None:
        """Return the share of the time since the last call that the thread worked, from 0 to 1.

        Work counts when it ends. The result is None if no work was ever noted, because the process
        has no working thread.
        """
        worked_before_s, last_call = self._last_lap
        worked_s = self._worked_s
        now = time.monotonic()
        self._last_lap = (worked_s, now)
        if not self._used:
            return None
        if now <= last_call:
            return 0.0
        return min(1.0, (worked_s - worked_before_s) / (now - last_call))
