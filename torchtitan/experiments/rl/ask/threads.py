"""Daemon threads that run sync user code.

A `concurrent.futures.ThreadPoolExecutor` does not fit: a function that never returns would keep its
thread, and the interpreter joins the executor's threads when the process ends. A thread for each
call does not fit either: under a busy event loop it took 6 ms a call, against 0.1 ms here.
"""

import asyncio
import contextvars
import logging
import queue
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any

from torchtitan.experiments.rl.ask.stacks import frames_of_thread, location_in, with_owner
from torchtitan.experiments.rl.errors import UserCodeTimeout

logger = logging.getLogger(__name__)

TIMER_S = 0.001
"""Seconds by which a timer of an event loop may be early."""


@dataclass(frozen=True, slots=True)
class CallResult:
    """End of a call: its value, or what it raised.

    A future can't hold every exception: asyncio refuses StopIteration, and takes CancelledError for
    the caller's.
    """

    value: Any = None
    error: BaseException | None = None


class ThreadCall(Future[CallResult]):
    """A call that a thread runs, or will run."""

    def __init__(self, function: Callable[..., object], args: tuple[object, ...]):
        super().__init__()
        self.function = function
        self.args = args
        self.context = contextvars.copy_context()  # costs of a group are counted by it
        self.began_at: float | None = None
        """`time.monotonic` at which a thread took the call; None while it is queued."""
        self.ended_at: float | None = None
        self.thread_id: int | None = None
        self.owner = ""
        """Name of the code, for the error of a call around this one."""
        self.is_replaced = False
        """True if another thread was started in the place of the one that runs the call."""

    def run(self) -> CallResult:
        try:
            return CallResult(value=self.context.run(self.function, *self.args))
        except BaseException as error:  # noqa: BLE001 - user code may raise or exit with anything
            return CallResult(error=error)

    def left_s(self, timeout_s: float) -> float:
        """Return the seconds left of the limit, which begins when a thread takes the call."""
        if self.began_at is None:
            return timeout_s
        # The event loop may see the end late: that time is not the call's.
        ended_at = time.monotonic() if self.ended_at is None else self.ended_at
        left_s = self.began_at + timeout_s - ended_at
        return left_s if left_s > TIMER_S else 0.0

    def location(self) -> str:
        """Return where the call is, for the error of a call around it."""
        return with_owner(self.owner, self.own_location())

    def own_location(self) -> str:
        """Return the function that the call is in, with file and line; empty if not known."""
        if self.began_at is None or self.ended_at is not None:
            return ""
        return location_in(frames_of_thread(self.thread_id))


class WorkerThreads:
    """At most ``size`` threads that take calls in the order in which they were submitted.

    A thread whose call was abandoned is not counted: another takes its place.
    """

    def __init__(self, size: int, *, name: str = "user-code"):
        self._size = size
        self._name = name
        self._running = 0
        self._lock = threading.Lock()
        self._calls: queue.SimpleQueue[ThreadCall] = queue.SimpleQueue()

    def submit(self, function: Callable[..., object], *args: object) -> ThreadCall:
        """Queue a call. A thread runs it when one is free.

        The call fails if the process can't start a thread and has none that could run it.
        """
        call = ThreadCall(function, args)
        with self._lock:
            if self._running < self._size:
                try:
                    self._start_thread()
                    self._running += 1
                except RuntimeError as error:
                    if not self._running:
                        call.set_result(CallResult(error=error))
                        return call
        self._calls.put(call)
        return call

    async def result(self, call: ThreadCall, timeout_s: float | None) -> CallResult:
        """Wait for the end of a call, and abandon the call if that takes too long.

        Args:
            timeout_s: limit, from the moment when a thread took the call.

        Raises:
            UserCodeTimeout: it took longer. A thread can't be stopped: it is left to the call.
        """
        future = asyncio.wrap_future(call)
        try:
            left_s = timeout_s
            while not future.done():
                await asyncio.wait({future}, timeout=left_s)
                if timeout_s is not None and not future.done():
                    left_s = call.left_s(timeout_s)
                    if left_s <= 0:
                        late = UserCodeTimeout(f"no answer within {timeout_s:g} s")
                        late.where = call.own_location()
                        raise late
        finally:
            future.cancel()
            self.abandon(call)
        result = future.result()
        if timeout_s is not None and result.error is None:
            took_s = (call.ended_at or 0.0) - (call.began_at or 0.0)
            if took_s > timeout_s:  # the event loop was held up, and saw the deadline too late
                text = f"no answer within {timeout_s:g} s, but after {took_s:.3g} s"
                late = UserCodeTimeout(text)
                late.returned = True
                raise late
        return result

    def abandon(self, call: ThreadCall) -> None:
        """Take back a queued call; have another thread take the place of one that runs on.

        Nothing happens to a call that has ended.
        """
        call.cancel()
        with self._lock:
            if call.running() and call.ended_at is None and not call.is_replaced:
                try:
                    self._start_thread()
                    call.is_replaced = True
                except RuntimeError as error:  # its thread stays, should the call ever end
                    logger.warning("no thread in place of one that hangs: %s", error)

    def _start_thread(self) -> None:
        """Start a thread.

        Raises:
            RuntimeError: the process may have no more threads.
        """
        threading.Thread(target=self._work, name=self._name, daemon=True).start()

    def _work(self) -> None:
        while True:
            call = self._calls.get()
            if not call.set_running_or_notify_cancel():
                continue
            call.thread_id = threading.get_ident()
            call.began_at = time.monotonic()
            result = call.run()
            with self._lock:
                call.ended_at = time.monotonic()
            call.set_result(result)
            if call.is_replaced:
                return
            del call, result  # an idle thread would keep the call's arguments alive
