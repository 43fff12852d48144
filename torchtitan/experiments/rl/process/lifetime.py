"""Notices when a process ends and why, and kills processes.

`Lifetime` belongs to whoever calls a process. It ends the calls that wait for the process, which
would otherwise wait for ever. `descendants` and the functions after it find and kill processes of
this host.
"""

import asyncio
import contextlib
import os
import select
import signal
import threading
from collections.abc import Awaitable
from pathlib import Path
from typing import Any

import psutil

from torchtitan.experiments.rl.compat.monarch import process_death_behind
from torchtitan.experiments.rl.errors import RunError

WATCH_S = 5.0
"""Seconds that the watch of a process has to say why it ended, once Monarch has reported the end.
The watch itself hears of an end within milliseconds."""
_PF_EXITING = 0x4
"""Linux's flag of a process that is being taken down."""
_FLAGS_FIELD = 6
"""Index of a process's flags in /proc/PID/stat, counted after the name in parentheses."""


# ---- the end of a process


class ProcessLost(RunError):
    """A call that can't be answered, because its process has ended."""

    def __init__(self, name: str, cause: str):
        super().__init__(f"{name} died: {cause}")
        self.name = name
        self.cause = cause

    def __reduce__(self) -> tuple[type["ProcessLost"], tuple[str, str]]:
        return type(self), (self.name, self.cause)


class Lifetime:
    """Life of a process, as another process sees it that calls it.

    The end is learned in two ways. `watch` notices the end of a process of this host at once, and
    reads its exit code. Monarch reports the end of any process, within some ten seconds, to
    `report`.

    A lifetime is made on the event loop that uses it.
    """

    def __init__(self, name: str):
        """Begin with a process that lives and is not watched.

        Args:
            name: name of the process in messages, such as "generator 1".
        """
        self.name = name
        self.pid: int | None = None
        """Process that is watched; None before `watch`."""
        self._loop = asyncio.get_running_loop()
        self._ended: asyncio.Future[str] = self._loop.create_future()
        self._descriptor = -1
        """Descriptor of the watched process; -1 while none is watched."""

    @property
    def cause(self) -> str | None:
        """Cause of the process's end; None while it lives."""
        return self._ended.result() if self._ended.done() else None

    @property
    def ending(self) -> bool:
        """True if Linux is taking the watched process down.

        Its files and sockets are closed by then, and `watch` is about to see its end.
        """
        try:
            status = Path(f"/proc/{self.pid}/stat").read_text()
            flags = int(status.rpartition(")")[2].split()[_FLAGS_FIELD])
        except (OSError, IndexError):  # no process is watched, or it is gone
            return False
        return bool(flags & _PF_EXITING)

    async def ended(self) -> str:
        """Wait until the process has ended, and return the cause."""
        return await asyncio.shield(self._ended)

    def end(self, cause: str) -> None:
        """Take the process as ended. If it is called again, the first cause stays."""
        if not self._ended.done():
            self._ended.set_result(cause)
        self.close()

    def report(self, cause: str) -> None:
        """Take note of Monarch's report that the process has ended, or that its actor is lost.

        If the process is watched, the watch has WATCH_S to say why it ended, and ``cause`` counts
        only if it says nothing. So people read the same words for the same end, although Monarch
        may report it first.
        """
        if self._descriptor < 0:
            self.end(cause)
        else:
            self._loop.call_later(WATCH_S, self.end, cause)

    async def call(self, answer: Awaitable[Any]) -> Any:  # noqa: ANN401 - any endpoint's
        """Return the answer of a call to the process.

        Raises:
            ProcessLost: The process ended first.
            Exception: The call raised it.
        """
        try:
            return await self.during(answer)
        except Exception as error:
            death = process_death_behind(error)
            if death is None:
                raise
            self.report(death.cause)
            raise ProcessLost(self.name, await self.ended()) from error

    async def during(self, work: Awaitable[Any]) -> Any:  # noqa: ANN401 - any result
        """Return what ``work`` returns, or raise what it raises.

        The work is cancelled if the process ends first.

        Raises:
            ProcessLost: The process ended first.
        """
        task = asyncio.ensure_future(work)
        try:
            await asyncio.wait({task, self._ended}, return_when=asyncio.FIRST_COMPLETED)
            if self._ended.done():
                raise ProcessLost(self.name, self._ended.result())
            return task.result()
        finally:
            if not task.done():
                task.cancel()
            elif not task.cancelled():
                task.exception()  # asyncio logs an exception that nobody has asked for

    def watch(self, pid: int, output: str = "") -> None:
        """Call `end` when a process of this host ends.

        Args:
            pid: the process.
            output: file with what the process has printed. If the process crashes, the cause names
                the file.
        """
        self.pid = pid
        try:
            self._descriptor = os.pidfd_open(pid)
        except ProcessLookupError:
            self.end("ended before it was watched")
            return
        # A thread that waits in the kernel, and not the event loop, which could be busy when the
        # process ends: Monarch waits for its children too, and only the first learns the exit code.
        threading.Thread(
            target=self._wait,
            args=(pid, os.dup(self._descriptor), output),
            name=f"wait for {pid}",
            daemon=True,
        ).start()

    def kill(self, cause: str) -> None:
        """Kill the process if it is watched, and take it as ended for ``cause``."""
        if self._descriptor >= 0:
            with contextlib.suppress(ProcessLookupError):
                signal.pidfd_send_signal(self._descriptor, signal.SIGKILL)
        self.end(cause)

    def close(self) -> None:
        """Stop watching the process."""
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1

    def _wait(self, pid: int, descriptor: int, output: str) -> None:
        """Wait for the end of the process, in a thread of its own, and close the descriptor."""
        try:
            status = os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)
        except ChildProcessError:  # Monarch was first, or it is another process's child
            select.select([descriptor], [], [])
            status = None
        os.close(descriptor)
        with contextlib.suppress(RuntimeError):  # the event loop is closed, and nobody listens
            self._loop.call_soon_threadsafe(self.end, _cause_in(status, output))


def _cause_in(status: os.waitid_result | None, output: str) -> str:
    """Return the cause of a process's end in words; ``status`` is None if its code is unknown."""
    if status is None:
        return "its process ended"
    if status.si_code == os.CLD_EXITED:
        return f"its process ended with exit code {status.si_status}" + _note_of_output(output)
    cause = f"killed by {signal.Signals(status.si_status).name}"
    if status.si_status == signal.SIGKILL:  # it had no time to print why
        return cause
    return cause + _note_of_output(output)


def _note_of_output(output: str) -> str:
    """Return a note that names the file with what a process has printed, unless it is empty."""
    with contextlib.suppress(OSError):
        if output and Path(output).stat().st_size:
            return f" (what it printed is in {output})"
    return ""


# ---- processes of this host


def descendants(of: int | None = None) -> list[int]:
    """Return the pids of the living descendants of a process, parents before their children.

    Args:
        of: their ancestor; None for this process.
    """
    pids = []
    with contextlib.suppress(psutil.NoSuchProcess):
        for child in psutil.Process(of).children(recursive=True):
            with contextlib.suppress(psutil.NoSuchProcess):
                if child.status() != psutil.STATUS_ZOMBIE:
                    pids.append(child.pid)
    return pids


def kill_descendants() -> None:
    """Kill the descendants of this process, and those that they start meanwhile."""
    while alive := descendants():
        kill(alive)


def kill_family(ancestor: int) -> None:
    """Kill a process and its descendants, and this process last, which may be one of them."""
    while others := [pid for pid in descendants(ancestor) if pid != os.getpid()]:
        kill(others)
    kill([ancestor, os.getpid()])


def kill(pids: list[int]) -> None:
    """Kill processes, in this order. Those that are gone, or another user's, are passed over."""
    for pid in pids:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.kill(pid, signal.SIGKILL)
