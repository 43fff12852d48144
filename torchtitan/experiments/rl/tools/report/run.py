"""A run folder as the pages see it: its state, its config without secrets, and its index."""

import json
import os
import re
import threading
import time
from pathlib import Path
from typing import Any

from torchtitan.experiments.rl.config.run_folder import CONFIG_FILE, LOCK_FILE, read_command, read_config
from torchtitan.experiments.rl.errors import RunError
from torchtitan.experiments.rl.rollouts.record_file import METRICS_FILE, ROLLOUTS_FILE
from torchtitan.experiments.rl.tools.report.index import RunIndex

REFRESH_EVERY_S = 1.0
STALLED_AFTER_S = 120.0
"""At least; slower runs have ten times their usual step."""
HIDDEN = "(hidden)"
_SECRET = re.compile(r"(api_?key|secret|token|password|credential)s?$", re.IGNORECASE)
"""Names of fields whose text is not shown. A field that names an environment variable (..._env) is no secret."""


class ReportedRun:
    """``start`` follows the files until ``close``."""

    def __init__(self, folder: Path):
        """
        Raises:
            RunError: there is no run in the folder.
        """
        self.folder = folder.resolve()
        if not any((self.folder / name).is_file() for name in (METRICS_FILE, ROLLOUTS_FILE, "config.json")):
            raise RunError(f"{folder}: no run: it has no {METRICS_FILE}, {ROLLOUTS_FILE} or config.json")
        self.name = self.folder.name
        self.index = RunIndex(self.folder)
        self._problem: str | None = None
        """Why the files can't be read at the moment."""
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._follow, name=f"index-{self.name}", daemon=True)

    def start(self) -> None:
        """Index in a thread, from now on. What is not indexed yet is missing from the pages, which say so."""
        self._thread.start()

    def close(self) -> None:
        self._closed.set()
        if self._thread.is_alive():
            self._thread.join()
        self.index.close()

    def _follow(self) -> None:
        while not self._closed.is_set():
            try:
                read_all, self._problem = self.index.refresh(), None
            except Exception as error:  # a disk that fails, a file that someone changes: it may be over the next time
                self._problem, read_all = f"{type(error).__name__}: {error}", True
            if read_all:
                self._closed.wait(REFRESH_EVERY_S)

    def config(self) -> dict[str, Any]:
        """The resolved config, by dotted path of each field; what may be a secret is hidden."""
        whole = self._whole_config()
        return dict(sorted((name, HIDDEN if _is_secret(name, value) else value) for name, value in whole.items()))

    def _whole_config(self) -> dict[str, Any]:
        return _flat(self._read_config(), "")

    def _read_config(self) -> dict[str, Any]:
        return {} if (self.folder / CONFIG_FILE).is_symlink() else read_config(self.folder) or {}

    def without_secrets(self, text: str) -> str:
        """The text with what the config hides taken out."""
        for name, value in self._whole_config().items():
            text = text.replace(value, HIDDEN) if _is_secret(name, value) else text
        return text

    def tasks(self) -> list[str]:
        """By name."""
        rows = self.index.rows("SELECT DISTINCT task FROM ledger UNION SELECT DISTINCT task FROM rollouts")
        config = self._read_config().get("tasks")
        configured = list(config) if isinstance(config, dict) else []
        return configured + sorted({row[0] for row in rows} - set(configured))

    def state(self) -> dict[str, Any]:
        """What the run is doing, as far as its files say.

        Returns:
            ``state``: "running", "stalled", "done", "stopped" or "starting". ``step``, ``steps``: taken, and to take.
            ``silent_s``: since its metrics were written.
        """
        config = self._read_config()
        step = self.index.rows("SELECT MAX(step) FROM metrics")[0][0]
        steps = config["steps"] if isinstance(config.get("steps"), int) else None
        silent = _age_s(self.folder / METRICS_FILE)
        usual = self.index.rows("SELECT AVG(value) FROM metrics WHERE name = 'time/step_s'")[0][0]
        if steps is not None and step is not None and step >= steps:
            state = "done"
        elif is_locked(self.folder / LOCK_FILE):
            late = silent is not None and silent > max(STALLED_AFTER_S, 10 * (usual or 0))
            state = "stalled" if late else "running" if step is not None else "starting"
        else:
            state = "stopped"
        command = read_command(self.folder)
        return {
            "state": state,
            "step": step,
            "steps": steps,
            "silent_s": silent,
            "config_name": None if command is None else command.config_name,
            "started": command.started if command is not None and isinstance(command.started, int | float) else None,
            "unread_bytes": self.index.unread_bytes(),
            "problem": self._problem,
        }


def is_locked(path: Path) -> bool:
    """Whether a process of this host holds the lock of a run folder. Looked up, and not tried: a run may want to take it."""
    try:
        entry = path.stat()
        lines = Path("/proc/locks").read_text().splitlines()
    except OSError:
        return False
    place = f"{os.major(entry.st_dev):02x}:{os.minor(entry.st_dev):02x}:{entry.st_ino}"
    return any(place in line.split() for line in lines)


def _age_s(path: Path) -> float | None:
    try:
        return max(0.0, time.time() - path.stat().st_mtime)
    except OSError:
        return None


def _flat(value: Any, path: str) -> dict[str, Any]:
    if isinstance(value, dict):
        below = [_flat(entry, f"{path}.{name}" if path else name) for name, entry in value.items()]
        return {name: found for entries in below for name, found in entries.items()} or ({path: "{}"} if path else {})
    return {path: json.dumps(value) if isinstance(value, list) else value}


def _is_secret(name: str, value: Any) -> bool:
    return isinstance(value, str) and value != "" and _SECRET.search(name) is not None
