"""What this process does and for how long: seconds by name, its event loop's lag and, while steps are profiled, each span.
``operations/reports.py`` collects the spans of every process.

    with lane("rollout"):              # in a row of its own, beside other rollouts that run at the same time
        with span("env", name="Maze"): # inside that row
            ...

Each block is recorded as two events of Chrome's trace format. A lane and the spans inside it are nestable async events (``b``,
``e``) with one id; a span of a thread without an event loop is in the row of that thread (``B``, ``E``). What an event loop
runs outside of every lane is not recorded: it would overlap with what the loop runs meanwhile. So what had begun before the
recording is not in it; what goes on after it has no second event. While nothing is recorded, ``span`` and ``lane`` return an
object that does nothing.
"""

import asyncio
import contextlib
import os
import threading
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from contextvars import ContextVar
from typing import Any

INTERVAL_S = 0.01
"""Between two measurements of an event loop's lag. A shorter block may fall between them."""
Event = dict[str, Any]
"""As the format has it, but without ``pid``, and with ``ts`` in nanoseconds since the epoch, so that processes, and hosts as
far as their clocks agree, can be compared."""
_events: list[Event] | None = None
_lane: ContextVar[dict[str, str] | None] = ContextVar("lane", default=None)
"""What all events of the lane have."""
_NOTHING: AbstractContextManager[None] = contextlib.nullcontext()


def span(name: str, **details: Any) -> AbstractContextManager[None]:
    """What happens in the block, as a part of what the lane or the thread does."""
    if (events := _events) is None:
        return _NOTHING
    if _lane.get() is None:
        with contextlib.suppress(RuntimeError):
            asyncio.get_running_loop()
            return _NOTHING
    return _recorded(events, name, _lane.get(), details)


def lane(kind: str, **details: Any) -> AbstractContextManager[None]:
    """What happens in the block runs beside others of its kind, and has a row of its own for that time."""
    events = _events  # another thread may stop the recording
    return (
        _NOTHING
        if events is None
        else _recorded(events, kind, {"cat": kind, "id": os.urandom(7).hex()}, details)
    )


@contextlib.contextmanager
def _recorded(
    events: list[Event], name: str, lane: dict[str, str] | None, details: dict[str, Any]
) -> Iterator[None]:
    event = {"name": name, "tid": threading.get_native_id(), **(lane or {})}
    begins, ends = "be" if lane else "BE"
    token = _lane.set(lane)
    events.append({"ph": begins, **event, "ts": time.time_ns(), "args": details})
    try:
        yield
    finally:
        events.append({"ph": ends, **event, "ts": time.time_ns()})
        _lane.reset(token)


def recording() -> bool:
    """Whether spans are recorded now."""
    return _events is not None


def start() -> None:
    """Record what begins from now on."""
    global _events
    _events = []


def stop() -> list[Event]:
    """Record no more. Returns what was recorded, and the names of the threads that did it and still run."""
    global _events
    recorded, _events = [*(_events or ())], None  # threads go on ending theirs
    tids = {event["tid"] for event in recorded}
    return recorded + [
        {
            "ph": "M",
            "name": "thread_name",
            "tid": thread.native_id,
            "ts": time.time_ns(),
            "args": {"name": thread.name},
        }
        for thread in threading.enumerate()
        if thread.native_id in tids
    ]


class Stopwatch:
    """Adds up the seconds spent under each name, until the lap is read. The running event loop tells the time.

    Spans of one name add up; spans of different names may overlap, and then each counts its own seconds.
    """

    def __init__(self) -> None:
        self._seconds: dict[str, float] = {}

    @contextmanager
    def span(self, name: str) -> Iterator[None]:
        loop = asyncio.get_running_loop()
        began = loop.time()
        try:
            with span(name):
                yield
        finally:  # a span that raised took its time too
            self._seconds[name] = self._seconds.get(name, 0.0) + loop.time() - began

    def lap(self) -> dict[str, float]:
        """Seconds per name since the last lap, and a fresh start."""
        lap, self._seconds = self._seconds, {}
        return lap


class LoopLag:
    """Sleeps, and measures how late it wakes up. A measurement takes about 10 us of CPU."""

    def __init__(self, interval_s: float = INTERVAL_S) -> None:
        """Measure nothing before `start`.

        Args:
            interval_s: seconds between two measurements.
        """
        self._interval_s = interval_s
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
        loop = asyncio.get_running_loop()
        while True:
            before = loop.time()
            await asyncio.sleep(self._interval_s)
            self.lags_s.append(max(0.0, loop.time() - before - self._interval_s))
