"""Measures how long an event loop is held up, and names the code that holds it up.

    event loop   tick ─ tick ─ tick ── a step that blocks ────────────────── tick (late: lag)
    watchdog      ·             ·            ·  overdue: note task and function

A timer of the loop ticks every `TICK_S`, and the time by which a tick is late is lag. Lag moves the
deadlines of calls (`ask/scopes.py`), and a run reports the longest of each training step.

A step that blocks can't be interrupted and can't measure itself. So a thread looks every `WATCH_S`:
if a tick is overdue by `WATCH_S`, the thread notes which asyncio task runs, and in which function.
"""

import asyncio
import logging
import math
import threading
import time
from dataclasses import dataclass
from typing import Any, Protocol
from weakref import WeakSet

from torchtitan.experiments.rl.ask.stacks import frames_of_thread, location_in
from torchtitan.experiments.rl.ask.threads import TIMER_S

logger = logging.getLogger(__name__)

TICK_S = 0.01
"""Seconds between two ticks. Up to this much of a step that blocks is not lag."""
HOLD_S = 0.005
"""Lateness of a tick up to which the event loop counts as free."""
WATCH_S = 0.1
"""Seconds between two looks of the watchdog. It sees every step that blocks for twice as long."""


@dataclass(frozen=True, slots=True)
class Block:
    """A step of user code that held up the event loop."""

    owner: str
    """Name of the code, such as "Maze.step_message"; empty if it has none."""
    location: str
    """Function that the step was in, with file and line; empty if not known."""
    seconds: float


class WatchedTask(Protocol):
    """An asyncio task of user code, which may hold up its event loop."""

    @property
    def owner(self) -> str:
        """Name of the code that runs in the task. Any thread may ask."""

    def note_block(self, block: Block) -> None:
        """Learn of a step of the task that held up the loop, when the step was measured."""


class LimitedCall(Protocol):
    """A call of user code that has a limit."""

    def left_s(self) -> float:
        """Return the seconds that are left of the limit; 0 or less if the call is late."""

    def expire(self) -> None:
        """End the call, which is late. Called once."""


@dataclass(kw_only=True, frozen=True, slots=True)
class _Sighting:
    """Step that ran when the watchdog found a tick overdue."""

    due: float
    """`time.monotonic` at which that tick was due, which tells its hold-up from others."""
    since: float
    """`time.monotonic` since which the task is known to hold up the loop."""
    task: asyncio.Task[Any] | None
    watched: WatchedTask | None
    """The task's code of users; None if it runs none."""
    owner: str
    location: str


class Deadlines:
    """Open calls on one event loop that have one limit, and the timer that ends the late ones.

    They share a timer, because hundreds are open at once: with a timer for each, the event loop's
    heap of timers took a fifth of the processor time of a rollout of one turn. The timer fires
    at or before the earliest deadline, and is then set again. It stays set when no call is left,
    for those that begin until it fires.
    """

    def __init__(self, clock: "LoopClock", limit_s: float):
        self._clock = clock
        self._limit_s = limit_s
        self._calls: dict[LimitedCall, None] = {}
        self._timer: asyncio.TimerHandle | None = None

    def add(self, call: LimitedCall) -> None:
        """Add a call that begins now."""
        if not self._calls:
            self._clock.start()
        self._calls[call] = None
        # A timer that is set is due by the deadline of a call that began before. This call has the
        # same limit, so its deadline is later.
        if self._timer is None:
            self._timer = self._clock.loop.call_later(self._limit_s, self._end_late_calls)

    def remove(self, call: LimitedCall) -> None:
        """Remove a call that has ended; nothing happens if it is late and was removed by that."""
        if call in self._calls:
            del self._calls[call]
            if not self._calls:
                self._clock.stop()

    def _end_late_calls(self) -> None:
        self._timer = None
        if not self._calls:
            return
        left_s = {call: call.left_s() for call in self._calls}
        for call, left in left_s.items():
            if left <= 0:
                del self._calls[call]
                try:
                    call.expire()
                except Exception:  # of a user's future that it awaits, whose ``cancel`` raised
                    logger.exception("a call that is late could not be cancelled")
        if not self._calls:
            self._clock.stop()
            return
        next_s = min(left_s[call] for call in self._calls)
        # Not less than TIMER_S: adding a few 1e-17 s to a clock in virtual time leaves it where it
        # is, and the timer would fire for ever.
        # Not more than the limit: the deadline of a call that begins meanwhile is no later.
        next_s = min(max(next_s, TIMER_S), self._limit_s)
        self._timer = self._clock.loop.call_later(next_s, self._end_late_calls)


class LoopClock:
    """Clock of an event loop, with the lag of the loop so far. Used in the loop's thread."""

    def __init__(self, loop: asyncio.AbstractEventLoop):
        self.loop = loop
        self.watched: dict[asyncio.Task[Any], WatchedTask] = {}
        """Tasks of user code that have not ended."""
        self._deadlines: dict[float, Deadlines] = {}
        """Open calls by their limit in seconds. Limits come from the config, so they are few, and
        none is ever removed."""
        self._lag_s = 0.0
        self._longest_s = 0.0
        """Longest lag since the last lap."""
        self._blocked: set[Block] = set()
        """Steps since the last lap that made a call late."""
        self._due = math.inf
        """`time.monotonic` at which the next tick is due; infinite while the loop does not tick."""
        self._sighting: _Sighting | None = None
        """Step that ran when the watchdog last found a tick overdue; None if it never did."""
        self._thread = threading.get_ident()
        self._users = 0

    def time(self) -> float:
        """Return the time that limits are measured with, in seconds."""
        return time.monotonic()

    def measure_lag_s(self) -> float:
        """Measure the step that runs, and return the seconds for which the loop was held up so far.

        If a step calls this while it holds up the loop, its time so far counts.
        """
        now = time.monotonic()
        due = self._due
        late_s = now - due
        if late_s > HOLD_S:
            self._lag_s += late_s
            self._longest_s = max(self._longest_s, late_s)
            self._due = now  # the tick is overdue and runs next
            seen = self._sighting
            if seen is not None and seen.due == due and seen.watched is not None:
                seconds = min(late_s, now - seen.since)
                seen.watched.note_block(Block(seen.owner, seen.location, seconds))
        return self._lag_s

    def count_late(self, block: Block) -> None:
        """Count a step that made a call late; once, however many calls it makes late."""
        self._blocked.add(block)

    def lap(self) -> tuple[float, int]:
        """Begin a new lap.

        Returns:
            The longest lag of the last lap in seconds, and the number of steps of user code that
            held up the loop for the whole limit of a call.
        """
        lap = self._longest_s, len(self._blocked)
        self._longest_s = 0.0
        self._blocked.clear()
        return lap

    def deadlines_of(self, limit_s: float) -> Deadlines:
        """Return the open calls that have this limit."""
        deadlines = self._deadlines.get(limit_s)
        if deadlines is None:
            deadlines = self._deadlines[limit_s] = Deadlines(self, limit_s)
        return deadlines

    def start(self) -> None:
        """Add a user. The clock ticks while it has any."""
        self._users += 1
        if self._due == math.inf:
            self._schedule_tick()
            _WATCHDOG.watch(self)

    def stop(self) -> None:
        """Remove a user."""
        self._users -= 1

    def look(self) -> None:
        """Note the step that runs, if a tick is overdue. Called in the watchdog's thread."""
        now = time.monotonic()
        due = self._due
        if now - due < WATCH_S or not self.loop.is_running():
            return
        task = asyncio.current_task(self.loop)
        last = self._sighting
        since = due
        if last is not None and last.due == due:
            # The steps of several tasks may hold up the loop in turn.
            since = last.since if last.task is task else now
        watched = self.watched.get(task) if task is not None else None
        self._sighting = _Sighting(
            due=due,
            since=since,
            task=task,
            watched=watched,
            owner="" if watched is None else watched.owner,
            location=location_in(frames_of_thread(self._thread)),
        )

    def _schedule_tick(self) -> None:
        self._due = time.monotonic() + TICK_S
        self.loop.call_later(TICK_S, self._tick)

    def _tick(self) -> None:
        self.measure_lag_s()
        if self._users:
            self._schedule_tick()
        else:
            self._due = math.inf


class VirtualClock(LoopClock):
    """Clock of an event loop in virtual time, in which steps take no time: nothing lags."""

    def time(self) -> float:
        return self.loop.time()

    def measure_lag_s(self) -> float:
        return 0.0

    def start(self) -> None:
        pass

    def stop(self) -> None:
        pass


class _Watchdog:
    """Thread that looks at the event loops of this process."""

    def __init__(self) -> None:
        self._clocks: WeakSet[LoopClock] = WeakSet()
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None
        self._has_warned = False

    def watch(self, clock: LoopClock) -> None:
        """Look at the clock's loop from now on.

        If the process can start no thread, limits still hold, but code that blocks the loop is
        neither named nor late for blocking.
        """
        with self._lock:
            self._clocks.add(clock)
            if self._thread is not None and self._thread.is_alive():  # a fork has no threads
                return
            thread = threading.Thread(target=self._run, name="loop-watchdog", daemon=True)
            try:
                thread.start()
                self._thread = thread
            except RuntimeError as error:  # the process may have no more threads
                if not self._has_warned:
                    logger.warning("calls that block the event loop are not seen: %s", error)
                self._has_warned = True

    def _run(self) -> None:
        while True:
            time.sleep(WATCH_S)
            with self._lock:
                clocks = list(self._clocks)
            while clocks:  # emptied, so that the clock of a loop that has ended is freed
                clocks.pop().look()


_WATCHDOG = _Watchdog()


class _Clocks(threading.local):
    current: LoopClock | None = None
    """Clock of the event loop that this thread runs, or ran last."""


_CLOCKS = _Clocks()


def clock_of_running_loop() -> LoopClock:
    """Return the running event loop's clock."""
    loop = asyncio.get_running_loop()
    clock = _CLOCKS.current
    if clock is None or clock.loop is not loop:
        clock = LoopClock(loop)
        _CLOCKS.current = clock
    return clock


def use_clock(clock: LoopClock) -> None:
    """Have the calls on the clock's loop, which this thread is about to run, use this clock."""
    _CLOCKS.current = clock
