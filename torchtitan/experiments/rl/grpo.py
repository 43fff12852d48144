"""The command: ``python -m torchtitan.experiments.rl.grpo --config NAME [--module MODULE] [field overrides]``, or
``--resume FOLDER [field overrides]``.

Exit codes: 0 done; 1 the run failed; 2 the config can't run, and nothing was spawned; 129, 130 and 143 stopped by
SIGHUP, Ctrl-C and SIGTERM. docs/operations.md explains each.
"""

import sys
from pathlib import Path
from typing import Any

from torchtitan.experiments.rl.checkpointing.folder import policies
from torchtitan.experiments.rl.compat.huggingface_hub import push_fault
from torchtitan.experiments.rl.config.command_line import (
    Command,
    config_functions,
    config_groups,
    find_model,
    load_config,
    parse_command,
)
from torchtitan.experiments.rl.errors import ConfigError, MissingError, RunError, fault_of
from torchtitan.experiments.rl.observability.console import write_line
from torchtitan.experiments.rl.printable import printable_line
from torchtitan.experiments.rl.process.memory import collect_again, hold_collection, keep_imported
from torchtitan.experiments.rl.process.setup import (
    escape_unencodable_output,
    quiet_libraries,
    run_command,
    set_up_process,
)
from torchtitan.experiments.rl.process.temporary import TemporaryFolder, hold_sockets, remove_left_over
from torchtitan.experiments.rl.process.terminal import share_terminal


def main(arguments: list[str] | None = None) -> int:
    """``arguments``: None: those of this process. Someone waits for it then, and the first line tells them so."""
    escape_unencodable_output()
    if arguments is None:
        hold_collection()
    try:
        command = parse_command(sys.argv[1:] if arguments is None else arguments)
        if arguments is None and not command.list_configs:
            write_line(sys.stdout, printable_line(starting_line(command)))
        set_up_process()
        if command.list_configs:
            return _list(command.module)
        find_model(command)
        resumed, command = _resumed(command)
        config, name = load_config(command), str(command.config_name)
        if command.gpus is not None:
            config = _divided(command, config)
        keep_imported()
        try:
            with quiet_libraries():
                start = _check(config, command, resumed or _newest(config, command))
        except Exception as error:
            if isinstance(error, ConfigError):
                raise
            # Of the user's classes, where nothing expects one. Nothing was spawned.
            raise ConfigError("--config", name, f"the check failed: {fault_of(error)}") from error
    except ConfigError as error:
        for line in [f"error: {error}", *error.lines]:
            print(printable_line(line), file=sys.stderr)
        return 2
    except KeyboardInterrupt:  # while modules are imported; nothing was spawned
        return 130
    if command.dry_run:
        return 0
    if start is None:  # a run that has taken its steps, and may have been killed after them
        remove_left_over()
        return 0
    if start.script is not None:
        return _submit(config, start)
    code = _run(config, start, name)
    if code == 0 and command.push_to_hub is not None:
        code = _push(Path(start.run_dir), command.push_to_hub)
    return code


def starting_line(command: Command) -> str:
    """What the command prints within a second: the imports that follow take some more."""
    what = command.config_name if command.resume in (None, "auto") else command.resume
    return f"starting    {what} (imports, then checks)"


def _list(module: str) -> int:
    functions = config_functions(module)
    width = max(map(len, functions), default=0)
    groups = config_groups(module)
    named = {name for names in groups.values() for name in names}
    for title, names in {**groups, "Others" if groups else "": [name for name in functions if name not in named]}.items():
        if names and title:
            print(title)
        for name in names:
            line = f"{name:<{width}}  {(functions[name].__doc__ or '').strip().partition(chr(10))[0]}".rstrip()
            print(f"  {line}" if title else line)
    return 0


def _resumed(command: Command) -> tuple[Any, Command]:
    """The run that ``--resume FOLDER`` names, or None, and the command with what the run's own said."""
    if command.resume in (None, "auto"):
        return None, command
    from torchtitan.experiments.rl.config.resume import find_resumed

    resumed = find_resumed(str(command.resume))
    assert resumed is not None, "None is for auto"
    return resumed, resumed.command(command)


def _divided(command: Command, config: Any) -> Any:
    """The config with ``--gpus`` divided between trainer and generators."""
    from torchtitan.experiments.rl.config import checks
    from torchtitan.experiments.rl.process.host import gpu_memory_gib

    checks.check(config)
    command.overrides += checks.split_of(config, int(command.gpus or 0), gpu_gib=gpu_memory_gib() or checks.USUAL_GPU_GIB)
    return load_config(command)


def _newest(config: Any, command: Command) -> Any:
    """The run that ``--resume auto`` means, or None."""
    if command.resume is None:
        return None
    from torchtitan.experiments.rl.config.resume import find_resumed

    resumed = find_resumed("auto", config_name=command.config_name, output_dir=config.output_dir)
    if resumed is None:
        write_line(sys.stdout, f"no run of {command.config_name} in {config.output_dir} has a checkpoint: a new run starts")
    return resumed


def _check(config: Any, command: Command, resumed: Any) -> Any:
    """Check everything that can be known before a process is spawned, and make the run's folder, or take that of ``resumed``.

    A dry run prints the plan and leaves no folder. It notes what this machine lacks: GPUs, keys, files and, where the config
    names the architecture, the model.

    Returns:
        None: the resumed run has nothing left to do.
    """
    from torchtitan.experiments.rl.config import checks, trial
    from torchtitan.experiments.rl.config.checks import check_teachers
    from torchtitan.experiments.rl.config.machine import (
        checkpoint_seconds,
        fit_rows,
        machine_lacks,
        missing_gpu_memory,
        missing_gpus,
        missing_on_gpu_host,
        numa_lines,
        raise_descriptor_limit,
    )
    from torchtitan.experiments.rl.config.resume import Start, files_of_models, find_initial
    from torchtitan.experiments.rl.config.run_folder import (
        SavedCommand,
        check_run_folder,
        lock_run_folder,
        make_run_folder,
        save_command,
    )
    from torchtitan.experiments.rl.config.trial import learning_rate_warning, shown_tasks
    from torchtitan.experiments.rl.envs.renderer import AUTO, DEFAULT, renderer_name

    notes: list[MissingError] = []
    checks.check(config)  # first: only a checked config surely has a model to look for
    trial.build_parts(config)
    try:
        checks.check_model_folder(config.model)
    except MissingError as error:
        if not command.dry_run or config.model.flavor is None:
            raise
        notes.append(error)
    on_this_host = config.provision.job.host_count == 1 and config.provision.job.has_gpus is None
    without_gpus = command.dry_run and config.provision.device == "cuda" and on_this_host
    gpus = list(range(checks.needed_gpus(config)))
    plan = checks.plan_run(config, device="cuda", available=gpus) if without_gpus else checks.plan_run(config)
    fitted: str | None = None
    short: list[MissingError] = []
    if plan.device == "cpu" and on_this_host:
        try:
            plan, fitted = fit_rows(config, plan, lambda: checks.plan_run(config))
        except MissingError as error:
            short.append(error)
    lacking = checks.missing(config)
    if lacking and not command.dry_run:
        raise next(iter(lacking.values()))
    tasks = trial.build_tasks(config, left_out=lacking) if not notes else {}
    if not notes:
        check_teachers(config, ask_servers=not command.dry_run)
    raise_descriptor_limit()
    field, folder = ("output_dir", config.output_dir) if command.run_dir is None else ("--run-dir", command.run_dir)
    if resumed is not None:
        field, folder = "--resume", str(resumed.run_dir)
    checkpoints = resumed.checkpoints if resumed is not None else 0
    if command.push_to_hub is not None and not config.trainer.save_final_model:
        raise ConfigError("--push-to-hub", command.push_to_hub, "there is nothing to push: trainer.save_final_model is False")
    here = short + checks.missing_engine(config) + machine_lacks(plan, folder, field=field, checkpoints=checkpoints)
    here += missing_gpus(len(gpus)) if without_gpus else []
    here += missing_gpu_memory(plan) if on_this_host else []
    here += missing_on_gpu_host() if plan.device == "cuda" and on_this_host else []
    if command.push_to_hub is not None and (fault := push_fault(command.push_to_hub)) is not None:
        here.append(MissingError("--push-to-hub", command.push_to_hub, fault))
    if here and not command.dry_run:
        raise here[0]
    takes_s = checkpoint_seconds(plan, folder)
    grace_s = max(config.checkpoint.grace_s, config.provision.job.seconds_left())
    tried = trial.try_tasks(config, tasks)
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
            for line in [*lines, f"the run has taken its {config.steps} steps; a higher --steps goes on"]:
                write_line(sys.stdout, printable_line(line))
            return None
    else:
        if command.init_from is not None:
            start.init_from, refused = find_initial(command.init_from, config)
            lines = [*(f"refused     {reason}" for reason in refused), f"weights     of {start.init_from}"]
        job = config.provision.job
        keep = not command.dry_run
        start.run_dir = make_run_folder(command.run_dir, config.output_dir, name, keep=keep, may_hold=job.files)
    renderer = next((renderer_name(task.renderer) for task in tasks.values()), None)
    if config.renderer.name == AUTO and renderer == DEFAULT and not command.dry_run:
        lines.append("renderer    default: no family's makes the prompts that the tokenizer's own template does")
    for line in [*lines, *([fitted] if fitted is not None else [])]:
        write_line(sys.stdout, printable_line(line))
    start.plan = plan
    start.script = config.provision.job.script(command.words_in(start.run_dir), start.run_dir, plan.hosts)
    if not command.dry_run and start.script is None:
        start.lock = start.lock or lock_run_folder(Path(start.run_dir), field="--run-dir")
        files = {**(resumed.saved.model_files if resumed is not None else {}), **files_of_models(config)}
        saved = SavedCommand(config_name=name, module=command.module, overrides=command.overrides, model_files=files)
        save_command(Path(start.run_dir), saved)
    if command.dry_run:
        scheduled = start.script or config.provision.job.plan(start.run_dir, plan.hosts)
        near = numa_lines(plan.device, elsewhere=config.provision.job.has_gpus is not None)
        placed = plan.placement.lines(plan.device, submitted=start.script is not None)
        if takes_s is not None:
            near = [f"checkpoint     about {takes_s:,.0f} s, at the speed of this folder's disk", *near]
        print("\n".join([*plan.lines(), *placed, *near, *([scheduled] if scheduled else [])]))
        print("\n".join(shown_tasks(config, tried, renderer=renderer)))
        for note in [*notes, *lacking.values(), *here]:
            print(f"before a run   {printable_line(str(note))}")
    if takes_s is not None and takes_s > grace_s:
        warned = f"a checkpoint takes about {takes_s:,.0f} s here, and SIGTERM leaves the run {grace_s:,.0f} s: raise "
        field = "provision.job.stop_before_s" if config.provision.job.name == "slurm" else "checkpoint.grace_s"
        write_line(sys.stderr, f"warning: {warned}{field}, or what follows the last checkpoint is lost then")
    warnings = [learning_rate_warning(config, plan.parameters), *(task.examples_warning for task in tasks.values())]
    for warning in [*warnings, *(seen.warning for seen in tried.values())]:
        if warning is not None:
            write_line(sys.stderr, f"warning: {printable_line(warning)}")
    return start


def _submit(config: Any, start: Any) -> int:
    """Hand the run to a scheduler."""
    try:
        for line in config.provision.job.submit(start.script, start.run_dir):
            write_line(sys.stdout, printable_line(line))
    except RunError as error:
        write_line(sys.stderr, f"error: {printable_line(str(error))}")
        return 1
    except KeyboardInterrupt:  # the job stays in the queue
        return 130
    return 0


def _push(run_dir: Path, name: str) -> int:
    """Upload the policy of a run that is done."""
    from torchtitan.experiments.rl.config.hub import push

    return 0 if push(policies(run_dir)[-1], name) else 1


def _run(config: Any, start: Any, config_name: str) -> int:
    from torchtitan.experiments.rl.operations.session import run_to_end

    temporary = TemporaryFolder()
    hold_sockets(temporary.path)
    share_terminal()
    collect_again()
    try:
        return run_to_end(config, start, config_name, temporary)
    finally:
        temporary.remove()


if __name__ == "__main__":
    run_command(main)
