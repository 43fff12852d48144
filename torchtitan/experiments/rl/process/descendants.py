"""The processes that this one started, and those that they started."""

import contextlib
import os
import signal
from pathlib import Path


def descendants() -> list[int]:
    """Process ids of those that live, parents before their children."""
    children: dict[int, list[int]] = {}
    for entry in os.listdir("/proc"):
        if entry.isdigit():
            with contextlib.suppress(OSError, IndexError, ValueError):
                # The name, in parentheses, may hold anything.
                state, parent = Path(f"/proc/{entry}/stat").read_text().rpartition(")")[2].split()[:2]
                if state != "Z":
                    children.setdefault(int(parent), []).append(int(entry))
    found = list(children.get(os.getpid(), []))
    for pid in found:
        found += children.get(pid, [])
    return found


def kill_descendants() -> None:
    """End them with SIGKILL; those too that one of them starts meanwhile."""
    while alive := descendants():
        for pid in alive:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(pid, signal.SIGKILL)
