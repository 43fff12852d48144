"""POSIX shared memory of processes: its files stay when the process that made them is killed before it removes them."""

import contextlib
from collections.abc import Iterable
from pathlib import Path

SHARED_MEMORY = Path("/dev/shm")


def mapped_by(pids: Iterable[int]) -> set[str]:
    """Names of the files that these processes have mapped and that are there."""
    return {name for pid in pids for name in _mapped_by(pid)}


def remove(names: Iterable[str]) -> None:
    """Remove files by name, as far as they are there."""
    for name in names:
        with contextlib.suppress(OSError):
            (SHARED_MEMORY / Path(name).name).unlink()


def _mapped_by(pid: int) -> set[str]:
    try:
        lines = Path(f"/proc/{pid}/maps").read_text().splitlines()
    except OSError:
        return set()
    paths = (line.split(maxsplit=5)[5] for line in lines if line.count(" ") >= 5 and f" {SHARED_MEMORY}/" in line)
    return {Path(path).name for path in paths if not path.endswith(" (deleted)")}
