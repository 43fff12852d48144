"""Which host this process is on. Host names do not tell: containers and cluster nodes may have one name, or change theirs."""

import os
import socket
from pathlib import Path

VARIABLE = "TORCHTITAN_RL_HOST"
"""Environment variable that replaces the identity: processes of one machine then count as several hosts."""


def host_identity() -> str:
    """The same in two processes exactly where they share memory, process ids and network interfaces.

    It names the boot of the kernel, and what this process sees of it: its process ids and network (their namespaces) and the
    file system that shared memory is in. Two containers of one machine differ where they do not share one of these.
    """
    return os.environ.get(VARIABLE) or ":".join([_kernel(), _namespace("pid"), _namespace("net"), _shared_memory()])


def _kernel() -> str:
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:  # some container runtimes have no such file
        return f"{_machine_id()}:{socket.gethostname()}"


def _machine_id() -> str:
    try:
        return Path("/etc/machine-id").read_text().strip()
    except OSError:
        return "machine"


def _namespace(kind: str) -> str:
    try:
        return os.readlink(f"/proc/self/ns/{kind}")
    except OSError:
        return kind


def _shared_memory() -> str:
    """Linux numbers each mounted memory file system."""
    try:
        return f"shm:{os.stat('/dev/shm').st_dev}"
    except OSError:
        return "shm"
