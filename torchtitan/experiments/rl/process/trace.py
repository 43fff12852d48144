"""What this process does and for how long, while steps are profiled. ``operations/profile.py`` collects it from every process.

    with lane("rollout"):              # in a row of its own, beside other rollouts that run at the same time
        with span("env", name="Maze"): # inside that row
            ...

A span of a thread without an event loop is in the row of that thread. What an event loop runs outside of every lane is not
recorded: it would overlap with what the loop runs meanwhile. So what had begun before the recording is not in it. While nothing
is recorded, ``span`` and ``lane`` return an object that does nothing.
"""

import asyncio
import contextlib
import itertools
import threading
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any


@dataclass(slots=True)
class Event:
    name: str
    row: str
    """Name of a lane ("rollout 3") or of a thread."""
    start_ns: int
    """Since the epoch, so that processes, and hosts as far as their clocks agree, can be compared."""
    duration_ns: int
    details: dict[str, Any]


@dataclass(slots=True)
class _Recording:
    # perf_counter never jumps; the epoch's clock is read once.
    epoch_ns: int = field(default_factory=lambda: time.time_ns() - time.perf_counter_ns())
    events: list[Event] = field(default_factory=list)
    open: dict[int, Event] = field(default_factory=dict)
    """Those that have not ended, by their id."""
    lanes: set[str] = field(default_factory=set)
    """Rows of the lanes that are open."""

    def end(self, event: Event, ended_ns: int) -> None:
        event.duration_ns = self.epoch_ns + ended_ns - event.start_ns
        self.events.append(event)

    @contextlib.contextmanager
    def span(self, name: str, row: str, details: dict[str, Any]) -> Iterator[None]:
        event = Event(name, row, self.epoch_ns + time.perf_counter_ns(), 0, details)
        self.open[id(event)] = event
        try:
            yield
        finally:
            if self.open.pop(id(event), None) is not None:
                self.end(event, time.perf_counter_ns())

    @contextlib.contextmanager
    def lane(self, kind: str, details: dict[str, Any]) -> Iterator[None]:
        row = next(row for number in itertools.count(1) if (row := f"{kind} {number}") not in self.lanes)
        self.lanes.add(row)
        token = _lane.set(row)
        try:
            with self.span(kind, row, details):
                yield
        finally:
            _lane.reset(token)
            self.lanes.remove(row)


_recording: _Recording | None = None
_lane: ContextVar[str | None] = ContextVar("lane", default=None)
_NOTHING: AbstractContextManager[None] = contextlib.nullcontext()


def span(name: str, **details: Any) -> AbstractContextManager[None]:
    """What happens in the block, as a part of what the lane or the thread does."""
    if _recording is None:
        return _NOTHING
    row = _lane.get() or ("" if _in_event_loop() else threading.current_thread().name)
    return _recording.span(name, row, details) if row else _NOTHING


def lane(kind: str, **details: Any) -> AbstractContextManager[None]:
    """What happens in the block runs beside others of its kind, and has a row of its own for that time."""
    return _NOTHING if _recording is None else _recording.lane(kind, details)


def _in_event_loop() -> bool:
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return False
    return True


def recording() -> bool:
    """Whether spans are recorded now."""
    return _recording is not None


def start() -> None:
    """Record what begins from now on."""
    global _recording
    _recording = _Recording()


def stop() -> list[Event]:
    """Record no more. What has not ended yet is cut here, and says so."""
    global _recording
    recorded, _recording = _recording, None
    if recorded is None:
        return []
    now = time.perf_counter_ns()
    for unfinished in list(recorded.open.values()):  # threads go on ending theirs
        unfinished.details["unfinished"] = True
        recorded.end(unfinished, now)
    recorded.open.clear()
    return recorded.events
