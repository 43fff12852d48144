"""Asks the code that users wrote: envs, reward functions, algorithms, tasks.

    value = await ask(env.step_message, message, timeout_s=60, owner="Maze.step_message")

The call ends in the function's value, in a `UserCodeError`, or in a `UserCodeTimeout`.

async function   runs on the event loop (`ask/scopes.py`). If it is late, it is cancelled, and
                 abandoned if it ignores that.
sync function    runs in a daemon thread (`ask/threads.py`), which can only be abandoned. If it
                 returns an awaitable, awaiting it has the whole limit again.
isolated         runs in a process that can be killed (`ask/child.py`).

A late call says where it waits: in the innermost of the user's functions, with file and line. A
cancellation of the caller passes through, after the user's code was cancelled too.

An async function that blocks without awaiting, by ``time.sleep`` or a sync HTTP request, holds up
every rollout on the event loop, and no limit can interrupt it. If a step of it blocks for the whole
limit, the call is late even if it returns a value, and its error names the function that blocked.
Such code belongs in a sync function or in ``asyncio.to_thread``.
"""

import asyncio
import functools
import inspect
import logging
import math
from collections.abc import Awaitable, Callable, Coroutine, Iterable, Sequence
from typing import Any, TypeVar, overload

from torchtitan.experiments.rl.ask.scopes import Scope, current_scope
from torchtitan.experiments.rl.ask.threads import CallResult, ThreadCall, WorkerThreads
from torchtitan.experiments.rl.errors import (
    UserCodeError,
    UserCodeTimeout,
    cause_of,
    locations_of,
)

T = TypeVar("T")

logger = logging.getLogger(__name__)

CANCELLED_ITSELF = "CancelledError: raised by the code itself"
"""Cause of the failure of code that raised CancelledError, and that its caller did not cancel."""
MAX_FRAMES = 20
"""Number of innermost frames by which failures are told apart: an endless recursion would otherwise
be a new kind of failure at each depth."""
MAX_KINDS = 1000
"""Maximum number of kinds of failures that are logged: generated code has no end of them."""


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


async def ask_each(
    function: Callable[..., object],
    arguments: Sequence[tuple[object, ...]],
    *,
    timeout_s: float | None,
) -> list[CallResult]:
    """Return the result of ``function(*args)`` for each tuple of arguments; see `ask`.

    The calls run side by side, and the failure of one changes nothing for the others: the error of
    a result is a `UserCodeError`.

    Raises:
        asyncio.CancelledError: the caller was cancelled.
    """
    if not inspect.iscoroutinefunction(function):
        return await results_of(ask(function, *args, timeout_s=timeout_s) for args in arguments)
    # A scope each, and not a scope in each task of a gather.
    scopes = [Scope() for _ in arguments]
    for scope, args in zip(scopes, arguments, strict=True):
        scope.start(functools.partial(function, *args), _limit_s(timeout_s), owner="")
    results = await Scope.results(scopes)
    return [
        result if result.error is None else CallResult(error=_failure(result.error))
        for result in results
    ]


async def results_of(calls: Iterable[Awaitable[object]]) -> list[CallResult]:
    """Return the results of calls of user code, which run side by side."""

    async def result_of(call: Awaitable[object]) -> CallResult:
        try:
            return CallResult(value=await call)
        except UserCodeError as error:
            return CallResult(error=error)

    return await asyncio.gather(*map(result_of, calls))


def _limit_s(timeout_s: float | None) -> float:
    return math.inf if timeout_s is None else timeout_s


async def ask_in_thread(
    threads: WorkerThreads, call: ThreadCall, timeout_s: float | None, owner: str = ""
) -> object:
    """Return the value of a call that was submitted to ``threads``; see `ask`."""
    scope = current_scope()
    if scope is not None:
        call.owner = owner
        scope.inside[call] = None
    try:
        result = await threads.result(call, timeout_s)
    finally:
        if scope is not None:
            scope.inside.pop(call, None)
    if result.error is not None:
        raise _failure(result.error)
    value = result.value
    if isinstance(value, Awaitable):
        return await _ask_on_loop(lambda: value, timeout_s, owner)
    return value


async def _ask_on_loop(
    function: Callable[[], Awaitable[object]], timeout_s: float | None, owner: str
) -> object:
    """Await ``function()`` in the running scope, or in a new one; see `ask`."""
    limit_s = _limit_s(timeout_s)
    scope = current_scope()
    if scope is not None and scope.is_current:
        result = await scope.call(function, limit_s, owner)
    else:
        scope = Scope()
        scope.start(function, limit_s, owner)
        (result,) = await Scope.results([scope])
    if result.error is not None:
        raise _failure(result.error)
    return result.value


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


def is_cancelled() -> bool:
    """Return True if someone has cancelled the running asyncio task.

    A CancelledError that an engine raises by itself is a failure of the engine.
    """
    running = asyncio.current_task()
    return running is not None and running.cancelling() > 0


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
    kind = (type(error), *locations_of(error)[-MAX_FRAMES:])
    if kind not in _LOGGED_KINDS and len(_LOGGED_KINDS) < MAX_KINDS:
        _LOGGED_KINDS.add(kind)
        logger.info("user code failed, the first time in this way", exc_info=error)


def sentence(error: BaseException) -> str:
    """Return the cause of a failed call, and where it waited if it was late."""
    where = error.where if isinstance(error, UserCodeError) else ""
    return cause_of(error) + (f"; it waits in {where}" if where else "")
