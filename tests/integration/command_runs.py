"""Starts the command in processes of its own, and looks at what it does and leaves behind."""

import contextlib
import getpass
import os
import pty
import shutil
import signal
import subprocess
import sys
import tempfile
import termios
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import IO

from tests.integration.processes import open_files, process_stat
from torchtitan.experiments.rl.observability.metrics import read_metrics
from torchtitan.experiments.rl.process.temporary import SHARED_MEMORY, shared_memory_of

ROOT = Path(__file__).resolve().parents[2]
MODULE = "torchtitan.experiments.rl.train"
SMALL = "--rollouts-per-step 32 --validation.examples 8 --post-batch-filters none".split()
"""Without the filters that make a step smaller: so many rollouts are trained in each."""
ENDLESS = ["--steps", "100000", "--validation.every", "0"]
PATIENCE_S = 600
"""How long to wait for what must come; nothing is claimed about how long it takes."""
NOTED_EVERY_S = 0.5
COMPILED = os.environ.get(
    "TORCHINDUCTOR_CACHE_DIR", f"{tempfile.gettempdir()}/torchinductor_{getpass.getuser()}"
)
"""Kept from run to run, where torch keeps it."""


class Run:
    """One run of the command, in a session of its own so that whatever it leaves alive can be found."""

    def __init__(
        self,
        folder: Path,
        *words: str,
        config: str = "rl_grpo_qwen3_debug",
        resume: Path | None = None,
        program: tuple[str, ...] = (sys.executable, "-m", MODULE),
        cwd: Path = ROOT,
        columns: int | None = None,
    ):
        """
        Args:
            resume: the run folder of an earlier run, which goes on.
            program: what starts the command.
            columns: stdout and stderr are a terminal, which is so wide; ``out`` has both.
        """
        self.folder = resume or folder / "run"
        self.temporary = Path(tempfile.mkdtemp(prefix="rl-"))
        """Not below ``folder``, whose path is too long for the run's sockets."""
        self._out, self._err = folder / "stdout", folder / "stderr"
        command = [*program, *words]
        if resume is None:
            command += ["--config", config, "--run-dir", str(self.folder), *SMALL]
        else:
            command += ["--resume", str(resume)]
        own = {"TMPDIR": str(self.temporary)}
        with contextlib.ExitStack() as files:
            if columns is None:
                out, err = (
                    files.enter_context(self._out.open("wb")),
                    files.enter_context(self._err.open("wb")),
                )
            else:
                out = err = files.enter_context(terminal_that_writes_to(self._out, columns))
                own["TERM"] = "xterm"
            self._process = subprocess.Popen(
                command,
                cwd=cwd,
                env=environment() | own,
                stdout=out,
                stderr=err,
                start_new_session=True,
            )
        self._mapped: set[str] = set()
        threading.Thread(target=self._note_shared_memory, daemon=True).start()

    def _note_shared_memory(self) -> None:
        """Until the command ends: other programs of this machine have shared memory too, other tests among them."""
        while self._process.poll() is None:
            self._mapped |= shared_memory_of(self.alive())
            time.sleep(NOTED_EVERY_S)

    @property
    def out(self) -> str:
        return self._out.read_bytes().decode()

    @property
    def err(self) -> str:
        return self._err.read_bytes().decode() if self._err.exists() else ""

    @property
    def metrics(self) -> list[dict]:
        return read_metrics(self.folder / "metrics.jsonl")

    @property
    def steps(self) -> list[dict]:
        return self.metrics[1:]

    def wait(self) -> int:
        return self._process.wait(PATIENCE_S)

    def ended_well(self) -> "Run":
        assert self.wait() == 0, self.err + self.out
        return self

    def until_step(self, step: int) -> None:
        def ended_or_there() -> bool:
            path = self.folder / "metrics.jsonl"
            return self._process.poll() is not None or (
                path.exists() and len(read_metrics(path)) > step
            )

        wait_for(ended_or_there, f"step {step} did not come")
        assert self._process.poll() is None, self.err + self.out

    def send(self, number: int) -> None:
        """As a terminal does: to every process of the group."""
        os.killpg(self._process.pid, number)

    def alive(self) -> set[int]:
        """Processes of the run's session, itself included; zombies are not alive."""
        pids = (int(entry) for entry in os.listdir("/proc") if entry.isdigit())
        stats = {pid: process_stat(pid) for pid in pids}
        return {
            pid
            for pid, stat in stats.items()
            if stat and stat[2] == self._process.pid and stat[0] != "Z"
        }

    def worker(self, name: str, index: int = 0) -> int:
        """The process that holds the log file of this rank of the role."""
        (pid,) = self._workers(name, index)
        return pid

    def has(self, name: str, index: int = 0) -> bool:
        """Whether that process is there."""
        return bool(self._workers(name, index))

    def _workers(self, name: str, index: int) -> set[int]:
        log = str(self.folder / "logs" / f"{name}-{index}.jsonl")
        return {pid for pid in self.alive() if log in open_files(pid)}

    def assert_nothing_left(self) -> None:
        wait_for(lambda: not self.alive(), "processes left alive")
        wait_for(lambda: not self._shared_memory_left(), "shared memory left behind")
        wait_for(lambda: not list(self.temporary.iterdir()), "temporary files left behind")

    def _shared_memory_left(self) -> set[str]:
        """Files in shared memory that the run's processes have mapped, and that are still there."""
        return self._mapped & set(os.listdir(SHARED_MEMORY))

    def kill(self) -> None:
        for pid in self.alive():
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                pass
        self._process.wait()
        shutil.rmtree(self.temporary, ignore_errors=True)


def terminal_that_writes_to(file: Path, columns: int) -> IO[bytes]:
    """One end of a terminal; what is written to it goes to ``file``."""
    ours, theirs = pty.openpty()
    termios.tcsetwinsize(theirs, (24, columns))

    def copy() -> None:
        no_process_has_the_other_end = contextlib.suppress(OSError)
        with (
            file.open("wb", buffering=0) as copied,
            os.fdopen(ours, "rb", buffering=0) as end,
            no_process_has_the_other_end,
        ):
            while written := end.read(2**16):
                copied.write(written)

    threading.Thread(target=copy, daemon=True).start()
    return os.fdopen(theirs, "wb")


def environment() -> dict[str, str]:
    return os.environ | {"WANDB_SILENT": "true", "TORCHINDUCTOR_CACHE_DIR": COMPILED}


def wait_for(condition: Callable[[], object], what: str = "nothing happened") -> None:
    deadline = time.monotonic() + PATIENCE_S
    while not condition():
        assert time.monotonic() < deadline, what
        time.sleep(0.1)


def private(path: str) -> bool:
    """Whether a folder above ``path`` lets nobody in but its owner."""
    return not path.startswith("@") and any(
        folder.stat().st_mode & 0o077 == 0 for folder in Path(path).parents
    )


def assert_ledger_balances(record: dict) -> None:
    columns = {key: count for key, count in record.items() if key.startswith("ledger/sum_digits/")}
    dispatched = columns.pop("ledger/sum_digits/dispatched")
    assert (
        sum(columns.values()) == dispatched
        and columns["ledger/sum_digits/trained"] == 32 * record["step"]
    )


def command(
    words: list[str], *, cwd: Path = ROOT, env: dict[str, str] | None = None
) -> subprocess.CompletedProcess:
    return subprocess.run(
        [sys.executable, "-m", MODULE, *words],
        cwd=cwd,
        env=env or environment(),
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
        start_new_session=True,
    )
