"""Calls code that users wrote: envs, reward functions, algorithms. Whatever it does ends in a value or in a ``UserCodeError``.

1. Every call has a time limit. Async code that is late is cancelled and, if it ignores that, abandoned; sync code runs in a
   daemon thread, which can only be abandoned (a subprocess can be killed: rubrics/isolated.py).
2. Async code runs in a task of its own. A ``sys.exit()`` inside a task would otherwise stop the whole event loop, and a
   CancelledError raised by the user's code could not be told from ours.
3. Our own cancellation passes through, after the user's code was cancelled too.

Async code that blocks without awaiting (``time.sleep``, a sync HTTP call) holds up the event loop and every rollout on it; no
time limit can interrupt it. Such code belongs in ``asyncio.to_thread``.
"""

import asyncio
import logging
import math
import threading
import traceback
from collections.abc import Awaitable, Callable
from typing import Any, TypeVar

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


def cause_of(error: BaseException) -> str:
    """One line: exception type, message, and the file and line that raised it."""
    text = " ".join(str(error).split())[:CAUSE_LENGTH]
    if isinstance(error, UserCodeError):
        return text
    frames = traceback.extract_tb(error.__traceback__)
    where = f" ({frames[-1].filename.rsplit('/', 1)[-1]}:{frames[-1].lineno})" if frames else ""
    return f"{type(error).__name__}: {text}{where}" if text else f"{type(error).__name__}{where}"


def is_finite_number(value: Any) -> bool:
    """True for Python and numpy numbers and bools that are neither NaN nor infinite; strings and arrays are not numbers."""
    try:
        return hasattr(value, "__float__") and not getattr(value, "shape", ()) and math.isfinite(value)
    except (TypeError, ValueError, OverflowError):
        return False


async def call_bounded(call: Callable[[], Awaitable[T]], *, timeout_s: float | None) -> T:
    """Await ``call()`` for at most ``timeout_s`` seconds (None: for as long as it takes).

    Raises:
        UserCodeTimeout: it took longer.
        UserCodeError: it raised anything, SystemExit and a CancelledError of its own included.
        asyncio.CancelledError: the caller was cancelled.
    """
    task = asyncio.ensure_future(_outcome(call))
    try:
        await asyncio.wait({task}, timeout=timeout_s)
    except asyncio.CancelledError:
        await asyncio.sleep(0)  # a task cancelled before its first step never runs: an env's close() would be skipped
        await _stop(task)
        raise
    if not task.done():
        await _stop(task)
        raise UserCodeTimeout(f"no answer within {timeout_s:g} s")
    if task.cancelled():
        raise UserCodeError("CancelledError: raised by the code itself")
    value, error = task.result()
    if error is not None:
        logger.debug("user code failed", exc_info=error)
        raise UserCodeError(cause_of(error)) from error
    return value


async def call_in_thread(function: Callable[..., Any], *args: Any) -> Any:
    """Run a sync function in a daemon thread of its own and await its answer; an awaitable it returns is awaited here.

    A thread rather than an executor: a function that never returns would keep its place in the pool, and the process alive.
    """
    loop = asyncio.get_running_loop()
    answer: asyncio.Future = loop.create_future()

    def deliver(value: Any, error: BaseException | None) -> None:
        if answer.done():  # nobody waits any more
            return
        answer.set_result((value, error))

    def run() -> None:
        try:
            outcome = function(*args), None
        except BaseException as error:
            outcome = None, error
        try:
            loop.call_soon_threadsafe(deliver, *outcome)
        except RuntimeError:  # the loop closed while an abandoned function ran on
            pass

    threading.Thread(target=run, name=f"user-code-{getattr(function, '__name__', 'function')}", daemon=True).start()
    value, error = await answer
    if error is not None:
        raise error
    return await value if isinstance(value, Awaitable) else value


async def _outcome(call: Callable[[], Awaitable[T]]) -> tuple[T | None, BaseException | None]:
    try:
        return await call(), None
    except asyncio.CancelledError:
        raise
    except BaseException as error:
        return None, error


async def _stop(task: asyncio.Task) -> None:
    task.cancel()
    _, running = await asyncio.wait({task}, timeout=CANCEL_GRACE_S)
    if running:
        logger.warning("user code ignored its cancellation and was abandoned: %s", task)
