"""The folder of each checkpoint: complete or absent, at every instant.

    checkpoints/.step-000040.partial    being written
    checkpoints/step-000020             complete: it has been renamed, after its manifest.json was written last

``manifest.json`` has every file's size and SHA-256. Files and folders are fsynced before the rename, so a power failure leaves
no complete checkpoint with a file that is not.
"""

import contextlib
import errno
import hashlib
import logging
import os
import re
import shutil
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import msgspec

from torchtitan.experiments.rl.bounds import NonNegativeInt, PositiveFloat, PositiveInt
from torchtitan.experiments.rl.errors import RunError

logger = logging.getLogger(__name__)

CHECKPOINTS_FOLDER = "checkpoints"
MANIFEST_FILE = "manifest.json"
POLICY_FOLDER = "policy"
"""In the run folder: the policy as hub folders, ``policy/step-N``."""
OLD_POLICY_FOLDER = "checkpoint"
"""What older runs call it."""
TRAINER_FOLDER = "trainer"
"""In a checkpoint's folder: what the trainer's ranks wrote."""
FORMAT = 2
"""Of the manifest; a reader refuses others."""

_NAME = re.compile(r"step-(\d{6,})")
_READERS = 4
"""Threads that read files for their checksums. SHA-256 takes a core about 1 GB/s."""
_NO_FOLDER_SYNC = (errno.EINVAL, errno.ENOTSUP, errno.EBADF)
"""What network file systems answer that can't fsync a folder."""


@dataclass(kw_only=True, slots=True)
class CheckpointConfig:
    interval: NonNegativeInt = 20
    """Optimizer steps between two checkpoints. 0: none but those at a signal, at an error and at the end."""
    keep: PositiveInt = 2
    """Checkpoints that stay; older ones are deleted. With 1, a damaged disk block costs the whole run."""
    grace_s: PositiveFloat = 25.0
    """After SIGTERM or SIGHUP: seconds for the step to end and be saved. Then the run ends with the last checkpoint. Schedulers
    kill 30 s after SIGTERM unless told otherwise."""


def policies(run_dir: Path) -> list[Path]:
    """The hub folders that a run has written of its policy, the newest last."""
    found = [
        path
        for name in (OLD_POLICY_FOLDER, POLICY_FOLDER)
        for path in (run_dir / name).glob("step-*")
    ]
    return sorted(
        (path for path in found if path.name[5:].isdigit()), key=lambda path: int(path.name[5:])
    )


class _File(msgspec.Struct):
    size: int
    sha256: str


class _Manifest(msgspec.Struct):
    format: int
    step: int
    files: dict[str, _File]


class CheckpointError(RunError):
    """A checkpoint that can't be written or read."""


class CheckpointFolder:
    """Writes the checkpoints of one run, one at a time: ``begin``, write files, then ``commit`` or ``discard``."""

    def __init__(self, run_dir: Path, keep: int):
        """``keep``: complete checkpoints that stay when another is committed."""
        self._folder, self._keep = Path(run_dir) / CHECKPOINTS_FOLDER, keep

    def begin(self, step: int) -> Path:
        """An empty folder for the files of ``step``'s checkpoint. Removes what earlier crashes left.

        Raises:
            CheckpointError: the disk is full, read-only or failing.
        """
        with self._explained(step):
            self._folder.mkdir(parents=True, exist_ok=True)
            for left in sorted(self._folder.glob(".step-*")):
                shutil.rmtree(left)
            partial = self._partial(step)
            partial.mkdir()
            return partial

    def commit(self, step: int) -> Path:
        """Make what lies in ``begin``'s folder the checkpoint of ``step``, and delete old ones. Returns its folder.

        Where a valid checkpoint of this step is there already, that one stays.

        Blocks: it reads every file again, for the checksum.

        Raises:
            CheckpointError: the disk is full, read-only or failing. The checkpoints before are as they were.
        """
        partial, target = self._partial(step), self._folder / _name(step)
        with self._explained(step):
            _write_manifest(partial, step)
            if target.exists() and _is_valid(target):
                shutil.rmtree(
                    partial
                )  # two folders can't change places at once, and this one could be the only checkpoint
            else:
                if target.exists():
                    target.rename(self._removed(step))
                partial.rename(target)
                _sync_folder(self._folder)
        kept = _complete(self._folder)
        for path in kept[: -self._keep]:
            try:
                self._remove(path)
            except OSError as error:  # the new checkpoint is complete all the same
                logger.warning("an old checkpoint can't be deleted: %s", error)
        return target

    def discard(self, step: int) -> None:
        """Remove ``begin``'s folder. What can't be removed now goes when another checkpoint begins."""
        shutil.rmtree(self._partial(step), ignore_errors=True)

    def drop_after(self, step: int) -> list[Path]:
        """Delete the checkpoints of later steps: the run goes on from ``step``, and will write others. Returns them.

        Raises:
            CheckpointError: one can't be deleted.
        """
        later = [path for path in _complete(self._folder) if step_of(path) > step]
        for path in reversed(later):
            with self._explained(step_of(path)):
                self._remove(path)
        return later

    def _partial(self, step: int) -> Path:
        return self._folder / f".{_name(step)}.partial"

    def _removed(self, step: int) -> Path:
        return self._folder / f".{_name(step)}.removed"

    def _remove(self, path: Path) -> None:
        """Renamed first: deleting takes several operations, and a folder without some of its files must not look complete.
        ``begin`` removes what is left."""
        removed = self._removed(step_of(path))
        path.rename(removed)
        shutil.rmtree(removed, ignore_errors=True)

    @contextlib.contextmanager
    def _explained(self, step: int) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            why = f"{error.strerror or type(error).__name__}: {error.filename or self._folder}"
            cure = "checkpoints before it are intact; free space, or make the folder writable"
            raise CheckpointError(
                f"the checkpoint of step {step} can't be written ({why}); {cure}"
            ) from error


def step_of(path: Path) -> int:
    """The step of a checkpoint's folder."""
    found = _NAME.fullmatch(path.name)
    if found is None:
        raise ValueError(f"{path} is no checkpoint: its name is not step-NNNNNN")
    return int(found[1])


def checkpoints(run_dir: Path) -> list[Path]:
    """The complete checkpoints of a run, oldest first. Their files may be damaged: ``verify``."""
    return _complete(Path(run_dir) / CHECKPOINTS_FOLDER)


def verify(path: Path) -> None:
    """Read every file of a checkpoint and compare it with the manifest.

    Raises:
        CheckpointError: names the first damaged file, what is wrong with it, and the cure.
    """
    path = Path(path)
    manifest = _read_manifest(path)

    def problem(name: str) -> str | None:
        file, said = path / name, manifest.files[name]
        try:
            size = file.stat().st_size
            if size != said.size:
                return f"{file} has {size:,} bytes and had {said.size:,}"
            return (
                None
                if _checksum(file) == said.sha256
                else f"{file} has other bytes than were written"
            )
        except OSError as error:
            return _unread(file, error)

    with ThreadPoolExecutor(_READERS) as readers:
        for found in readers.map(problem, sorted(manifest.files)):
            if found is not None:
                raise _damaged(path, found)


def _is_valid(path: Path) -> bool:
    try:
        verify(path)
    except CheckpointError:
        return False
    return True


def newest_valid(run_dir: Path) -> tuple[Path, list[str]]:
    """The newest checkpoint whose files are all as they were written, and why newer ones were refused, a line each.

    Raises:
        CheckpointError: there is none.
    """
    refused: list[str] = []
    for path in reversed(_named(Path(run_dir) / CHECKPOINTS_FOLDER)):
        try:
            verify(path)
        except CheckpointError as error:
            refused.append(str(error))
        else:
            return path, refused
    there = sorted(path.name for path in Path(run_dir).iterdir() if not path.name.startswith("."))
    why = (
        "; ".join(refused)
        or f"it has no complete checkpoint (there is {', '.join(there) or 'nothing'})"
    )
    raise CheckpointError(f"{run_dir} can't be resumed: {why}; start a new run")


def _name(step: int) -> str:
    return f"step-{step:06d}"


def _complete(folder: Path) -> list[Path]:
    return [path for path in _named(folder) if (path / MANIFEST_FILE).is_file()]


def _named(folder: Path) -> list[Path]:
    """Those too that have lost their manifest."""
    found = folder.iterdir() if folder.is_dir() else ()
    return sorted((path for path in found if _NAME.fullmatch(path.name)), key=step_of)


def _write_manifest(folder: Path, step: int) -> None:
    """Fsync every file and folder below, and then write the manifest."""
    files = sorted(path for path in folder.rglob("*") if path.is_file())

    def entry(path: Path) -> _File:
        _sync(path)
        return _File(path.stat().st_size, _checksum(path))

    with ThreadPoolExecutor(_READERS) as readers:
        entries = dict(
            zip(
                (str(path.relative_to(folder)) for path in files),
                readers.map(entry, files),
                strict=True,
            )
        )
    for path in folder.rglob("*"):
        if path.is_dir():
            _sync_folder(path)
    manifest = msgspec.json.encode(_Manifest(FORMAT, step, entries))
    (folder / MANIFEST_FILE).write_bytes(msgspec.json.format(manifest, indent=1) + b"\n")
    _sync(folder / MANIFEST_FILE)
    _sync_folder(folder)


def _read_manifest(path: Path) -> _Manifest:
    file = path / MANIFEST_FILE
    try:
        manifest = msgspec.json.decode(file.read_bytes(), type=_Manifest)
    except OSError as error:
        raise _damaged(path, _unread(file, error)) from None
    except ValueError:
        raise _damaged(path, f"{file} is not what was written") from None
    if manifest.format != FORMAT:
        raise CheckpointError(
            f"{file} has format {manifest.format}, and this version reads {FORMAT}: resume with the one that wrote it"
        )
    if _NAME.fullmatch(path.name) and step_of(path) != manifest.step:
        raise _damaged(path, f"{file} is not what was written")
    return manifest


def _damaged(path: Path, what: str) -> CheckpointError:
    return CheckpointError(
        f"checkpoint {path} is damaged: {what}; use the one before, or copy this one again"
    )


def _unread(file: Path, error: OSError) -> str:
    return (
        f"{file} is missing"
        if isinstance(error, FileNotFoundError)
        else f"{file} can't be read ({error.strerror})"
    )


def _checksum(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def write_durably(path: Path, text: str) -> None:
    """Write a file that a power failure leaves as it was or as it is to be."""
    scratch = path.with_name(f"{path.name}.partial")
    scratch.write_text(text, encoding="utf-8")
    _sync(scratch)
    scratch.rename(path)
    for folder in (path.parent, path.parent.parent):  # the folder may be as new as the file
        _sync_folder(folder)


def _sync(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _sync_folder(path: Path) -> None:
    try:
        _sync(path)
    except OSError as error:
        if error.errno not in _NO_FOLDER_SYNC:
            raise
