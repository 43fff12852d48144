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
import heapq
import threading
import time
from contextlib import AbstractContextManager
from contextvars import ContextVar, Token
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True, slots=True)
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
    open: "dict[int, _Span]" = field(default_factory=dict)
    free: dict[str, list[int]] = field(default_factory=dict)
    """By kind of lane: numbers that were used and are free."""
    used: dict[str, int] = field(default_factory=dict)
    """By kind of lane: how many numbers there are."""

    def take_lane(self, kind: str) -> int:
        if free := self.free.get(kind):
            return heapq.heappop(free)
        self.used[kind] = self.used.get(kind, 0) + 1
        return self.used[kind]

    def free_lane(self, kind: str, number: int) -> None:
        heapq.heappush(self.free.setdefault(kind, []), number)

    def add(self, span: "_Span", ended_ns: int) -> None:
        began = span.began_ns
        self.events.append(Event(span.name, span.row, self.epoch_ns + began, ended_ns - began, span.details))


_recording: _Recording | None = None
_lane: ContextVar[str | None] = ContextVar("lane", default=None)
_NOTHING: AbstractContextManager[None] = contextlib.nullcontext()


class _Span(AbstractContextManager[None]):
    def __init__(self, recording: _Recording, name: str, details: dict[str, Any]):
        self._recording, self.name, self.details = recording, name, details
        self.row = ""
        self.began_ns = 0

    def __enter__(self) -> None:
        self.row = _lane.get() or ("" if _in_event_loop() else threading.current_thread().name)
        if self.row:
            self._begin()

    def __exit__(self, *raised: object) -> None:
        if self._recording.open.pop(id(self), None) is not None:
            self._recording.add(self, time.perf_counter_ns())

    def _begin(self) -> None:
        self._recording.open[id(self)] = self
        self.began_ns = time.perf_counter_ns()


class _Lane(_Span):
    _token: Token[str | None]

    def __enter__(self) -> None:
        self._number = self._recording.take_lane(self.name)
        self.row = f"{self.name} {self._number}"
        self._token = _lane.set(self.row)
        self._begin()

    def __exit__(self, *raised: object) -> None:
        super().__exit__(*raised)
        _lane.reset(self._token)
        self._recording.free_lane(self.name, self._number)


def span(name: str, **details: Any) -> AbstractContextManager[None]:
    """What happens in the block, as a part of what the lane or the thread does."""
    return _NOTHING if _recording is None else _Span(_recording, name, details)


def lane(kind: str, **details: Any) -> AbstractContextManager[None]:
    """What happens in the block runs beside others of its kind, and has a row of its own for that time."""
    return _NOTHING if _recording is None else _Lane(_recording, kind, details)


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
    for unfinished in list(recorded.open.values()):
        unfinished.details["unfinished"] = True
        recorded.add(unfinished, now)
    recorded.open.clear()
    return recorded.events
