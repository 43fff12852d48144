"""The run's folder, which a run makes and a plan makes and removes again, as a test."""

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

from torchtitan.experiments.rl.checkpointing.folder import checkpoints, write_durably
from torchtitan.experiments.rl.errors import ConfigError
from torchtitan.experiments.rl.observability.console import write_line
from torchtitan.experiments.rl.printable import printable_line

_LONGEST_FILE = (
    "checkpoint-step-000000000-sharded-and-the-name-of-a-file-in-it-"
    "which-may-have-sixty-characters.safetensors"
)
"""As long as the paths that a run writes in its folder."""


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
    folder = (
        Path(output_dir) / f"{config_name}-{stamp}-{os.getpid()}" if given is None else Path(given)
    )
    made = [path for path in (folder, *folder.parents) if not os.path.lexists(path)]
    kept = False
    try:
        if os.path.isdir(folder) and not all(
            any(map(file.match, may_hold)) for file in folder.iterdir()
        ):
            cure = "holds files already; name a new folder, nothing in it is overwritten"
            if checkpoints(folder):
                cure += f"; --resume {folder} goes on with the run in it"
            raise ConfigError("--run-dir", str(folder), cure)
        with contextlib.suppress(FileNotFoundError, NotADirectoryError):
            os.lstat(
                folder / _LONGEST_FILE
            )  # a path that is too long: before a thousand folders of it are made
        folder.mkdir(parents=True, exist_ok=True)
        _write_and_remove(folder)
        kept = keep
        return str(folder.resolve())
    except (OSError, ValueError) as error:  # ValueError: a null character
        if isinstance(error, ConfigError):
            raise
        is_file = os.path.exists(value) and not os.path.isdir(value)
        raise ConfigError(
            field,
            value,
            f"{'is a file' if is_file else _cause(error)}; name a folder that can be written",
        ) from None
    finally:
        for path in () if kept else made:
            with contextlib.suppress(OSError, ValueError):  # it was not made
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
            field,
            str(run_dir),
            f"{_cause(error)}; the run goes on in its own folder: make it writable",
        ) from None


def _write_and_remove(folder: Path) -> None:
    file = folder / _LONGEST_FILE
    file.touch()
    file.unlink()


def _cause(error: Exception) -> str:
    return getattr(error, "strerror", None) or f"can't be made a folder ({error})"


COMMAND_FILE = "command.json"
CONFIG_FILE = "config.json"
"""The resolved config; the controller writes it. Each checkpoint has a copy of both."""
LOCK_FILE = ".lock"

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
    config_name: str
    module: str
    overrides: list[str]
    started: float = field(default_factory=time.time)
    """Seconds since 1970 of the last start or resume."""
    folder: str = ""
    """The folder that the run was started in: its modules may lie there, and relative paths begin
    there."""
    model_files: Mapping[str, Mapping[str, str]] = field(default_factory=dict)
    """SHA-256 by file name, of each model's folder. A folder that was moved is the same model."""


def save_command(run_dir: Path, command: SavedCommand) -> None:
    """Write the command into the run folder; a kill leaves the old file or the new one."""
    write_durably(run_dir / COMMAND_FILE, json.dumps(asdict(command), indent=2) + "\n")


def read_command(run_dir: Path) -> SavedCommand | None:
    """Return the command that made a run; None where the folder holds none that can be read."""
    try:
        return SavedCommand(**json.loads((run_dir / COMMAND_FILE).read_bytes()))
    except (OSError, ValueError, TypeError):
        return None


def read_config(run_dir: Path) -> dict[str, Any] | None:
    """Return the resolved config that the run was started with last; None if it can't be read."""
    try:
        config = json.loads((run_dir / CONFIG_FILE).read_bytes())
    except (OSError, ValueError):
        return None
    return config if isinstance(config, dict) else None


def model_files(folder: str) -> dict[str, str]:
    """SHA-256 of what defines a model, without its weights."""
    files = sorted(
        {path for pattern in _MODEL_FILES for path in Path(folder).glob(pattern) if path.is_file()}
    )
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
