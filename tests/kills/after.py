"""What a run left behind outside its folder: shared memory and temporary files."""

import os
import re
from collections.abc import Iterable
from pathlib import Path

SHARED_MEMORY = Path("/dev/shm")


def mapped_by(pids: Iterable[int]) -> set[str]:
    """Names of the shared memory that processes have mapped: other programs of this machine leave theirs there too."""
    names: set[str] = set()
    for pid in pids:
        try:
            names.update(re.findall(rf" {SHARED_MEMORY}/(\S+)$", Path(f"/proc/{pid}/maps").read_text(), re.MULTILINE))
        except OSError:
            pass
    return names


def left_behind(temporary: Path, mapped: set[str]) -> list[str]:
    """A line for each temporary file, and for each of the ``mapped`` names that is still there."""
    faults = [f"shared memory left: {name}" for name in sorted(mapped & set(os.listdir(SHARED_MEMORY)))]
    return faults + [f"temporary file left: {path.name}" for path in sorted(temporary.iterdir())]
