"""What a run folder keeps of the command that runs in it: enough to start it again, and to know that nobody else does."""

import fcntl
import hashlib
import json
import os
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, BinaryIO

from torchtitan.experiments.rl.checkpointing.folder import write_durably
from torchtitan.experiments.rl.errors import ConfigError

COMMAND_FILE = "command.json"
CONFIG_FILE = "config.json"
"""The resolved config; the controller writes it. Each checkpoint has a copy of both."""
LOCK_FILE = ".lock"

_MODEL_FILES = ("config.json", "tokenizer*", "chat_template*", "special_tokens_map.json", "vocab*", "merges.txt")
"""Of a hub folder. The weights are left out: a resumed run takes its own."""


@dataclass(kw_only=True, slots=True)
class SavedCommand:
    config_name: str
    module: str
    overrides: list[str]
    started: float = field(default_factory=time.time)
    """Seconds since 1970 of the last start or resume."""
    model_files: Mapping[str, Mapping[str, str]] = field(default_factory=dict)
    """SHA-256 by file name, of each model's folder. A folder that was moved is the same model."""


def save_command(run_dir: Path, command: SavedCommand) -> None:
    """A kill or a power failure leaves the old file or the new one."""
    write_durably(run_dir / COMMAND_FILE, json.dumps(asdict(command), indent=2) + "\n")


def save_config(run_dir: Path, config: Any) -> Any:
    """Returns what is saved: the resolved config."""
    # Imported here: it imports torch, and commands read a run's command before the process is set up for that.
    from torchtitan.experiments.rl.config.resolved import resolved_config

    resolved = resolved_config(config)
    write_durably(run_dir / CONFIG_FILE, json.dumps(resolved, indent=2) + "\n")
    return resolved


def read_command(run_dir: Path) -> SavedCommand | None:
    """None where the folder holds no run, or one that began before there were checkpoints."""
    try:
        return SavedCommand(**json.loads((run_dir / COMMAND_FILE).read_bytes()))
    except (OSError, ValueError, TypeError):
        return None


def read_config(run_dir: Path) -> dict[str, Any] | None:
    """The resolved config that the run was started with last; None where there is none that can be read."""
    try:
        config = json.loads((run_dir / CONFIG_FILE).read_bytes())
    except (OSError, ValueError):
        return None
    return config if isinstance(config, dict) else None


def model_files(folder: str) -> dict[str, str]:
    """SHA-256 of what defines a model, without its weights."""
    files = sorted({path for pattern in _MODEL_FILES for path in Path(folder).glob(pattern) if path.is_file()})
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
        raise ConfigError(field, str(run_dir), f"process {owner} runs in it: wait until it ends, or stop it") from None
    except OSError:  # a file system without locks
        return file
    file.truncate(0)
    file.write(f"{os.getpid()}\n".encode())
    file.flush()
    return file
