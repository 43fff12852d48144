"""Serves calls of functions in a process that is a fork for each call; see `ask/child.py`.

    serve ─ load the function ─ fork ─ call it once, write the answer as JSON, end
                                  └─ wait: read answer and output, look at time and memory

A call runs in a main thread, where `signal.alarm` works. The system limits the memory of each
process of a call. The limits of all its processes together, on their number and memory, are looked
at every `WATCH_S`, so a burst between two looks goes unseen. The answer is JSON: to load a pickle
of a process that ran what a model wrote could run that code in the caller.
"""

import asyncio
import contextlib
import ctypes
import gc
import inspect
import json
import os
import resource
import selectors
import signal
import sys
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, NoReturn

import cloudpickle
import psutil

from torchtitan.experiments.rl.errors import cause_of, users_traceback
from torchtitan.experiments.rl.process.lifetime import descendants, kill
from torchtitan.experiments.rl.process.setup import set_up_isolated_process

MAX_PROCESSES = 64
"""Maximum number of processes that a call may have at a time, its own included."""
MAX_OUTPUT = 16_384
"""Maximum number of bytes that a call prints; what follows is dropped."""
MAX_ANSWER = 16 * 2**20
"""Maximum number of bytes of an answer."""
WATCH_S = 0.25
"""Seconds between two looks at the processes of a call."""
READ_SIZE = 1 << 16
_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36


@dataclass(frozen=True, slots=True)
class Request:
    """A call that the caller asks for."""

    function: bytes
    """Pickle. The server loads it once, and imports what it needs."""
    args: bytes
    """Pickle, which the call alone loads."""
    timeout_s: float
    memory: int
    """Bytes that the call may take beside what the server has."""


@dataclass(frozen=True, slots=True)
class ChildResult:
    """End of a call, which the server sends to the caller. At most one of the fields is set."""

    answer: bytes = b""
    """JSON that the call wrote: the function's value, or the error that it raised."""
    is_late: bool = False
    """True if the call was ended at its time limit."""
    failure: str = ""
    """Reason that there is no answer: the process died, or used too much."""


def died(code: int) -> str:
    """Return the words of an error about a process that ended with this exit code, or signal."""
    if code >= 0:
        return f"its process died (exit status {code})"
    known = -code in set(map(int, signal.Signals))  # most of the real-time signals are not
    return f"its process died ({signal.Signals(-code).name if known else f'signal {-code}'})"


# The server.


def serve(fd: int) -> None:
    """Run the calls that are asked for at the socket ``fd``, until its other end is closed."""
    set_up_isolated_process()
    os.set_inheritable(fd, False)
    libc = ctypes.CDLL(None)
    libc.prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    connection: Connection = Connection(fd)
    functions: dict[bytes, Callable[..., Any]] = {}
    """Functions by their pickles: those of one rubric."""
    with contextlib.suppress(EOFError, ConnectionError):  # the caller has ended
        connection.send(None)
        while True:
            request = connection.recv()
            try:
                if request.function not in functions:
                    functions[request.function] = cloudpickle.loads(request.function)
                    gc.collect()
                    gc.freeze()  # a call that collects garbage would copy every page
            except BaseException as error:  # noqa: BLE001 - an import may raise or exit with anything
                connection.send(ChildResult(answer=_failure(error)))
                continue
            connection.send(None)
            connection.send(_run(functions[request.function], request, connection, libc))


def _run(
    function: Callable[..., Any], request: Request, connection: Connection, libc: ctypes.CDLL
) -> ChildResult:
    """Fork a process for a call, and wait for its end."""
    answer, answer_end = os.pipe()
    output, output_end = os.pipe()
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):
            stream.flush()  # else each call prints again what the import has printed
    pid = os.fork()
    if pid == 0:
        connection.close()
        libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
        _call(function, request, answer_end, output_end)
    os.close(answer_end)
    os.close(output_end)
    watched = _WatchedCall(pid, answer=answer, output=output, memory=request.memory)
    try:
        result = watched.result(request.timeout_s)
    finally:
        _end_children()
        os.close(answer)
        os.close(output)
    if watched.printed:
        with contextlib.suppress(OSError):  # nobody reads it any more
            _write_all(2, watched.printed[:MAX_OUTPUT])
    return result


@dataclass(slots=True)
class _WatchedCall:
    """A call that runs, as its server sees it."""

    pid: int
    answer: int
    """Descriptor that the call writes its answer to."""
    output: int
    """Descriptor that the call prints to."""
    memory: int
    answered: bytearray = field(default_factory=bytearray)
    printed: bytearray = field(default_factory=bytearray)

    def result(self, timeout_s: float) -> ChildResult:
        """Wait for the end of the call, for at most ``timeout_s``, and read what it writes."""
        process = os.pidfd_open(self.pid)
        try:
            with selectors.DefaultSelector() as selector:
                for descriptor in (self.answer, self.output, process):
                    os.set_blocking(descriptor, False)
                    selector.register(descriptor, selectors.EVENT_READ)
                return self._watch(selector, process, time.monotonic() + timeout_s)
        finally:
            os.close(process)

    def _watch(
        self, selector: selectors.BaseSelector, process: int, deadline: float
    ) -> ChildResult:
        next_look = time.monotonic() + WATCH_S
        while (now := time.monotonic()) < deadline:
            if now >= next_look:
                next_look = now + WATCH_S
                if excess := self._excess():
                    return ChildResult(failure=excess)
            wait_s = max(0.0, min(deadline, next_look) - now)
            ready = [key.fd for key, _ in selector.select(wait_s)]
            for descriptor in ready:
                if descriptor != process and not self._read(descriptor):
                    selector.unregister(descriptor)
            if len(self.answered) > MAX_ANSWER:
                return ChildResult(failure=f"its answer has more than {MAX_ANSWER:,} bytes")
            if process in ready:
                return self._ended()
        return ChildResult(is_late=True)

    def _read(self, descriptor: int) -> bool:
        """Read what the call has written to a pipe. Return False at the pipe's end."""
        try:
            data = os.read(descriptor, READ_SIZE)
        except BlockingIOError:
            return True
        if descriptor == self.answer:
            self.answered += data
        elif len(self.printed) < MAX_OUTPUT:
            self.printed += data
        return bool(data)

    def _ended(self) -> ChildResult:
        """Return the result of a call whose process has ended.

        A process without an answer has ended itself, by ``os._exit``.
        """
        _, status = os.waitpid(self.pid, 0)
        _end_children()  # one of them might go on writing
        for descriptor in (self.answer, self.output):
            size = -1
            while size != len(self.answered) + len(self.printed):  # until a round brings nothing
                size = len(self.answered) + len(self.printed)
                self._read(descriptor)
        code = os.waitstatus_to_exitcode(status)
        if code or not self.answered:
            return ChildResult(failure=died(code))
        return ChildResult(answer=bytes(self.answered))

    def _excess(self) -> str:
        """Return an error's words if the processes of the call use too much, else an empty text."""
        pids = descendants()
        if len(pids) > MAX_PROCESSES:
            return f"it had more than {MAX_PROCESSES} processes; they were killed"
        used = 0
        for pid in pids:
            with contextlib.suppress(psutil.Error):
                # Pages of its own alone: a fork shares those of the server until it writes to them.
                used += psutil.Process(pid).memory_full_info().uss
        if used > self.memory:
            limit_gib = self.memory / 2**30
            return f"it used more than {limit_gib:.3g} GiB of memory; its processes were killed"
        return ""


def _end_children() -> None:
    """End what a call has left. Its orphans are children of this process."""
    while True:
        try:
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass
        except ChildProcessError:
            return
        kill(descendants())
        time.sleep(0.001)


# The call.


def _call(
    function: Callable[..., Any], request: Request, answer_end: int, output_end: int
) -> NoReturn:
    """Call the function in this process, write its answer, and end the process."""
    code = 1
    try:
        os.setsid()  # a signal to its own group does not reach the server
        os.dup2(output_end, 1)
        os.dup2(output_end, 2)
        os.close(output_end)
        try:
            _limit_memory(request.memory)
            value = function(*cloudpickle.loads(request.args))
            if inspect.isawaitable(value):
                value = asyncio.run(_awaited(value))
            answer = json.dumps({"value": value}, default=_plain).encode()
        except BaseException as error:  # noqa: BLE001 - user code may raise or exit with anything
            answer = _failure(error)
        with contextlib.suppress(BaseException):
            sys.stdout.flush()
            sys.stderr.flush()
        _write_all(answer_end, answer)
        code = 0
    finally:
        os._exit(code)


def _limit_memory(memory: int) -> None:
    """Limit what this process, and each that it starts, may have beside what the server has."""
    data_pages = int(Path("/proc/self/statm").read_text().split()[5])
    limit = data_pages * resource.getpagesize() + memory
    _, allowed = resource.getrlimit(resource.RLIMIT_DATA)
    if allowed != resource.RLIM_INFINITY:
        limit = min(limit, allowed)
    resource.setrlimit(resource.RLIMIT_DATA, (limit, limit))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))


async def _awaited(value: Any) -> Any:  # noqa: ANN401 - the user's
    return await value


def _plain(value: Any) -> Any:  # noqa: ANN401 - the user's
    """Return a number or an array of numpy or torch as JSON has it."""
    if hasattr(value, "tolist"):
        return value.tolist()
    if hasattr(value, "__float__"):
        return float(value)
    raise TypeError(f"returned a {type(value).__name__}, want a number, a text, or lists of them")


def _failure(error: BaseException) -> bytes:
    """Return the answer of a call that raised ``error``."""
    whole = "".join(traceback.format_exception(error))
    fields = {
        "error": cause_of(error),
        "traceback": users_traceback(error),
        "whole": whole[-MAX_OUTPUT:],
    }
    return json.dumps(fields).encode()


def _write_all(descriptor: int, data: bytes | bytearray) -> None:
    unwritten = memoryview(data)
    while unwritten:
        unwritten = unwritten[os.write(descriptor, unwritten) :]
