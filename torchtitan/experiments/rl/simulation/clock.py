"""An event loop whose clock jumps to its next timer.

The loops of a run ask their event loop for the time, so they need nothing else to run in virtual time. The clocks of `time` go on.
"""

import asyncio
import selectors
import threading
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

from torchtitan.experiments.rl.ask.lag import NoLag, use_watch
from torchtitan.experiments.rl.ask.threads import ThreadCall, WorkerThreads
from torchtitan.experiments.rl.errors import RunError

T = TypeVar("T")


class Escape(RunError):
    """Raised if the loop waits for something outside, or a thread calls into it: a simulated run would not repeat."""


class VirtualClockLoop(asyncio.SelectorEventLoop):
    """Never waits: where it would sleep, its clock jumps. What is given to a thread is done at once, in no time."""

    def __init__(self) -> None:
        super().__init__(_Jump(self))
        self.now = 0.0
        self._clock_resolution = 1e-9
        self._owner = threading.get_ident()

    def time(self) -> float:
        return self.now

    # typeshed ties the arguments of both to the function's by type variables.
    def run_in_executor(self, executor: Any, func: Any, *args: Any) -> Any:  # type: ignore[override]  # untied
        done = self.create_future()
        try:
            done.set_result(func(*args))
        except Exception as error:
            done.set_exception(error)
        return done

    def call_soon_threadsafe(self, callback: Any, *args: Any, context: Any = None) -> Any:  # type: ignore[override]  # as above
        if threading.get_ident() != self._owner:
            raise Escape("a thread called into the virtual event loop")
        return self.call_soon(callback, *args, context=context)


class _Jump(selectors.DefaultSelector):
    def __init__(self, loop: VirtualClockLoop):
        super().__init__()
        self._loop = loop

    def select(self, timeout: float | None = None) -> Any:
        if timeout is None:
            raise Escape(
                "nothing will ever happen again: the loops wait for each other, or for something outside"
            )
        self._loop.now += max(0.0, timeout)
        return []


class Cores:
    """What computes. Everyone has a device, so what it had a device for is the loop's time; a subclass may share cores."""

    def time(self) -> float:
        return asyncio.get_running_loop().time()

    def call_at(self, when: float, callback: Callable[[], None]) -> Any:
        """Compute until ``time`` tells ``when``, then call back. Returns what has a ``cancel``."""
        return asyncio.get_running_loop().call_at(when, callback)

    async def use(self, seconds: float) -> None:
        """Compute for so long."""
        await asyncio.sleep(seconds)


class InlineThread(WorkerThreads):
    """Runs each call at once: in virtual time no sampler or filter takes any."""

    def __init__(self) -> None:
        super().__init__(1)

    def submit(self, function: Callable[..., object], *args: object) -> ThreadCall:
        """Run a call."""
        call = ThreadCall(function, args)
        call.set_result(call.run())
        return call


def run_virtually(work: Callable[[], Coroutine[Any, Any, T]]) -> T:
    """Run ``work()`` to its end on a loop of its own, from the time 0 on.

    Raises:
        Escape: it would wait for ever, or a thread calls into the loop.
    """
    with asyncio.Runner(loop_factory=VirtualClockLoop) as runner:
        use_watch(NoLag(runner.get_loop()))
        return runner.run(work())
