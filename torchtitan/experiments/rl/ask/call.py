"""Asks the code that users wrote: envs, reward functions, algorithms, tasks.

    value = await ask(env.step_message, message, timeout_s=60, owner="Maze.step_message")

The call ends in the function's value, in a `UserCodeError`, or in a `UserCodeTimeout`.

1. A call has one limit. An async function that is late is cancelled and, if it ignores that for
   `CANCEL_GRACE_S`, abandoned. A sync function runs in a daemon thread, which can only be
   abandoned; `ask/child.py` runs functions in a process that can be killed. If a sync function
   returns an awaitable, awaiting it has the whole limit again.
2. An async function runs in an asyncio task of its own. A ``sys.exit()`` inside it would otherwise
   stop the event loop, and a CancelledError that it raised would be taken for the caller's.
3. A cancellation of the caller passes through, after the user's code was cancelled too.
4. A late call says where it waits: in the innermost of the user's functions, with file and line.
5. The deadline moves by the time that other code held up the event loop (`ask/lag.py`). What a call
   asks in turn belongs to it. An asyncio task that its code starts by itself is other code.

An async function that blocks without awaiting, by ``time.sleep`` or a sync HTTP request, holds up
every rollout on the event loop, and no limit can interrupt it. If it blocks beyond its limit, the
call is counted in `BLOCKING`, and is late even if it returns a value: its error names the function
that blocked. A call that blocks and then raises ends in what it raised. Such code belongs in a sync
function or in ``asyncio.to_thread``.
"""

import asyncio
import functools
import inspect
import logging
import math
from collections.abc import Awaitable, Callable, Coroutine
from contextvars import ContextVar
from typing import Any, Protocol, TypeVar, overload

from torchtitan.experiments.rl.ask.lag import watch_of_running_loop
from torchtitan.experiments.rl.ask.stacks import frames_of_coroutine, place_in, with_owner
from torchtitan.experiments.rl.ask.threads import TIMER_S, Outcome, ThreadCall, WorkerThreads
from torchtitan.experiments.rl.errors import (
    UserCodeError,
    UserCodeTimeout,
    cause_of,
    places_of,
)

T = TypeVar("T")

logger = logging.getLogger(__name__)

CANCEL_GRACE_S = 1.0
"""Seconds that cancelled code may take to unwind before it is abandoned."""
CANCELLED_ITSELF = "CancelledError: raised by the code itself"
"""Cause of the failure of code that raised CancelledError, and that its caller did not cancel."""
MAX_FRAMES = 20
"""Number of innermost frames by which failures are told apart: an endless recursion would otherwise
be a new kind of failure at each depth."""
MAX_KINDS = 1000
"""Maximum number of kinds of failures that are logged: generated code has no end of them."""


class BlockingCalls:
    """Counter of the calls that held up the event loop beyond their limit.

    A step that exceeds the limits of several calls, one of which made the next, counts once.
    """

    def __init__(self) -> None:
        self.count = 0

    def add(self) -> None:
        self.count += 1

    def lap(self) -> int:
        """Return the count since the last lap."""
        count = self.count
        self.count = 0
        return count


BLOCKING = BlockingCalls()
"""Counter of this process."""
USER_THREADS = WorkerThreads(32)
"""Threads that run this process's sync user code. Code that waits for a server should be async."""


@overload
async def ask(
    function: Callable[..., Coroutine[Any, Any, T]],
    *args: object,
    timeout_s: float | None,
    owner: str = "",
) -> T: ...
@overload
async def ask(
    function: Callable[..., T], *args: object, timeout_s: float | None, owner: str = ""
) -> T: ...
async def ask(
    function: Callable[..., object], *args: object, timeout_s: float | None, owner: str = ""
) -> object:
    """Return ``function(*args)``, awaited if that can be awaited.

    Args:
        timeout_s: limit of the call; None for no limit. The time that a sync function waits for a
            thread does not count. An awaitable that it returned is awaited for as long again.
        owner: name of the code for errors, such as "Maze.step_message": begins their message.

    Raises:
        UserCodeTimeout: the function took longer, or returned after it blocked the event loop
            beyond its limit.
        UserCodeError: the function raised anything, SystemExit and CancelledError included.
        asyncio.CancelledError: the caller was cancelled.
    """
    try:
        if inspect.iscoroutinefunction(function):
            return await _ask_on_loop(functools.partial(function, *args), timeout_s, owner)
        return await ask_in_thread(
            USER_THREADS, USER_THREADS.submit(function, *args), timeout_s, owner
        )
    except UserCodeError as error:
        if not owner:
            raise
        raise error.of(owner) from error


async def ask_in_thread(
    threads: WorkerThreads, call: ThreadCall, timeout_s: float | None, owner: str = ""
) -> object:
    """Return the value of a call that was submitted to ``threads``; see `ask`."""
    caller = _CALLER.get()
    if caller is not None:
        call.owner = owner
        caller.inner[call] = None
    try:
        outcome = await threads.outcome(call, timeout_s)
    finally:
        if caller is not None:
            caller.inner.pop(call, None)
    if outcome.error is not None:
        raise _failure(outcome.error)
    value = outcome.value
    if isinstance(value, Awaitable):
        return await _ask_on_loop(lambda: value, timeout_s, owner)
    return value


async def _ask_on_loop(
    function: Callable[[], Awaitable[object]], timeout_s: float | None, owner: str
) -> object:
    """Await ``function()`` in an asyncio task of its own; see `ask`."""
    call = _LoopCall(function, timeout_s, owner)
    task = call.start()
    try:
        try:
            await call.wait()
        except asyncio.CancelledError:
            try:
                # A task that is cancelled before its first step never runs: an env would not be
                # closed.
                await asyncio.sleep(0)
            finally:
                await _stop(task)
            raise
        if task.done():
            outcome = Outcome(error=asyncio.CancelledError())
            if not task.cancelled():
                outcome = task.result()
            if outcome.error is not None:
                raise _failure(outcome.error)
            if not call.has_blocked:
                return outcome.value
        # The code is late, or it has returned, but only after it blocked the event loop.
        late = call.late()
        late.returned = task.done()
        await _stop(task)
        raise late
    finally:
        call.close(task)


async def _stop(task: asyncio.Task[Outcome]) -> None:
    """Cancel user code, and abandon it if it takes longer than `CANCEL_GRACE_S` to end.

    What the code returns or raises after that is dropped.
    """
    if task.done():
        return
    task.cancel()
    _, running = await asyncio.wait({task}, timeout=CANCEL_GRACE_S)
    if running:
        logger.warning("user code was cancelled, did not end and was abandoned: %s", task)


class _Place(Protocol):
    """A call that can say where it is."""

    def place(self) -> str: ...


class _LoopCall:
    """A call of an async function.

    The context of the call's task refers to the call (`_CALLER`). So the call does not refer to its
    task: such a circle would leave every task to the garbage collector, which then holds up the
    event loop.
    """

    def __init__(self, function: Callable[[], Awaitable[Any]], timeout_s: float | None, owner: str):
        self.inner: dict[_Place, None] = {}
        """Calls that the call's code has made and that have not ended, oldest first."""
        self._timeout_s = math.inf if timeout_s is None else timeout_s
        self._owner = owner
        self._caller = _CALLER.get()
        if self._caller is not None:
            self._caller.inner[self] = None
        self._own_lag_s = 0.0
        """Seconds for which the call's own steps held up the event loop."""
        self._blocked_s = 0.0
        """Length of the own step in which the limit was exceeded; 0 if there was none."""
        self._blocked_in = ""
        """Function that this step was in, with file and line."""
        self._watch = watch_of_running_loop()
        self._ended_or_late = self._watch.loop.create_future()
        if self._timeout_s != math.inf:
            self._watch.begin()
            self._watch.calls_of(self._timeout_s).add(self)
        self._lag_before_s = self._watch.lag_s()
        self._began_at = self._watch.time()
        self._coroutine = self._run(function)

    def start(self) -> asyncio.Task[Outcome]:
        """Start the code in a task of its own."""
        task = self._watch.loop.create_task(self._coroutine)
        task.add_done_callback(self.wake)
        self._watch.calls[task] = self
        return task

    async def _run(self, function: Callable[[], Awaitable[Any]]) -> Outcome:
        _CALLER.set(self)
        try:
            return Outcome(value=await function())
        except asyncio.CancelledError:
            raise
        except BaseException as error:  # noqa: BLE001 - user code may raise or exit with anything
            return Outcome(error=error)

    async def wait(self) -> None:
        """Wait until the code has ended or is late.

        Not by `asyncio.timeout`: its deadline can't be moved any more once it has come.
        """
        await self._ended_or_late
        self._watch.lag_s()  # blames the call if its last step held up the event loop

    def wake(self, _: object = None) -> None:
        """End the wait for the code."""
        if not self._ended_or_late.done():
            self._ended_or_late.set_result(None)

    @property
    def has_blocked(self) -> bool:
        """True if the limit was exceeded while the call's own step held up the event loop."""
        return self._blocked_s > 0

    def late(self) -> UserCodeTimeout:
        """Return the error of a late call, with where it waits. Call this before `_stop`."""
        text = f"no answer within {self._timeout_s:g} s"
        if self.has_blocked:
            culprit = self._blocked_in or "it"
            text += f": {culprit} blocked the event loop for {self._blocked_s:.3g} s"
            late = UserCodeTimeout(f"{text} without awaiting")
        else:
            late = UserCodeTimeout(text)
            late.where = self._place_inside() or self._own_place()
        return late

    def close(self, task: asyncio.Task[Outcome]) -> None:
        """Forget the call, which has ended or is abandoned."""
        self._watch.calls.pop(task, None)
        if self._timeout_s != math.inf:
            self._watch.calls_of(self._timeout_s).remove(self)
            self._watch.end()
        # Not before it was stopped: its caller may be late meanwhile, and say where it waits.
        if self._caller is not None:
            self._caller.inner.pop(self, None)

    def place(self) -> str:
        """Return where the code waits, for the error of a call around it."""
        return self._place_inside() or with_owner(self._owner, self._own_place())

    def _place_inside(self) -> str:
        """Return where the code's latest open call waits, of those whose place is known.

        Empty if there is none.
        """
        for inner in reversed(self.inner):
            if place := inner.place():
                return place
        return ""

    def _own_place(self) -> str:
        return place_in(frames_of_coroutine(self._coroutine))

    def blame(self, seconds: float, place: str) -> None:
        """Count lag that a step of this call caused against its limit, and those of its callers.

        See `ask/lag.py`.
        """
        has_blocked = False
        call: _LoopCall | None = self
        while call is not None:
            call._own_lag_s += seconds
            left_s = call.left_s()
            if left_s <= 0 < left_s + seconds:  # the limit ran out in this step
                call._blocked_s = seconds
                call._blocked_in = place if call is self else with_owner(self._owner, place)
                has_blocked = True
            call = call._caller
        if has_blocked:
            BLOCKING.add()

    def left_s(self) -> float:
        """Return the seconds that are left of the limit; 0 or less if the call is late.

        They are `TIMER_S` fewer than the limit has, so that a timer that is early finds it late.
        """
        lag_s = self._watch.lag_s() - self._lag_before_s
        ran_s = self._watch.time() - self._began_at - (lag_s - self._own_lag_s)
        return self._timeout_s - ran_s - TIMER_S


_CALLER: ContextVar[_LoopCall | None] = ContextVar("call of user code that runs", default=None)


def _failure(error: BaseException) -> UserCodeError:
    """Return the error of a call whose code raised ``error``, which is its cause; log it."""
    if isinstance(error, UserCodeTimeout):  # of a call inside it, whose deadline came first
        return error
    log_first(error)
    cause = CANCELLED_ITSELF if isinstance(error, asyncio.CancelledError) else cause_of(error)
    failure = UserCodeError(cause)
    failure.__cause__ = error
    return failure


async def contained(work: Awaitable[T]) -> T:
    """Await ``work``, as the body of an asyncio task of the library that runs code of users.

    Raises:
        UserCodeError: it raised what would stop the event loop: SystemExit or KeyboardInterrupt.
        asyncio.CancelledError: it was cancelled, or raised this itself.
        Exception: whatever else it raised.
    """
    try:
        return await work
    except (Exception, asyncio.CancelledError):
        raise
    except BaseException as error:  # SystemExit and KeyboardInterrupt would stop the event loop
        raise UserCodeError(cause_of(error)) from error


_LOGGED_KINDS: set[tuple[Any, ...]] = set()
"""Kinds of failures whose traceback this process has logged."""


def log_first(error: BaseException) -> None:
    """Log the traceback of an error of user code, unless one of its kind was logged before.

    Errors are of one kind if they have the same type and come from the same lines. The
    CancelledError of async code arrives without its traceback, so there is one kind of it. An error
    that the library made of another is left out: the other was logged where it was caught.
    """
    is_made = isinstance(error, UserCodeError)
    if is_made or not logger.isEnabledFor(logging.INFO):  # the preflight has no log
        return
    kind = (type(error), *places_of(error)[-MAX_FRAMES:])
    if kind not in _LOGGED_KINDS and len(_LOGGED_KINDS) < MAX_KINDS:
        _LOGGED_KINDS.add(kind)
        logger.info("user code failed, the first time in this way", exc_info=error)


def sentence(error: BaseException) -> str:
    """Return the cause of a failed call, and where it waited if it was late."""
    where = error.where if isinstance(error, UserCodeError) else ""
    return cause_of(error) + (f"; it waits in {where}" if where else "")
