"""Calls code that users wrote: envs, reward functions, algorithms, tasks. Every call ends in a value or in a ``UserCodeError``.

1. Every call has a time limit. Async code that is late is cancelled and, if it ignores that, abandoned. Sync code runs in a
   daemon thread, which can only be abandoned (a subprocess can be killed: user_code/isolated.py).
2. ``call_user`` tells the two apart: async functions run on the event loop, all others in worker threads.
3. Async code runs in an asyncio task of its own. A ``sys.exit()`` inside a task would otherwise stop the whole event loop, and
   a CancelledError raised by the user's code could not be told from that of the caller.
4. A cancellation of the caller passes through, after the user's code was cancelled too.

Async code that blocks without awaiting (``time.sleep``, a sync HTTP call) holds up the event loop and every rollout on it; no
time limit can interrupt it. A call that blocks beyond its limit ends as late all the same, and is counted in ``BLOCKING``.
Such code belongs in ``asyncio.to_thread``.

Code that must be called in order, such as samplers, has a gate of its own: user_code/gate.py.
"""

import asyncio
import functools
import inspect
from collections.abc import Awaitable, Callable
from typing import Any, TypeVar

from torchtitan.experiments.rl.user_code.bounded import (
    UserCodeError,
    UserCodeTimeout,
    call_bounded,
    call_plain,
    cause_of,
    is_finite_number,
)
from torchtitan.experiments.rl.user_code.threads import Threads
from torchtitan.experiments.rl.user_code.watch import BLOCKING

__all__ = [
    "BLOCKING",
    "Threads",
    "UserCodeError",
    "UserCodeTimeout",
    "call_bounded",
    "call_plain",
    "call_user",
    "cause_of",
    "contained",
    "is_finite_number",
]

T = TypeVar("T")

USER_THREADS = Threads(32)
"""Where the process's sync user code runs. Code that waits for something, such as a judge, should be async."""


async def call_user(function: Callable[..., Any], *args: Any, timeout_s: float | None, owner: str | None = None) -> Any:
    """Run ``function(*args)``, async or not, for at most ``timeout_s`` seconds, without holding up the event loop.

    Args:
        owner: whose function it is and what it does, such as "task 'sum': SumTask.setup"; begins the message of the errors.

    Raises:
        UserCodeTimeout: it took longer, or blocked the event loop beyond its limit.
        UserCodeError: it raised anything.
        asyncio.CancelledError: the caller was cancelled.
    """
    try:
        if inspect.iscoroutinefunction(function):
            return await call_bounded(lambda: function(*args), timeout_s=timeout_s, owner=owner or "")
        call = functools.partial(USER_THREADS.call, function, *args, timeout_s=timeout_s)
        return await call_bounded(call, timeout_s=None, owner=owner or "")
    except UserCodeError as error:
        if owner is None:
            raise
        message = f"{owner}: {error}"
        raise (error.again(message) if isinstance(error, UserCodeTimeout) else UserCodeError(message)) from error


async def contained(work: Awaitable[T]) -> T:
    """Await ``work`` inside an asyncio task of the library.

    Raises:
        UserCodeError: it raised what would stop the event loop: SystemExit or KeyboardInterrupt.
        Exception: whatever else it raised, CancelledError included.
    """
    try:
        return await work
    except (Exception, asyncio.CancelledError):
        raise
    except BaseException as error:
        raise UserCodeError(cause_of(error)) from error
