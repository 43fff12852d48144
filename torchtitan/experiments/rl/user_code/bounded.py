"""Awaits code that users wrote, with a time limit; and what its failures are."""

import asyncio
import inspect
import logging
import math
import time
import traceback
from collections.abc import Awaitable, Callable
from typing import Any, TypeVar, cast

from torchtitan.experiments.rl.user_code.watch import HOLD_S, Watch

logger = logging.getLogger(__name__)

T = TypeVar("T")

CANCEL_GRACE_S = 1.0
"""How long cancelled code may take to unwind before it is abandoned."""

CANCELLED_ITSELF = "CancelledError: raised by the code itself"

CAUSE_LENGTH = 400
"""Characters of a cause that are kept: it goes into logs and rollout records."""


class UserCodeError(Exception):
    """User code failed; the message is its cause in one line, exception type first."""


class UserCodeTimeout(UserCodeError):
    """User code took longer than its limit."""

    where: str = ""
    """What it waited for: ``Watch.waits_in``."""
    returned: bool = False
    """The code returned, too late, and raised nothing."""

    def again(self, message: str) -> "UserCodeTimeout":
        """The same with another message."""
        late = UserCodeTimeout(message)
        late.where, late.returned = self.where, self.returned
        return late


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


async def call_bounded(call: Callable[[], Awaitable[T]], *, timeout_s: float | None, owner: str = "") -> T:
    """Await ``call()`` for at most ``timeout_s`` seconds (None: for as long as it takes).

    Time that other calls hold up the event loop does not count: user_code/watch.py.

    Args:
        owner: whose code it is, such as "SumRubric.setup": where a call that made this one is late, its error says so.

    Raises:
        UserCodeTimeout: it took longer, or blocked the event loop beyond its limit.
        UserCodeError: it raised anything, SystemExit and CancelledError included.
        asyncio.CancelledError: the caller was cancelled.
    """
    watch = Watch(timeout_s, owner)
    task = asyncio.ensure_future(_outcome(call, watch))
    try:
        try:
            await _ended_or_late(task, watch, timeout_s)
        except asyncio.CancelledError:
            await asyncio.sleep(0)  # a task cancelled before its first step never runs: an env's close() would be skipped
            await _stop(task)
            raise
        if task.done():
            if task.cancelled():
                raise UserCodeError(CANCELLED_ITSELF)
            value, error = task.result()
            if error is not None:
                raise failure(error) from error
            if not watch.blocked_s:
                return cast(T, value)
        late = too_late(watch, returned=task.done())
        await _stop(task)
        raise late
    finally:
        watch.over()  # not before it was stopped: a call that it is part of may be late meanwhile, and say what it waits for


def call_plain(call: Callable[[], T], *, timeout_s: float, owner: str = "") -> T:
    """``call()``, a plain function that the event loop waits for, because what follows needs its answer at once.

    Raises:
        UserCodeTimeout: it took longer than ``timeout_s``. It is not interrupted.
        BaseException: whatever it raised.
    """
    watch = Watch(timeout_s, owner)
    try:
        value = watch.begin(call)
    finally:
        watch.leave()
    if watch.blocked_s:
        raise too_late(watch, returned=True)
    return value


def failure(error: BaseException) -> UserCodeError:
    """What a call ends with whose code raised ``error``."""
    logger.debug("user code failed", exc_info=error)
    if isinstance(error, UserCodeTimeout):  # of a call inside it, whose limit was met first
        return error.again(str(error))
    return UserCodeError(CANCELLED_ITSELF if isinstance(error, asyncio.CancelledError) else cause_of(error))


def too_late(watch: Watch, *, returned: bool = False) -> UserCodeTimeout:
    """What a late call ends with. To be asked before it is stopped: it says what the code waits for.

    Args:
        returned: it has ended by itself, without an error.
    """
    late = UserCodeTimeout(f"no answer within {watch.limit_s:g} s")
    if watch.blocked_s:
        culprit = watch.blocked_by if watch.blocked_by not in ("", watch.owner) else "it"
        late = UserCodeTimeout(f"{late}: {culprit} blocked the event loop for {watch.blocked_s:.3g} s without awaiting")
    else:
        late.where = watch.waits_in()
    late.returned = returned
    return late


async def _ended_or_late(task: asyncio.Task, watch: Watch, timeout_s: float | None) -> None:
    left_s, extended = timeout_s, False
    while True:
        wakes_at = time.monotonic() + (left_s or 0.0)
        await asyncio.wait({task}, timeout=left_s)
        if task.done() or watch.blocked_s:
            return
        left_s = watch.left_s()
        # This timer was late too: something else held up the event loop, which may have the code's next step ready.
        if not extended and (overslept_s := time.monotonic() - wakes_at) > HOLD_S:
            left_s, extended = max(left_s, overslept_s), True
        if left_s <= 0:
            return


async def _outcome(call: Callable[[], Awaitable[T]], watch: Watch) -> tuple[T | None, BaseException | None]:
    try:
        awaitable = watch.begin(call)
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
