"""The ends of processes: calls to one end when it does, and whoever owns it learns the cause.

``Heartbeat`` is what the working thread of a process does, and since when: how another process sees that it hangs, or is idle.
"""

import asyncio
import contextlib
import os
import select
import signal
import threading
import time
from collections.abc import Awaitable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

from torchtitan.experiments.rl.compat.monarch import process_death_behind
from torchtitan.experiments.rl.errors import RunError

WATCH_S = 5.0
"""How long the watch of a process has to say why it ended after Monarch has; of an end it hears within milliseconds."""
_PF_EXITING = 0x4
"""Linux's flag of a process that is being taken down (proc(5), "flags" of /proc/PID/stat)."""


class ProcessLost(RunError):
    """A call can't be answered: its process has ended."""

    def __init__(self, name: str, cause: str):
        super().__init__(f"{name} died: {cause}")
        self.name, self.cause = name, cause

    def __reduce__(self) -> tuple[type["ProcessLost"], tuple[str, str]]:
        return type(self), (self.name, self.cause)


class Lifetime:
    """Made on the event loop that uses it.

    ``watch`` notices the end of a process of this host at once; Monarch reports any process's, within some ten seconds.
    """

    def __init__(self, name: str):
        """``name`` is what people call the part, such as "generator 1"."""
        self.name = name
        self.pid: int | None = None
        """Set by ``watch``."""
        self._loop = asyncio.get_running_loop()
        self._ended: asyncio.Future[str] = self._loop.create_future()
        self._descriptor = -1

    @property
    def cause(self) -> str | None:
        """Why the process ended; None while it lives."""
        return self._ended.result() if self._ended.done() else None

    @property
    def ending(self) -> bool:
        """Whether the system is taking this host's process down: its files are closed by then, and its end is seen soon."""
        with contextlib.suppress(
            OSError, IndexError
        ):  # there is no such process, or its end was seen
            return bool(
                int(Path(f"/proc/{self.pid}/stat").read_text().rpartition(")")[2].split()[6])
                & _PF_EXITING
            )
        return False

    async def ended(self) -> str:
        """Wait for the end. Returns the cause."""
        return await asyncio.shield(self._ended)

    def end(self, cause: str) -> None:
        """The process has ended, or is to be treated as if it had. The first cause counts."""
        if not self._ended.done():
            self._ended.set_result(cause)
        self.close()

    def report(self, cause: str) -> None:
        """Monarch says that the process has ended, or that its actor can't be called. Of a process that is watched the cause is
        the one that its watch learns, so that people read the same words for the same end; Monarch may say it first.
        """
        if self._descriptor < 0:
            self.end(cause)
        else:
            self._loop.call_later(WATCH_S, self.end, cause)

    async def call(self, answer: Awaitable[Any]) -> Any:
        """The answer of a call to the process.

        Raises:
            ProcessLost: the process ended first.
            Exception: what the call raises.
        """
        try:
            return await self.during(answer)
        except Exception as error:
            death = process_death_behind(error)
            if death is None:
                raise
            self.report(death.cause)
            raise ProcessLost(self.name, await self.ended()) from error

    async def during(self, work: Awaitable[Any]) -> Any:
        """What ``work`` returns or raises; it is cancelled when the process ends.

        Raises:
            ProcessLost: the process ended first.
        """
        working = asyncio.ensure_future(work)
        try:
            await asyncio.wait({working, self._ended}, return_when=asyncio.FIRST_COMPLETED)
            if self._ended.done():
                raise ProcessLost(self.name, self._ended.result())
            return working.result()
        finally:
            if not working.done():
                working.cancel()
            elif not working.cancelled():
                working.exception()  # looked at: asyncio logs one that nobody does

    def watch(self, pid: int, output: str = "") -> None:
        """``end`` this lifetime when the process ``pid`` of this host ends. Of one that crashes the cause names ``output``, the
        file with what it has printed.
        """
        self.pid = pid
        try:
            self._descriptor = os.pidfd_open(pid)
        except ProcessLookupError:
            return self.end("ended before it was watched")
        arguments = (pid, os.dup(self._descriptor), output)
        threading.Thread(
            target=self._wait, args=arguments, name=f"wait for {pid}", daemon=True
        ).start()

    def kill(self, cause: str) -> None:
        """End the process with SIGKILL, for ``cause``."""
        if self._descriptor >= 0:
            with contextlib.suppress(ProcessLookupError):
                signal.pidfd_send_signal(self._descriptor, signal.SIGKILL)
        self.end(cause)

    def close(self) -> None:
        """Its end is of no interest any more."""
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1

    def _wait(self, pid: int, descriptor: int, output: str) -> None:
        # In a thread that waits in the kernel: Monarch waits for its children too, and who is second learns no exit code.
        try:
            status = os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)
        except ChildProcessError:  # Monarch was first, or it is another's child
            select.select([descriptor], [], [])
            status = None
        os.close(descriptor)
        with contextlib.suppress(RuntimeError):  # the event loop is closed: nobody is interested
            self._loop.call_soon_threadsafe(self.end, _cause_in(status, output))


def _cause_in(status: os.waitid_result | None, output: str) -> str:
    if status is None:
        return "its process ended"
    if status.si_code == os.CLD_EXITED:
        return f"its process ended with exit code {status.si_status}" + _last_words(output)
    killed = f"killed by {signal.Signals(status.si_status).name}"
    return killed if status.si_status == signal.SIGKILL else killed + _last_words(output)


def _last_words(output: str) -> str:
    with contextlib.suppress(OSError):
        if output and Path(output).stat().st_size:
            return f" (what it printed is in {output})"
    return ""


def descendants(of: int | None = None) -> list[int]:
    """Process ids of those that live, parents before their children.

    Args:
        of: their ancestor; None: this process.
    """
    found = []
    with contextlib.suppress(psutil.NoSuchProcess):
        for child in psutil.Process(of).children(recursive=True):
            with contextlib.suppress(psutil.NoSuchProcess):
                if child.status() != psutil.STATUS_ZOMBIE:
                    found.append(child.pid)
    return found


def kill_descendants() -> None:
    """End them with SIGKILL; those too that one of them starts meanwhile."""
    while alive := descendants():
        kill(alive)


def kill_family(ancestor: int) -> None:
    """End the descendants of ``ancestor`` with SIGKILL, then itself, and this process last, which may be one of them."""
    while others := [pid for pid in descendants(ancestor) if pid != os.getpid()]:
        kill(others)
    kill([ancestor, os.getpid()])


def kill(pids: list[int]) -> None:
    for pid in pids:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.kill(pid, signal.SIGKILL)


@dataclass(frozen=True, kw_only=True, slots=True)
class Pulse:
    doing: str
    """"" while the thread waits for work."""
    seconds: float
    """Since it began, or last made progress."""
    slow: bool
    """Whether what it does may take long: a build, a load of weights, a first step that compiles, a checkpoint."""


class Heartbeat:
    """Written by the working thread and read by the others; each write is one assignment, and so needs no lock."""

    def __init__(self) -> None:
        self._work: tuple[str, float, bool] = ("", time.monotonic(), False)
        self._used = False
        self._worked_s = 0.0
        """In blocks of ``work`` that have ended."""
        self._lapped = (0.0, time.monotonic())

    @contextlib.contextmanager
    def work(self, what: str, *, slow: bool = False) -> Iterator[None]:
        """The thread does ``what`` in the block."""
        began = time.monotonic()
        self._used = True
        self._work = (what, began, slow)
        try:
            yield
        finally:
            ended = time.monotonic()
            self._work = ("", ended, False)
            self._worked_s += ended - began

    def beat(self, what: str | None = None, *, slow: bool | None = None) -> None:
        """The work goes on: its time starts again. ``what`` and ``slow`` are of its next part; None: as before."""
        before, _, was_slow = self._work
        self._work = (
            before if what is None else what,
            time.monotonic(),
            was_slow if slow is None else slow,
        )

    def pulse(self) -> Pulse:
        what, since, slow = self._work
        return Pulse(doing=what, seconds=time.monotonic() - since, slow=slow)

    def lap_busy(self) -> float | None:
        """Share of the time since the last call that the thread worked, from 0 to 1. Work under way counts when it ends.

        None where nothing was ever noted: the process has no working thread.
        """
        worked_s, now = self._worked_s, time.monotonic()
        before_s, then = self._lapped
        self._lapped = (worked_s, now)
        if not self._used:
            return None
        return min(1.0, (worked_s - before_s) / (now - then)) if now > then else 0.0
