"""The command: ``python -m torchtitan.experiments.rl.grpo --config NAME [--module MODULE] [field overrides]``.

Exit codes: 0 done; 1 the run failed; 2 the config can't run, and nothing was spawned; 130 stopped by Ctrl-C,
143 by SIGTERM.
"""

import os
import signal
import sys
import time
import traceback
from pathlib import Path
from typing import Any

from torchtitan.experiments.rl.compat.monarch import original
from torchtitan.experiments.rl.config.command_line import config_functions, load_config, parse_command
from torchtitan.experiments.rl.errors import ConfigError, RunError
from torchtitan.experiments.rl.printable import printable_line
from torchtitan.experiments.rl.process.setup import set_up_process

SIGNAL_POLL_S = 0.2


def main(arguments: list[str] | None = None) -> int:
    try:
        command = parse_command(sys.argv[1:] if arguments is None else arguments)
        set_up_process()
        if command.list_configs:
            functions = config_functions(command.module)
            width = max(map(len, functions), default=0)
            for name, function in functions.items():
                print(f"{name:<{width}}  {(function.__doc__ or '').strip().partition(chr(10))[0]}".rstrip())
            return 0
        config = load_config(command)
        if command.dry_run:
            return _dry_run(config)
        _check_all(config)
        name = str(command.config_name)
        run_dir = _run_dir(command.run_dir, config.output_dir, name)
    except ConfigError as error:
        print(f"error: {printable_line(str(error))}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:  # while modules are imported; nothing was spawned
        return 130
    return _run(config, run_dir, name)


def _dry_run(config: Any) -> int:
    """Print the plan. A named architecture can be planned before its weights are here, for GPUs this host lacks, and before
    the frozen models' keys and checkpoints are."""
    from torchtitan.experiments.rl.config.checks import check, needed_gpus, plan_run

    check(config)
    on_gpus = config.provision.device == "cuda"
    plan = plan_run(config, device="cuda", available=list(range(needed_gpus(config)))) if on_gpus else plan_run(config)
    print("\n".join(plan.lines()))
    try:
        _check_model(config)
    except ConfigError as error:
        if config.model.flavor is None:
            raise
        print(f"before a run   {printable_line(str(error))}")
    try:
        _check_present(config)
    except ConfigError as error:
        print(f"before a run   {printable_line(str(error))}")
    return 0


def _check_all(config: Any) -> None:
    from torchtitan.experiments.rl.config.checks import check, plan_run

    check(config)  # first: only a checked config surely has a model to look for
    _check_model(config)
    plan_run(config)
    _check_present(config)


def _check_model(config: Any) -> None:
    from torchtitan.experiments.rl.config.checks import check_model_folder

    check_model_folder(config.model.hf_assets_path)


def _check_present(config: Any) -> None:
    from torchtitan.experiments.rl.config.checks import check_present

    check_present(config)


def _run_dir(given: str | None, output_dir: str, config_name: str) -> str:
    folder = Path(given) if given else Path(output_dir) / f"{config_name}-{time.strftime('%Y%m%d-%H%M%S')}-{os.getpid()}"
    if folder.exists() and any(folder.iterdir()):
        raise ConfigError("--run-dir", str(folder), "holds files already; name a new folder, nothing in it is overwritten")
    folder.mkdir(parents=True, exist_ok=True)
    return str(folder.resolve())


def _run(config: Any, run_dir: str, config_name: str) -> int:
    from monarch.actor import shutdown_context, this_proc

    from torchtitan.experiments.rl.controller.actor import Controller

    # A handler that only notes the signal: an exception out of nowhere would tear the actors' messages in half.
    signals: list[int] = []
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda received, frame: signals.append(received))
    controller = this_proc().spawn("controller", Controller, config, run_dir=run_dir, config_name=config_name)
    running = controller.run.call_one()
    heard, code = 0, 0
    while True:
        try:
            running.get(timeout=SIGNAL_POLL_S)
            break
        except TimeoutError:
            if len(signals) == heard:
                continue
            heard = len(signals)
            if heard > 1:
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
    sys.exit(main())
