"""Runs a checked config from the command's process, and ends it whatever happens.

the last step      exit code 0
an error           one line on stderr, exit code 1
a signal           the run ends after its step and is saved; exit code 128 + the signal's number
a second signal    the run ends at once; so it does when a grace period is over
"""

import math
import os
import shlex
import signal
import sys
import time
import traceback
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import Any, NoReturn

from monarch.actor import shutdown_context, this_proc

from torchtitan.experiments.rl.checkpointing.folder import checkpoints, step_of
from torchtitan.experiments.rl.command.history import How, write_end, write_start
from torchtitan.experiments.rl.command.start import Ready
from torchtitan.experiments.rl.compat.monarch import (
    MONARCH_OUTPUT,
    drop_late_faults,
    original,
    printed_to,
)
from torchtitan.experiments.rl.config.run_config import RunConfig
from torchtitan.experiments.rl.controller.actor import Controller
from torchtitan.experiments.rl.errors import OWN_LENGTH, RunError
from torchtitan.experiments.rl.fleet.hosts import take_hosts
from torchtitan.experiments.rl.hosts.pool import HostPool
from torchtitan.experiments.rl.observability.console import (
    end_status_line,
    near,
    typed_command,
    write_line,
)
from torchtitan.experiments.rl.printable import one_sentence, printable_line
from torchtitan.experiments.rl.process.lifetime import descendants, kill_descendants
from torchtitan.experiments.rl.process.logs import quiet_libraries
from torchtitan.experiments.rl.process.temporary import TemporaryFolder

SIGNAL_POLL_S = 0.2
"""Seconds between two looks at the signals that were received."""
SHARED_MEMORY_EVERY_S = 30.0
"""Seconds between two looks at the shared memory of the run's processes. One takes milliseconds."""
SAME_SIGNAL_S = 2.0
"""Seconds after the first signal in which a further SIGTERM or SIGHUP counts as the same.

A closed terminal and some schedulers send one more than once. A further Ctrl-C always counts.
"""


class Signals:
    """Records the signals that end a run.

    A handler that raised could interrupt the sending of a message between actors.
    """

    def __init__(self) -> None:
        """Install the handlers."""
        self.received: list[int] = []
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            # nohup has SIGHUP ignored, and a shell SIGINT in its background jobs.
            if signal.getsignal(number) is not signal.SIG_IGN:
                signal.signal(number, self._record)

    def _record(self, number: int, frame: FrameType | None) -> None:
        self.received.append(number)


def run_to_end(
    config: RunConfig, start: Ready, config_name: str, temporary: TemporaryFolder
) -> int:
    """Take the run's hosts, run it, and give them back.

    Args:
        temporary: folder of the run's temporary files.

    Returns:
        The command's exit code. A second signal, or the end of the grace period, exits at once
        instead, and says how the run can go on.
    """
    signals = Signals()
    run_dir = Path(start.run_dir)
    try:
        write_start(run_dir, 0 if start.resume_from is None else step_of(start.resume_from))
        hosts = take_hosts(config, start, stopped=lambda: bool(signals.received))
    except (RunError, OSError) as error:
        line = printable_line(cause(error))
        write_line(sys.stderr, f"error: {line}")
        shutdown_context().get()
        if signals.received:
            write_end(run_dir, "stopped", _signal_name(signals.received[0]))
            return 128 + signals.received[0]
        write_end(run_dir, "failed", line)
        return 1
    try:
        return _WaitingCommand(config, start, config_name, temporary, signals, hosts).run()
    finally:
        drop_late_faults()
        with quiet_libraries():  # Monarch's job reports the end of each host
            if hosts is not None:
                hosts.close()
            shutdown_context().get()


@dataclass
class _WaitingCommand:
    """The command's process while the controller runs: it waits, and passes signals on."""

    config: RunConfig
    start: Ready
    config_name: str
    temporary: TemporaryFolder
    signals: Signals
    hosts: HostPool | None
    controller: Any = field(init=False)
    """Mesh of the Controller actor."""
    code: int = 0
    """Exit code if the run ends without an error."""
    handled: int = 0
    """Number of signals that were handled."""
    asked_at: float | None = None
    """Time at which the run was asked to stop; None before that."""
    grace_s: float = 0.0
    """Seconds from then until the run is given up, unless Ctrl-C asked."""
    deadline: float = math.inf
    """Time at which the grace period is over."""
    replies: list[Any] = field(default_factory=list)
    """Replies of the controller, which are awaited by nobody but must not be dropped."""

    @property
    def run_dir(self) -> Path:
        return Path(self.start.run_dir)

    def run(self) -> int:
        """Spawn the controller, and wait until the run has ended."""
        with printed_to(self.run_dir / MONARCH_OUTPUT):
            here = this_proc()
        self.controller = here.spawn(
            "controller",
            Controller,
            self.start.plan,
            run_dir=self.start.run_dir,
            config_name=self.config_name,
            hosts=self.hosts,
            resume_from=self.start.resume_from,
            init_from=self.start.init_from,
        )
        running = self.controller.run.call_one()
        next_look = time.monotonic() + SHARED_MEMORY_EVERY_S
        while True:
            try:
                summary = running.get(timeout=SIGNAL_POLL_S)
                how: How = "stopped" if self.code else "done"
                write_end(self.run_dir, how, summary.stopped_by)
                return self.code
            except TimeoutError:
                now = time.monotonic()
            except Exception as error:  # noqa: BLE001 - whatever ended the run is said in one line
                line = printable_line(cause(error))
                write_line(sys.stderr, f"error: {line} (logs in {self.start.run_dir}/logs)")
                write_end(self.run_dir, "failed", line)
                return 1
            if now > next_look:
                self.temporary.note_shared_memory(descendants())
                next_look = now + SHARED_MEMORY_EVERY_S
            self._obey_signals(now)

    def _obey_signals(self, now: float) -> None:
        """Stop the run after its step at the first signal, and at once at a second."""
        if now > self.deadline:
            why = (
                f"the step did not end within its grace period ({self.grace_s:.3g} s, "
                "checkpoint.grace_s)"
            )
            self._stop_at_once(why, self.code)
        received = self.signals.received
        if len(received) == self.handled:
            return
        new = received[self.handled :]
        self.handled = len(received)
        if self.asked_at is None:  # several may have come since the last look
            self._stop_after_the_step(new[-1], now)
        elif new[-1] == signal.SIGINT or now >= self.asked_at + SAME_SIGNAL_S:
            self._stop_at_once("stopped at once", 128 + new[-1])
        has_deadline = self.deadline < math.inf
        if not has_deadline and any(number != signal.SIGINT for number in new):
            # Whoever sends another signal than Ctrl-C kills the process soon.
            job = self.config.provision.job
            self.grace_s = max(self.config.checkpoint.grace_s, job.seconds_left())
            self.deadline = now + self.grace_s

    def _stop_after_the_step(self, number: int, now: float) -> None:
        self.code = 128 + number
        self.asked_at = now
        write_line(sys.stderr, "stopping after this step; once more stops at once")
        reason = _signal_name(number)
        self.replies.append(self.controller.request_stop.call_one(reason))

    def _stop_at_once(self, why: str, code: int) -> NoReturn:
        """End every process without a word to any actor: one may hang.

        A checkpoint that is being written is absent afterwards.
        """
        end_status_line()
        write_line(sys.stderr, f"{why}: what follows the last checkpoint is lost")
        write_end(self.run_dir, "stopped", f"{_signal_name(code - 128)}: {why}")
        _say_what_is_left(self.start)
        kill_descendants()
        self.temporary.remove()
        # The controller goes on in its thread, and may have started others meanwhile.
        kill_descendants()
        os._exit(code)


def _signal_name(number: int) -> str:
    return signal.Signals(number).name


def cause(error: Exception) -> str:
    """Return what ended the run, in one sentence. The log has all of it."""
    raised = original(error)
    if isinstance(raised, RunError):
        # A RunError is a sentence for the person at the terminal; other errors need their type.
        return one_sentence(str(raised), OWN_LENGTH)
    if isinstance(raised, OSError) and raised.filename is not None:
        return f"{raised.filename}: {raised.strerror}; see to its disk, then resume"
    return one_sentence("".join(traceback.format_exception_only(raised)))


def _say_what_is_left(start: Ready) -> None:
    """Print the last checkpoint and the commands that show the run and resume it.

    The summary of a run that ends by itself has the same lines.
    """
    folder = shlex.quote(near(start.run_dir))
    saved = checkpoints(Path(start.run_dir))
    if saved:
        lines = [f"saved       step {step_of(saved[-1])}: {saved[-1]}"]
    else:
        lines = ["saved       no checkpoint: the run had not taken one"]
    lines.append(f"see it      {typed_command('report')} {folder}")
    label = "go on with " if saved else "begin again"
    lines.append(f"{label} {typed_command('train')} --resume {folder}")
    write_line(sys.stdout, "\n".join(lines))
