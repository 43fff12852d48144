"""Asks code that has to be called in order: samplers, datasets, task mix, filters, tasks' builds.

One thread runs the calls in the order in which they were made. Such objects are written for one
caller at a time, and some, such as a database connection, work only in the thread that made them.

    event loop   start ─ wait in place ─▶ answer at once
                                     └─▶ the call takes longer: await its answer
    thread             call ─ call ─ call

Most calls take microseconds. The event loop waits for a call in place for a moment: that is quicker
than to be woken, and leaves the order of the loop's events as it is. A call that takes longer is
awaited, and those behind it are not waited for in place.
"""

import contextlib
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Generic, TypeVar, cast

from torchtitan.experiments.rl.ask.call import ask_in_thread, log_first, sentence
from torchtitan.experiments.rl.ask.threads import ThreadCall, WorkerThreads
from torchtitan.experiments.rl.errors import RunError, UserCodeError

T = TypeVar("T")

CALL_TIMEOUT_S = 60.0
"""Limit of a call whose `OrderedCalls` were given no other."""
IN_PLACE_S = 0.02
"""Seconds that the event loop waits in place."""
IN_PLACE_SYNCHRONOUS_S = 5.0
"""The same in a synchronous run: it repeats bit for bit only if answers never change the order."""


class OrderedCalls:
    """Calls of one run in one process. Whatever goes wrong in one is a RunError: "owner: cause"."""

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
        self._last: ThreadCall | None = None

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
        is_behind_another = self._last is not None and not (
            self._last.done() or self._last.is_abandoned
        )
        call = self._thread.submit(function, *args)
        self._last = call
        if not is_behind_another:
            with contextlib.suppress(TimeoutError):
                call.result(min(self._in_place_s, limit_s))
        return OrderedCall(self._thread, call, owner, limit_s)


@dataclass(frozen=True, slots=True)
class OrderedCall(Generic[T]):
    """A call that has begun or waits for its turn."""

    thread: WorkerThreads
    call: ThreadCall
    owner: str
    timeout_s: float

    @property
    def answered(self) -> bool:
        """True if the function has returned or raised, and nothing has to be awaited."""
        return self.call.done() and not isinstance(self.call.result().value, Awaitable)

    def value_now(self) -> T:
        """Return the value of a call that is answered.

        Raises:
            RunError: the function raised anything.
        """
        outcome = self.call.result()
        if outcome.error is not None:
            log_first(outcome.error)
            raise RunError(f"{self.owner}: {sentence(outcome.error)}") from outcome.error
        return cast(T, outcome.value)

    async def value(self) -> T:
        """Return the value, without going round the event loop if the call is answered.

        Raises:
            RunError: the function took longer than its limit, or raised anything.
        """
        if self.answered:
            return self.value_now()
        try:
            value = await ask_in_thread(self.thread, self.call, self.timeout_s, self.owner)
        except UserCodeError as error:
            raise RunError(f"{self.owner}: {sentence(error)}") from error
        return cast(T, value)
