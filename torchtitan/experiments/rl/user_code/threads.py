"""Threads that sync user code runs in."""

import asyncio
import contextlib
import queue
import threading
import time
from collections.abc import Awaitable, Callable, Iterator
from typing import Any

from torchtitan.experiments.rl.user_code.bounded import UserCodeTimeout, call_bounded
from torchtitan.experiments.rl.user_code.watch import TIMER_S


class Threads:
    """Daemon threads that run sync user code, at most ``size`` at a time; started when first needed.

    Not an executor: there a function that never returns keeps its place, and keeps the process from ending. Not a
    thread per call either: under a busy event loop that took 6 ms per call, against 0.1 ms here.
    """

    def __init__(self, size: int):
        self._size = size
        self._running = 0
        self._lock = threading.Lock()
        self._jobs: queue.SimpleQueue[Job] = queue.SimpleQueue()

    async def call(self, function: Callable[..., Any], *args: Any, timeout_s: float | None) -> Any:
        """Run ``function(*args)`` in a thread for at most ``timeout_s`` seconds from its start; then await what it returned, if
        that can be awaited, for as long again.

        Raises:
            UserCodeTimeout: it took longer; its thread is left to it.
            BaseException: whatever it raised.
        """
        return await self.answer(self.submit(function, *args), timeout_s=timeout_s)

    def submit(self, function: Callable[..., Any], *args: Any) -> "Job":
        """Queue ``function(*args)``. A thread runs it when one is free; jobs begin in the order they were queued."""
        job = Job(lambda: function(*args))
        self._jobs.put(job)
        with self._lock:
            more = self._running < self._size
            self._running += more
        if more:
            self._start_thread()
        return job

    async def answer(self, job: "Job", *, timeout_s: float | None) -> Any:
        """Await the result of a queued job; see ``call``."""
        try:
            left_s = timeout_s
            while not (await asyncio.wait({job.outcome}, timeout=left_s))[0] and timeout_s is not None:
                # Neither time in the queue counts, nor time that the event loop takes to see that it has ended.
                ends = time.monotonic() if job.ended_at is None else job.ended_at
                left_s = timeout_s if job.begun_at is None else job.begun_at + timeout_s - ends
                if job.begun_at is not None and left_s <= TIMER_S:
                    late = UserCodeTimeout(f"no answer within {timeout_s:g} s")
                    late.where = job.doing[-1] if job.doing else ""
                    raise late
        finally:
            self._leave(job)
        value, error = job.outcome.result()
        if error is not None:
            raise error
        if timeout_s is not None and job.seconds > timeout_s:  # it held up the event loop, which saw the limit too late
            raise UserCodeTimeout(f"no answer within {timeout_s:g} s, but after {job.seconds:.3g} s")
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
            _RUNNING.job = job
            outcome = job.run()
            with self._lock:
                if job.left:  # another thread was started in its place
                    return
                job.ended_at = time.monotonic()
            job.deliver(outcome)

    def _leave(self, job: "Job") -> None:
        with self._lock:
            hung = job.begun_at is not None and job.ended_at is None
            job.left = True
        if hung:
            self._start_thread()


class Job:
    """One call in a thread; its times are written under the lock of its Threads."""

    def __init__(self, call: Callable[[], Any]):
        self._call = call
        self._loop = asyncio.get_running_loop()
        self._over = threading.Event()
        self.outcome: asyncio.Future[tuple[Any, BaseException | None]] = self._loop.create_future()
        self.result: tuple[Any, BaseException | None] | None = None
        """Value and error; None while it is queued or running."""
        self.begun_at: float | None = None
        self.ended_at: float | None = None
        self.left = False
        """Its caller no longer waits for it."""
        self.doing: list[str] = []
        """Names of the user's functions that it is in, the innermost last: ``doing``."""

    @property
    def seconds(self) -> float:
        """From its start to its end; 0 before that."""
        return self.ended_at - self.begun_at if self.ended_at is not None and self.begun_at is not None else 0.0

    def wait_in_place(self, seconds: float) -> bool:
        """Block the calling thread until the job has ended, for at most ``seconds``. Returns whether it has."""
        return self._over.wait(seconds)

    def run(self) -> tuple[Any, BaseException | None]:
        try:
            return self._call(), None
        except BaseException as error:
            return None, error

    def deliver(self, outcome: tuple[Any, BaseException | None]) -> None:
        self.result = outcome
        self._over.set()
        try:
            self._loop.call_soon_threadsafe(self._set, outcome)
        except RuntimeError:  # the loop was closed meanwhile
            pass

    def _set(self, outcome: tuple[Any, BaseException | None]) -> None:
        if not self.outcome.done():
            self.outcome.set_result(outcome)


class _Running(threading.local):
    job: Job | None = None
    """Of this thread."""


_RUNNING = _Running()


@contextlib.contextmanager
def doing(what: str) -> Iterator[None]:
    """Name the user's function that the block calls: where the job of this thread is late, its error says what it waits for."""
    job = _RUNNING.job
    if job is None:
        yield
        return
    job.doing.append(what)
    try:
        yield
    finally:
        job.doing.pop()
