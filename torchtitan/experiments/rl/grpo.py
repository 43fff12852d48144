"""The command: ``python -m torchtitan.experiments.rl.grpo --config NAME [--module MODULE] [field overrides]``, or
``--resume FOLDER [field overrides]``.

Exit codes: 0 done; 1 the run failed; 2 the config can't run, and nothing was spawned; 129, 130 and 143 stopped by
SIGHUP, Ctrl-C and SIGTERM. docs/operations.md explains each.
"""

import inspect
import re
import sys
from pathlib import Path
from typing import Any

from torchtitan.experiments.rl.checkpointing.folder import policies
from torchtitan.experiments.rl.config.command_line import (
    Command,
    config_functions,
    config_groups,
    find_model,
    load_config,
    parse_command,
    starting_line,
)
from torchtitan.experiments.rl.config.hub import push
from torchtitan.experiments.rl.errors import RunError
from torchtitan.experiments.rl.observability.console import write_line
from torchtitan.experiments.rl.printable import printable_line
from torchtitan.experiments.rl.process.host import other_users_line
from torchtitan.experiments.rl.process.setup import (
    of_command,
    quiet_libraries,
    run_command,
    set_up_process,
)
from torchtitan.experiments.rl.process.temporary import TemporaryFolder, remove_left_over


@of_command()
def main(arguments: list[str] | None) -> int:
    """``arguments``: None: those of this process. Someone waits for it then, and the first line tells them so."""
    command = parse_command(sys.argv[1:] if arguments is None else arguments)
    if arguments is None and not command.list_configs:
        write_line(sys.stdout, printable_line(starting_line(command)))
    set_up_process()
    if command.list_configs:
        return _list(command.module)
    find_model(command)
    resumed = None
    if command.resume not in (None, "auto"):
        resumed = _resumed(command)
        command = resumed.command(command)
    with command.naming_the_runs_folder():
        config = load_config(command)
    if command.gpus is not None:
        config = _divided(command, config)
    with quiet_libraries():
        from torchtitan.experiments.rl.config.gate import pass_gate
        from torchtitan.experiments.rl.config.start import Ended, ToSubmit

        if command.resume == "auto":
            resumed = _resumed(
                command, config_name=str(command.config_name), output_dir=config.output_dir
            )
        with command.naming_the_runs_folder():
            start = pass_gate(config, command, resumed)
    if command.dry_run:
        return 0
    if isinstance(start, Ended):  # the run may have been killed after its last step
        remove_left_over()
        return 0
    if isinstance(start, ToSubmit):
        return _submit(config, start)
    code = _run(config, start, str(command.config_name))
    if code == 0 and command.push_to_hub is not None:
        return 0 if push(policies(Path(start.run_dir))[-1], command.push_to_hub) else 1
    return code


def _list(module: str) -> int:
    functions, groups, lines = config_functions(module), config_groups(module), []
    width = max(map(len, functions), default=0)
    named = {name for names in groups.values() for name in names}
    for title, names in {
        **groups,
        "Others": [name for name in functions if name not in named],
    }.items():
        if names and groups:
            lines.append(title)
        for name in names:
            line = f"{name:<{width}}  {summary_of(functions[name].__doc__ or '')}".rstrip()
            lines.append(f"  {line}" if groups else line)
    write_line(sys.stdout, "\n".join(lines))  # whose reader may have seen enough
    return 0


def summary_of(doc: str) -> str:
    """Return the first line of a docstring, with the rest of the sentence that it begins."""
    paragraph = inspect.cleandoc(doc).partition("\n\n")[0]
    first, _, rest = (" ".join(part.split()) for part in paragraph.partition("\n"))
    if not rest or first.endswith((".", "!", "?")):
        return first
    end_of_sentence = re.split(r"(?<=[.!?])\s", rest, maxsplit=1)[0]
    return f"{first} {end_of_sentence}"


def _divided(command: Command, config: Any) -> Any:
    """The config with ``--gpus`` divided between trainer and generators."""
    from torchtitan.experiments.rl.config import checks
    from torchtitan.experiments.rl.process.host import gpu_memory_gib

    checks.check(config)
    command.overrides += checks.split_of(
        config, int(command.gpus or 0), gpu_gib=gpu_memory_gib() or checks.USUAL_GPU_GIB
    )
    return load_config(command)


def _resumed(command: Command, **newest: str) -> Any:
    """The run that ``--resume`` names, or None. ``newest``: what ``auto`` takes the newest run of."""
    from torchtitan.experiments.rl.config.resume import find_resumed

    resumed = find_resumed(str(command.resume), **newest)
    if resumed is None:
        line = f"no run of {command.config_name} in {newest['output_dir']} has a checkpoint: a new run starts"
        write_line(sys.stdout, line)
    return resumed


def _submit(config: Any, start: Any) -> int:
    """Hand the run to a scheduler."""
    try:
        for line in config.provision.job.submit(start.script, start.run_dir):
            write_line(sys.stdout, printable_line(line))
    except RunError as error:
        write_line(sys.stderr, f"error: {printable_line(str(error))}")
        return 1
    return 0


def _run(config: Any, start: Any, config_name: str) -> int:
    from torchtitan.experiments.rl.operations.session import run_to_end

    temporary = TemporaryFolder()
    if line := other_users_line():
        write_line(sys.stderr, printable_line(line))
    try:
        return run_to_end(config, start, config_name, temporary)
    finally:
        temporary.remove()


if __name__ == "__main__":
    run_command(main)
