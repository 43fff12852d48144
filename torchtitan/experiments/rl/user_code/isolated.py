"""Calls reward functions in child processes that can be killed: for code that may hang or crash (math-verify, generated code).

A child serves one call after another, because starting one takes seconds (it imports what the function needs). A child whose
call is late or crashes is lost, and the next call starts another. The child calls the function in its main thread, so
``signal.alarm``, which fails in the worker threads that Monarch endpoints run on, works there.

Parent and child exchange length-prefixed pickles over the child's stdin and stdout: "ready", then per call a request, "running"
(the function and its arguments are loaded and the clock starts) and the answer.
"""

import asyncio
import inspect
import os
import queue
import select
import signal
import struct
import subprocess
import sys
import time
import weakref
from collections.abc import Callable
from typing import IO, Any

import cloudpickle

from torchtitan.experiments.rl.process.setup import set_up_isolated_process
from torchtitan.experiments.rl.user_code.calls import UserCodeError, UserCodeTimeout, cause_of

START_S = 120.0
"""Limit for starting a child and for importing what a function needs; neither counts against the function's own time."""
ORPHAN_S = 10.0
"""A child whose parent died during a call ends itself this long after the call's limit."""
HEADER = struct.Struct("!Q")


class IsolatedCalls:
    """At most ``max_workers`` child processes, started when first needed and ended with this object or the process."""

    def __init__(self, max_workers: int):
        self._idle: queue.LifoQueue[_Worker | None] = queue.LifoQueue()
        self._workers: list[_Worker] = []
        for _ in range(max_workers):
            self._idle.put(None)
        weakref.finalize(self, _kill_all, self._workers)

    def call(self, function: Callable[..., Any], args: tuple, *, timeout_s: float) -> Any:
        """Run ``function(*args)`` in a child and return its answer; blocks the calling thread.

        Raises:
            UserCodeTimeout: it took longer than timeout_s; its process was killed.
            UserCodeError: it raised, its process died, or it can't be sent to another process.
        """
        try:
            request = cloudpickle.dumps((function, args, timeout_s))
        except Exception as error:
            raise UserCodeError(f"can't be sent to another process: {cause_of(error)}") from error
        worker = self._idle.get()
        try:
            if worker is None:
                worker = _Worker()
                self._workers.append(worker)
            return worker.call(request, timeout_s)
        finally:
            if worker is not None and not worker.alive:
                worker.kill()
                self._workers.remove(worker)
                worker = None
            self._idle.put(worker)


class _Worker:
    def __init__(self):
        self.alive = True
        # A session of its own, so that killing it also kills what the function started.
        self._process = subprocess.Popen(
            [sys.executable, "-m", __name__],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            bufsize=0,
            start_new_session=True,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(path or os.getcwd() for path in sys.path)},
        )
        assert self._process.stdin is not None and self._process.stdout is not None
        self._requests, self._answers = self._process.stdin, self._process.stdout
        self._ready = False

    def call(self, request: bytes, timeout_s: float) -> Any:
        try:
            if not self._ready:
                self._receive(START_S)
                self._ready = True
            _send(self._requests, request)
            kind, value = self._receive(START_S)
            if kind == "running":
                kind, value = self._receive(timeout_s)
        except TimeoutError:
            self.alive = False
            raise UserCodeTimeout(f"no answer within {timeout_s:g} s; its process was killed") from None
        except (EOFError, BrokenPipeError):
            self.alive = False
            raise UserCodeError(f"its process died ({self._exit_cause()})") from None
        if kind == "error":
            raise UserCodeError(value)
        return value

    def kill(self) -> None:
        try:
            os.killpg(self._process.pid, signal.SIGKILL)
        except ProcessLookupError:
            pass
        self._process.wait()
        self._requests.close()
        self._answers.close()

    def _receive(self, timeout_s: float) -> tuple[str, Any]:
        deadline = time.monotonic() + timeout_s
        (length,) = HEADER.unpack(self._read(HEADER.size, deadline))
        return cloudpickle.loads(self._read(length, deadline))

    def _read(self, length: int, deadline: float) -> bytes:
        data, fd = b"", self._answers.fileno()
        while len(data) < length:
            if not select.select([fd], [], [], max(0.0, deadline - time.monotonic()))[0]:
                raise TimeoutError
            chunk = os.read(fd, length - len(data))
            if not chunk:
                raise EOFError
            data += chunk
        return data

    def _exit_cause(self) -> str:
        try:
            code = self._process.wait(timeout=5)
        except subprocess.TimeoutExpired:
            return "its output was closed"
        return signal.Signals(-code).name if code < 0 else f"exit status {code}"


def _kill_all(workers: list[_Worker]) -> None:
    for worker in workers:
        worker.kill()


def _send(stream: IO[bytes], payload: bytes) -> None:
    view = memoryview(HEADER.pack(len(payload)) + payload)
    while view:
        view = view[stream.write(view) :]


def _serve() -> None:
    set_up_isolated_process()
    requests, answers = os.fdopen(os.dup(0), "rb"), os.fdopen(os.dup(1), "wb", buffering=0)
    # What the function prints must not mix with the answers, nor what it reads with the requests.
    os.dup2(2, 1)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    _send(answers, cloudpickle.dumps(("ready", None)))
    while header := requests.read(HEADER.size):
        request = requests.read(HEADER.unpack(header)[0])
        try:
            function, args, timeout_s = cloudpickle.loads(request)
            _send(answers, cloudpickle.dumps(("running", None)))
            signal.setitimer(signal.ITIMER_REAL, timeout_s + ORPHAN_S)
            value = function(*args)
            if inspect.isawaitable(value):
                value = asyncio.run(_awaited(value))
            answer = cloudpickle.dumps(("value", value))
        except BaseException as error:
            answer = cloudpickle.dumps(("error", cause_of(error)))
        signal.setitimer(signal.ITIMER_REAL, 0)
        _send(answers, answer)


async def _awaited(value: Any) -> Any:
    return await value


if __name__ == "__main__":
    _serve()
