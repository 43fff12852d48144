"""What a run left behind outside its folder: shared memory and temporary files."""

import os
from pathlib import Path

from torchtitan.experiments.rl.process.temporary import SHARED_MEMORY


def left_behind(temporary: Path, mapped: set[str]) -> list[str]:
    """A line for each temporary file, and for each of the ``mapped`` names that is still there."""
    faults = [
        f"shared memory left: {name}" for name in sorted(mapped & set(os.listdir(SHARED_MEMORY)))
    ]
    return faults + [f"temporary file left: {path.name}" for path in sorted(temporary.iterdir())]
