"""Calls user code that must keep its order: samplers, datasets, the task mix, filters, and the building of tasks.

1. One thread runs the calls, in the order they were made: such objects are written for one caller at a time, and some, a
   database connection for one, work only in the thread that made them.
2. The event loop waits in place for a moment. Most calls take microseconds, and a call that is answered in place leaves the
   order of events on the loop as it is. A call that takes longer is awaited, and the loop goes on. While one is awaited, those
   behind it are not waited for in place.
3. Every call has an owner and a limit. Whatever goes wrong is a ``RunError`` that begins with the owner: "owner: cause".
"""

import inspect
from collections.abc import Awaitable, Callable
from typing import Any

from torchtitan.experiments.rl.errors import ConfigError, RunError
from torchtitan.experiments.rl.user_code.bounded import UserCodeError, UserCodeTimeout, call_bounded, cause_of
from torchtitan.experiments.rl.user_code.threads import Job, Threads

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

    def start(self, function: Callable[..., Any], *args: Any, owner: str, timeout_s: float | None = None) -> "Call":
        """Begin ``function(*args)``; wait in place for a moment."""
        behind_another = self._is_busy
        job = self._last = self._threads.submit(function, *args)
        if not behind_another:
            job.wait_in_place(min(self._in_place_s, timeout_s or self._timeout_s))
        return Call(self._threads, job, owner=owner, timeout_s=timeout_s or self._timeout_s)

    def start_own(self, function: Callable[..., Any], *args: Any, owner: str) -> "Call":
        """The same of a function of the library's own, which takes microseconds: without the thread, unless it has calls to run
        before this one."""
        if self._is_busy:
            return self.start(function, *args, owner=owner)
        job = Job(lambda: function(*args))
        job.result = job.run()
        return Call(self._threads, job, owner=owner, timeout_s=self._timeout_s)

    @property
    def _is_busy(self) -> bool:
        return self._last is not None and self._last.result is None and not self._last.left

    async def call(self, function: Callable[..., Any], *args: Any, owner: str, timeout_s: float | None = None) -> Any:
        """The value of ``function(*args)``, or of what it returned if that can be awaited.

        Args:
            owner: whose function it is and what it does, such as "sampler ShuffledCursor.next of task 'sum'".
            timeout_s: limit, the gate's where None. Time spent behind other calls doesn't count.

        Raises:
            RunError: it took longer or raised anything: "owner: cause".
        """
        return await self.start(function, *args, owner=owner, timeout_s=timeout_s).value()


class Call:
    """A call that has begun."""

    def __init__(self, threads: Threads, job: Job, *, owner: str, timeout_s: float):
        self._threads, self._job = threads, job
        self._owner, self._timeout_s = owner, timeout_s

    @property
    def answered(self) -> bool:
        """Whether ``value_now`` can be called: the function has returned or raised, and nothing has to be awaited."""
        return self._job.result is not None and not isinstance(self._job.result[0], Awaitable)

    def value_now(self) -> Any:
        """The value of a call that is answered.

        Raises:
            RunError: it raised anything.
        """
        assert self._job.result is not None
        value, error = self._job.result
        if error is not None:
            raise self._failure(error) from error
        return value

    async def value(self) -> Any:
        """The value, as soon as there is one.

        Raises:
            RunError: the function took longer than its limit or raised anything.
        """
        if self.answered:
            return self.value_now()
        try:
            if self._job.result is None:
                # In an asyncio task of its own, so that a CancelledError raised by the function is told from the caller's.
                return await call_bounded(lambda: self._threads.answer(self._job, timeout_s=self._timeout_s), timeout_s=None)
            returned = self._job.result[0]
            return await call_bounded(lambda: returned, timeout_s=self._timeout_s)
        except UserCodeError as error:
            raise self._failure(error) from error

    def _failure(self, error: BaseException) -> RunError:
        return RunError(f"{self._owner}: {sentence(error)}")


def sentence(error: BaseException) -> str:
    """The cause of a failed call in one line. The library's own errors are sentences; others need their type and place."""
    # call_bounded and call_user wrap what was raised; an error that names its owner itself is left as it is.
    while isinstance(error, UserCodeError) and error.__cause__ is not None and str(error) == cause_of(error.__cause__):
        error = error.__cause__
    if isinstance(error, UserCodeTimeout) and error.where:
        return f"{error}; it waits in {error.where}"
    return str(error) if isinstance(error, RunError | ConfigError) else cause_of(error)


def name_of(part: Any, method: str | None = None) -> str:
    """A part of the run as its owner is named: its class, and the method that is called."""
    cls = part if inspect.isclass(part) else type(part)
    return f"{cls.__name__}.{method}" if method else cls.__name__
