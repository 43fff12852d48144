"""Records what this process does and for how long.

It records seconds by name and, while steps are profiled, each span.
``watch/reports.py`` collects the spans of every process.

    with lane("rollout"):              # in a row of its own, beside other rollouts of that time
        with span("env", name="Maze"): # inside that row
            ...

Each block is recorded as two events of Chrome's trace format. A lane and the spans inside it are
nestable async events (``b``, ``e``) with one id. A span of a thread without an event loop is in the
row of that thread (``B``, ``E``). A span that an event loop runs outside of every lane is not
recorded, because it would overlap with the other work of the loop.

A block that began before the recording is not in it, and a block that ends after it has no second
event. While nothing is recorded, ``span`` and ``lane`` return an object that does nothing.
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

Event = dict[str, Any]
"""Event of the trace format, but without ``pid``, and with ``ts`` in nanoseconds since the epoch.
So processes can be compared, and hosts as far as their clocks agree."""
_events: list[Event] | None = None
"""Events that were recorded; None while nothing is recorded."""
_lane: ContextVar[dict[str, str] | None] = ContextVar("lane", default=None)
"""Fields that every event of the current lane has; None outside of every lane."""
_NOTHING: AbstractContextManager[None] = contextlib.nullcontext()


def span(name: str, **details: Any) -> AbstractContextManager[None]:  # noqa: ANN401 - JSON
    """Record the block as a part of the current lane, or of this thread."""
    events = _events  # another thread may stop the recording
    if events is None:
        return _NOTHING
    if _lane.get() is None:
        with contextlib.suppress(RuntimeError):
            asyncio.get_running_loop()
            return _NOTHING
    return _recorded(events, name, _lane.get(), details)


def lane(kind: str, **details: Any) -> AbstractContextManager[None]:  # noqa: ANN401 - JSON
    """Record the block in a row of its own, because it runs beside others of its kind."""
    events = _events  # another thread may stop the recording
    if events is None:
        return _NOTHING
    return _recorded(events, kind, {"cat": kind, "id": os.urandom(7).hex()}, details)


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
    """Return True while spans are recorded."""
    return _events is not None


def start() -> None:
    """Record the blocks that begin from now on."""
    global _events
    _events = []


def stop() -> list[Event]:
    """Stop recording.

    Returns:
        The events that were recorded, and one with the name of each of their threads that still
        runs.
    """
    global _events
    recorded = list(_events or ())  # a copy: threads go on ending their blocks
    _events = None
    thread_ids = {event["tid"] for event in recorded}
    names = [
        {
            "ph": "M",
            "name": "thread_name",
            "tid": thread.native_id,
            "ts": time.time_ns(),
            "args": {"name": thread.name},
        }
        for thread in threading.enumerate()
        if thread.native_id in thread_ids
    ]
    return recorded + names


class Stopwatch:
    """Adds up the seconds spent under each name, until the lap is read.

    The running event loop tells the time. Spans of one name add up. Spans of different names may
    overlap, and then each counts its own seconds.
    """

    def __init__(self) -> None:
        """Begin the first lap."""
        self._seconds: dict[str, float] = {}

    @contextmanager
    def span(self, name: str) -> Iterator[None]:
        """Count the seconds of the block, and record it as a ``span``."""
        loop = asyncio.get_running_loop()
        began = loop.time()
        try:
            with span(name):
                yield
        finally:  # a span that raised took its time too
            self._seconds[name] = self._seconds.get(name, 0.0) + loop.time() - began

    def lap(self) -> dict[str, float]:
        """Return the seconds under each name since the last lap, and begin a new one."""
        lap = self._seconds
        self._seconds = {}
        return lap
