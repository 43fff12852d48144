"""What the working thread of a process is doing, and since when: how another process sees that it hangs."""

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
    """Whether what it does may take long: a build, a first step that compiles, a checkpoint."""


class Heartbeat:
    """Written by the working thread and read by the others; each write is one assignment, and so needs no lock."""

    def __init__(self) -> None:
        self._work: tuple[str, float, bool] = ("", time.monotonic(), False)

    @contextlib.contextmanager
    def work(self, what: str, *, slow: bool = False) -> Iterator[None]:
        """The thread does ``what`` in the block."""
        self._work = (what, time.monotonic(), slow)
        try:
            yield
        finally:
            self._work = ("", time.monotonic(), False)

    def beat(self) -> None:
        """The work goes on: its time starts anew."""
        what, _, slow = self._work
        self._work = (what, time.monotonic(), slow)

    def pulse(self) -> Pulse:
        what, since, slow = self._work
        return Pulse(doing=what, seconds=time.monotonic() - since, slow=slow)
