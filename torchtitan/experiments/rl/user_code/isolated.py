"""Calls reward functions in child processes that can be killed: for code that may hang or crash (math-verify, generated code).

A child serves one call after another, because starting one takes seconds (it imports what the function needs). A child whose
call is late or crashes is lost, and the next call starts another. The child calls the function in its main thread, so
``signal.alarm``, which fails in the worker threads that Monarch endpoints run on, works there.

Parent and child exchange pickles over a socket of their own: "ready", then per call a request, "running" (the function and its
arguments are loaded and the clock starts) and the answer.
"""

import asyncio
import inspect
import os
import queue
import signal
import subprocess
import sys
import weakref
from collections.abc import Callable
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from typing import Any

import cloudpickle

from torchtitan.experiments.rl.process.setup import set_up_isolated_process
from torchtitan.experiments.rl.user_code.calls import UserCodeError, UserCodeTimeout, cause_of

START_S = 120.0
"""Limit for starting a child and for importing what a function needs; neither counts against the function's own time."""
ORPHAN_S = 10.0
"""A child whose parent died during a call ends itself this long after the call's limit."""


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
        self._connection, theirs = Pipe()
        # A session of its own, so that killing it also kills what the function started. What that prints goes to stderr.
        self._process = subprocess.Popen(
            [sys.executable, "-m", __name__, str(theirs.fileno())],
            stdin=subprocess.DEVNULL,
            stdout=2,
            pass_fds=[theirs.fileno()],
            start_new_session=True,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(path or os.getcwd() for path in sys.path)},
        )
        theirs.close()
        self._ready = False

    def call(self, request: bytes, timeout_s: float) -> Any:
        try:
            if not self._ready:
                self._receive(START_S)
                self._ready = True
            self._connection.send_bytes(request)
            kind, value = self._receive(START_S)
            if kind == "running":
                kind, value = self._receive(timeout_s)
        except TimeoutError:
            self.alive = False
            raise UserCodeTimeout(f"no answer within {timeout_s:g} s; its process was killed") from None
        except (EOFError, ConnectionError):
            self.alive = False
            try:
                code = self._process.wait(timeout=5)
                end = signal.Signals(-code).name if code < 0 else f"exit status {code}"
            except subprocess.TimeoutExpired:
                end = "its output was closed"
            raise UserCodeError(f"its process died ({end})") from None
        if kind == "error":
            raise UserCodeError(value)
        return value

    def kill(self) -> None:
        try:
            os.killpg(self._process.pid, signal.SIGKILL)
        except ProcessLookupError:
            pass
        self._process.wait()
        self._connection.close()

    def _receive(self, timeout_s: float) -> tuple[str, Any]:
        if not self._connection.poll(timeout_s):
            raise TimeoutError
        return cloudpickle.loads(self._connection.recv_bytes())


def _kill_all(workers: list[_Worker]) -> None:
    for worker in workers:
        worker.kill()


def _serve(fd: int) -> None:
    set_up_isolated_process()
    os.set_inheritable(fd, False)
    connection: Connection = Connection(fd)
    connection.send_bytes(cloudpickle.dumps(("ready", None)))
    while True:
        try:
            request = connection.recv_bytes()
        except EOFError:
            return
        try:
            function, args, timeout_s = cloudpickle.loads(request)
            connection.send_bytes(cloudpickle.dumps(("running", None)))
            signal.setitimer(signal.ITIMER_REAL, timeout_s + ORPHAN_S)
            value = function(*args)
            if inspect.isawaitable(value):
                value = asyncio.run(_awaited(value))
            answer = cloudpickle.dumps(("value", value))
        except BaseException as error:
            answer = cloudpickle.dumps(("error", cause_of(error)))
        signal.setitimer(signal.ITIMER_REAL, 0)
        connection.send_bytes(answer)


async def _awaited(value: Any) -> Any:
    return await value


if __name__ == "__main__":
    _serve(int(sys.argv[1]))
