"""The folder of each checkpoint, which is complete or absent at every instant.

    checkpoints/.step-000040.partial    a checkpoint that is being written
    checkpoints/.step-000020.removed    a checkpoint that is being deleted
    checkpoints/step-000020             a complete checkpoint

A checkpoint is written in this order, so that a power failure leaves none that is half there:

1. the files, into the partial folder
2. an fsync of every file and folder
3. ``manifest.json``, with the size and the SHA-256 of every file
4. the rename to ``step-000040``

A checkpoint is deleted in the opposite order: it is renamed first.
"""

import contextlib
import errno
import hashlib
import logging
import os
import re
import shutil
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import msgspec

from torchtitan.experiments.rl.bounds import (
    NonEmptyStr,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
)
from torchtitan.experiments.rl.errors import RunError

logger = logging.getLogger(__name__)

CHECKPOINTS_FOLDER = "checkpoints"
MANIFEST_FILE = "manifest.json"
SET_ASIDE_FOLDER = "set_aside"
"""Folder in a run's folder with checkpoints that the run no longer goes on from, and keeps."""
TRAINER_FOLDER = "trainer"
"""Folder in a checkpoint with the files of the trainer's ranks."""
POLICY_FOLDER = "policy"
"""Folder in a run's folder with the policy as hub folders, ``policy/step-N``."""
BEST_POLICY = "best"
"""Name of the hub folder beside them that has the policy of the best checkpoint."""
OLD_POLICY_FOLDER = "checkpoint"
"""Name of the same folder in older runs."""
FORMAT = 2
"""Format of the manifest. A reader refuses others."""

_NAME = re.compile(r"step-(\d{6,})")
_READERS = 4
"""Number of threads that read files for their checksums. SHA-256 takes a core about 1 GB/s."""
_NO_FOLDER_SYNC = (errno.EINVAL, errno.ENOTSUP, errno.EBADF)
"""Errors of network file systems that can't fsync a folder."""


@dataclass(kw_only=True, slots=True)
class CheckpointConfig:
    """Schedule of a run's checkpoints, and the number that it keeps."""

    interval: NonNegativeInt = 20
    """Optimizer steps between two checkpoints. With 0 a run writes one at a signal, at an error and
    at its end."""
    keep: PositiveInt = 2
    """Number of checkpoints that stay; older ones are deleted. With 1, a damaged disk block costs
    the whole run."""
    keep_best: NonEmptyStr | None = None
    """Metric of the evaluations, such as validation/reward, whose best checkpoint stays beside the
    newest ones, and is written as a hub folder at the end. None keeps the newest alone."""
    best_is: Literal["highest", "lowest"] = "highest"
    """Value of ``keep_best`` that is the best."""
    grace_s: PositiveFloat = 25.0
    """Seconds after SIGTERM or SIGHUP for the step to end and be saved. After them the run ends
    with the checkpoint before. Schedulers kill 30 s after SIGTERM unless told otherwise."""


class CheckpointError(RunError):
    """A checkpoint that can't be written or read."""


class _File(msgspec.Struct):
    """Size and checksum of a file when it was written."""

    size: int
    sha256: str


class _CheckpointManifest(msgspec.Struct):
    """Contents of manifest.json."""

    format: int
    step: int
    files: dict[str, _File]
    """Files by their path within the checkpoint."""


class CheckpointWriter:
    """Writer of the checkpoints of one run, one at a time.

    Call ``begin``, write the files, and call ``commit`` or ``discard``.
    """

    def __init__(self, run_dir: Path, keep: int):
        """Write into a run's folder.

        Args:
            keep: number of complete checkpoints that stay when another one is committed.
        """
        self._folder = Path(run_dir) / CHECKPOINTS_FOLDER
        self._keep = keep

    def begin(self, step: int) -> Path:
        """Return an empty folder for the files of a step's checkpoint.

        What earlier crashes left in the run's folder is removed.

        Raises:
            CheckpointError: the disk is full, read-only or failing.
        """
        with self._explained(step):
            self._folder.mkdir(parents=True, exist_ok=True)
            for leftover in sorted(self._folder.glob(".step-*")):
                shutil.rmtree(leftover)
            partial = self._partial(step)
            partial.mkdir()
            return partial

    def commit(self, step: int, *, stays: Callable[[int], bool] = lambda step: False) -> Path:
        """Make the folder of ``begin`` the step's checkpoint, and delete the oldest ones.

        Args:
            stays: returns True for the step of a checkpoint that is not deleted, however old.

        A valid checkpoint of the step that is there already stays in its place. The call blocks
        while every file is read again, for its checksum.

        Returns:
            Folder of the checkpoint.

        Raises:
            CheckpointError: the disk is full, read-only or failing. The checkpoints before are as
                they were.
        """
        target = self._folder / _name(step)
        with self._explained(step):
            _write_manifest(self._partial(step), step)
            self._put_in_place(step, target)
        for path in _complete(self._folder)[: -self._keep]:
            if stays(step_of(path)):
                continue
            try:
                self._remove(path)
            except OSError as error:  # the new checkpoint is complete all the same
                logger.warning("an old checkpoint can't be deleted: %s", error)
        return target

    def _put_in_place(self, step: int, target: Path) -> None:
        """Rename the partial folder to ``target``, unless a valid checkpoint is there."""
        partial = self._partial(step)
        if target.exists():
            if _is_valid(target):
                # Two folders can't change places at once, and this could be the only checkpoint.
                shutil.rmtree(partial)
                return
            target.rename(self._removed(step))
        partial.rename(target)
        _sync_folder(self._folder)

    def discard(self, step: int) -> None:
        """Remove the folder of ``begin``.

        What can't be removed now is removed when another checkpoint begins.
        """
        shutil.rmtree(self._partial(step), ignore_errors=True)

    def drop_after(self, step: int) -> list[Path]:
        """Delete the checkpoints of later steps, and return them.

        The run goes on from ``step``, and will write others.

        Raises:
            CheckpointError: a checkpoint can't be deleted.
        """
        later = [path for path in _complete(self._folder) if step_of(path) > step]
        for path in reversed(later):
            with self._explained(step_of(path)):
                self._remove(path)
        return later

    def set_aside(self, step: int) -> Path:
        """Move a checkpoint to where the run neither resumes from it nor replaces it.

        Raises:
            CheckpointError: it can't be moved.
        """
        target = set_aside_path(self._folder.parent, step)
        with self._explained(step):
            target.parent.mkdir(exist_ok=True)
            if target.exists():  # of an earlier resume, whose steps were taken again since
                shutil.rmtree(target)
            (self._folder / _name(step)).rename(target)
            _sync_folder(target.parent)
            _sync_folder(self._folder)
        return target

    def _partial(self, step: int) -> Path:
        return self._folder / f".{_name(step)}.partial"

    def _removed(self, step: int) -> Path:
        return self._folder / f".{_name(step)}.removed"

    def _remove(self, path: Path) -> None:
        """Delete a checkpoint.

        It is renamed first, because deleting takes several operations, and a folder without some of
        its files must not look complete. ``begin`` removes what is left of it.
        """
        removed = self._removed(step_of(path))
        path.rename(removed)
        shutil.rmtree(removed, ignore_errors=True)

    @contextlib.contextmanager
    def _explained(self, step: int) -> Iterator[None]:
        """Turn an error of the disk into a CheckpointError with its cause and the cure."""
        try:
            yield
        except OSError as error:
            cause = f"{error.strerror or type(error).__name__}: {error.filename or self._folder}"
            cure = "checkpoints before it are intact; free space, or make the folder writable"
            raise CheckpointError(
                f"the checkpoint of step {step} can't be written ({cause}); {cure}"
            ) from error


# ---- the checkpoints of a run


def step_of(path: Path) -> int:
    """Return the step of a checkpoint's folder.

    Raises:
        ValueError: the folder has no name of a checkpoint.
    """
    match = _NAME.fullmatch(path.name)
    if match is None:
        raise ValueError(f"{path} is no checkpoint: its name is not step-NNNNNN")
    return int(match[1])


def checkpoint_path(run_dir: Path, step: int) -> Path:
    """Return the folder that the checkpoint of a step has in a run's folder."""
    return Path(run_dir) / CHECKPOINTS_FOLDER / _name(step)


def set_aside_path(run_dir: Path, step: int) -> Path:
    """Return the folder of a checkpoint that a resume from an earlier step has set aside."""
    return Path(run_dir) / SET_ASIDE_FOLDER / _name(step)


def checkpoints(run_dir: Path) -> list[Path]:
    """Return the complete checkpoints of a run, oldest first.

    Their files may have been damaged since; ``verify`` says so.
    """
    return _complete(Path(run_dir) / CHECKPOINTS_FOLDER)


def has_checkpoints(run_dir: Path) -> bool:
    """Return True if a run has checkpoints, whole or damaged."""
    return bool(_named(Path(run_dir) / CHECKPOINTS_FOLDER))


def newest_valid(run_dir: Path) -> tuple[Path, list[str]]:
    """Return the newest checkpoint whose files are all as they were written.

    Returns:
        The checkpoint's folder, and a line for each newer one that says why it was refused.

    Raises:
        CheckpointError: there is no such checkpoint.
    """
    refusals: list[str] = []
    for path in reversed(_named(Path(run_dir) / CHECKPOINTS_FOLDER)):
        try:
            verify(path)
        except CheckpointError as error:
            refusals.append(str(error))
        else:
            return path, refusals
    cause = "; ".join(refusals)
    if not refusals:
        names = sorted(path.name for path in Path(run_dir).iterdir())
        visible = [name for name in names if not name.startswith(".")]
        cause = f"it has no complete checkpoint (there is {', '.join(visible) or 'nothing'})"
    raise CheckpointError(f"{run_dir} can't be resumed: {cause}; start a new run")


def policies(run_dir: Path) -> list[Path]:
    """Return the hub folders that a run has written of its policy, the newest last."""
    folders = [
        path
        for name in (OLD_POLICY_FOLDER, POLICY_FOLDER)
        for path in (run_dir / name).glob("step-*")
    ]
    numbered = [path for path in folders if path.name.removeprefix("step-").isdigit()]
    return sorted(numbered, key=lambda path: int(path.name.removeprefix("step-")))


def _name(step: int) -> str:
    return f"step-{step:06d}"


def _complete(folder: Path) -> list[Path]:
    """Return the checkpoints that have a manifest, oldest first."""
    return [path for path in _named(folder) if (path / MANIFEST_FILE).is_file()]


def _named(folder: Path) -> list[Path]:
    """Return the checkpoints by their names, oldest first: also one that lost its manifest."""
    if not folder.is_dir():
        return []
    return sorted((path for path in folder.iterdir() if _NAME.fullmatch(path.name)), key=step_of)


# ---- the manifest


def verify(path: Path) -> None:
    """Read every file of a checkpoint and compare it with the manifest.

    Raises:
        CheckpointError: a file is damaged; names the first one, what is wrong with it and the cure.
    """
    path = Path(path)
    files = _read_manifest(path).files

    def damage_of(name: str) -> str | None:
        return _damage(path / name, files[name])

    with ThreadPoolExecutor(_READERS) as readers:
        for damage in readers.map(damage_of, sorted(files)):
            if damage is not None:
                raise _damaged(path, damage)


def _damage(path: Path, written: _File) -> str | None:
    """Return what is wrong with a file; None if it is as it was written."""
    try:
        size = path.stat().st_size
        if size != written.size:
            return f"{path} has {size:,} bytes and had {written.size:,}"
        if _checksum(path) != written.sha256:
            return f"{path} has other bytes than were written"
    except OSError as error:
        return _unread(path, error)
    return None


def _is_valid(path: Path) -> bool:
    try:
        verify(path)
    except CheckpointError:
        return False
    return True


def _write_manifest(folder: Path, step: int) -> None:
    """Fsync every file and folder of a checkpoint, and then write its manifest."""
    paths = sorted(folder.rglob("*"))
    files = [path for path in paths if path.is_file()]
    names = [str(path.relative_to(folder)) for path in files]
    with ThreadPoolExecutor(_READERS) as readers:
        entries = dict(zip(names, readers.map(_synced_entry, files), strict=True))
    for path in paths:
        if path.is_dir():
            _sync_folder(path)
    manifest = msgspec.json.encode(_CheckpointManifest(FORMAT, step, entries))
    (folder / MANIFEST_FILE).write_bytes(msgspec.json.format(manifest, indent=1) + b"\n")
    _sync(folder / MANIFEST_FILE)
    _sync_folder(folder)


def _synced_entry(path: Path) -> _File:
    """Fsync a file, and return its entry in the manifest."""
    _sync(path)
    return _File(path.stat().st_size, _checksum(path))


def _read_manifest(path: Path) -> _CheckpointManifest:
    """Return the manifest of a checkpoint.

    Raises:
        CheckpointError: the manifest is missing or damaged, or has another format.
    """
    file = path / MANIFEST_FILE
    try:
        manifest = msgspec.json.decode(file.read_bytes(), type=_CheckpointManifest)
    except OSError as error:
        raise _damaged(path, _unread(file, error)) from None
    except ValueError:
        raise _damaged(path, f"{file} is not what was written") from None
    if manifest.format != FORMAT:
        raise CheckpointError(
            f"{file} has format {manifest.format}, and this version reads {FORMAT}: "
            "resume with the one that wrote it"
        )
    if _NAME.fullmatch(path.name) and step_of(path) != manifest.step:
        raise _damaged(path, f"{file} is not what was written")
    return manifest


def _damaged(path: Path, damage: str) -> CheckpointError:
    return CheckpointError(
        f"checkpoint {path} is damaged: {damage}; use the one before, or copy this one again"
    )


def _unread(file: Path, error: OSError) -> str:
    if isinstance(error, FileNotFoundError):
        return f"{file} is missing"
    return f"{file} can't be read ({error.strerror})"


def _checksum(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


# ---- the disk


def write_durably(path: Path, text: str) -> None:
    """Write a file that a power failure leaves either as it was or as it is to be."""
    scratch = path.with_name(f"{path.name}.partial")
    scratch.write_text(text, encoding="utf-8")
    _sync(scratch)
    scratch.rename(path)
    for folder in (path.parent, path.parent.parent):  # the folder may be as new as the file
        _sync_folder(folder)


def _sync(path: Path) -> None:
    """Return once a file or folder is on the disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _sync_folder(path: Path) -> None:
    """Return once the names in a folder are on the disk, where the file system can say so."""
    try:
        _sync(path)
    except OSError as error:
        if error.errno not in _NO_FOLDER_SYNC:
            raise
