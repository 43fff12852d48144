"""The processes that one process started, and those that they started."""

import contextlib
import os
import signal
from pathlib import Path


def descendants(of: int | None = None) -> list[int]:
    """Process ids of those that live, parents before their children.

    Args:
        of: their ancestor; None: this process.
    """
    children: dict[int, list[int]] = {}
    for entry in os.listdir("/proc"):
        if entry.isdigit():
            with contextlib.suppress(OSError, IndexError, ValueError):
                # The name, in parentheses, may hold anything.
                state, parent = Path(f"/proc/{entry}/stat").read_text().rpartition(")")[2].split()[:2]
                if state != "Z":
                    children.setdefault(int(parent), []).append(int(entry))
    found = list(children.get(os.getpid() if of is None else of, []))
    for pid in found:
        found += children.get(pid, [])
    return found


def kill_descendants() -> None:
    """End them with SIGKILL; those too that one of them starts meanwhile."""
    while alive := descendants():
        _kill(alive)


def kill_family(ancestor: int) -> None:
    """End the descendants of ``ancestor`` with SIGKILL, then itself, and this process last, which may be one of them."""
    while others := [pid for pid in descendants(ancestor) if pid != os.getpid()]:
        _kill(others)
    _kill([ancestor, os.getpid()])


def _kill(pids: list[int]) -> None:
    for pid in pids:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.kill(pid, signal.SIGKILL)
