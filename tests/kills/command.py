"""One start of the command, in a session and a TMPDIR of its own, watched from outside."""

import getpass
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from tests.integration.processes import open_files, process_stat

ROOT = Path(__file__).resolve().parents[2]
MODULE = "torchtitan.experiments.rl.train"
ORPHAN_LIMIT_S = 60.0
"""What is left of a run whose command was killed has this long to end by itself."""
COMPILED = os.environ.get(
    "TORCHINDUCTOR_CACHE_DIR", f"{tempfile.gettempdir()}/torchinductor_{getpass.getuser()}"
)
"""Kept from run to run, where torch keeps it."""


class Command:
    def __init__(self, folder: Path, words: list[str], *, output: Path, temporary: Path):
        """``folder``: the run's. ``output`` is appended to; ``temporary`` is the command's TMPDIR."""
        self.folder, self.output = folder, output
        temporary.mkdir(parents=True, exist_ok=True)
        self.began = time.monotonic()
        self.logs_before = {
            path.name: path.stat().st_size for path in (folder / "logs").glob("*.jsonl")
        }
        """Bytes that an earlier command of this run wrote."""
        with output.open("a") as file:
            self.process = subprocess.Popen(
                [sys.executable, "-m", MODULE, *words],
                cwd=ROOT,
                env=os.environ
                | {
                    "WANDB_SILENT": "true",
                    "TORCHINDUCTOR_CACHE_DIR": COMPILED,
                    "TMPDIR": str(temporary.resolve()),
                },
                stdout=file,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    @property
    def lives(self) -> bool:
        return self.process.poll() is None

    def alive(self) -> set[int]:
        """Processes of the session; zombies are not alive."""
        stats = {
            int(entry): process_stat(int(entry)) for entry in os.listdir("/proc") if entry.isdigit()
        }
        return {
            pid
            for pid, stat in stats.items()
            if stat and stat[2] == self.process.pid and stat[0] != "Z"
        }

    def pid_of(self, part: str) -> int | None:
        """The process of a part, by the name of its log; "controller" is the command itself. None: there is none yet."""
        return self.process.pid if part == "controller" else self.parts().get(part)

    def parts(self) -> dict[str, int]:
        """Each process that has a log of the run open, by the log's name, the controller's apart."""
        logs, found = (self.folder / "logs").resolve(), {}
        for pid in self.alive() - {self.process.pid}:
            for path in open_files(pid):
                if path.startswith(f"{logs}/") and path.endswith(".jsonl"):
                    found[Path(path).stem] = pid
        return found

    def logged(self, log: str) -> str:
        """What this command has written to one of the run's logs."""
        path = self.folder / "logs" / f"{log}.jsonl"
        try:
            with path.open("rb") as file:
                file.seek(self.logs_before.get(path.name, 0))
                return file.read().decode(errors="replace")
        except FileNotFoundError:
            return ""

    def wait(self, limit_s: float) -> int | None:
        """The exit code; None if it does not end in time."""
        try:
            return self.process.wait(limit_s)
        except subprocess.TimeoutExpired:
            return None

    def kill_session(self) -> None:
        """SIGKILL to every process of it, as a machine that goes down."""
        while left := self.alive():
            for pid in left:
                try:
                    os.kill(pid, signal.SIGKILL)
                except ProcessLookupError:
                    pass
            time.sleep(0.02)
        self.process.wait()

    def orphans(self) -> list[str]:
        """Command lines of what does not end by itself once the command has ended. It is killed."""
        wait_for(lambda: not self.alive(), ORPHAN_LIMIT_S)
        names = [command_line(pid) for pid in self.alive()]
        self.kill_session()
        return names


def wait_for(condition: Callable[[], object], limit_s: float, every_s: float = 0.1) -> bool:
    """Whether ``condition`` held in time."""
    deadline = time.monotonic() + limit_s
    while not condition():
        if time.monotonic() > deadline:
            return False
        time.sleep(every_s)
    return True


def command_line(pid: int) -> str:
    try:
        return (
            Path(f"/proc/{pid}/cmdline")
            .read_bytes()
            .replace(b"\0", b" ")
            .decode(errors="replace")[:120]
        )
    except OSError:
        return "?"


def steps_recorded(folder: Path) -> int:
    """Step of the last whole line of the metrics; -1: none."""
    try:
        lines = (folder / "metrics.jsonl").read_bytes().splitlines(keepends=True)
    except FileNotFoundError:
        return -1
    whole = [line for line in lines if line.endswith(b"\n")]
    return json.loads(whole[-1])["step"] if whole else -1


def has_checkpoint(folder: Path) -> bool:
    return any(folder.glob("checkpoints/step-*/manifest.json"))
