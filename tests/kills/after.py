"""What a run left behind outside its folder: shared memory and temporary files."""

import os
import time
from pathlib import Path

SHARED_MEMORY = Path("/dev/shm")
WAIT_S = 30.0


def shared_memory() -> set[str]:
    return set(os.listdir(SHARED_MEMORY))


def left_behind(temporary: Path, shared_memory_before: set[str]) -> list[str]:
    """A line for each file that is there after WAIT_S too. Other programs have their shared memory mapped, or remove it."""
    names = shared_memory() - shared_memory_before
    deadline = time.monotonic() + WAIT_S
    while names := {name for name in names & shared_memory() if not mapped_by_anyone(name)}:
        if time.monotonic() > deadline:
            break
        time.sleep(1.0)
    faults = [f"shared memory left: {name}" for name in sorted(names)]
    return faults + [f"temporary file left: {path.name}" for path in sorted(temporary.iterdir())]


def mapped_by_anyone(name: str) -> bool:
    for maps in Path("/proc").glob("[0-9]*/maps"):
        try:
            if f"{SHARED_MEMORY}/{name}" in maps.read_text():
                return True
        except OSError:
            pass
    return False
