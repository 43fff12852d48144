"""Runs the async code of users in scopes: one asyncio task each, in which calls are frames.

    caller ──awaits the scope──┐
                               ▼
    scope's task   turn loop ──▶ RendererEnv ──▶ Maze.step_message ──▶ ...
                   └ frame, 600 s                └ frame, 60 s

A call that is made in its scope's own task runs in place, as a frame: it takes no task, no future
and no timer of its own. A call from elsewhere begins a scope: at the top, and in a task that the
user's code has started.

1. A frame whose deadline comes cancels the scope's task. The CancelledError passes through whatever
   the frame has called, and the frame ends in its own error.
2. Code that ignores its cancellation for `CANCEL_GRACE_S` is abandoned with its whole scope. The
   scope's caller goes on with the error, and the code runs on. A call that was open when the scope
   was abandoned ends in CancelledError when its function returns.
3. A deadline that comes after the event loop was held up moves by that time, at most `MAX_MOVES`
   times. If a step between two calls holds up the loop for the whole limit, the call is late, and
   a value that it returns is lost.
4. A cancellation of the scope's caller, and that of a timeout around a frame, passes through.
"""

import asyncio
import contextlib
import logging
import math
from collections.abc import Awaitable, Callable, Sequence
from contextvars import ContextVar
from typing import Any, Protocol, cast

from torchtitan.experiments.rl.ask.lag import TICK_S, Block, clock_of_running_loop
from torchtitan.experiments.rl.ask.stacks import frames_of_coroutine, location_in, with_owner
from torchtitan.experiments.rl.ask.threads import TIMER_S, CallResult
from torchtitan.experiments.rl.errors import UserCodeError, UserCodeTimeout

logger = logging.getLogger(__name__)

CANCEL_GRACE_S = 1.0
"""Seconds that cancelled code may take to unwind before it is abandoned."""
MAX_MOVES = 3
"""Number of times that lag of the event loop may move the deadline of a call. Code that computes
all the time, and lets others run between, moves its own, and would never be late."""


class AwaitedCall(Protocol):
    """A call in another task or thread that a scope's code waits for."""

    def location(self) -> str:
        """Return the function that the call is in, with file and line; empty if not known."""


class Frame:
    """A call that is open in a scope."""

    __slots__ = (
        "_deadline",
        "_lag_before_s",
        "_moves",
        "began_at",
        "block",
        "late",
        "limit_s",
        "owner",
        "scope",
    )

    def __init__(self, scope: "Scope", limit_s: float, owner: str):
        clock = scope.clock
        self.scope = scope
        self.limit_s = limit_s
        self.owner = owner
        self.late: UserCodeTimeout | None = None
        """Error of the call, once its deadline has come."""
        self.block: Block | None = None
        """Step of the call that held up the event loop for the whole limit."""
        self._lag_before_s = clock.measure_lag_s()
        self.began_at = clock.time()
        self._deadline = self.began_at + limit_s
        self._moves = 0
        """Number of times that the deadline has moved by the lag of the event loop."""

    def left_s(self) -> float:
        """Return the seconds until the deadline, which this may move; 0 or less if it has come.

        They are `TIMER_S` fewer, so that a timer that is early finds the call late.
        """
        clock = self.scope.clock
        left_s = self._deadline - clock.time() - TIMER_S
        if left_s > 0:
            return left_s
        now_s = clock.measure_lag_s()  # may call `note_block`, which changes `_lag_before_s`
        lag_s = now_s - self._lag_before_s
        self._lag_before_s = now_s
        if lag_s <= TIMER_S or self.block is not None or self._moves == MAX_MOVES:
            return left_s
        self._moves += 1
        self._deadline = clock.time() + lag_s
        return lag_s - TIMER_S

    def note_block(self, block: Block) -> None:
        """Learn of a step of this call, or of one inside it, that held up the event loop."""
        self._lag_before_s += block.seconds  # its own time moves no deadline
        # Up to a tick of the step was not measured.
        if self.block is None and block.seconds > self.limit_s - TICK_S:
            self.block = block

    def expire(self) -> None:
        """Note that the deadline has come, and cancel the code."""
        if self.block is not None:
            self.late = self.blocked(self.block)
        else:
            self.late = UserCodeTimeout(f"no answer within {self.limit_s:g} s")
            self.late.where = self.scope.location_seen_from(self)
        self.scope.cancel_late(self)

    def blocked(self, block: Block) -> UserCodeTimeout:
        """Count a step that held up the event loop for the whole limit, and return its error."""
        self.scope.clock.count_late(block)
        is_own = block.owner == self.owner
        culprit = block.location if is_own else with_owner(block.owner, block.location)
        return UserCodeTimeout(
            f"no answer within {self.limit_s:g} s: {culprit or 'it'} blocked the event loop for "
            f"{block.seconds:.3g} s without awaiting"
        )


class Scope:
    """An asyncio task that runs code of users, and the calls that are open in it."""

    def __init__(self) -> None:
        self.clock = clock_of_running_loop()
        self.inside: dict[AwaitedCall, None] = {}
        """Calls in other tasks and threads that the scope's code waits for, oldest first."""
        self._parent = _SCOPE.get()
        """Scope whose code has made the call that this scope runs."""
        self._frames: list[Frame] = []
        """Open calls in the scope's task, outermost first."""
        self._ended: asyncio.Future[CallResult] = self.clock.loop.create_future()
        self._task: asyncio.Task[None] | None = None
        """None before it starts, and as it ends: its context refers to the scope."""
        self._is_cancelled = False
        """True if the scope ends whatever its code does: the caller was cancelled, or has gone on
        without it."""

    @property
    def is_current(self) -> bool:
        """True in the scope's own task."""
        return self._task is not None and self._task is asyncio.current_task()

    @property
    def owner(self) -> str:
        """Name of the code that runs in the scope's task."""
        frame = next(reversed(self._frames), None)
        return "" if frame is None else frame.owner

    def note_block(self, block: Block) -> None:
        """Learn of a step of the scope's task, or of a scope that its code has begun."""
        for frame in self._frames:
            frame.note_block(block)
        if self._parent is not None:
            self._parent.note_block(block)

    # ---- the caller's side

    def start(self, function: Callable[[], Awaitable[object]], limit_s: float, owner: str) -> None:
        """Begin the scope's first call."""
        self._task = self.clock.loop.create_task(self._run(function, limit_s, owner))
        self.clock.watched[self._task] = self
        if self._parent is not None:
            self._parent.inside[self] = None

    @staticmethod
    async def results(scopes: "Sequence[Scope]") -> list[CallResult]:
        """Wait for the ends of the first calls of scopes that have started.

        Raises:
            asyncio.CancelledError: the caller was cancelled, and so was the code.
        """
        try:
            return await asyncio.gather(*(scope._ended for scope in scopes))
        except asyncio.CancelledError:
            running = [scope for scope in scopes if not scope._is_cancelled]
            for scope in running:
                scope._is_cancelled = True
            try:
                # A task that is cancelled before its first step never runs: an env would not be
                # closed.
                await asyncio.sleep(0)
            finally:
                await Scope._stop(running)
            raise
        finally:
            for scope in scopes:
                if scope._parent is not None:
                    scope._parent.inside.pop(scope, None)

    @staticmethod
    async def _stop(scopes: "Sequence[Scope]") -> None:
        """Cancel the tasks of scopes, and abandon those that take long to end."""
        scope_of = {scope._task: scope for scope in scopes if scope._task is not None}
        for task in scope_of:
            task.cancel()  # before anything is awaited: the caller may be cancelled again
        if scope_of:
            _, running = await asyncio.wait(scope_of, timeout=CANCEL_GRACE_S)
            for task in running:
                scope_of[task]._abandon()

    # ---- the task's side

    async def _run(
        self, function: Callable[[], Awaitable[object]], limit_s: float, owner: str
    ) -> None:
        _SCOPE.set(self)
        try:
            result = await self.call(function, limit_s, owner)
        except BaseException as error:  # noqa: BLE001 - CancelledError; no other, but a mistake here
            result = CallResult(error=error)
        self.clock.watched.pop(cast(Any, self._task), None)
        self._task = None
        if not self._ended.done():
            self._ended.set_result(result)

    async def call(
        self, function: Callable[[], Awaitable[object]], limit_s: float, owner: str
    ) -> CallResult:
        """Await ``function()`` as a frame. Called in the scope's own task.

        Returns:
            The value; or what the function raised, or UserCodeTimeout.

        Raises:
            asyncio.CancelledError: the scope, or a part of it around this call, is cancelled.
        """
        task = self._task
        assert task is not None, "the scope's task has not ended"
        cancelling = task.cancelling()
        frame = Frame(self, limit_s, owner)
        deadlines = None if limit_s == math.inf else self.clock.deadlines_of(limit_s)
        self._frames.append(frame)
        if deadlines is not None:
            deadlines.add(frame)
        try:
            result = CallResult(value=await function())
        except BaseException as error:  # noqa: BLE001 - user code may raise or exit with anything
            result = CallResult(error=error)
        if deadlines is not None:
            deadlines.remove(frame)
            if self.clock.time() - frame.began_at >= limit_s:
                self.clock.measure_lag_s()  # notes a step of the call that has just ended
        self._frames.pop()
        await self._take_back_cancellations(frame, result, cancelling)
        if frame.late is not None:
            frame.late.returned = result.error is None
            return CallResult(error=frame.late)
        if frame.block is not None:
            late = frame.blocked(frame.block)
            late.returned = True
            if result.error is None:
                return CallResult(error=late)
        if isinstance(result.error, UserCodeTimeout):
            result.error.is_inner = True
        return result

    async def _take_back_cancellations(
        self, frame: Frame, result: CallResult, cancelling: int
    ) -> None:
        """Take back the cancellations of the task that were of a call that has ended.

        Args:
            cancelling: number of requests to cancel the task before the call began.

        Raises:
            asyncio.CancelledError: one was of the scope, or of a part of it around the call.
        """
        task = self._task
        assert task is not None
        if task.cancelling() <= cancelling:
            return
        if frame.late is not None:
            task.uncancel()  # the frame's own request; one that is left is of a timeout around it
        is_cancelled = isinstance(result.error, asyncio.CancelledError)
        if is_cancelled and task.cancelling() > cancelling:
            raise cast(asyncio.CancelledError, result.error)
        # User code has swallowed or requested the others. Yield once, so that one that has not
        # arrived yet does.
        requests = task.cancelling()
        with contextlib.suppress(asyncio.CancelledError):
            await asyncio.sleep(0)
        has_another = task.cancelling() > requests  # such as that of a timeout around the call
        while requests > cancelling:
            task.uncancel()
            requests -= 1
        if self._is_ending or has_another:
            raise asyncio.CancelledError

    @property
    def _is_ending(self) -> bool:
        """True if the scope, or a late call around the one that has ended, is being cancelled."""
        return self._is_cancelled or any(frame.late is not None for frame in self._frames)

    # ---- late code

    def cancel_late(self, frame: Frame) -> None:
        """Cancel the task, because a frame is late."""
        if self._task is not None:
            self.clock.loop.call_later(CANCEL_GRACE_S, self._abandon_late, frame)
            self._task.cancel()

    def _abandon_late(self, frame: Frame) -> None:
        """Abandon the scope, unless the late frame has ended."""
        if frame not in self._frames or self._ended.done():
            return
        assert frame.late is not None
        late: UserCodeError = frame.late
        if frame is not self._frames[0]:  # an inner call's error names its own code
            late = late.of(frame.owner)
            late.is_inner = True
        late.was_abandoned = True
        self._ended.set_result(CallResult(error=late))
        self._abandon()

    def _abandon(self) -> None:
        self._is_cancelled = True
        logger.warning("user code was cancelled, did not end and was abandoned: %s", self._task)

    # ---- where the code waits

    def location(self) -> str:
        """Return where the code waits, for the error of a call around this scope."""
        return self.location_seen_from(None)

    def location_seen_from(self, frame: Frame | None) -> str:
        """Return the function that the innermost call waits in, with the call's owner.

        Args:
            frame: call whose own error names its owner.
        """
        for inner in reversed(self.inside):
            if location := inner.location():
                return location
        location = (
            "" if self._task is None else location_in(frames_of_coroutine(self._task.get_coro()))
        )
        if not self._frames or self._frames[-1] is frame:
            return location
        return with_owner(self.owner, location)


_SCOPE: ContextVar[Scope | None] = ContextVar("scope of user code that runs", default=None)


def current_scope() -> Scope | None:
    """Return the scope whose code runs, in the scope's own task or in one that the code started."""
    return _SCOPE.get()
