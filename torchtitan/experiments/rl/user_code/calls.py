"""Calls code that users wrote: envs, reward functions, algorithms, tasks. Every call ends in a value or in a ``UserCodeError``.

1. Every call has a time limit. Async code that is late is cancelled and, if it ignores that, abandoned. Sync code runs in a
   daemon thread, which can only be abandoned (a process can be killed: user_code/isolated.py).
2. ``call_user`` tells the two apart: async functions run on the event loop, all others in worker threads.
3. Async code runs in an asyncio task of its own. A ``sys.exit()`` inside a task would otherwise stop the whole event loop, and
   a CancelledError raised by the user's code could not be told from that of the caller.
4. A cancellation of the caller passes through, after the user's code was cancelled too.
5. A call's time is the clock's since its first step, less the time that other calls held up the event loop meanwhile. Calls
   that a call makes belong to it: what they hold up counts as its own.

Async code that blocks without awaiting (``time.sleep``, a sync HTTP call) holds up the event loop and every rollout on it; no
time limit can interrupt it. A call that blocks beyond its limit ends as late all the same, and is counted in ``BLOCKING``.
Such code belongs in ``asyncio.to_thread``.

A ``Gate`` is for code that must be called in order: samplers, datasets, the task mix, filters, and the building of tasks. One
thread runs its calls, in the order they were made: such objects are written for one caller at a time, and some, a database
connection for one, work only in the thread that made them. The event loop waits in place for a moment, because most calls take
microseconds, and a call that is answered in place leaves the order of events on the loop as it is. A call that takes longer is
awaited, and those behind it are not waited for in place. Whatever goes wrong is a ``RunError``: "owner: cause".
"""

import asyncio
import contextlib
import functools
import inspect
import logging
import math
import queue
import threading
import time
import types
from collections.abc import Awaitable, Callable, Generator, Iterator
from concurrent.futures import Future
from contextvars import ContextVar
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar, cast

from torchtitan.experiments.rl.errors import (
    RunError,
    UserCodeError,
    UserCodeTimeout,
    cause_of,
    places_of,
)

T = TypeVar("T")

logger = logging.getLogger(__name__)

CANCEL_GRACE_S = 1.0
"""How long cancelled code may take to unwind before it is abandoned."""
CANCELLED_ITSELF = "CancelledError: raised by the code itself"
HOLD_S = 0.005
"""A step that runs longer has held up the event loop."""
TIMER_S = 0.001
"""How early an event loop's timer may be: uvloop counts milliseconds."""
MOST_FRAMES = 20
"""Number of innermost frames in which two failures of one kind agree: a recursion may go deeper by one each time."""
NOT_THE_USERS = ("/asyncio/", f"/{Path(__file__).parent.name}/")
"""Folders whose functions no call is said to wait in."""


def is_finite_number(value: Any) -> bool:
    """True for Python and numpy numbers and bools that are neither NaN nor infinite; strings and arrays are not numbers."""
    try:
        return (
            hasattr(value, "__float__") and not getattr(value, "shape", ()) and math.isfinite(value)
        )
    except BaseException:  # the value is the user's, and so is its __float__
        return False


class BlockingCalls:
    """Counts calls that held up the event loop for longer than their limit."""

    count = 0

    def add(self) -> None:
        self.count += 1

    def lap(self) -> int:
        """Calls since the last lap."""
        count, self.count = self.count, 0
        return count


BLOCKING = BlockingCalls()
"""Of this process."""


class _Held(threading.local):
    seconds = 0.0
    """For which watched calls have held up the event loop of this thread."""


_HELD = _Held()
_CALLER: ContextVar["Watch | None"] = ContextVar("watched call that runs", default=None)


class Watch:
    """Times one call, and says what became of it."""

    def __init__(self, limit_s: float | None, owner: str, call: Callable[[], Awaitable[Any]]):
        async def invoke() -> Any:
            return await call()

        self.limit_s = math.inf if limit_s is None else limit_s
        self.owner = owner
        self.blocked_s = 0.0
        """Length of the step that held up the event loop until the limit was exceeded; 0 where there is none."""
        self.blocked_by = ""
        """Owner of that step: of this call, or of one inside it."""
        self._coroutine = invoke()
        self._began: float | None = None
        self._held_before = self._own_s = 0.0
        self._inner: dict[Watch, None] = {}
        """Calls that it made and that have not ended."""
        self._caller = _CALLER.get()
        if self._caller is not None:
            self._caller._inner[self] = None

    async def outcome(self) -> tuple[Any, BaseException | None]:
        """Run the call: its value, or what it raised."""
        _CALLER.set(self)
        self._held_before, self._began = _HELD.seconds, time.monotonic()
        try:
            return await self._steps(), None
        except asyncio.CancelledError:
            raise
        except BaseException as error:
            return None, error

    @types.coroutine
    def _steps(self) -> Generator[Any, Any, Any]:
        """Run the coroutine, and time each of its steps, from one await to the next."""
        resume: Callable[[Any], Any] = self._coroutine.send
        argument: Any = None
        while True:
            began, held_before = time.monotonic(), _HELD.seconds
            try:
                waits_for = resume(argument)
            except StopIteration as end:
                return end.value
            finally:
                # What a call inside this step has held up since it began is that call's.
                if (seconds := time.monotonic() - began - (_HELD.seconds - held_before)) > HOLD_S:
                    self._hold(seconds)
            try:
                argument = yield waits_for
                resume = self._coroutine.send
            except BaseException as error:
                resume, argument = self._coroutine.throw, error

    def over(self) -> None:
        """The call has ended or is abandoned."""
        if self._began is None:
            self._coroutine.close()  # it never ran
        if self._caller is not None:
            self._caller._inner.pop(self, None)

    def left_s(self) -> float:
        """What is left of its limit; 0 where a timer can't measure it."""
        left_s = self.limit_s - self._ran_s(time.monotonic())
        return left_s if left_s > TIMER_S else 0.0

    def _hold(self, seconds: float) -> None:
        """A step of so many seconds, which ends now, held up the event loop."""
        ended = time.monotonic()
        _HELD.seconds += seconds
        late, watch = False, cast(Watch | None, self)
        while watch is not None:
            watch._own_s += seconds
            if watch._ran_s(ended - seconds) < watch.limit_s <= watch._ran_s(ended):
                watch.blocked_s, watch.blocked_by, late = seconds, self.owner, True
            watch = watch._caller
        if late:
            BLOCKING.add()

    def late(self, *, returned: bool) -> UserCodeTimeout:
        """What it ends with where it is late. To be asked before it is stopped: it says what the code waits for.

        Args:
            returned: it has ended by itself, without an error.
        """
        late = UserCodeTimeout(f"no answer within {self.limit_s:g} s")
        if self.blocked_s:
            culprit = self.blocked_by if self.blocked_by not in ("", self.owner) else "it"
            late = UserCodeTimeout(
                f"{late}: {culprit} blocked the event loop for {self.blocked_s:.3g} s without awaiting"
            )
        else:
            late.where = self.waits_in()
        late.returned = returned
        return late

    def waits_in(self) -> str:
        """What it waits for: the call inside it that has not ended, and the innermost of the user's functions, with file and
        line; empty where that is not known."""
        for inner in reversed(self._inner):
            if found := inner.waits_in():
                return found
        function = ""
        coroutine: Any = self._coroutine
        while inspect.iscoroutine(coroutine) and coroutine.cr_frame is not None:
            code = coroutine.cr_code
            if not any(folder in code.co_filename for folder in NOT_THE_USERS):
                file = code.co_filename.rsplit("/", 1)[-1]
                function = f"{code.co_qualname.rpartition('<locals>.')[2]} ({file}:{coroutine.cr_frame.f_lineno})"
            coroutine = coroutine.cr_await
        if not self.owner or function.startswith(f"{self.owner} "):
            return function
        return f"{self.owner}, at {function}" if function else self.owner

    def _ran_s(self, now: float) -> float:
        """Its own time; ``now`` is now, or when a step began that ends now."""
        if self._began is None:
            return 0.0
        return now - self._began - (_HELD.seconds - self._held_before - self._own_s)


async def call_bounded(
    call: Callable[[], Awaitable[T]], *, timeout_s: float | None, owner: str = ""
) -> T:
    """Await ``call()`` for at most ``timeout_s`` seconds (None: for as long as it takes).

    Args:
        owner: whose code it is, such as "SumRubric.setup": where a call that made this one is late, its error says so.

    Raises:
        UserCodeTimeout: it took longer, or blocked the event loop beyond its limit.
        UserCodeError: it raised anything, SystemExit and CancelledError included.
        asyncio.CancelledError: the caller was cancelled.
    """
    watch = Watch(timeout_s, owner, call)
    task = asyncio.create_task(watch.outcome())
    try:
        try:
            await _ended_or_late(task, watch, timeout_s)
        except asyncio.CancelledError:
            await asyncio.sleep(
                0
            )  # a task cancelled before its first step never runs: an env's close() would be skipped
            await _stop(task)
            raise
        if task.done():
            if task.cancelled():
                raise UserCodeError(CANCELLED_ITSELF)
            value, error = task.result()
            if error is not None:
                log_first(error)
                if isinstance(
                    error, UserCodeTimeout
                ):  # of a call inside it, whose limit was met first
                    raise error
                raise UserCodeError(cause_of(error)) from error
            if not watch.blocked_s:
                return cast(T, value)
        late = watch.late(returned=task.done())
        await _stop(task)
        raise late
    finally:
        watch.over()  # not before it was stopped: a call that it is part of may be late meanwhile, and say what it waits for


async def _ended_or_late(task: asyncio.Task, watch: Watch, timeout_s: float | None) -> None:
    left_s, extended = timeout_s, False
    while True:
        wakes_at = time.monotonic() + (left_s or 0.0)
        await _done_or_after(task, left_s)
        if task.done() or watch.blocked_s:
            return
        left_s = watch.left_s()
        # This timer was late too: something else held up the event loop, which may have the code's next step ready.
        if not extended and (overslept_s := time.monotonic() - wakes_at) > HOLD_S:
            left_s, extended = max(left_s, overslept_s), True
        if left_s <= 0:
            return


async def _done_or_after(task: asyncio.Task, seconds: float | None) -> None:
    """``asyncio.wait({task}, timeout=seconds)``, in half of the time."""
    loop = asyncio.get_running_loop()
    waiter = loop.create_future()

    def wake(*_: Any) -> None:
        if not waiter.done():
            waiter.set_result(None)

    timer = None if seconds is None else loop.call_later(seconds, wake)
    task.add_done_callback(wake)
    try:
        await waiter
    finally:
        task.remove_done_callback(wake)
        if timer is not None:
            timer.cancel()


async def _stop(task: asyncio.Task) -> None:
    if task.done():
        return
    task.cancel()
    _, running = await asyncio.wait({task}, timeout=CANCEL_GRACE_S)
    if running:
        logger.warning("user code ignored its cancellation and was abandoned: %s", task)


class Job(Future[tuple[Any, BaseException | None]]):
    """A call in a thread. Its result is the value, or what was raised."""

    def __init__(self, call: Callable[[], Any]):
        super().__init__()
        self._call = call
        self.begun_at: float | None = None
        self.ended_at: float | None = None
        self.left = False
        """Nobody waits for it any more."""
        self.doing: list[str] = []
        """Names of the user's functions that it is in, the innermost last: ``doing``."""

    def run(self) -> tuple[Any, BaseException | None]:
        try:
            return self._call(), None
        except BaseException as error:
            return None, error


class Threads:
    """Daemon threads that run sync user code, at most ``size`` at a time; started when first needed.

    Not an executor: there a function that never returns keeps its place, and keeps the process from ending. Not a
    thread per call either: under a busy event loop that took 6 ms per call, against 0.1 ms here.
    """

    def __init__(self, size: int):
        self._size, self._running = size, 0
        self._lock = threading.Lock()
        self._jobs: queue.SimpleQueue[Job] = queue.SimpleQueue()

    async def call(self, function: Callable[..., Any], *args: Any, timeout_s: float | None) -> Any:
        """Run ``function(*args)`` in a thread for at most ``timeout_s`` seconds from its start; then await what it returned, if
        that can be awaited, for as long again.

        Raises:
            UserCodeTimeout: it took longer; its thread is left to it.
            BaseException: whatever it raised.
        """
        return await self.answer(self.submit(function, *args), timeout_s)

    def submit(self, function: Callable[..., Any], *args: Any) -> Job:
        """Queue ``function(*args)``. A thread runs it when one is free; jobs begin in the order they were queued."""
        job = Job(functools.partial(function, *args))
        self._jobs.put(job)
        with self._lock:
            more = self._running < self._size
            self._running += more
        if more:
            self._start_thread()
        return job

    async def answer(self, job: Job, timeout_s: float | None) -> Any:
        """Await the result of a job; see ``call``."""
        outcome, left_s = asyncio.wrap_future(job), timeout_s
        try:
            while not (await asyncio.wait({outcome}, timeout=left_s))[0] and timeout_s is not None:
                # Neither time in the queue counts, nor time that the event loop takes to see that it has ended.
                ends = time.monotonic() if job.ended_at is None else job.ended_at
                left_s = timeout_s if job.begun_at is None else job.begun_at + timeout_s - ends
                if job.begun_at is not None and left_s <= TIMER_S:
                    late = UserCodeTimeout(f"no answer within {timeout_s:g} s")
                    late.where = job.doing[-1] if job.doing else ""
                    raise late
        finally:
            outcome.cancel()
            job.cancel()  # it is never begun if it is queued
            with self._lock:
                job.left = True
                hung = job.running() and job.ended_at is None
            if hung:  # another thread takes the place of its thread
                self._start_thread()
        value, error = outcome.result()
        if error is not None:
            raise error
        took_s = (job.ended_at or 0.0) - (job.begun_at or 0.0)
        if (
            timeout_s is not None and took_s > timeout_s
        ):  # it held up the event loop, which saw the limit too late
            raise UserCodeTimeout(f"no answer within {timeout_s:g} s, but after {took_s:.3g} s")
        return (
            await call_bounded(lambda: value, timeout_s=timeout_s)
            if isinstance(value, Awaitable)
            else value
        )

    def _start_thread(self) -> None:
        threading.Thread(target=self._work, name="user-code", daemon=True).start()

    def _work(self) -> None:
        while True:
            job = self._jobs.get()
            if not job.set_running_or_notify_cancel():
                continue
            job.begun_at = time.monotonic()
            _JOB.set(job)
            outcome = job.run()
            with self._lock:
                job.ended_at = time.monotonic()
                left = job.left
            job.set_result(outcome)
            if left:  # another thread was started in its place
                return


_JOB: ContextVar[Job | None] = ContextVar("job of this thread", default=None)


@contextlib.contextmanager
def doing(what: str) -> Iterator[None]:
    """Name the user's function that the block calls: where the job of this thread is late, its error says what it waits for."""
    job = _JOB.get()
    if job is None:
        yield
        return
    job.doing.append(what)
    try:
        yield
    finally:
        job.doing.pop()


USER_THREADS = Threads(32)
"""Where the process's sync user code runs. Code that waits for something, such as a judge, should be async."""


async def call_user(
    function: Callable[..., Any], *args: Any, timeout_s: float | None, owner: str | None = None
) -> Any:
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
            return await call_bounded(
                lambda: function(*args), timeout_s=timeout_s, owner=owner or ""
            )
        call = functools.partial(USER_THREADS.call, function, *args, timeout_s=timeout_s)
        return await call_bounded(call, timeout_s=None, owner=owner or "")
    except UserCodeError as error:
        if owner is None:
            raise
        raise error.of(owner) from error


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


CALL_TIMEOUT_S = 60.0
"""Limit of a call whose gate was given no other."""
IN_PLACE_S = 0.02
"""How long the event loop waits in place."""
IN_PLACE_SYNCHRONOUS_S = 5.0
"""The same in a synchronous run, which repeats bit for bit only if answers come in the same order each time."""


class Gate:
    """One of these per process and run."""

    def __init__(self, *, timeout_s: float = CALL_TIMEOUT_S, synchronous: bool = False):
        """
        Args:
            timeout_s: limit of each call that names no other.
            synchronous: the run has to repeat bit for bit.
        """
        self._timeout_s = timeout_s
        self._in_place_s = IN_PLACE_SYNCHRONOUS_S if synchronous else IN_PLACE_S
        self._threads = Threads(1)
        self._last: Job | None = None

    def start(
        self, function: Callable[..., Any], *args: Any, owner: str, timeout_s: float | None = None
    ) -> "Call":
        """Begin ``function(*args)``; wait in place for a moment."""
        behind_another, timeout_s = self._is_busy, timeout_s or self._timeout_s
        job = self._last = self._threads.submit(function, *args)
        if not behind_another:
            with contextlib.suppress(TimeoutError):
                job.result(min(self._in_place_s, timeout_s))
        return Call(self._threads, job, owner, timeout_s)

    def start_own(self, function: Callable[..., Any], *args: Any, owner: str) -> "Call":
        """The same of a function of the library's own, which takes microseconds: without the thread, unless it has calls to run
        before this one."""
        if self._is_busy:
            return self.start(function, *args, owner=owner)
        job = Job(functools.partial(function, *args))
        job.set_result(job.run())
        return Call(self._threads, job, owner, self._timeout_s)

    @property
    def _is_busy(self) -> bool:
        return self._last is not None and not (self._last.done() or self._last.left)

    async def call(
        self, function: Callable[..., Any], *args: Any, owner: str, timeout_s: float | None = None
    ) -> Any:
        """The value of ``function(*args)``, or of what it returned if that can be awaited.

        Args:
            owner: whose function it is and what it does, such as "sampler ShuffledCursor.next of task 'sum'".
            timeout_s: limit, the gate's where None. Time spent behind other calls doesn't count.

        Raises:
            RunError: it took longer or raised anything: "owner: cause".
        """
        return await self.start(function, *args, owner=owner, timeout_s=timeout_s).value()


@dataclass(slots=True)
class Call:
    """A call that has begun."""

    threads: Threads
    job: Job
    owner: str
    timeout_s: float

    @property
    def answered(self) -> bool:
        """Whether ``value_now`` can be called: the function has returned or raised, and nothing has to be awaited."""
        return self.job.done() and not isinstance(self.job.result()[0], Awaitable)

    def value_now(self) -> Any:
        """The value of a call that is answered.

        Raises:
            RunError: it raised anything.
        """
        value, error = self.job.result()
        if error is not None:
            log_first(error)
            raise RunError(f"{self.owner}: {sentence(error)}") from error
        return value

    async def value(self) -> Any:
        """The value, as soon as there is one.

        Raises:
            RunError: the function took longer than its limit or raised anything.
        """
        if self.answered:
            return self.value_now()
        try:
            # In an asyncio task of its own, so that a CancelledError raised by the function is told from the caller's.
            return await call_bounded(
                lambda: self.threads.answer(self.job, self.timeout_s), timeout_s=None
            )
        except UserCodeError as error:
            raise RunError(f"{self.owner}: {sentence(error)}") from error


_KINDS: set[tuple[Any, ...]] = set()
"""Kinds of failures whose traceback this process has logged."""
MOST_KINDS = 1000
"""Maximum number of kinds that are logged: code that is generated again and again has no end of them."""


def log_first(error: BaseException) -> None:
    """Log the whole traceback of an error of user code, unless one of its kind was: of its type, from the same lines.

    An error that the library made of another is left out: the other was logged where it was caught.
    """
    if isinstance(error, UserCodeError) or not logger.isEnabledFor(
        logging.INFO
    ):  # the preflight has no log
        return
    kind = (type(error), *places_of(error)[-MOST_FRAMES:])
    if kind not in _KINDS and len(_KINDS) < MOST_KINDS:
        _KINDS.add(kind)
        logger.info("user code failed, the first time in this way", exc_info=error)


def sentence(error: BaseException) -> str:
    """``cause_of`` what failed in a call, and what it waited for where it was late."""
    # call_bounded and call_user wrap what was raised; an error that names its owner itself is left as it is.
    while (
        isinstance(error, UserCodeError)
        and error.__cause__ is not None
        and str(error) == cause_of(error.__cause__)
    ):
        error = error.__cause__
    return cause_of(error) + (
        f"; it waits in {error.where}" if isinstance(error, UserCodeError) and error.where else ""
    )


def name_of(part: Any, method: str | None = None) -> str:
    """A part of the run as its owner is named: its class, and the method that is called."""
    cls = part if inspect.isclass(part) else type(part)
    return f"{cls.__name__}.{method}" if method else cls.__name__
