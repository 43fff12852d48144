"""Ends programs that run other people's code, with all that they have started.

Such a program is an agent's command, or the server of isolated calls. It may start processes that
outlive it, in sessions of their own, and none may stay when the program or the run has ended.

1. `new_mark` returns a mark, a number of 18 digits. The caller starts the program by the command
   line of `marked`, with the variables of `variables_of`, and every descendant inherits the mark.
2. When the program has ended, `kill_marked` kills the processes that still have its mark.
3. If this process is killed, it can do nothing itself. So its first mark starts a watcher, another
   process, which waits for the end of this one. The first 9 digits are the same in all marks of a
   process: by them the watcher finds everything that this process has left.

The mark is the program's limit of file locks (RLIMIT_LOCKS). Linux has ignored that limit since
version 2.4, children inherit it, everyone may read it in /proc, and a program that clears its
environment keeps it. Hosts without the ``prlimit`` command use an environment variable instead,
which such a program loses.

A mark finds processes that were forgotten, not processes that hide: a program may lower its limit.

The watcher runs this file as a program. The file imports nothing but the standard library, so that
the watcher starts within 50 ms.
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
"""Names of the run's environment variables that a program gets. The others may hold keys, which the
code that a model writes could read."""
PRLIMIT = shutil.which("prlimit")
"""Path of the command that sets the limit of file locks; None if the host has no such command."""
VARIABLE = "TORCHTITAN_RL_MARK"
"""Environment variable that holds the mark if there is no ``prlimit``."""
END_S = 1.0
"""Seconds to wait for each killed process to be gone. One that reads a dead disk takes longer."""
_DIGITS = 9
"""Number of digits in each half of a mark: those of the process, and those of the program."""

_lock = threading.Lock()
_process_digits = ""
"""First half of every mark of this process; empty before the first mark."""
_watched_pid = 0
"""Process that has a watcher. After a fork it is another process than this one."""
_programs = itertools.count(1)


def new_mark() -> str:
    """Return a mark that no other program has. The first call in a process starts its watcher."""
    global _process_digits, _watched_pid
    with _lock:
        if _watched_pid != os.getpid():
            smallest = 10 ** (_DIGITS - 1)
            _process_digits = str(smallest + secrets.randbelow(9 * smallest))
            _start_watcher(_process_digits)
            # Last: if the watcher can't start, the next call tries again.
            _watched_pid = os.getpid()
        return f"{_process_digits}{next(_programs):0{_DIGITS}d}"


def marked(command: Sequence[str], mark: str) -> list[str]:
    """Return the command line that runs ``command`` with a mark.

    The program's environment needs `variables_of` the mark too.
    """
    if PRLIMIT is None:
        return list(command)
    return [PRLIMIT, f"--locks={mark}", "--", *command]


def variables_of(mark: str) -> dict[str, str]:
    """Return the environment variables that a program with a mark needs."""
    return {VARIABLE: mark} if PRLIMIT is None else {}


def kill_marked(mark: str) -> None:
    """Kill the processes whose mark begins with ``mark``, and wait until they are gone.

    Processes that these start meanwhile are killed too.

    Args:
        mark: a whole mark for the processes of one program; the first 9 digits for those of all
            programs that a process has started.
    """
    seen: set[int] = set()
    with contextlib.ExitStack() as descriptors:
        killed = []
        while found := _marked_pids(mark) - seen:
            seen |= found
            for pid in found:
                descriptor = _kill_if_marked(pid, mark)
                if descriptor is not None:
                    descriptors.callback(os.close, descriptor)
                    killed.append(descriptor)
        for descriptor in killed:
            select.select([descriptor], [], [], END_S)


def _marked_pids(mark: str) -> set[int]:
    pids = (int(entry) for entry in os.listdir("/proc") if entry.isdigit())
    return {pid for pid in pids if _has_mark(pid, mark)}


def _kill_if_marked(pid: int, mark: str) -> int | None:
    """Kill a process if it has the mark.

    The mark is read again once the process can't be confused with a later one of the same pid.

    Returns:
        A descriptor of the process that was killed, for the caller to close; None if none was.
    """
    try:
        descriptor = os.pidfd_open(pid)
    except OSError:
        return None
    try:
        if _has_mark(pid, mark):
            signal.pidfd_send_signal(descriptor, signal.SIGKILL)
            return descriptor
    except OSError:
        pass
    os.close(descriptor)
    return None


def _has_mark(pid: int, mark: str) -> bool:
    """Return True if the mark of a process begins with ``mark``."""
    if PRLIMIT is None:
        file, text = "environ", f"{VARIABLE}={mark}"
    else:
        file, text = "limits", f" {mark}"
    try:
        with open(f"/proc/{pid}/{file}", "rb") as contents:
            return text.encode() in contents.read()
    except OSError:  # it has ended, or it is another user's
        return False


def _start_watcher(process_digits: str) -> None:
    # With the same PATH, so that it finds ``prlimit`` if this process does.
    environment = {name: os.environ[name] for name in INHERITED if name in os.environ}
    command = [sys.executable, "-I", "-S", __file__, str(os.getpid()), process_digits]
    subprocess.run(command, stdin=subprocess.DEVNULL, cwd="/", env=environment, check=True)


def _watch(parent: int, process_digits: str) -> None:
    """Be the watcher: wait for the end of ``parent``, then kill what has its digits.

    The watcher forks and is an orphan from then on. So it survives a command that kills all its
    descendants.
    """
    parent_descriptor = os.pidfd_open(parent)  # before the fork, for which ``parent`` waits
    if os.fork():
        return
    os.setsid()
    null = os.open(os.devnull, os.O_RDWR)
    for stream in (1, 2):  # else the reader of the command's output would wait for the watcher
        os.dup2(null, stream)
    select.select([parent_descriptor], [], [])
    kill_marked(process_digits)


if __name__ == "__main__":
    _watch(int(sys.argv[1]), sys.argv[2])
