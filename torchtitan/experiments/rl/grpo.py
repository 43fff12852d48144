"""The command: ``python -m torchtitan.experiments.rl.grpo --config NAME [--module MODULE] [field overrides]``, or
``--resume FOLDER [field overrides]``.

Exit codes: 0 done; 1 the run failed; 2 the config can't run, and nothing was spawned; 130 stopped by Ctrl-C,
143 by SIGTERM.
"""

import os
import signal
import sys
import traceback
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

from torchtitan.experiments.rl.compat.monarch import original
from torchtitan.experiments.rl.config.command_line import Command, config_functions, load_config, parse_command
from torchtitan.experiments.rl.config.user_faults import fault_of
from torchtitan.experiments.rl.errors import ConfigError, MissingError, RunError
from torchtitan.experiments.rl.printable import printable_line
from torchtitan.experiments.rl.process.setup import (
    escape_unencodable_output,
    quiet_libraries,
    restart_with_utf8,
    set_up_process,
)

SIGNAL_POLL_S = 0.2


@dataclass(slots=True)
class Start:
    """What a run starts from, all of it checked."""

    run_dir: str = ""
    resume_from: Path | None = None
    """A checkpoint of the run in ``run_dir``."""
    init_from: Path | None = None
    """A checkpoint of another run, whose weights this one begins with."""
    lock: BinaryIO | None = None
    """Open while the run folder is this process's."""


def main(arguments: list[str] | None = None) -> int:
    escape_unencodable_output()
    try:
        command = parse_command(sys.argv[1:] if arguments is None else arguments)
        set_up_process()
        if command.list_configs:
            return _list(command.module)
        resumed, command = _resumed(command)
        config, name = load_config(command), str(command.config_name)
        try:
            with quiet_libraries():
                start = _check(config, command, resumed or _newest(config, command))
        except Exception as error:
            if isinstance(error, ConfigError):
                raise
            # Of the user's classes, where nothing expects one. Nothing was spawned.
            raise ConfigError("--config", name, f"the check failed: {fault_of(error)}") from error
    except ConfigError as error:
        print(f"error: {printable_line(str(error))}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:  # while modules are imported; nothing was spawned
        return 130
    return 0 if command.dry_run or start is None else _run(config, start, name)


def _list(module: str) -> int:
    functions = config_functions(module)
    width = max(map(len, functions), default=0)
    for name, function in functions.items():
        print(f"{name:<{width}}  {(function.__doc__ or '').strip().partition(chr(10))[0]}".rstrip())
    return 0


def _resumed(command: Command) -> tuple[Any, Command]:
    """The run that ``--resume FOLDER`` names, or None, and the command with what the run's own said."""
    if command.resume in (None, "auto"):
        return None, command
    from torchtitan.experiments.rl.config.resume import find_resumed

    resumed = find_resumed(str(command.resume))
    assert resumed is not None, "None is for auto"
    return resumed, resumed.command(command)


def _newest(config: Any, command: Command) -> Any:
    """The run that ``--resume auto`` means, or None."""
    if command.resume is None:
        return None
    from torchtitan.experiments.rl.config.resume import find_resumed

    resumed = find_resumed("auto", config_name=command.config_name, output_dir=config.output_dir)
    if resumed is None:
        print(f"no run of {command.config_name} in {config.output_dir} has a checkpoint: a new run starts")
    return resumed


def _check(config: Any, command: Command, resumed: Any) -> Start | None:
    """Check everything that can be known before a process is spawned, and make the run's folder, or take that of ``resumed``.

    A dry run prints the plan and leaves no folder. It notes what this machine lacks: GPUs, keys, files and, where the config
    names the architecture, the model.

    Returns:
        None: the resumed run has nothing left to do.
    """
    from torchtitan.experiments.rl.config import checks, trial_build
    from torchtitan.experiments.rl.config.resume import files_of_models, find_initial
    from torchtitan.experiments.rl.config.run_folder import check_run_folder, make_run_folder
    from torchtitan.experiments.rl.config.saved_command import SavedCommand, lock_run_folder, save_command

    notes: list[MissingError] = []
    checks.check(config)  # first: only a checked config surely has a model to look for
    trial_build.build_parts(config)
    try:
        checks.check_model_folder(config.model)
    except MissingError as error:
        if not command.dry_run or config.model.flavor is None:
            raise
        notes.append(error)
    on_gpus = command.dry_run and config.provision.device == "cuda"
    gpus = list(range(checks.needed_gpus(config)))
    plan = checks.plan_run(config, device="cuda", available=gpus) if on_gpus else checks.plan_run(config)
    lacking = checks.missing(config)
    if lacking and not command.dry_run:
        raise next(iter(lacking.values()))
    if not notes:
        trial_build.build_tasks(config, left_out=lacking)
    name, lines = str(command.config_name), []
    start = Start()
    if resumed is not None:
        resumed.check_config(config)
        check_run_folder(resumed.run_dir, field="--resume")
        start.run_dir, start.resume_from, start.lock, lines = (
            str(resumed.run_dir),
            resumed.checkpoint,
            resumed.lock,
            resumed.lines,
        )
        if resumed.has_ended(config):
            print("\n".join(lines))
            print(f"the run has taken its {config.steps} steps; a higher --steps goes on")
            return None
    else:
        if command.init_from is not None:
            start.init_from, refused = find_initial(command.init_from, config)
            lines = [*(f"refused     {reason}" for reason in refused), f"weights     of {start.init_from}"]
        start.run_dir = make_run_folder(command.run_dir, config.output_dir, name, keep=not command.dry_run)
    print("".join(printable_line(line) + "\n" for line in lines), end="")
    if not command.dry_run:
        start.lock = start.lock or lock_run_folder(Path(start.run_dir), field="--run-dir")
        files = {**(resumed.saved.model_files if resumed is not None else {}), **files_of_models(config)}
        saved = SavedCommand(config_name=name, module=command.module, overrides=command.overrides, model_files=files)
        save_command(Path(start.run_dir), saved)
    if command.dry_run:
        print("\n".join(plan.lines()))
        for note in [*notes, *lacking.values()]:
            print(f"before a run   {printable_line(str(note))}")
    return start


def _run(config: Any, start: Start, config_name: str) -> int:
    from monarch.actor import shutdown_context, this_proc

    from torchtitan.experiments.rl.controller.actor import Controller

    # The handler only records the signal: an exception raised between two bytecodes could cut a message between actors in two.
    signals: list[int] = []
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda received, frame: signals.append(received))
    controller = this_proc().spawn(
        "controller",
        Controller,
        config,
        run_dir=start.run_dir,
        config_name=config_name,
        resume_from=start.resume_from,
        init_from=start.init_from,
    )
    running = controller.run.call_one()
    handled, code = 0, 0
    while True:
        try:
            running.get(timeout=SIGNAL_POLL_S)
            break
        except TimeoutError:
            if len(signals) == handled:
                continue
            handled = len(signals)
            if handled > 1:
                print("stopped at once: the last step is lost", file=sys.stderr)
                os._exit(128 + signals[-1])
            print("stopping after this step; once more stops at once", file=sys.stderr)
            code = 128 + signals[0]
            controller.request_stop.call_one(signal.Signals(signals[0]).name).get()
        except Exception as error:
            print(f"error: {printable_line(_cause(error))} (logs in {start.run_dir}/logs)", file=sys.stderr)
            code = 1
            break
    shutdown_context().get()
    return code


def _cause(error: Exception) -> str:
    raised = original(error)
    if isinstance(raised, RunError):  # a sentence for the person who runs it; other errors need their type
        return str(raised)
    return " ".join("".join(traceback.format_exception_only(raised)).split())


if __name__ == "__main__":
    restart_with_utf8()
    sys.exit(main())
