"""An event loop whose clock jumps to its next timer, all that tells the time or waits made to go by it."""

import asyncio
import selectors
import threading
import time
from collections.abc import Callable, Coroutine, Iterator
from contextlib import contextmanager
from typing import Any, NoReturn, TypeVar

from torchtitan.experiments.rl.ask.lag import NoLag, use_watch
from torchtitan.experiments.rl.ask.threads import ThreadCall, WorkerThreads
from torchtitan.experiments.rl.errors import RunError
from torchtitan.experiments.rl.process import trace

T = TypeVar("T")
LAG_INTERVAL_S = 3600.0
"""Between two measurements of the event loop's lag, which is always 0: at 10 ms they were most of what there is to simulate."""


class Escape(RunError):
    """Something would take real time, or happen in a thread: a simulated run would not repeat."""


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


@contextmanager
def _going_by(loop: VirtualClockLoop) -> Iterator[None]:
    """Clocks of this process tell the loop's time; a thread or a sleep raises Escape."""

    def escape(*args: Any) -> NoReturn:
        raise Escape(
            f"in virtual time {args[0] if args else 'something'} would sleep, or start a thread"
        )

    clocks: dict[str, Any] = dict.fromkeys(("monotonic", "perf_counter", "time"), loop.time)
    patches: list[tuple[Any, str, Any]] = [(time, name, clock) for name, clock in clocks.items()]
    patches += [
        (time, "sleep", escape),
        (threading.Thread, "start", escape),
        (trace, "INTERVAL_S", LAG_INTERVAL_S),
    ]
    before = [(owner, name, getattr(owner, name)) for owner, name, _ in patches]
    try:
        for owner, name, value in patches:
            setattr(owner, name, value)
        yield
    finally:
        for owner, name, value in before:
            setattr(owner, name, value)


def run_virtually(work: Callable[[], Coroutine[Any, Any, T]]) -> T:
    """Run ``work()`` to its end on a loop of its own, from the time 0 on.

    Raises:
        Escape: it would wait for ever, for real time, or for a thread.
    """
    loop = VirtualClockLoop()
    asyncio.set_event_loop(loop)
    use_watch(NoLag(loop))
    try:
        with _going_by(loop):
            return loop.run_until_complete(work())
    finally:
        asyncio.set_event_loop(None)
        loop.close()
