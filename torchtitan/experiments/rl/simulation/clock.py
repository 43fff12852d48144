"""Virtual time: an event loop whose clock jumps to its next timer.

    run_virtually(work) ──▶ VirtualClockLoop ──▶ nothing is ready ──▶ the clock jumps ──▶ timer

The loops of a run ask their event loop for the time, so nothing else has to change for them. The
clocks of Python's `time` module go on as usual.
"""

import asyncio
import contextvars
import selectors
import threading
from collections.abc import Callable, Coroutine
from typing import Any, Protocol, TypeVar

from torchtitan.experiments.rl.ask.lag import VirtualClock, use_clock
from torchtitan.experiments.rl.ask.threads import ThreadCall, WorkerThreads
from torchtitan.experiments.rl.errors import RunError

T = TypeVar("T")


class Escape(RunError):
    """A simulation that depends on something outside of its event loop, so it would not repeat."""


class VirtualClockLoop(asyncio.SelectorEventLoop):
    """Event loop that never sleeps: where another would, its clock jumps.

    A function that is handed to a thread runs at once in this one, and takes no virtual time.
    """

    def __init__(self) -> None:
        super().__init__(_ClockSelector(self))
        self.now = 0.0
        """Seconds of virtual time since the loop was made."""
        self._clock_resolution = 1e-9
        self._owner = threading.get_ident()

    def time(self) -> float:
        return self.now

    def run_in_executor(
        self, executor: object, func: Callable[..., T], *args: object
    ) -> asyncio.Future[T]:
        """Call the function now, and return a future that is done."""
        result: asyncio.Future[T] = self.create_future()
        try:
            result.set_result(func(*args))
        except Exception as error:  # noqa: BLE001 - whatever the function raises is its result
            result.set_exception(error)
        return result

    def call_soon_threadsafe(
        self,
        callback: Callable[..., object],
        *args: object,
        context: contextvars.Context | None = None,
    ) -> asyncio.Handle:
        """Schedule a call by the loop's own thread.

        Raises:
            Escape: another thread calls.
        """
        if threading.get_ident() != self._owner:
            raise Escape("a thread called into the virtual event loop")
        return self.call_soon(callback, *args, context=context)


class _ClockSelector(selectors.DefaultSelector):
    """Selector that moves the loop's clock forward in place of waiting."""

    def __init__(self, loop: VirtualClockLoop):
        super().__init__()
        self._loop = loop

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        """Advance the clock by the timeout, after which the loop's next timer is due.

        Raises:
            Escape: the loop has no timer.
        """
        if timeout is None:
            raise Escape(
                "nothing will ever happen again: the loops wait for each other, or for something "
                "outside"
            )
        self._loop.now += max(0.0, timeout)
        return []


class Timer(Protocol):
    """Callback that is due later."""

    def cancel(self) -> object: ...


class Cores:
    """Time that an actor computes for.

    Every actor has a device of its own, so a busy actor does not slow another, and a second of
    computing is a second of the event loop. A subclass may have actors share cores.
    """

    def time(self) -> float:
        """Return the seconds that an actor which always computes has had a device for."""
        return asyncio.get_running_loop().time()

    def call_at(self, when: float, callback: Callable[[], None]) -> Timer:
        """Compute until ``time`` returns ``when``, and then call back."""
        return asyncio.get_running_loop().call_at(when, callback)

    async def use(self, seconds: float) -> None:
        """Compute for ``seconds``."""
        await asyncio.sleep(seconds)


class InlineThread(WorkerThreads):
    """Worker thread whose calls run at once: samplers and filters take no virtual time."""

    def __init__(self) -> None:
        super().__init__(1)

    def submit(self, function: Callable[..., object], *args: object) -> ThreadCall:
        """Run a call, and return it ended."""
        call = ThreadCall(function, args)
        call.set_result(call.run())
        return call


def run_virtually(work: Callable[[], Coroutine[Any, Any, T]]) -> T:
    """Run ``work()`` on an event loop of its own, from the time 0 on, and return its result.

    Raises:
        Escape: the work waits for something outside, or a thread calls into its loop.
    """
    with asyncio.Runner(loop_factory=VirtualClockLoop) as runner:
        use_clock(VirtualClock(runner.get_loop()))
        return runner.run(work())
