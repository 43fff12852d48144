"""Calls reward functions with isolate=True, each call in a process of its own: it may hang, crash or run what a model wrote.

    this process ──request──▶ server, clean: has imported what the function needs, and never calls it
                                 └─fork──▶ the call: calls the function once, writes its answer as JSON, and ends

A server serves one call after another, because starting one takes seconds. Each call is a fork of it, so that nothing that
a call changes in its process is there in the next. A call runs in a main thread, where ``signal.alarm`` works. Its time, output
and answer are bounded, and the memory of each of its processes. Their number and their memory together are looked at every
WATCH_S, so a burst passes. The answer is JSON: to load a pickle of a process that ran what a model wrote could run that here.

Three nets end what a call started, in whatever session: the server ends its descendants after each call, since it adopts their
orphans; the caller ends a server by its mark; and a watcher ends both where the caller is killed (process/foreign.py).

**This is no sandbox.** A call has the user's files and network, and code in it can write an answer of its own. What a process
for each call prevents is that one reply changes how the next is judged. A hostile reply can still cheat for itself
(docs/security.md).

In the socket between caller and server: None, the server is there; a request; None, the function is loaded and its time begins,
or the outcome of a function that can't be; the outcome.

The forkserver of ``multiprocessing`` does not fit: it imports the program's main module again in each fork, fixes what is
imported when it starts, and leaves processes behind.
"""

import asyncio
import contextlib
import ctypes
import gc
import inspect
import json
import logging
import os
import queue
import resource
import selectors
import signal
import subprocess
import sys
import time
import traceback
import weakref
from collections.abc import Callable
from dataclasses import dataclass, field
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, NoReturn

import cloudpickle
import psutil

from torchtitan.experiments.rl.errors import (
    UserCodeError,
    UserCodeTimeout,
    cause_of,
    users_traceback,
)
from torchtitan.experiments.rl.process import foreign
from torchtitan.experiments.rl.process.lifetime import descendants, kill
from torchtitan.experiments.rl.process.setup import (
    ENVIRONMENT,
    SPAWNED_ENVIRONMENT,
    set_up_isolated_process,
)

logger = logging.getLogger(__name__)

START_S = 120.0
"""Limit for starting a server and for importing what a function needs; neither counts against the function's own time."""
ORPHAN_S = 10.0
"""Time beyond a call's limit after which its server, which should have ended it, is taken for dead."""
MOST_PROCESSES = 64
"""Maximum number of processes that a call may have at a time, its own included."""
MOST_OUTPUT = 16_384
"""Maximum number of bytes that a call prints; what follows is dropped."""
MOST_ANSWER = 16 * 2**20
"""Maximum number of bytes of an answer."""
WATCH_S = 0.25
"""Time between two looks at the processes of a call."""
_FOLDERS = ("HOME", "TMPDIR", "XDG_CACHE_HOME", "TORCHINDUCTOR_CACHE_DIR", "HF_HOME", "NLTK_DATA")
_SETTINGS = (*_FOLDERS, "HF_HUB_OFFLINE", "CUDA_VISIBLE_DEVICES", "OMP_NUM_THREADS", "PYTHONUTF8")
INHERITED = (*foreign.INHERITED, *_SETTINGS, *ENVIRONMENT, *SPAWNED_ENVIRONMENT)
"""Environment variables of the run that a server gets. The others may hold keys."""
_PR_SET_PDEATHSIG, _PR_SET_CHILD_SUBREAPER = 1, 36


class IsolatedCalls:
    """At most ``max_workers`` calls at a time, by as many servers: started when first needed and ended with this object or the
    process."""

    def __init__(self, max_workers: int, *, memory_gib: float = 4.0):
        """
        Args:
            memory_gib: of a call, beside what its server has.
        """
        self._memory = int(memory_gib * 2**30)
        self._idle: queue.LifoQueue[_Server | None] = queue.LifoQueue()
        """Places for a call, each with its server, or None where none is started."""
        self._servers: list[_Server] = []
        for _ in range(max_workers):
            self._idle.put(None)
        weakref.finalize(self, _kill_all, self._servers)

    def call(self, function: Callable[..., Any], args: tuple, *, timeout_s: float) -> Any:
        """Run ``function(*args)`` in a process of its own and return what JSON holds of its answer; blocks the calling thread.

        Raises:
            UserCodeTimeout: it took longer than timeout_s; its processes were killed.
            UserCodeError: it raised, its process died or used too much, its answer is no JSON, or it can't be sent to another
                process.
        """
        try:
            request = _Request(
                cloudpickle.dumps(function), cloudpickle.dumps(args), timeout_s, self._memory
            )
        except Exception as error:
            raise UserCodeError(f"can't be sent to another process: {cause_of(error)}") from error
        server = self._idle.get()
        try:
            if server is None:
                server = _Server()
                self._servers.append(server)
            return server.call(request)
        finally:
            if server is None or server.alive:
                self._idle.put(server)
            else:
                self._idle.put(
                    None
                )  # before the rest, which may fail: a place that is lost blocks a later call for good
                self._servers.remove(server)
                server.kill()


@dataclass(frozen=True, slots=True)
class _Request:
    function: bytes
    """Pickle. The server loads it once, and imports what it needs."""
    args: bytes
    """Pickle, which the call alone loads."""
    timeout_s: float
    memory: int
    """Bytes."""


@dataclass(slots=True)
class _Outcome:
    """Result of a call, which its server sends to the caller. At most one of the fields is set."""

    answer: bytes = b""
    """JSON that the call wrote: the function's value, or the error that it raised."""
    late: bool = False
    """True if the call was ended at its time limit."""
    failure: str = ""
    """Reason that there is no answer: the process died, or used too much."""


class _Server:
    """A server as its caller sees it."""

    def __init__(self) -> None:
        self.alive = True
        """False during a call, and after one whose outcome was not received: it would be taken for that of the next."""
        self._mark = foreign.new_mark()
        self._connection, theirs = Pipe()
        inherited = {name: os.environ[name] for name in INHERITED if name in os.environ}
        paths = {"PYTHONPATH": os.pathsep.join(path or os.getcwd() for path in sys.path)}
        self._process = subprocess.Popen(
            foreign.marked(
                [sys.executable, "-c", f"from {__name__} import serve; serve({theirs.fileno()})"],
                self._mark,
            ),
            stdin=subprocess.DEVNULL,
            stdout=2,  # what calls print goes to this process's standard error
            pass_fds=[theirs.fileno()],
            start_new_session=True,
            env=inherited | paths | foreign.variables_of(self._mark),
        )
        theirs.close()
        self._ready = False

    def call(self, request: _Request) -> Any:
        self.alive = False
        late = f"what it needs was not imported within {START_S:g} s; its process was killed"
        try:
            if not self._ready:
                self._receive(START_S)
                self._ready = True
            self._connection.send(request)
            outcome = self._receive(START_S)
            if outcome is None:
                late = f"no answer within {request.timeout_s:g} s; its process was killed"
                outcome = self._receive(request.timeout_s + ORPHAN_S)
            self.alive = True
        except TimeoutError:
            raise UserCodeTimeout(late) from None
        except (EOFError, ConnectionError):
            try:
                failure = _died(self._process.wait(timeout=5))
            except subprocess.TimeoutExpired:
                failure = "its process died (its output was closed)"
            raise UserCodeError(failure) from None
        if outcome.late:
            raise UserCodeTimeout(late)
        if outcome.failure:
            raise UserCodeError(outcome.failure)
        return _value_of(outcome.answer)

    def kill(self) -> None:
        """End the server and all that its calls have started."""
        self._process.kill()  # it may have no mark yet
        foreign.kill_marked(self._mark)
        self._process.wait()
        self._connection.close()

    def _receive(self, timeout_s: float) -> Any:
        if not self._connection.poll(timeout_s):
            raise TimeoutError
        return self._connection.recv()


def _kill_all(servers: list[_Server]) -> None:
    for server in servers:
        server.kill()


def _value_of(answer: bytes) -> Any:
    """Return the value that a call has written.

    Raises:
        UserCodeError: it wrote an error, or no JSON.
    """
    try:
        said = json.loads(answer)
        if "value" in said:
            return said["value"]
        error = UserCodeError(str(said["error"]))
        error.traceback = str(said["traceback"])
        whole = str(said["whole"])
    except (ValueError, TypeError, KeyError, RecursionError) as fault:
        raise UserCodeError(f"its answer can't be read: {type(fault).__name__}") from None
    logger.info("an isolated function failed\n%s", whole)
    raise error


def _died(code: int) -> str:
    if code >= 0:
        return f"its process died (exit status {code})"
    known = -code in set(map(int, signal.Signals))  # not so most of the real-time signals
    return f"its process died ({signal.Signals(-code).name if known else f'signal {-code}'})"


# ---- in the server


def serve(fd: int) -> None:
    """Run the calls that are asked for at the socket ``fd``, until its other end is closed."""
    set_up_isolated_process()
    os.set_inheritable(fd, False)
    libc = ctypes.CDLL(None)
    libc.prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    connection: Connection = Connection(fd)
    functions: dict[bytes, Callable[..., Any]] = {}
    """By their pickles: those of one rubric."""
    with contextlib.suppress(EOFError, ConnectionError):  # the caller has ended
        connection.send(None)
        while True:
            request = connection.recv()
            try:
                if request.function not in functions:
                    functions[request.function] = cloudpickle.loads(request.function)
                    gc.collect()
                    gc.freeze()  # a call that collects garbage would copy every page
            except BaseException as error:
                connection.send(_Outcome(answer=_failure(error)))
                continue
            connection.send(None)
            connection.send(_run(functions[request.function], request, connection, libc))


def _run(
    function: Callable[..., Any], request: _Request, connection: Connection, libc: ctypes.CDLL
) -> _Outcome:
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
    watched = _Watched(pid, answer=answer, output=output, memory=request.memory)
    try:
        outcome = watched.outcome(request.timeout_s)
    finally:
        _end_children()
        os.close(answer)
        os.close(output)
    if watched.printed:
        with contextlib.suppress(OSError):  # nobody reads it any more
            _write_all(2, watched.printed[:MOST_OUTPUT])
    return outcome


@dataclass(slots=True)
class _Watched:
    """A call that runs."""

    pid: int
    answer: int
    output: int
    memory: int
    answered: bytearray = field(default_factory=bytearray)
    printed: bytearray = field(default_factory=bytearray)

    def outcome(self, timeout_s: float) -> _Outcome:
        """Wait for the end of the call, for at most ``timeout_s``, and read what it writes."""
        end = time.monotonic() + timeout_s
        look = time.monotonic() + WATCH_S
        process = os.pidfd_open(self.pid)
        with selectors.DefaultSelector() as selector:
            for descriptor in (self.answer, self.output, process):
                os.set_blocking(descriptor, False)
                selector.register(descriptor, selectors.EVENT_READ)
            try:
                while True:
                    now = time.monotonic()
                    if now >= end:
                        return _Outcome(late=True)
                    if now >= look:
                        look = now + WATCH_S
                        if excess := self._excess():
                            return _Outcome(failure=excess)
                    ready = [key.fd for key, _ in selector.select(max(0.0, min(end, look) - now))]
                    for descriptor in ready:
                        if descriptor != process and not self._read(descriptor):
                            selector.unregister(descriptor)
                    if len(self.answered) > MOST_ANSWER:
                        return _Outcome(failure=f"its answer has more than {MOST_ANSWER:,} bytes")
                    if process in ready:
                        return self._ended()
            finally:
                os.close(process)

    def _read(self, descriptor: int) -> bool:
        """Read what there is; False at the end."""
        try:
            read = os.read(descriptor, 1 << 16)
        except BlockingIOError:
            return True
        if descriptor == self.answer:
            self.answered += read
        elif len(self.printed) < MOST_OUTPUT:
            self.printed += read
        return bool(read)

    def _ended(self) -> _Outcome:
        """Return the outcome of a call whose process has ended. One without an answer has ended itself, by ``os._exit``."""
        _, status = os.waitpid(self.pid, 0)
        _end_children()  # one of them might go on writing
        for descriptor in (self.answer, self.output):
            before = -1
            while before != (
                seen := len(self.answered) + len(self.printed)
            ):  # until a round brings nothing
                before = seen
                self._read(descriptor)
        code = os.waitstatus_to_exitcode(status)
        return (
            _Outcome(failure=_died(code))
            if code or not self.answered
            else _Outcome(answer=bytes(self.answered))
        )

    def _excess(self) -> str:
        """Return what the processes of the call use too much of; empty where they don't."""
        pids = descendants()
        if len(pids) > MOST_PROCESSES:
            return f"it had more than {MOST_PROCESSES} processes; they were killed"
        used = 0
        for pid in pids:
            with contextlib.suppress(psutil.Error):
                used += (
                    psutil.Process(pid).memory_full_info().pss
                )  # pages that several share count once
        if used > self.memory:
            return f"it used more than {self.memory / 2**30:.3g} GiB of memory; its processes were killed"
        return ""


def _end_children() -> None:
    """End what a call has left. Orphans of it are this process's children."""
    while True:
        try:
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass
        except ChildProcessError:
            return
        kill(descendants())
        time.sleep(0.001)


# ---- in the call


def _call(
    function: Callable[..., Any], request: _Request, answer_end: int, output_end: int
) -> NoReturn:
    code = 1
    try:
        os.setsid()  # it signals its own group, and not the server's
        os.dup2(output_end, 1)
        os.dup2(output_end, 2)
        os.close(output_end)
        try:
            _limit_memory(request.memory)
            value = function(*cloudpickle.loads(request.args))
            if inspect.isawaitable(value):
                value = asyncio.run(_awaited(value))
            answer = json.dumps({"value": value}, default=_plain).encode()
        except BaseException as error:
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


async def _awaited(value: Any) -> Any:
    return await value


def _plain(value: Any) -> Any:
    """Return what JSON has for a number or an array of numpy or torch."""
    if hasattr(value, "tolist"):
        return value.tolist()
    if hasattr(value, "__float__"):
        return float(value)
    raise TypeError(f"returned a {type(value).__name__}, want a number, a text, or lists of them")


def _failure(error: BaseException) -> bytes:
    whole = "".join(traceback.format_exception(error))
    said = {
        "error": cause_of(error),
        "traceback": users_traceback(error),
        "whole": whole[-MOST_OUTPUT:],
    }
    return json.dumps(said).encode()


def _write_all(descriptor: int, data: bytes | bytearray) -> None:
    left = memoryview(data)
    while left:
        left = left[os.write(descriptor, left) :]
