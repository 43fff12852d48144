"""Awaits code that users wrote, with a time limit; and what its failures are."""

import asyncio
import inspect
import logging
import math
import time
import traceback
from collections.abc import Awaitable, Callable, Coroutine, Generator
from typing import Any, TypeVar, cast

logger = logging.getLogger(__name__)

T = TypeVar("T")

CANCEL_GRACE_S = 1.0
"""How long cancelled code may take to unwind before it is abandoned."""

CAUSE_LENGTH = 400
"""Characters of a cause that are kept: it goes into logs and rollout records."""


class UserCodeError(Exception):
    """User code failed; the message is its cause in one line, exception type first."""


class UserCodeTimeout(UserCodeError):
    """User code took longer than its limit."""

    where: str = ""
    """The innermost function of the user that had not returned, with its file and line; empty where that is not known."""


class BlockingCalls:
    """Counts calls that held up the event loop for longer than their limit."""

    def __init__(self) -> None:
        self._count = 0

    def add(self) -> None:
        """One more call."""
        self._count += 1

    def lap(self) -> int:
        """Calls since the last lap."""
        count, self._count = self._count, 0
        return count


BLOCKING = BlockingCalls()
"""Of this process."""


def cause_of(error: BaseException) -> str:
    """One line: exception type, message, and the file and line that raised it. A message that can't be read is left out."""
    try:
        text = " ".join(str(error).split())[:CAUSE_LENGTH]
    except BaseException as broken:  # the exception is the user's too
        text = f"its message can't be read ({type(broken).__name__} in __str__)"
    if isinstance(error, UserCodeError):
        return text
    frames = traceback.extract_tb(error.__traceback__)
    where = f" ({frames[-1].filename.rsplit('/', 1)[-1]}:{frames[-1].lineno})" if frames else ""
    return f"{type(error).__name__}: {text}{where}" if text else f"{type(error).__name__}{where}"


def is_finite_number(value: Any) -> bool:
    """True for Python and numpy numbers and bools that are neither NaN nor infinite; strings and arrays are not numbers."""
    try:
        return hasattr(value, "__float__") and not getattr(value, "shape", ()) and math.isfinite(value)
    except BaseException:  # the value is the user's, and so is its __float__
        return False


async def call_bounded(call: Callable[[], Awaitable[T]], *, timeout_s: float | None) -> T:
    """Await ``call()`` for at most ``timeout_s`` seconds (None: for as long as it takes).

    Raises:
        UserCodeTimeout: it took longer, or blocked the event loop beyond its limit.
        UserCodeError: it raised anything, SystemExit and CancelledError included.
        asyncio.CancelledError: the caller was cancelled.
    """
    watch = _Watch(timeout_s)
    task = asyncio.ensure_future(_outcome(call, watch))
    try:
        await asyncio.wait({task}, timeout=timeout_s)
    except asyncio.CancelledError:
        await asyncio.sleep(0)  # a task cancelled before its first step never runs: an env's close() would be skipped
        await _stop(task)
        raise
    if watch.blocked_s:
        BLOCKING.add()
        await _stop(task)
        raise UserCodeTimeout(
            f"no answer within {timeout_s:g} s: it blocked the event loop for {watch.blocked_s:.3g} s without awaiting"
        )
    if not task.done():
        late = UserCodeTimeout(f"no answer within {timeout_s:g} s")
        late.where = watch.innermost()
        await _stop(task)
        raise late
    if task.cancelled():
        raise UserCodeError("CancelledError: raised by the code itself")
    value, error = task.result()
    if error is not None:
        logger.debug("user code failed", exc_info=error)
        raise UserCodeError(cause_of(error)) from error
    return cast(T, value)


class _Watch:
    """Notes whether code blocked the event loop beyond its limit: whether one of its steps began before and ended after it.

    Code that is late because other code held up the event loop has no such step.
    """

    def __init__(self, limit_s: float | None):
        self.deadline = math.inf if limit_s is None else time.monotonic() + limit_s
        self.blocked_s = 0.0
        """Length of that step; 0 where there is none."""
        self._coroutine: Any = None

    def steps(self, coroutine: Coroutine[Any, Any, T]) -> "_Steps[T]":
        self._coroutine = coroutine
        return _Steps(coroutine, self)

    def innermost(self) -> str:
        """Which of the nested coroutines, asyncio's own aside, the code waits in; empty where that is not known."""
        found, coroutine = "", self._coroutine
        while inspect.iscoroutine(coroutine) and coroutine.cr_frame is not None:
            code = coroutine.cr_code
            if "/asyncio/" not in code.co_filename:
                file = code.co_filename.rsplit("/", 1)[-1]
                found = f"{code.co_qualname.rpartition('<locals>.')[2]} ({file}:{coroutine.cr_frame.f_lineno})"
            coroutine = coroutine.cr_await
        return found


class _Steps(Awaitable[T]):
    """Awaits something and times each of its steps, from one await to the next."""

    def __init__(self, awaitable: Awaitable[T], watch: _Watch):
        self._awaitable, self._watch = awaitable, watch

    def __await__(self) -> Generator[Any, Any, T]:
        steps = self._awaitable.__await__()
        watch, deadline, clock = self._watch, self._watch.deadline, time.monotonic
        resume: Callable[[Any], Any] = steps.send
        argument: Any = None
        while True:
            began = clock()
            try:
                waits_for = resume(argument)
            except StopIteration as end:
                return end.value
            finally:
                if began < deadline <= (ended := clock()):
                    watch.blocked_s = ended - began
            try:
                argument = yield waits_for
                resume = steps.send
            except BaseException as error:
                resume, argument = steps.throw, error


async def _outcome(call: Callable[[], Awaitable[T]], watch: _Watch) -> tuple[T | None, BaseException | None]:
    try:
        awaitable = call()
        # Other awaitables, such as futures, wait and compute nothing.
        return await (watch.steps(awaitable) if inspect.iscoroutine(awaitable) else awaitable), None
    except asyncio.CancelledError:
        raise
    except BaseException as error:
        return None, error


async def _stop(task: asyncio.Task) -> None:
    if task.done():
        return
    task.cancel()
    _, running = await asyncio.wait({task}, timeout=CANCEL_GRACE_S)
    if running:
        logger.warning("user code ignored its cancellation and was abandoned: %s", task)
