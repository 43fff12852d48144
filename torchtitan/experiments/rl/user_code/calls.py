"""Calls code that users wrote: envs, reward functions, algorithms. Whatever it does ends in a value or in a ``UserCodeError``.

1. Every call has a time limit. Async code that is late is cancelled and, if it ignores that, abandoned; sync code runs in a
   daemon thread, which can only be abandoned (a subprocess can be killed: user_code/isolated.py).
2. ``call_user`` tells the two apart: async functions run on the event loop, all others in worker threads.
3. Async code runs in a task of its own. A ``sys.exit()`` inside a task would otherwise stop the whole event loop, and a
   CancelledError raised by the user's code could not be told from ours.
4. Our own cancellation passes through, after the user's code was cancelled too.

Async code that blocks without awaiting (``time.sleep``, a sync HTTP call) holds up the event loop and every rollout on it; no
time limit can interrupt it. Such code belongs in ``asyncio.to_thread``.
"""

import asyncio
import inspect
import logging
import math
import queue
import threading
import time
import traceback
from collections.abc import Awaitable, Callable
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
    return cast(T, value)


class Threads:
    """Daemon threads that run sync user code, at most ``size`` at a time; started when first needed.

    Not an executor: there a function that never returns keeps its place for good, and the process alive at its end. Not a
    thread per call either: under a busy event loop that took 6 ms per call, against 0.1 ms here.
    """

    def __init__(self, size: int):
        self._size = size
        self._running = 0
        self._lock = threading.Lock()
        self._jobs: queue.SimpleQueue[_Job] = queue.SimpleQueue()

    async def call(self, function: Callable[..., Any], *args: Any, timeout_s: float | None) -> Any:
        """Run ``function(*args)`` in a thread for at most ``timeout_s`` seconds from its start; then await what it returned, if
        that can be awaited, for as long again.

        Raises:
            UserCodeTimeout: it took longer; its thread is left to it.
            BaseException: whatever it raised.
        """
        job = _Job(lambda: function(*args))
        self._jobs.put(job)
        with self._lock:
            more = self._running < self._size
            self._running += more
        if more:
            self._start_thread()
        try:
            left_s = timeout_s
            while not (await asyncio.wait({job.outcome}, timeout=left_s))[0] and timeout_s is not None:
                # Time in the queue doesn't count.
                left_s = timeout_s if job.begun_at is None else job.begun_at + timeout_s - time.monotonic()
                if left_s <= 0:
                    raise UserCodeTimeout(f"no answer within {timeout_s:g} s")
        finally:
            self._leave(job)
        value, error = job.outcome.result()
        if error is not None:
            raise error
        return await call_bounded(lambda: value, timeout_s=timeout_s) if isinstance(value, Awaitable) else value

    def _start_thread(self) -> None:
        threading.Thread(target=self._work, name="user-code", daemon=True).start()

    def _work(self) -> None:
        while True:
            job = self._jobs.get()
            with self._lock:
                if job.left:
                    continue
                job.begun_at = time.monotonic()
            outcome = job.run()
            with self._lock:
                if job.left:  # another thread was started in its place
                    return
                job.ended = True
            job.deliver(outcome)

    def _leave(self, job: "_Job") -> None:
        with self._lock:
            hung = job.begun_at is not None and not job.ended
            job.left = True
        if hung:
            self._start_thread()


USER_THREADS = Threads(32)
"""Where the process's sync user code runs. Code that waits for something, such as a judge, should be async."""


async def call_user(function: Callable[..., Any], *args: Any, timeout_s: float | None) -> Any:
    """Run ``function(*args)``, async or not, for at most ``timeout_s`` seconds, without holding up the event loop.

    Raises:
        UserCodeTimeout: it took longer.
        UserCodeError: it raised anything.
        asyncio.CancelledError: the caller was cancelled.
    """
    if inspect.iscoroutinefunction(function):
        return await call_bounded(lambda: function(*args), timeout_s=timeout_s)
    try:
        return await call_bounded(lambda: USER_THREADS.call(function, *args, timeout_s=timeout_s), timeout_s=None)
    except UserCodeError as error:
        if isinstance(error.__cause__, UserCodeTimeout):
            raise error.__cause__ from None
        raise


class _Job:
    """One call; its fields are written under the lock of its Threads."""

    def __init__(self, call: Callable[[], Any]):
        self._call = call
        self._loop = asyncio.get_running_loop()
        self.outcome: asyncio.Future[tuple[Any, BaseException | None]] = self._loop.create_future()
        self.begun_at: float | None = None
        self.ended = False
        self.left = False
        """Nobody waits for it any more."""

    def run(self) -> tuple[Any, BaseException | None]:
        try:
            return self._call(), None
        except BaseException as error:
            return None, error

    def _set(self, outcome: tuple[Any, BaseException | None]) -> None:
        if not self.outcome.done():
            self.outcome.set_result(outcome)

    def deliver(self, outcome: tuple[Any, BaseException | None]) -> None:
        try:
            self._loop.call_soon_threadsafe(self._set, outcome)
        except RuntimeError:  # the loop was closed meanwhile
            pass


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
