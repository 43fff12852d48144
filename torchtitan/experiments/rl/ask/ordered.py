"""Asks code that has to be called in order: samplers, datasets, task mix, filters, tasks' builds.

One call runs at a time, in the order in which they were made, and all in one thread. Such objects
are written for one caller at a time, and some, such as a database connection, work only in the
thread that made them. What an async function awaits runs on the event loop, in its turn.

A call that is late or cancelled keeps the thread, and those behind it run in another. That happens
only as a run ends: a late call is a RunError, and only the end of a run cancels calls.

    event loop   start ─ wait in place ─▶ answer at once
                                     └─▶ the call takes longer: await its answer
    thread             call ─ call ─ call

Most calls take microseconds. The event loop waits for a call in place for a moment: that is quicker
than to be woken, and leaves the order of the loop's events as it is. A call that takes longer is
awaited, and those behind it are not waited for in place.
"""

import asyncio
import contextlib
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Generic, TypeVar, cast

from torchtitan.experiments.rl.ask.call import ask_in_thread, log_first, sentence
from torchtitan.experiments.rl.ask.threads import CallResult, ThreadCall, WorkerThreads
from torchtitan.experiments.rl.errors import RunError, UserCodeError

T = TypeVar("T")

CALL_TIMEOUT_S = 60.0
"""Limit of a call whose `OrderedCalls` were given no other."""
IN_PLACE_S = 0.02
"""Seconds that the event loop waits in place."""
IN_PLACE_SYNCHRONOUS_S = 5.0
"""Seconds that the event loop waits in place in a synchronous run. It repeats bit for bit only if
the time that an answer takes does not change the order of events."""


class OrderedCalls:
    """Makes the ordered calls of one run in one process.

    Whatever goes wrong in a call is a RunError with the text "owner: cause".
    """

    def __init__(
        self,
        *,
        timeout_s: float = CALL_TIMEOUT_S,
        synchronous: bool = False,
        thread: WorkerThreads | None = None,
    ):
        """Start no thread before the first call.

        Args:
            timeout_s: limit of each call that names no other.
            synchronous: True if the run has to repeat bit for bit.
            thread: runs the calls, one at a time.
        """
        self._timeout_s = timeout_s
        self._in_place_s = IN_PLACE_SYNCHRONOUS_S if synchronous else IN_PLACE_S
        self._thread = thread or WorkerThreads(1)
        self._turn = asyncio.Lock()
        """Held by the call that runs, if it was not answered in place. The others come in order."""
        self._open: set[asyncio.Task[CallResult]] = set()
        """Calls that have not ended, but for one that is answered in place."""

    async def call(
        self,
        function: Callable[..., T],
        *args: object,
        owner: str,
        timeout_s: float | None = None,
    ) -> T:
        """Return ``function(*args)``, awaited if that can be awaited.

        Args:
            owner: name of the code for errors, such as "task 'sum': sampler ShuffledCursor.next".
            timeout_s: limit of the call; None for the usual one. Time behind other calls is free.

        Raises:
            RunError: it took longer, or raised anything.
        """
        return await self.start(function, *args, owner=owner, timeout_s=timeout_s).value()

    def start(
        self,
        function: Callable[..., T],
        *args: object,
        owner: str,
        timeout_s: float | None = None,
    ) -> "OrderedCall[T]":
        """Begin a call, and wait for it in place for a moment; see `call`."""
        limit_s = timeout_s or self._timeout_s

        def submit() -> ThreadCall:
            return self._thread.submit(function, *args)

        if self._open:
            return OrderedCall(owner, self._in_turn(submit, limit_s, owner))
        begun = submit()
        with contextlib.suppress(TimeoutError):
            result = begun.result(min(self._in_place_s, limit_s))
            if not isinstance(result.value, Awaitable):
                return OrderedCall(owner, result)
        task = self._in_turn(lambda: begun, limit_s, owner)
        # A task that is cancelled before its first step never runs, and would leave the call be.
        task.add_done_callback(lambda _: self._thread.abandon(begun))
        return OrderedCall(owner, task)

    def _in_turn(
        self, submit: Callable[[], ThreadCall], limit_s: float, owner: str
    ) -> asyncio.Task[CallResult]:
        """Run a call behind those that are open, in a task of its own."""

        async def run() -> CallResult:
            async with self._turn:
                try:
                    value = await ask_in_thread(self._thread, submit(), limit_s, owner)
                    return CallResult(value=value)
                except UserCodeError as error:
                    return CallResult(error=error)

        task = asyncio.create_task(run())
        self._open.add(task)
        task.add_done_callback(self._open.discard)
        return task


@dataclass(frozen=True, slots=True)
class OrderedCall(Generic[T]):
    """A call that is answered, or runs, or waits for its turn."""

    owner: str
    result: CallResult | asyncio.Task[CallResult]
    """Result of a call that was answered in place, or the task that ends with it."""

    @property
    def answered(self) -> bool:
        """True if the function has returned or raised, and nothing has to be awaited."""
        return isinstance(self.result, CallResult)

    def value_now(self) -> T:
        """Return the value of a call that is answered.

        Raises:
            RunError: the function raised anything.
        """
        assert isinstance(self.result, CallResult), "the call is answered"
        return self._value_of(self.result)

    async def value(self) -> T:
        """Return the value, without going round the event loop if the call is answered.

        A caller that is cancelled cancels the call.

        Raises:
            RunError: the function took longer than its limit, or raised anything.
        """
        result = self.result
        return self._value_of(result if isinstance(result, CallResult) else await result)

    def _value_of(self, result: CallResult) -> T:
        if result.error is not None:
            log_first(result.error)
            raise RunError(f"{self.owner}: {sentence(result.error)}") from result.error
        return cast(T, result.value)
