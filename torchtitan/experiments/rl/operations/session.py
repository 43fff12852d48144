"""Runs a checked config to its end, whatever ends it: its last step, an error, a signal."""

import math
import os
import shlex
import signal
import sys
import time
import traceback
from pathlib import Path
from typing import Any, NoReturn

from monarch.actor import shutdown_context, this_proc

from torchtitan.experiments.rl.checkpointing.folder import checkpoints, step_of
from torchtitan.experiments.rl.compat.monarch import (
    MONARCH_OUTPUT,
    drop_late_faults,
    original,
    printed_to,
)
from torchtitan.experiments.rl.config.start import Ready
from torchtitan.experiments.rl.errors import OWN_LENGTH, RunError
from torchtitan.experiments.rl.hosts.pool import HostPool
from torchtitan.experiments.rl.observability.console import (
    end_status_line,
    near,
    typed_command,
    write_line,
)
from torchtitan.experiments.rl.operations.actor import Controller
from torchtitan.experiments.rl.operations.provision import take_hosts
from torchtitan.experiments.rl.printable import one_sentence, printable_line
from torchtitan.experiments.rl.process.lifetime import descendants, kill_descendants
from torchtitan.experiments.rl.process.setup import quiet_libraries
from torchtitan.experiments.rl.process.temporary import TemporaryFolder

SIGNAL_POLL_S = 0.2
SHARED_MEMORY_EVERY_S = 30.0
"""How often the shared memory of the run's processes is looked up: reading /proc takes some milliseconds."""

SAME_SIGNAL_S = 2.0
"""A closed terminal and some schedulers send a signal more than once within this time: that is not asked twice."""


class Signals:
    """Records the signals that end a run. A handler that raised could cut a message between actors in two."""

    def __init__(self) -> None:
        self.received: list[int] = []
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            if (
                signal.getsignal(number) is not signal.SIG_IGN
            ):  # nohup has SIGHUP ignored, and a shell's background job SIGINT
                signal.signal(number, lambda received, frame: self.received.append(received))


def run_to_end(config: Any, start: Ready, config_name: str, temporary: TemporaryFolder) -> int:
    """Returns the exit code. A second signal, or the end of the grace period, exits at once and says how to go on."""
    signals = Signals()
    try:
        hosts = take_hosts(config, start, stopped=lambda: bool(signals.received))
    except RunError as error:
        write_line(sys.stderr, f"error: {printable_line(cause(error))}")
        shutdown_context().get()
        return 128 + signals.received[0] if signals.received else 1
    try:
        return _run(config, start, config_name, temporary, signals, hosts)
    finally:
        drop_late_faults()
        with quiet_libraries():  # Monarch's job reports the end of each host
            if hosts is not None:
                hosts.close()
            shutdown_context().get()


def _run(
    config: Any,
    start: Ready,
    config_name: str,
    temporary: TemporaryFolder,
    signals: Signals,
    hosts: HostPool | None,
) -> int:
    with printed_to(Path(start.run_dir) / MONARCH_OUTPUT):
        here = this_proc()
    controller = here.spawn(
        "controller",
        Controller,
        start.plan,
        run_dir=start.run_dir,
        config_name=config_name,
        hosts=hosts,
        resume_from=start.resume_from,
        init_from=start.init_from,
    )
    running = controller.run.call_one()
    code, handled, asked, deadline, grace_s = 0, 0, 0.0, math.inf, 0.0
    look_up = time.monotonic() + SHARED_MEMORY_EVERY_S
    stops = []
    while True:
        try:
            running.get(timeout=SIGNAL_POLL_S)
            return code
        except TimeoutError:
            now = time.monotonic()
        except Exception as error:
            write_line(
                sys.stderr, f"error: {printable_line(cause(error))} (logs in {start.run_dir}/logs)"
            )
            return 1
        if now > look_up:
            temporary.note_shared_memory(descendants())
            look_up = now + SHARED_MEMORY_EVERY_S
        if now > deadline:
            why = f"the step did not end within its grace period ({grace_s:.3g} s, checkpoint.grace_s)"
            _stop_at_once(why, code, start, temporary)
        if len(signals.received) == handled:
            continue
        handled, newest = len(signals.received), signals.received[-1]
        if handled == 1:
            code, asked = 128 + newest, now
            write_line(sys.stderr, "stopping after this step; once more stops at once")
            if newest != signal.SIGINT:  # whoever sends these kills soon
                grace_s = max(config.checkpoint.grace_s, config.provision.job.seconds_left())
                deadline = now + grace_s
            stops.append(controller.request_stop.call_one(signal.Signals(newest).name))
        elif newest == signal.SIGINT or now >= asked + SAME_SIGNAL_S:
            _stop_at_once("stopped at once", 128 + newest, start, temporary)


def cause(error: Exception) -> str:
    """What ended the run, in one sentence. The log has all of it."""
    raised = original(error)
    if isinstance(
        raised, RunError
    ):  # a sentence for the person who runs it; other errors need their type
        return one_sentence(str(raised), OWN_LENGTH)
    if isinstance(raised, OSError) and raised.filename is not None:
        return f"{raised.filename}: {raised.strerror}; see to its disk, then resume"
    return one_sentence("".join(traceback.format_exception_only(raised)))


def _say_what_is_left(start: Ready) -> None:
    """Print the last checkpoint and the commands that show the run and resume it, as the summary of a run does."""
    folder, found = shlex.quote(near(start.run_dir)), checkpoints(Path(start.run_dir))
    saved = (
        f"step {step_of(found[-1])}: {found[-1]}"
        if found
        else "no checkpoint: the run had not taken one"
    )
    lines = [f"saved       {saved}", f"see it      {typed_command('report')} {folder}"]
    if found:
        lines.append(f"go on with  {typed_command('grpo')} --resume {folder}")
    write_line(sys.stdout, "\n".join(lines))


def _stop_at_once(why: str, code: int, start: Ready, temporary: TemporaryFolder) -> NoReturn:
    """Without a word to any actor: one may hang. A checkpoint that is being written is absent afterwards."""
    end_status_line()
    write_line(sys.stderr, f"{why}: what follows the last checkpoint is lost")
    _say_what_is_left(start)
    kill_descendants()
    temporary.remove()
    kill_descendants()  # the controller goes on in its thread, and may have started others meanwhile
    os._exit(code)
