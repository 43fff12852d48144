"""Measures how long an event loop is held up, and by which call of user code.

    event loop   tick ─ tick ─ tick ── a step that blocks ───────────── tick (late: lag)
    watch thread  ·      ·      ·      ·      note the task and its place  ·

A timer of the loop ticks every `TICK_S`, and the time by which a tick is late is lag. A step that
blocks can't be interrupted and can't measure itself, so a thread looks at the loop as often: while
a tick is overdue, it notes which asyncio task runs, and in which function. The time since the look
before is that task's, and its call is blamed for it: its deadline stays, and the deadline of every
other call moves. If no look saw the task of a call, no call is blamed, and every deadline moves.

This is a sample, not a measurement. Of many short steps a look sees one, whose call is blamed for
the others too.

Both run only while a call with a limit is open. They take about 0.1 % of a core.
"""

import asyncio
import logging
import math
import threading
import time
from dataclasses import dataclass
from typing import Any, Protocol

from torchtitan.experiments.rl.ask.stacks import frames_of_thread, place_in
from torchtitan.experiments.rl.ask.threads import TIMER_S

logger = logging.getLogger(__name__)

TICK_S = 0.02
"""Seconds between two ticks, and between two looks of the thread. A shorter block may go unseen. Up
to this much of a longer one, from its begin to the time at which a tick is due, is not lag."""
HOLD_S = 0.005
"""Lateness of a tick up to which the event loop counts as free."""


class WatchedCall(Protocol):
    """A call of user code that is open."""

    def blame(self, seconds: float, place: str) -> None:
        """Count lag that the call's own step caused against the call's limit.

        Args:
            place: function that the step was in, with file and line; empty if not known.
        """

    def left_s(self) -> float:
        """Return the seconds that are left of the call's limit; 0 or less if the call is late."""

    def wake(self) -> None:
        """End the wait for the call, which is late."""


@dataclass(slots=True)
class _Look:
    """An observation that a step holds up the event loop."""

    at: float
    """`time.monotonic` of the latest look at this step."""
    task: "asyncio.Task[Any] | None"
    """Task whose step it is; None for a callback."""
    place: str
    """Function that the step was in at the latest look; empty if not known."""


class CallsOfLimit:
    """The open calls that have one limit, and the timer that wakes those that are late.

    They share a timer, because hundreds are open at once: with a timer for each, the event loop's
    heap of timers took a fifth of the processor time of a rollout of one turn.

    The timer is never due after the first deadline. It may be due before: the call it was set for
    has ended, or lag has moved the deadlines. It then is set again. A call that was woken stays
    until `remove`, and needs no timer.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop, limit_s: float):
        self._loop = loop
        self._limit_s = limit_s
        self._calls: dict[WatchedCall, None] = {}
        self._timer: asyncio.TimerHandle | None = None

    def add(self, call: WatchedCall) -> None:
        """Add a call that begins now."""
        self._calls[call] = None
        # A timer that is set is due by the deadline of a call that began before. This call has the
        # same limit, so its deadline is later.
        if self._timer is None:
            self._timer = self._loop.call_later(self._limit_s, self._wake_late)

    def remove(self, call: WatchedCall) -> None:
        """Remove a call that has ended or is abandoned, whether it was woken or not."""
        del self._calls[call]
        if not self._calls and self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _wake_late(self) -> None:
        """Wake the calls that are late, and look again when the next may be."""
        self._timer = None
        left_s = [call.left_s() for call in self._calls]
        for call, left in zip(self._calls, left_s, strict=True):
            if left <= 0:
                call.wake()
        next_s = min((left for left in left_s if left > 0), default=None)
        if next_s is not None:
            # Not less than TIMER_S: adding a few 1e-17 s to a clock in virtual time leaves it where
            # it is, and the timer would fire for ever.
            self._timer = self._loop.call_later(max(next_s, TIMER_S), self._wake_late)


class LoopWatch:
    """Watch of one event loop. Made in the loop's thread, and used there."""

    def __init__(self, loop: asyncio.AbstractEventLoop):
        self.loop = loop
        self.calls: dict[asyncio.Task[Any], WatchedCall] = {}
        """Open calls by the task that runs their code."""
        self._limits: dict[float, CallsOfLimit] = {}
        """Calls by their limit in seconds. Limits come from the config, so they are few, and none
        is ever removed."""
        self._lag_s = 0.0
        self._due = math.inf
        """`time.monotonic` at which the next tick is due."""
        self._looks: list[_Look] = []
        """Observations since the last tick."""
        self._loop_thread = threading.get_ident()
        self._lock = threading.Lock()
        """Guards the fields below."""
        self._users = 0
        self._watcher: threading.Thread | None = None
        self._has_warned = False

    def time(self) -> float:
        """Return the time of the clock that limits are measured with."""
        return time.monotonic()

    def lag_s(self) -> float:
        """Return the seconds that the loop was held up so far, and blame the calls that did it.

        Only a tick that is more than `HOLD_S` late counts. If a step calls this while it holds up
        the loop, its time so far counts now, and the rest later.
        """
        now = time.monotonic()
        late_s = now - self._due
        if late_s > HOLD_S:
            self._lag_s += late_s
            since = self._due
            looks = [look for look in self._looks if look.at > since]
            self._looks = []
            self._due = now  # the tick is overdue and runs next
            self._blame(looks, since, now)
        return self._lag_s

    def calls_of(self, limit_s: float) -> CallsOfLimit:
        """Return the open calls that have this limit."""
        calls = self._limits.get(limit_s)
        if calls is None:
            calls = self._limits[limit_s] = CallsOfLimit(self.loop, limit_s)
        return calls

    def begin(self) -> None:
        """Watch the loop until `end` has been called as often as this."""
        with self._lock:
            self._users += 1
            if self._watcher is None:
                self._start_watcher()
        if self._due == math.inf:
            self._schedule_tick()

    def end(self) -> None:
        with self._lock:
            self._users -= 1

    def _start_watcher(self) -> None:
        """Start the thread, if the process can.

        Without it no call is blamed for lag. Limits still hold, but every deadline moves by all of
        the lag, so a call that blocks the event loop is not late for that.
        """
        watcher = threading.Thread(target=self._watch, name="loop-watch", daemon=True)
        try:
            watcher.start()
            self._watcher = watcher
        except RuntimeError as error:  # the process may have no more threads
            if not self._has_warned:
                logger.warning("calls that block the event loop are not seen: %s", error)
            self._has_warned = True

    def _schedule_tick(self) -> None:
        self._due = time.monotonic() + TICK_S
        self.loop.call_later(TICK_S, self._tick)

    def _tick(self) -> None:
        self.lag_s()
        if self._users:
            self._schedule_tick()
        else:
            self._due = math.inf

    def _blame(self, looks: list[_Look], since: float, now: float) -> None:
        """Share out lag, from ``since`` to ``now``, among the calls that were seen to cause it.

        The time up to a look is that of the call which it saw, and the time after the last look is
        that of the call which this one saw.
        """
        for look in looks:
            until = now if look is looks[-1] else look.at
            call = self.calls.get(look.task) if look.task is not None else None
            if call is not None:
                call.blame(until - since, look.place)
            since = until

    def _watch(self) -> None:
        """Look at the loop until it is no longer used. Runs in the thread."""
        while True:
            time.sleep(TICK_S)
            with self._lock:
                if not self._users or self.loop.is_closed():
                    self._watcher = None
                    return
            now = time.monotonic()
            if now - self._due > HOLD_S and self.loop.is_running():
                self._look(now)

    def _look(self, now: float) -> None:
        """Note the step that runs. Runs in the thread.

        If the step ends meanwhile, its look may have the next step's place. If `lag_s` takes the
        looks meanwhile, this one is lost or, because of its time, ignored.
        """
        task = asyncio.current_task(self.loop)
        looks = self._looks
        place = place_in(frames_of_thread(self._loop_thread))
        if looks and looks[-1].task is task:
            looks[-1].at = now
            looks[-1].place = place
        else:
            looks.append(_Look(now, task, place))


class NoLag(LoopWatch):
    """Watch of an event loop in virtual time, in which steps take no time: nothing is ever late."""

    def time(self) -> float:
        return self.loop.time()

    def lag_s(self) -> float:
        return 0.0

    def begin(self) -> None:
        pass

    def end(self) -> None:
        pass


class _Watches(threading.local):
    current: LoopWatch | None = None
    """Watch of the event loop that this thread runs, or ran last."""


_WATCHES = _Watches()


def watch_of_running_loop() -> LoopWatch:
    """Return the watch of the event loop that calls this."""
    loop = asyncio.get_running_loop()
    watch = _WATCHES.current
    if watch is None or watch.loop is not loop:
        watch = LoopWatch(loop)
        _WATCHES.current = watch
    return watch


def use_watch(watch: LoopWatch) -> None:
    """Have the calls on the watch's loop, which this thread is about to run, use this watch."""
    _WATCHES.current = watch
