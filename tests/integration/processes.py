"""Processes of this machine, as /proc lists them."""

import contextlib
import os
from collections.abc import Iterable
from pathlib import Path


def descendants(pid: int) -> set[int]:
    """Live processes below ``pid``, zombies not counted."""
    parents = {}
    for entry in os.listdir("/proc"):
        if entry.isdigit() and (stat := process_stat(int(entry))) and stat[0] != "Z":
            parents[int(entry)] = stat[1]
    found: set[int] = set()
    while more := {
        child
        for child, parent in parents.items()
        if (parent == pid or parent in found) and child not in found
    }:
        found |= more
    return found


def process_stat(pid: int) -> tuple[str, int, int] | None:
    """State, parent and session of a process; None where there is none."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return None
    return fields[0], int(fields[1]), int(fields[3])


def open_files(pid: int) -> set[str]:
    """Paths that a process has open; those it closes meanwhile may be missing, and all are where it ends."""
    found = set()
    with contextlib.suppress(OSError):
        for descriptor in os.scandir(f"/proc/{pid}/fd"):
            with contextlib.suppress(OSError):
                found.add(os.readlink(descriptor.path))
    return found


def listening_sockets(pids: Iterable[int]) -> set[str]:
    """Paths of the Unix sockets at which processes wait for others. An abstract one begins with @, and has no permissions."""
    inodes = {
        found.removeprefix("socket:[").removesuffix("]")
        for pid in pids
        for found in open_files(pid)
    }
    found = set()
    for line in Path("/proc/net/unix").read_text().splitlines()[1:]:
        _, _, _, flags, _, _, inode, *name = line.split()
        if flags == "00010000" and inode in inodes:  # Linux's flag of a socket that listens
            found |= set(name)
    return found
