"""Files that a run appends to, and how they stay in step with its checkpoints.

A checkpoint has the size of each of these files, taken between two records. A run that goes on
from the checkpoint cuts them back to these sizes: what follows was written by steps that are taken
again.
"""

import mmap
import os
from collections.abc import Mapping
from pathlib import Path

from torchtitan.experiments.rl.checkpointing.folder import CheckpointError
from torchtitan.experiments.rl.observability.metrics import TENSORBOARD_FOLDER
from torchtitan.experiments.rl.rollouts.record_file import (
    LEDGER_FILE,
    METRICS_FILE,
    ROLLOUTS_FILE,
    end_of_last_member,
)

_WITHOUT_GAPS = (METRICS_FILE, LEDGER_FILE)
"""Files of lines that a run can't go on without: its metrics and its ledger have no gap."""


def sizes(run_dir: Path) -> dict[str, int]:
    """Return the size in bytes of each file, by its path in the run's folder.

    A torn last line is left out. Call it when the writers have flushed, which leaves whole members
    of the records and whole TensorBoard events.
    """
    return {
        str(path.relative_to(run_dir)): _end_of_last_line(path)
        if path.name in _WITHOUT_GAPS
        else path.stat().st_size
        for path in _files(run_dir)
    }


def sync(run_dir: Path) -> None:
    """Fsync the files: a checkpoint that is on the disk must not be ahead of them."""
    for path in _files(run_dir):
        with path.open("rb+") as file:
            os.fsync(file.fileno())


def cut_back(run_dir: Path, offsets: Mapping[str, int]) -> list[str]:
    """Cut each file back to its size at a checkpoint, and delete files that were made later.

    Call it before the writers open the files. It may be repeated.

    Args:
        offsets: result of `sizes` at the checkpoint; empty for the beginning of the run.

    Returns:
        A line for each file that lacks something. Recorded rollouts and TensorBoard events may be
        missing, as when a run's folder was moved without them.

    Raises:
        CheckpointError: metrics or ledger are shorter than at the checkpoint, so that the run would
            have a gap, and nothing was changed; or a file can't be written.
    """
    now = {str(path.relative_to(run_dir)): path.stat().st_size for path in _files(run_dir)}
    short = {name: offset for name, offset in offsets.items() if now.get(name, 0) < offset}
    for name, offset in short.items():
        if name in _WITHOUT_GAPS:
            found = f"has {now[name]:,} bytes" if name in now else "is missing"
            cure = "put the file back, or resume an older checkpoint of the run"
            raise CheckpointError(
                f"{run_dir / name} {found}, and had {offset:,} at the checkpoint: {cure}"
            )
    for name, size in now.items():
        path = run_dir / name
        try:
            if name not in offsets:
                path.unlink()
                continue
            if size > offsets[name]:
                os.truncate(path, offsets[name])
            if name == ROLLOUTS_FILE and name in short:
                os.truncate(path, end_of_last_member(path))
        except OSError as error:
            raise CheckpointError(
                f"{path} can't be cut back to the checkpoint ({error.strerror}): make it writable, "
                "and resume again"
            ) from error
    return [
        f"{run_dir / name} lacks records from before the checkpoint; the run goes on without them"
        for name in short
    ]


def _files(run_dir: Path) -> list[Path]:
    """Return the files that exist, of all that a run appends to."""
    named = [run_dir / name for name in (*_WITHOUT_GAPS, ROLLOUTS_FILE)]
    events = sorted((run_dir / TENSORBOARD_FOLDER).glob("*tfevents*"))
    return [path for path in (*named, *events) if path.is_file()]


def _end_of_last_line(path: Path) -> int:
    """Return the size of a file without its torn last line."""
    if not path.stat().st_size:  # an empty file can't be mapped
        return 0
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
        return data.rfind(b"\n") + 1
