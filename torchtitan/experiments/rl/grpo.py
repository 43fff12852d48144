"""The command: ``python -m torchtitan.experiments.rl.grpo --config NAME [--module MODULE] [field overrides]``.

Exit codes: 0 done; 1 the run failed; 2 the config can't run, and nothing was spawned; 130 stopped by Ctrl-C,
143 by SIGTERM.
"""

import os
import signal
import sys
import traceback
from typing import Any

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


def main(arguments: list[str] | None = None) -> int:
    escape_unencodable_output()
    try:
        command = parse_command(sys.argv[1:] if arguments is None else arguments)
        set_up_process()
        if command.list_configs:
            return _list(command.module)
        config, name = load_config(command), str(command.config_name)
        try:
            with quiet_libraries():
                run_dir = _check(config, command)
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
    return 0 if command.dry_run else _run(config, run_dir, name)


def _list(module: str) -> int:
    functions = config_functions(module)
    width = max(map(len, functions), default=0)
    for name, function in functions.items():
        print(f"{name:<{width}}  {(function.__doc__ or '').strip().partition(chr(10))[0]}".rstrip())
    return 0


def _check(config: Any, command: Command) -> str:
    """Check everything that can be known before a process is spawned, and make the run's folder. Returns its path.

    A dry run prints the plan and leaves no folder. It notes what this machine lacks: GPUs, keys, files and, where the config
    names the architecture, the model.
    """
    from torchtitan.experiments.rl.config import checks, trial_build
    from torchtitan.experiments.rl.config.run_folder import make_run_folder

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
    run_dir = make_run_folder(command.run_dir, config.output_dir, str(command.config_name), keep=not command.dry_run)
    if command.dry_run:
        print("\n".join(plan.lines()))
        for note in [*notes, *lacking.values()]:
            print(f"before a run   {printable_line(str(note))}")
    return run_dir


def _run(config: Any, run_dir: str, config_name: str) -> int:
    from monarch.actor import shutdown_context, this_proc

    from torchtitan.experiments.rl.controller.actor import Controller

    # The handler only records the signal: an exception raised between two bytecodes could cut a message between actors in two.
    signals: list[int] = []
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda received, frame: signals.append(received))
    controller = this_proc().spawn("controller", Controller, config, run_dir=run_dir, config_name=config_name)
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
            print(f"error: {printable_line(_cause(error))} (logs in {run_dir}/logs)", file=sys.stderr)
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
