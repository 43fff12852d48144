"""The files that a run appends to, and how a resumed run cuts them back to its checkpoint.

A checkpoint has the size of each, taken between two records. What follows was written by steps that are taken again.
"""

import mmap
import os
from collections.abc import Mapping
from pathlib import Path

from torchtitan.experiments.rl.checkpointing.folder import CheckpointError
from torchtitan.experiments.rl.observability.metrics import TENSORBOARD_FOLDER
from torchtitan.experiments.rl.rollouts.record_file import LEDGER_FILE, METRICS_FILE, ROLLOUTS_FILE, end_of_last_member

_LINES = (METRICS_FILE, LEDGER_FILE)
"""A run can't do without them: a resumed run's metrics and ledger have no gap."""


def sizes(run_dir: Path) -> dict[str, int]:
    """Size in bytes of each file that the run appends to, by its path in the run folder; a torn last line is left out.

    Call it when the writers have flushed, which leaves whole members and events.
    """
    return {
        str(path.relative_to(run_dir)): _end_of_last_line(path) if path.name in _LINES else path.stat().st_size
        for path in _files(Path(run_dir))
    }


def sync(run_dir: Path) -> None:
    """Fsync those files: a checkpoint that is on the disk must not be ahead of them."""
    for path in _files(Path(run_dir)):
        with path.open("rb+") as file:
            os.fsync(file.fileno())


def cut_back(run_dir: Path, offsets: Mapping[str, int]) -> list[str]:
    """Cut each file back to what it was at the checkpoint. Files that were made later are deleted. May be repeated.

    Call it before the writers open them.

    Returns:
        What is lost, a line each: recorded rollouts and TensorBoard events may be missing, as when a run folder was moved
        without them.

    Raises:
        CheckpointError: metrics or ledger are shorter than at the checkpoint, so that the run would have a gap; or a file can't
            be written. Nothing is changed if a file is too short.
    """
    run_dir = Path(run_dir)
    sizes = {str(path.relative_to(run_dir)): path.stat().st_size for path in _files(run_dir)}
    short = {name: offset for name, offset in offsets.items() if sizes.get(name, 0) < offset}
    for name, offset in short.items():
        if name in _LINES:
            now = f"has {sizes[name]:,} bytes" if name in sizes else "is missing"
            cure = "put the file back, or resume an older checkpoint of the run"
            raise CheckpointError(f"{run_dir / name} {now}, and had {offset:,} at the checkpoint: {cure}")
    for name, size in sizes.items():
        path, end = run_dir / name, offsets.get(name, 0)
        try:
            if name not in offsets:
                path.unlink()
                continue
            if size > end:
                os.truncate(path, end)
            if name == ROLLOUTS_FILE and name in short:
                os.truncate(path, end_of_last_member(path))
        except OSError as error:
            cure = "make it writable, and resume again"
            raise CheckpointError(f"{path} can't be cut back to the checkpoint ({error.strerror}): {cure}") from error
    return [f"{run_dir / name} lacks records from before the checkpoint; the run goes on without them" for name in short]


def _files(run_dir: Path) -> list[Path]:
    named = [run_dir / name for name in (*_LINES, ROLLOUTS_FILE)]
    return [path for path in (*named, *sorted((run_dir / TENSORBOARD_FOLDER).glob("*tfevents*"))) if path.is_file()]


def _end_of_last_line(path: Path) -> int:
    if not path.stat().st_size:  # which can't be mapped
        return 0
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
        return data.rfind(b"\n") + 1
