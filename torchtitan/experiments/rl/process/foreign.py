"""Programs that run what others wrote: agents' commands, isolated functions. They see no keys of the run, and end with it.

``marked`` starts each with a mark that its descendants inherit, whatever session they open: a number of 18 digits, nine
random ones of the process that started it and nine that count its programs. ``kill_marked`` ends all that have a mark, or all
whose mark begins with some digits. A watcher, a process of its own, waits for the end of this one and then ends what is left
with its nine digits: also after SIGKILL, when no code of this process runs.

The mark is for what forgets to end, not for what hides: a program that sets its own limit of file locks loses it, and a
program with a mark can give those that it starts a lower one only.

This file is also the watcher's program, and imports the standard library alone: a watcher starts within 50 ms.
"""

import contextlib
import itertools
import os
import secrets
import select
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import Sequence

INHERITED = ("PATH", "LANG", "LC_ALL", "LD_LIBRARY_PATH", "SSL_CERT_FILE")
"""Environment variables of the run that a program gets. The others may hold keys, which what the model writes could read."""
PRLIMIT = shutil.which("prlimit")
"""Sets the mark as a limit of file locks, which Linux has not heeded since 2.4. None: a variable is the mark."""
VARIABLE = "TORCHTITAN_RL_MARK"
END_S = 1.0
"""Time to wait for a killed process to be gone. One that reads a dead disk takes longer."""
_DIGITS = 9
"""Number of digits of a mark that all marks of this process share; as many count its programs."""

_lock = threading.Lock()
_shared = ""
"""Digits that every mark of this process begins with; "" before the first."""
_pid = 0
"""Process that the watcher watches: a fork needs one of its own."""
_counter = itertools.count(1)


def new_mark() -> str:
    """Return a mark that no other program has. The first call of a process starts its watcher."""
    global _shared, _pid
    with _lock:
        if _pid != os.getpid():
            _shared = str(secrets.randbelow(9 * 10 ** (_DIGITS - 1)) + 10 ** (_DIGITS - 1))
            _start_watcher(_shared)
            _pid = os.getpid()  # last: where the watcher can't start, the next call tries again
        return f"{_shared}{next(_counter):0{_DIGITS}d}"


def marked(command: Sequence[str], mark: str) -> list[str]:
    """Return the command line that runs ``command`` with a mark. Its environment also has ``variables_of(mark)``."""
    return [*([PRLIMIT, f"--locks={mark}", "--"] if PRLIMIT else []), *command]


def variables_of(mark: str) -> dict[str, str]:
    """Return the environment variables that a command with this mark has."""
    return {} if PRLIMIT else {VARIABLE: mark}


def kill_marked(mark: str) -> None:
    """End the processes whose mark begins with ``mark``, and what they start meanwhile.

    A whole mark is one program's; the first nine digits of it are those of all programs of a process.
    """
    killed: set[str] = set()
    with contextlib.ExitStack() as descriptors:
        ending = []
        while new := {
            pid
            for pid in os.listdir("/proc")
            if pid.isdigit() and pid not in killed and _has(pid, mark)
        }:
            killed |= new
            for pid in new:
                with contextlib.suppress(OSError):
                    process = os.pidfd_open(int(pid))
                    descriptors.callback(os.close, process)
                    if _has(pid, mark):  # else the number is another process's by now
                        signal.pidfd_send_signal(process, signal.SIGKILL)
                        ending.append(process)
        for process in ending:
            select.select([process], [], [], END_S)


def _has(pid: str, mark: str) -> bool:
    begins = f" {mark}".encode() if PRLIMIT else f"{VARIABLE}={mark}".encode()
    with (
        contextlib.suppress(OSError),
        open(f"/proc/{pid}/{'limits' if PRLIMIT else 'environ'}", "rb") as held,
    ):
        return begins in held.read()
    return False


def _start_watcher(shared: str) -> None:
    environment = {
        name: os.environ[name] for name in INHERITED if name in os.environ
    }  # it finds prlimit where this one does
    command = [sys.executable, "-I", "-S", __file__, str(os.getpid()), shared]
    subprocess.run(command, stdin=subprocess.DEVNULL, cwd="/", env=environment, check=True)


def _watch(parent: int, shared: str) -> None:
    """Run the watcher, as no descendant of who started it: whoever ends a run's processes leaves it alone."""
    process = os.pidfd_open(parent)  # which waits for the fork below
    if os.fork():
        return
    os.setsid()
    null = os.open(os.devnull, os.O_RDWR)
    for stream in (1, 2):  # who reads the command's output is not kept waiting
        os.dup2(null, stream)
    select.select([process], [], [])
    kill_marked(shared)


if __name__ == "__main__":
    _watch(int(sys.argv[1]), sys.argv[2])
