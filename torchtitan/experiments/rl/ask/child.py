"""Asks functions that may hang, crash, or run what a model wrote, each call in its own process.

    this process ──request──▶ server ──fork──▶ the call
                 ◀──result──        ◀──JSON──

A server has imported what the function needs and never calls it (`ask/child_server.py`). It serves
one call after another, because to start one takes seconds. Each call is a fork of it, so that
nothing that a call changes is there in the next. Its time, output, answer and memory are bounded.

Three nets end what a call started, in whatever session: the server ends its descendants after each
call, since it adopts their orphans; the caller ends a server by its mark; and a watcher ends both
if the caller is killed (`process/foreign.py`).

**This is no sandbox.** A call has the user's files and network, and code in it can write an answer
of its own. A process for each call prevents that one reply changes how the next is judged. A
hostile reply can still cheat for itself (docs/security.md).

The forkserver of `multiprocessing` does not fit: it imports the program's main module again in each
fork, fixes what is imported when it starts, and leaves processes behind.
"""

import asyncio
import contextlib
import json
import logging
import os
import queue
import subprocess
import sys
import threading
import weakref
from collections.abc import Callable, Sequence
from multiprocessing import Pipe
from typing import IO, Any

import cloudpickle

from torchtitan.experiments.rl.ask import child_server
from torchtitan.experiments.rl.ask.call import ask_in_thread, results_of
from torchtitan.experiments.rl.ask.child_server import ChildResult, Request
from torchtitan.experiments.rl.ask.threads import CallResult, WorkerThreads
from torchtitan.experiments.rl.errors import UserCodeError, UserCodeTimeout, cause_of
from torchtitan.experiments.rl.process import foreign
from torchtitan.experiments.rl.process.setup import ENVIRONMENT, SPAWNED_ENVIRONMENT

logger = logging.getLogger(__name__)

START_S = 120.0
"""Limit in seconds for starting a server, and for importing what a function needs."""
ORPHAN_S = 10.0
"""Seconds beyond a call's limit after which its server, which should end it, is taken for dead."""
PRINT_S = 1.0
"""Maximum number of seconds that the end of a server waits for its last lines to be printed. They
end when no process holds the output open; one that has dropped the server's mark may live on."""
_FOLDERS = ("HOME", "TMPDIR", "XDG_CACHE_HOME", "TORCHINDUCTOR_CACHE_DIR", "HF_HOME", "NLTK_DATA")
_SETTINGS = (*_FOLDERS, "HF_HUB_OFFLINE", "CUDA_VISIBLE_DEVICES", "OMP_NUM_THREADS", "PYTHONUTF8")
INHERITED = (*foreign.INHERITED, *_SETTINGS, *ENVIRONMENT, *SPAWNED_ENVIRONMENT)
"""Environment variables of the run that a server gets. The others may hold keys."""


def pickled(value: object) -> bytes:
    """Return a function, or the arguments of a call, as they are sent to a server.

    Raises:
        UserCodeError: the value has a part that can't be pickled, such as a lock or a connection.
    """
    try:
        return cloudpickle.dumps(value)
    except Exception as error:  # noqa: BLE001 - of a user's class
        raise UserCodeError(f"can't be sent to another process: {cause_of(error)}") from error


class IsolatedCalls:
    """Runs functions in processes of their own, at most ``max_workers`` at a time.

    Servers start when they are first needed, and end with this object or the process.
    """

    def __init__(self, max_workers: int, *, memory_gib: float = 4.0):
        """Start no server yet.

        Args:
            memory_gib: memory of a call, beside what its server has.
        """
        self._memory = int(memory_gib * 2**30)
        self._threads = WorkerThreads(max_workers)
        self._slots: queue.LifoQueue[_ChildServer | None] = queue.LifoQueue()
        """Free slots for a call, each with its server; None if none is started there."""
        self._servers: list[_ChildServer] = []
        for _ in range(max_workers):
            self._slots.put(None)
        weakref.finalize(self, _kill_all, self._servers)

    async def ask(self, function: Callable[..., object], *args: object, timeout_s: float) -> Any:  # noqa: ANN401 - JSON
        """Return ``function(*args)`` as JSON holds it. The wait for a free slot is not limited.

        If the caller is cancelled, the call's processes are killed and its slot is free again.

        Raises:
            UserCodeTimeout: it took longer than its limit; its processes were killed.
            UserCodeError: anything else went wrong; see `call`.
        """
        caller = _Caller()

        def in_child() -> object:
            return self.call(function, args, timeout_s=timeout_s, caller=caller)

        try:
            return await ask_in_thread(self._threads, self._threads.submit(in_child), None)
        except asyncio.CancelledError:
            caller.give_up()
            raise

    async def ask_each(
        self,
        function: Callable[..., object],
        arguments: Sequence[tuple[object, ...]],
        *,
        timeout_s: float,
    ) -> list[CallResult]:
        """Return the result of ``function(*args)`` for each tuple of arguments; see `ask`."""
        return await results_of(
            self.ask(function, *args, timeout_s=timeout_s) for args in arguments
        )

    def call(
        self,
        function: Callable[..., object],
        args: tuple[object, ...],
        *,
        timeout_s: float,
        caller: "_Caller | None" = None,
    ) -> Any:  # noqa: ANN401 - JSON
        """Return ``function(*args)`` as JSON holds it. Blocks the calling thread.

        Raises:
            UserCodeTimeout: it took longer than ``timeout_s``; its processes were killed.
            UserCodeError: it raised, its process died or used too much, its answer is no JSON, or
                it can't be sent to another process.
        """
        request = Request(
            pickled(function), pickled(args), timeout_s=timeout_s, memory=self._memory
        )
        caller = caller or _Caller()
        server = self._slots.get()
        try:
            if server is None:
                server = _ChildServer()
                self._servers.append(server)
            caller.attach(server)
            return server.call(request)
        finally:
            caller.detach()
            self._give_back(server)

    def _give_back(self, server: "_ChildServer | None") -> None:
        """Free the slot of a call, and end its server if the next call can't use it."""
        if server is None or server.is_usable:
            self._slots.put(server)
            return
        # The slot is freed first: the rest may fail, and a lost slot would block a later call.
        self._slots.put(None)
        self._servers.remove(server)
        server.kill()


class _Caller:
    """Caller of one call, who may give it up while a thread waits for the answer.

    The thread calls `attach` and `detach`, the caller `give_up`.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._server: _ChildServer | None = None
        """Server that has the call; None before `attach` and after `detach`."""
        self._has_given_up = False

    def attach(self, server: "_ChildServer") -> None:
        """Note which server has the call.

        Raises:
            UserCodeError: the call was given up before it began.
        """
        with self._lock:
            if self._has_given_up:
                raise UserCodeError("its caller has given it up")
            self._server = server

    def detach(self) -> None:
        """Note that no server has the call any more. From now on `give_up` ends none."""
        with self._lock:
            self._server = None

    def give_up(self) -> None:
        """End the server that has the call, if one has: the thread then hears that it died."""
        with self._lock:
            self._has_given_up = True
            if self._server is not None:
                self._server.end()


class _ChildServer:
    """A server as its caller sees it.

    The server says None when it has started. For each request it says None when the function is
    loaded and its time begins, and then the result; or the result at once, if it can't be loaded.
    """

    def __init__(self) -> None:
        self._has_started = False
        self._has_result_to_come = False
        """True from the start of a call until its result is received."""
        self._was_ended = False
        self._mark = foreign.new_mark()
        self._connection, theirs = Pipe()
        code = f"from {child_server.__name__} import serve; serve({theirs.fileno()})"
        inherited = {name: os.environ[name] for name in INHERITED if name in os.environ}
        paths = {"PYTHONPATH": os.pathsep.join(path or os.getcwd() for path in sys.path)}
        self._process = subprocess.Popen(
            foreign.marked([sys.executable, "-c", code], self._mark),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            encoding="utf-8",
            errors="backslashreplace",
            pass_fds=[theirs.fileno()],
            start_new_session=True,
            env=inherited | paths | foreign.variables_of(self._mark),
        )
        theirs.close()
        self._printing = threading.Thread(
            target=_print_lines, args=(self._process.stdout,), daemon=True
        )
        self._printing.start()

    @property
    def is_usable(self) -> bool:
        """True if the next call may have the server.

        It may not if the server was ended, or if a result is still to come: the next call would
        take it for its own.
        """
        return not self._has_result_to_come and not self._was_ended

    def call(self, request: Request) -> Any:  # noqa: ANN401 - JSON
        """Have the server make the call, and return the value that the call has written.

        Raises:
            UserCodeTimeout: an import or the call took longer than its limit.
            UserCodeError: the call or the server failed.
        """
        self._has_result_to_come = True
        late = UserCodeTimeout(f"no answer within {request.timeout_s:g} s; its process was killed")
        try:
            self._load(request)
            result = self._receive(START_S)
            if result is None:
                result = self._receive_or(late, request.timeout_s + ORPHAN_S)
        except TimeoutError:
            text = f"what it needs was not imported within {START_S:g} s; its process was killed"
            raise UserCodeTimeout(text) from None
        except (EOFError, ConnectionError):
            raise UserCodeError(self._death()) from None
        self._has_result_to_come = False
        if result.is_late:
            raise late
        if result.failure:
            raise UserCodeError(result.failure)
        return _value_of(result.answer)

    def end(self) -> None:
        """End the server. Its caller hears of it, and then kills what its call has started.

        The result may have been received already: no other call may be given the server then.
        """
        self._was_ended = True
        self._process.kill()

    def kill(self) -> None:
        """End the server and all that its calls have started."""
        self._process.kill()  # it may have no mark yet
        foreign.kill_marked(self._mark)
        self._process.wait()
        self._printing.join(PRINT_S)
        self._connection.close()

    def _load(self, request: Request) -> None:
        if not self._has_started:
            self._receive(START_S)
            self._has_started = True
        self._connection.send(request)

    def _receive_or(self, late: UserCodeTimeout, timeout_s: float) -> ChildResult:
        try:
            result = self._receive(timeout_s)
        except TimeoutError:
            raise late from None
        assert result is not None
        return result

    def _receive(self, timeout_s: float) -> ChildResult | None:
        if not self._connection.poll(timeout_s):
            raise TimeoutError
        return self._connection.recv()

    def _death(self) -> str:
        try:
            return child_server.died(self._process.wait(timeout=5))
        except subprocess.TimeoutExpired:
            return "its process died (its output was closed)"


def _print_lines(output: IO[str]) -> None:
    """Print on stderr what a server and its calls print, whole lines at a time, until they end.

    A server that wrote there by itself could write into a line of this process.
    """
    with output:
        for line in output:
            with contextlib.suppress(OSError, ValueError):  # nobody reads it any more
                sys.stderr.write(line)
                sys.stderr.flush()


def _kill_all(servers: list[_ChildServer]) -> None:
    for server in servers:
        server.kill()


def _value_of(answer: bytes) -> Any:  # noqa: ANN401 - JSON
    """Return the value that a call has written.

    Raises:
        UserCodeError: it wrote an error, or no JSON.
    """
    try:
        fields = json.loads(answer)
        if "value" in fields:
            return fields["value"]
        error = UserCodeError(str(fields["error"]))
        error.traceback = str(fields["traceback"])
        whole = str(fields["whole"])
    except (ValueError, TypeError, KeyError, RecursionError) as fault:
        raise UserCodeError(f"its answer can't be read: {type(fault).__name__}") from None
    logger.info("an isolated function failed\n%s", whole)
    raise error
