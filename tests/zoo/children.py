"""Runs cases in forked children, each with a deadline: a case may leave its process in any state."""

import os
import pickle
import select
import signal
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

DEADLINE_S = 60.0
"""A case takes a tenth of a second and one that meets limits some seconds, on a busy machine ten times that."""


@dataclass
class _Child:
    name: str
    pid: int
    pipe: int
    started: float
    data: bytes = b""


def run_forked(
    work: Sequence[tuple[str, Callable[[], Any]]], *, at_once: int
) -> Iterator[tuple[str, Any, float]]:
    """Yield the name of each, in the order in which they end; with what it returned, or an Exception that says why it did
    not; and seconds."""
    waiting, running = list(reversed(work)), dict[int, _Child]()
    while waiting or running:
        while waiting and len(running) < at_once:
            child = _fork(*waiting.pop())
            running[child.pipe] = child
        ready, _, _ = select.select(list(running), [], [], 0.2)
        for pipe in ready:
            child = running[pipe]
            if chunk := os.read(pipe, 1 << 20):
                child.data += chunk
                continue
            del running[pipe]
            yield child.name, _ended(child), time.monotonic() - child.started
        for child in [
            child for child in running.values() if time.monotonic() - child.started > DEADLINE_S
        ]:
            del running[child.pipe]
            os.kill(child.pid, signal.SIGKILL)
            _ended(child)
            yield child.name, TimeoutError(f"it hangs: no end within {DEADLINE_S:g} s"), DEADLINE_S


def _fork(name: str, function: Callable[[], Any]) -> _Child:
    reader, writer = os.pipe()
    sys.stdout.flush()
    sys.stderr.flush()
    pid = os.fork()
    if pid:
        os.close(writer)
        return _Child(name, pid, reader, time.monotonic())
    status = 1
    try:
        os.close(reader)
        quiet = os.open(os.devnull, os.O_WRONLY)
        os.dup2(quiet, 2)
        os.dup2(quiet, 1)
        try:
            answer = function()
        except BaseException:  # a child that exits would leave its parent without an answer
            answer = RuntimeError("".join(traceback.format_exc()))
        data = pickle.dumps(answer)
        while data:
            data = data[os.write(writer, data) :]
        status = 0
    finally:
        os._exit(status)


def _ended(child: _Child) -> Any:
    os.close(child.pipe)
    _, status = os.waitpid(child.pid, 0)
    if not child.data:
        code = os.waitstatus_to_exitcode(status)
        return RuntimeError(
            f"its process ended by signal {-code}"
            if code < 0
            else f"its process exited with {code}"
        )
    return pickle.loads(child.data)
