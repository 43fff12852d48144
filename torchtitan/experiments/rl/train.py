"""The command that trains, ``rl-train``.

    python -m torchtitan.experiments.rl.train --config NAME [--module MODULE] [field overrides]
    python -m torchtitan.experiments.rl.train --resume FOLDER [field overrides]

Exit codes: 0 done; 1 the run failed; 2 the config can't run, and nothing was spawned; 129, 130 and
143 stopped by SIGHUP, Ctrl-C and SIGTERM. docs/operations.md explains each.
"""

import inspect
import re
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from torchtitan.experiments.rl.checkpointing.folder import BEST_POLICY, POLICY_FOLDER, policies
from torchtitan.experiments.rl.command.command_line import (
    Command,
    config_functions,
    config_groups,
    find_model,
    load_config,
    parse_command,
    starting_line,
)
from torchtitan.experiments.rl.command.hub import push
from torchtitan.experiments.rl.errors import ConfigError, RunError
from torchtitan.experiments.rl.observability.console import write_line
from torchtitan.experiments.rl.printable import printable_line
from torchtitan.experiments.rl.process.entry import of_command, run_command
from torchtitan.experiments.rl.process.host import other_users_line
from torchtitan.experiments.rl.process.logs import quiet_libraries
from torchtitan.experiments.rl.process.setup import set_up_process
from torchtitan.experiments.rl.process.temporary import TemporaryFolder, remove_left_over

if TYPE_CHECKING:  # imported after the process is set up
    from torchtitan.experiments.rl.command.resume import ResumedRun
    from torchtitan.experiments.rl.command.start import Ready, ToSubmit
    from torchtitan.experiments.rl.config.run_config import RunConfig


@of_command()
def main(arguments: list[str] | None) -> int:
    """Run the command, and return its exit code.

    Args:
        arguments: words of the command line; None takes this process's. A person waits for it then,
            so the first line says that it starts.
    """
    command = parse_command(sys.argv[1:] if arguments is None else arguments)
    if arguments is None and not command.list_configs:
        write_line(sys.stdout, printable_line(starting_line(command)))
    set_up_process()
    if command.list_configs:
        return _list(command.module)
    find_model(command)
    resumed = None
    if command.resume is not None and command.resume != "auto":
        resumed = _find_run(command.resume)
        command = resumed.command(command)
    with command.naming_the_runs_folder():
        config = load_config(command)
    if command.gpus is not None:
        config = _with_gpus_divided(command, config)
    with quiet_libraries():
        from torchtitan.experiments.rl.command.gate import pass_gate
        from torchtitan.experiments.rl.command.start import NothingToStart, ToSubmit

        if command.resume == "auto":
            resumed = _find_newest(command, config.output_dir)
        with command.naming_the_runs_folder():
            start = pass_gate(config, command, resumed)
    if command.dry_run:
        return 0
    if isinstance(start, ToSubmit):
        return _submit(config, start)
    if isinstance(start, NothingToStart):
        assert resumed is not None
        run_dir = resumed.run_dir
        code = 0
        remove_left_over()  # the run may have been killed after its last step
    else:
        run_dir = Path(start.run_dir)
        code = _run(start.plan.config, start, str(command.config_name))
    if code == 0 and command.push_to_hub is not None:
        return _push(run_dir, command.push_to_hub, best_by=config.checkpoint.keep_best)
    return code


def _list(module: str) -> int:
    """Print the config functions of a module, by group."""
    functions = config_functions(module)
    groups = config_groups(module)
    grouped = {name for names in groups.values() for name in names}
    others = [name for name in functions if name not in grouped]
    width = max(map(len, functions), default=0)
    lines = []
    for title, names in {**groups, "Others": others}.items():
        if names and groups:
            lines.append(title)
        for name in names:
            line = f"{name:<{width}}  {summary_of(functions[name].__doc__ or '')}".rstrip()
            lines.append(f"  {line}" if groups else line)
    write_line(sys.stdout, "\n".join(lines))  # the reader may close the pipe early
    return 0


def summary_of(doc: str) -> str:
    """Return the first line of a docstring, with the rest of the sentence that it begins."""
    paragraph = inspect.cleandoc(doc).partition("\n\n")[0]
    first, _, rest = (" ".join(part.split()) for part in paragraph.partition("\n"))
    if not rest or first.endswith((".", "!", "?")):
        return first
    end_of_sentence = re.split(r"(?<=[.!?])\s", rest, maxsplit=1)[0]
    return f"{first} {end_of_sentence}"


def _with_gpus_divided(command: Command, config: "RunConfig") -> "RunConfig":
    """Return the config with ``--gpus`` divided between trainer and generators."""
    from torchtitan.experiments.rl.command.checks import check
    from torchtitan.experiments.rl.command.gpu_split import USUAL_GPU_GIB, split_of
    from torchtitan.experiments.rl.process.host import gpu_memory_gib

    check(config)
    if config.provision.device == "cpu":
        cure = "this config computes on CPU: leave it out, or take --provision.device cuda"
        raise ConfigError("--gpus", command.gpus, cure)
    gpu_gib = gpu_memory_gib() or USUAL_GPU_GIB
    command.overrides += split_of(config, int(command.gpus or 0), gpu_gib=gpu_gib)
    return load_config(command)


def _find_run(given: str) -> "ResumedRun":
    """Return the run that ``--resume FOLDER`` names."""
    from torchtitan.experiments.rl.command.resume import find_resumed

    resumed = find_resumed(given)
    assert resumed is not None  # only "auto" may find none
    return resumed


def _find_newest(command: Command, output_dir: str) -> "ResumedRun | None":
    """Return the newest run of the config in ``output_dir``, or None with a line that says so."""
    from torchtitan.experiments.rl.command.resume import find_resumed

    name = str(command.config_name)
    resumed = find_resumed("auto", config_name=name, output_dir=output_dir)
    if resumed is None:
        line = f"no run of {name} in {output_dir} has a checkpoint: a new run starts"
        write_line(sys.stdout, line)
    return resumed


def _submit(config: "RunConfig", start: "ToSubmit") -> int:
    """Hand the run to a scheduler."""
    try:
        for line in config.provision.job.submit(start.script, start.run_dir):
            write_line(sys.stdout, printable_line(line))
    except RunError as error:
        write_line(sys.stderr, f"error: {printable_line(str(error))}")
        return 1
    return 0


def _push(run_dir: Path, name: str, *, best_by: str | None) -> int:
    """Push a run's best policy to the hub, or else its newest, and return the exit code.

    Args:
        best_by: metric by which the best checkpoint was kept; None if none was.
    """
    written = policies(run_dir)
    if not written:  # it ended before its first step
        write_line(sys.stderr, f"error: {name} was not pushed: the run has written no policy")
        return 1
    best = run_dir / POLICY_FOLDER / BEST_POLICY
    if best_by is None:
        return 0 if push(written[-1], name) else 1
    if best.is_dir():
        return 0 if push(best, name, which=f"the best by {best_by}") else 1
    return 0 if push(written[-1], name, which="of the last step") else 1


def _run(config: "RunConfig", start: "Ready", config_name: str) -> int:
    """Run the config to its end in this process, and return the exit code."""
    from torchtitan.experiments.rl.controller.signals import run_to_end

    temporary = TemporaryFolder()
    if line := other_users_line():
        write_line(sys.stderr, printable_line(line))
    try:
        return run_to_end(config, start, config_name, temporary)
    finally:
        temporary.remove()


if __name__ == "__main__":
    run_command(main)
