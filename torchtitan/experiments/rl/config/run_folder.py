"""The run's folder: made for a run, and made and removed again for a plan, which shows that a run could make it."""

import contextlib
import errno
import os
import time
from collections.abc import Collection
from pathlib import Path

from torchtitan.experiments.rl.config.saved_command import COMMAND_FILE
from torchtitan.experiments.rl.errors import ConfigError

_LONGEST_FILE = "checkpoint-step-000000000-sharded-and-the-name-of-a-file-in-it-which-may-have-sixty-characters.safetensors"
"""As long as the paths that a run writes in its folder."""
_CAUSES = {
    errno.ENAMETOOLONG: "is too long for this file system",
    errno.EROFS: "is on a file system that is mounted read-only",
    errno.ENOTDIR: "lies under a file",
    errno.EEXIST: "is a file",
    errno.EACCES: "may not be written by this user",
    errno.EPERM: "may not be written by this user",
    errno.ENOSPC: "is on a full disk",
}


def make_run_folder(given: str | None, output_dir: str, config_name: str, *, keep: bool, may_hold: Collection[str] = ()) -> str:
    """Make the run's folder, and write and remove a file in it.

    Args:
        given: the value of --run-dir; None: a new folder in ``output_dir``.
        keep: False removes whatever folders were made.
        may_hold: patterns of files that it may hold already.

    Returns:
        Its absolute path.

    Raises:
        ConfigError: it holds files, or can't be made or written. What was made of it is removed.
    """
    field, value = ("output_dir", output_dir) if given is None else ("--run-dir", given)
    stamp = time.strftime("%Y%m%d-%H%M%S")
    folder = Path(output_dir) / f"{config_name}-{stamp}-{os.getpid()}" if given is None else Path(given)
    made: list[Path] = []
    kept = False
    try:
        if os.path.isdir(folder) and not all(any(map(file.match, may_hold)) for file in folder.iterdir()):
            cure = "holds files already; name a new folder, nothing in it is overwritten"
            if (folder / COMMAND_FILE).exists():
                cure += f"; --resume {folder} goes on with the run in it"
            raise ConfigError("--run-dir", str(folder), cure)
        with contextlib.suppress(FileNotFoundError, NotADirectoryError):
            os.lstat(folder / _LONGEST_FILE)  # a path that is too long: before a thousand folders of it are made
        _make(folder, made, named=Path(value))
        _write_and_remove(folder)
        kept = keep
        return str(folder.resolve())
    except (OSError, ValueError) as error:  # ValueError: a null character
        if isinstance(error, ConfigError):
            raise
        raise ConfigError(field, value, f"{_cause(error)}; name a folder that can be written") from None
    finally:
        if not kept:
            for path in reversed(made):
                path.rmdir()


def check_run_folder(run_dir: Path, *, field: str) -> None:
    """Write and remove a file in the folder of a run that goes on.

    Raises:
        ConfigError: it can't be written.
    """
    try:
        _write_and_remove(run_dir)
    except OSError as error:
        raise ConfigError(
            field, str(run_dir), f"{_cause(error)}; the run goes on in its own folder: make it writable"
        ) from None


def _write_and_remove(folder: Path) -> None:
    file = folder / _LONGEST_FILE
    file.touch()
    file.unlink()


def _cause(error: Exception) -> str:
    return _CAUSES.get(getattr(error, "errno", 0), f"can't be made a folder ({type(error).__name__}: {error})")


def _make(folder: Path, made: list[Path], *, named: Path) -> None:
    """Make the folder and those above it. Each that was made is appended to ``made``, also when a later one fails.

    Raises:
        FileExistsError: ``named``, the path that the config names, is a file.
        NotADirectoryError: a path above it is.
        OSError: a folder can't be made for another reason.
    """
    missing = [folder]
    while not os.path.lexists(missing[-1]) and missing[-1].parent != missing[-1]:
        missing.append(missing[-1].parent)
    for path in reversed(missing):
        try:
            path.mkdir()
        except FileExistsError:
            if not path.is_dir():
                if path == named:
                    raise
                raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR), str(path)) from None
        else:
            made.append(path)
