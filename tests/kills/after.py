"""What a run left behind outside its folder: shared memory and temporary files."""

import os
from pathlib import Path

SHARED_MEMORY = Path("/dev/shm")


def shared_memory() -> set[str]:
    return set(os.listdir(SHARED_MEMORY))


def left_behind(temporary: Path, shared_memory_before: set[str]) -> list[str]:
    """A line for each file that is left. Other runs of this machine have their shared memory mapped."""
    shared = {name for name in shared_memory() - shared_memory_before if not mapped_by_anyone(name)}
    faults = [f"shared memory left: {name}" for name in sorted(shared)]
    return faults + [f"temporary file left: {path.name}" for path in sorted(temporary.iterdir())]


def mapped_by_anyone(name: str) -> bool:
    for maps in Path("/proc").glob("[0-9]*/maps"):
        try:
            if f"{SHARED_MEMORY}/{name}" in maps.read_text():
                return True
        except OSError:
            pass
    return False
