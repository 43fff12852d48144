"""The folder of a run: made, tried, locked, and read again by the command that resumes the run.

A dry run makes the folder too, to try it, and removes it again.
"""

import contextlib
import fcntl
import hashlib
import json
import os
import sys
import time
from collections.abc import Collection, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, BinaryIO

from torchtitan.experiments.rl.checkpointing.folder import (
    checkpoints,
    has_checkpoints,
    policies,
    write_durably,
)
from torchtitan.experiments.rl.command.history import read_history
from torchtitan.experiments.rl.errors import ConfigError
from torchtitan.experiments.rl.observability.console import write_line
from torchtitan.experiments.rl.printable import printable_line

_LONGEST_FILE = (
    "checkpoint-step-000000000-sharded-and-the-name-of-a-file-in-it-"
    "which-may-have-sixty-characters.safetensors"
)
"""Name of a file whose path is as long as the longest that a run writes in its folder."""


def make_run_folder(
    given: str | None,
    output_dir: str,
    config_name: str,
    *,
    keep: bool,
    may_hold: Collection[str] = (),
) -> str:
    """Make the run's folder, and write and remove a file in it.

    Args:
        given: value of --run-dir; None for a new folder in ``output_dir``.
        keep: False to remove again whatever folders were made.
        may_hold: patterns of files that the folder may hold already.

    Returns:
        Its absolute path.

    Raises:
        ConfigError: it holds files, or can't be made or written. What was made of it is removed.
    """
    if given is None:
        stamp = time.strftime("%Y%m%d-%H%M%S")
        folder = Path(output_dir) / f"{config_name}-{stamp}-{os.getpid()}"
    else:
        folder = Path(given)
    made = [path for path in (folder, *folder.parents) if not os.path.lexists(path)]
    kept = False
    try:
        _check_holds_no_files(folder, may_hold)
        # A path that is too long is refused before a thousand folders of it are made.
        with contextlib.suppress(FileNotFoundError, NotADirectoryError):
            os.lstat(folder / _LONGEST_FILE)
        folder.mkdir(parents=True, exist_ok=True)
        _write_and_remove(folder)
        kept = keep
        return str(folder.resolve())
    except ConfigError:
        raise
    except (OSError, ValueError) as error:  # ValueError: a null character
        field, value = ("output_dir", output_dir) if given is None else ("--run-dir", given)
        is_file = os.path.exists(value) and not os.path.isdir(value)
        fault = "is a file" if is_file else _cause(error)
        raise ConfigError(field, value, f"{fault}; name a folder that can be written") from None
    finally:
        for path in () if kept else made:
            with contextlib.suppress(OSError, ValueError):  # it was not made
                path.rmdir()


def _check_holds_no_files(folder: Path, may_hold: Collection[str]) -> None:
    """Refuse a folder for a new run that holds files.

    Args:
        may_hold: patterns of files that it may hold.

    Raises:
        ConfigError: it holds others.
    """
    if not os.path.isdir(folder):
        return
    if all(any(map(file.match, may_hold)) for file in folder.iterdir()):
        return
    cure = "holds files already; name a new folder, nothing in it is overwritten"
    if checkpoints(folder):
        cure += f"; --resume {folder} goes on with the run in it"
    elif has_no_checkpoint_yet(folder):
        cure += f"; --resume {folder} begins the run in it again"
    raise ConfigError("--run-dir", str(folder), cure)


def check_run_folder(run_dir: Path, *, field: str) -> None:
    """Write and remove a file in the folder of a run that goes on.

    Raises:
        ConfigError: it can't be written.
    """
    try:
        _write_and_remove(run_dir)
    except OSError as error:
        cure = f"{_cause(error)}; the run goes on in its own folder: make it writable"
        raise ConfigError(field, str(run_dir), cure) from None


def _write_and_remove(folder: Path) -> None:
    file = folder / _LONGEST_FILE
    file.touch()
    file.unlink()


def _cause(error: Exception) -> str:
    """Return why a folder can't be made or written."""
    return getattr(error, "strerror", None) or f"can't be made a folder ({error})"


COMMAND_FILE = "command.json"
"""File with the `SavedCommand` of a run. Each checkpoint has a copy of it and of the config."""
CONFIG_FILE = "config.json"
"""File with the resolved config, which the controller writes."""
LOCK_FILE = ".lock"
"""File that the process locks which runs in the folder."""
EVALUATION_FILE = "evaluation.json"
"""File with the result of an evaluation, in the folder of the first model's records."""
AGAINST_FOLDER = "against"
"""Folder in that of an evaluation, with the records of the model that is compared."""

_MODEL_FILES = (
    "config.json",
    "tokenizer*",
    "chat_template*",
    "special_tokens_map.json",
    "vocab*",
    "merges.txt",
)
"""Patterns of a hub folder's files. The weights are left out: a resumed run takes its own."""


@dataclass(kw_only=True, slots=True)
class SavedCommand:
    """Command that started a run, by which the run can be resumed."""

    config_name: str
    module: str
    overrides: list[str]
    started: float = field(default_factory=time.time)
    """Time of the last start or resume, in seconds since 1970."""
    folder: str = ""
    """Folder in which the run was started: its modules may lie there, and relative paths begin
    there."""
    model_files: Mapping[str, Mapping[str, str]] = field(default_factory=dict)
    """SHA-256 of the files of each model's folder, by file name. A folder that was moved is the
    same model."""
    datasets: Mapping[str, str] = field(default_factory=dict)
    """Digest of the examples of each dataset (`Dataset.digest`), by the path of its field."""
    init_from: str | None = None
    """Run or checkpoint whose weights the run began with; None for those of its model."""


def save_command(run_dir: Path, command: SavedCommand) -> None:
    """Write the command into the run folder; a kill leaves the old file or the new one."""
    write_durably(run_dir / COMMAND_FILE, json.dumps(asdict(command), indent=2) + "\n")


def read_command(run_dir: Path) -> SavedCommand | None:
    """Return the command that made a run; None where the folder holds none that can be read."""
    try:
        return SavedCommand(**json.loads((run_dir / COMMAND_FILE).read_bytes()))
    except (OSError, ValueError, TypeError):
        return None


def has_no_checkpoint_yet(run_dir: Path) -> bool:
    """Return True if a folder holds a run that has ended before its first checkpoint.

    A run that was resumed from a checkpoint, or has saved a policy, had some: they are gone.
    """
    is_run = read_command(run_dir) is not None and not has_checkpoints(run_dir)
    return is_run and not policies(run_dir) and not read_history(run_dir).resumes


def read_config(run_dir: Path) -> dict[str, Any] | None:
    """Return the resolved config that the run was started with last; None if it can't be read."""
    try:
        config = json.loads((run_dir / CONFIG_FILE).read_bytes())
    except (OSError, ValueError):
        return None
    return config if isinstance(config, dict) else None


def model_files(folder: str) -> dict[str, str]:
    """Return the SHA-256 of each file that defines a model, by file name, without its weights."""
    found = {path for pattern in _MODEL_FILES for path in Path(folder).glob(pattern)}
    files = sorted(path for path in found if path.is_file())
    return {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in files}


def lock_run_folder(run_dir: Path, *, field: str) -> BinaryIO:
    """Take the run folder for this process, until the file is closed or the process ends.

    Raises:
        ConfigError: another process runs in it.
    """
    file = (run_dir / LOCK_FILE).open("ab+")
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        file.seek(0)
        owner = file.read(20).decode(errors="replace").strip() or "?"
        file.close()
        raise ConfigError(
            field, str(run_dir), f"process {owner} runs in it: wait until it ends, or stop it"
        ) from None
    except OSError as error:  # a file system without locks
        line = (
            f"warning: {run_dir} can't be locked ({error.strerror}): nothing stops a second "
            "command from running in it"
        )
        write_line(sys.stderr, printable_line(line))
        return file
    file.truncate(0)
    file.write(f"{os.getpid()}\n".encode())
    file.flush()
    return file
