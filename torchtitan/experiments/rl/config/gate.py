"""What a run passes before a process of it is spawned. The first check that fails refuses the config.

A dry run passes the same checks, keeps no folder, and notes what this machine lacks in place of refusing it: GPUs, keys, files
and, where the config names the architecture, the model.
"""

import os
import shlex
import sys
from pathlib import Path

from torchtitan.experiments.rl.compat.huggingface_hub import push_fault
from torchtitan.experiments.rl.config import checks, machine, trial
from torchtitan.experiments.rl.config.command_line import Command
from torchtitan.experiments.rl.config.placement import needed_gpus
from torchtitan.experiments.rl.config.plan import RunPlan
from torchtitan.experiments.rl.config.resume import ResumedRun, Start, files_of_models, find_initial
from torchtitan.experiments.rl.config.run_config import RunConfig
from torchtitan.experiments.rl.config.run_folder import (
    SavedCommand,
    check_run_folder,
    lock_run_folder,
    make_run_folder,
    save_command,
)
from torchtitan.experiments.rl.envs.renderer import AUTO, DEFAULT, renderer_name
from torchtitan.experiments.rl.errors import ConfigError, MissingError, user_code
from torchtitan.experiments.rl.observability.console import typed_command, write_line
from torchtitan.experiments.rl.printable import printable_line
from torchtitan.experiments.rl.process.host import raise_descriptor_limit


def pass_gate(config: RunConfig, command: Command, resumed: ResumedRun | None) -> Start | None:
    """
    Returns:
        What the run starts from; None: the resumed run has nothing left to do.

    Raises:
        ConfigError: the first check that fails.
    """
    with user_code(
        "--config", str(command.config_name), "the check failed"
    ):  # the user's classes, where nothing expects it
        return _pass(config, command, resumed)


def _pass(config: RunConfig, command: Command, resumed: ResumedRun | None) -> Start | None:
    start, job, dry_run, hub = Start(), config.provision.job, command.dry_run, command.push_to_hub
    here = job.host_count == 1 and job.has_gpus is None
    lines: list[str] = []
    notes: list[MissingError] = []

    def note(lack: MissingError) -> None:
        """Refuse a run that lacks something; of a dry run note it."""
        if not dry_run:
            cure = f"{lack.cure} (--dry-run lists all that is missing)"
            raise MissingError(lack.field, lack.value, cure, lines=lack.lines)
        notes.append(lack)

    # The config by itself: only a checked one surely has a model to look for.
    checks.check(config)
    trial.build_parts(config)
    # Model and plan.
    try:
        checks.check_model_folder(config.model)
    except MissingError as error:
        if config.model.flavor is None:
            raise
        note(error)
    without_model = bool(notes)
    if resumed is None:
        checks.check_first_adapters(config)
    if dry_run and config.provision.device == "cuda" and here:
        plan = checks.plan_run(config, device="cuda", available=list(range(needed_gpus(config))))
    else:
        plan = checks.plan_run(config)
    if plan.device == "cpu" and here:
        try:
            plan, fitted = machine.fit_rows(plan)
            lines += [fitted] if fitted is not None else []
        except MissingError as error:
            note(error)
    # The tasks.
    missing = checks.missing(config)
    for lack in missing.values():
        note(lack)
    tasks = {} if without_model else trial.build_tasks(config, left_out=missing)
    if not without_model:
        checks.check_teachers(config, ask_servers=not dry_run)
    if not dry_run:
        checks.check_servers(config)
    # This machine.
    raise_descriptor_limit()
    field, folder = (
        ("output_dir", config.output_dir)
        if command.run_dir is None
        else ("--run-dir", command.run_dir)
    )
    if resumed is not None:
        field, folder = "--resume", str(resumed.run_dir)
    if hub is not None and not config.trainer.save_final_model:
        raise ConfigError(
            "--push-to-hub", hub, "there is nothing to push: trainer.save_final_model is False"
        )
    try:
        config.generator.engine.check_present(field="generator.engine")
    except MissingError as error:
        note(error)
    for lack in machine.lacks(
        plan,
        folder,
        field=field,
        checkpoints=0 if resumed is None else resumed.checkpoints,
        here=here,
    ):
        note(lack)
    if hub is not None and (fault := push_fault(hub)) is not None:
        note(MissingError("--push-to-hub", hub, fault))
    checkpoint_s = machine.checkpoint_seconds(plan, folder)
    tried = trial.try_tasks(config, tasks)
    # The run's folder: the resumed one's, or a new one.
    if resumed is not None:
        resumed.check_config(config)
        check_run_folder(resumed.run_dir, field="--resume")
        start.run_dir, start.resume_from, start.lock = (
            str(resumed.run_dir),
            resumed.checkpoint,
            resumed.lock,
        )
        if resumed.has_ended(config):
            for line in [
                *resumed.lines,
                f"the run has taken its {config.steps} steps; a higher --steps goes on",
            ]:
                write_line(sys.stdout, printable_line(line))
            return None
        lines = resumed.lines + lines
    elif command.init_from is not None:
        start.init_from, refused = find_initial(command.init_from, config)
        lines = [
            *(f"refused     {reason}" for reason in refused),
            f"weights     of {start.init_from}",
            *lines,
        ]
    if resumed is None:
        name = str(command.config_name)
        start.run_dir = make_run_folder(
            command.run_dir, config.output_dir, name, keep=not dry_run, may_hold=job.files
        )
    start.plan, start.script = (
        plan,
        job.script(command.words_in(start.run_dir), start.run_dir, plan.hosts),
    )
    renderer = next((task.renderer for task in tasks.values()), None)
    if (
        config.renderer.name == AUTO
        and renderer is not None
        and renderer_name(renderer) == DEFAULT
        and not dry_run
    ):
        lines.append(
            "renderer    default: no family's makes the prompts that the tokenizer's own template does"
        )
    for line in lines:
        write_line(sys.stdout, printable_line(line))
    if dry_run:
        shown = [
            *_plan_lines(config, plan, start, checkpoint_s),
            *trial.shown_tasks(config, tried, renderer=renderer),
        ]
        if plan.device == "cuda":
            words = [word for word in command.words if word != "--dry-run"]
            simulation = f"{typed_command('simulate')} {shlex.join(words)}"
            shown.append(f"what it takes  {simulation}   (simulated: docs/scale.md)")
            shown.append(f"best split     {simulation} --sweep replicas,max_offpolicy_steps")
        print(
            "\n".join([*shown, *(f"before a run   {printable_line(str(note))}" for note in notes)])
        )
    elif start.script is None:
        start.lock = start.lock or lock_run_folder(Path(start.run_dir), field="--run-dir")
        files = {
            **({} if resumed is None else resumed.saved.model_files),
            **files_of_models(config),
        }
        saved = SavedCommand(
            config_name=str(command.config_name),
            module=command.module,
            overrides=command.overrides,
            folder=command.started_in or os.getcwd(),
            model_files=files,
        )
        save_command(Path(start.run_dir), saved)
    warnings = [
        _checkpoint_warning(config, checkpoint_s),
        trial.learning_rate_warning(
            config, plan.sizes.parameters, whole_model_rate=command.whole_model_rate
        ),
    ]
    if config.generator.engine.warning is not None:
        warnings.append(f"generator.engine.{config.generator.engine.warning}")
    if renderer is not None:
        warnings.append(trial.turn_end_warning(config))
    warnings += [
        *(task.examples_warning for task in tasks.values()),
        *trial.validation_warnings(config, tasks),
        *(line for seen in tried.values() for line in seen.warnings()),
    ]
    if here and plan.device == "cuda":
        warnings.append(machine.memory_warning(plan))
    for warning in warnings:
        if warning is not None:
            write_line(sys.stderr, f"warning: {printable_line(warning)}")
    return start


def _plan_lines(
    config: RunConfig, plan: RunPlan, start: Start, checkpoint_s: float | None
) -> list[str]:
    job = config.provision.job
    lines = plan.lines() + plan.placement.lines(plan.device, submitted=start.script is not None)
    if checkpoint_s is not None:
        lines.append(
            f"checkpoint     about {checkpoint_s:,.0f} s, at the speed of this folder's disk"
        )
    lines.append(f"metrics        {', '.join(config.metrics.destinations()) or 'nowhere'}")
    scheduled = start.script or job.plan(start.run_dir, plan.hosts)
    return lines + ([scheduled] if scheduled else [])


def _checkpoint_warning(config: RunConfig, takes_s: float | None) -> str | None:
    job = config.provision.job
    grace_s = max(config.checkpoint.grace_s, job.seconds_left())
    if takes_s is None or takes_s <= grace_s:
        return None
    field = "provision.job.stop_before_s" if job.name == "slurm" else "checkpoint.grace_s"
    told = f"a checkpoint takes about {takes_s:,.0f} s here, and SIGTERM leaves the run {grace_s:,.0f} s: raise {field}"
    return f"{told}, or what follows the last checkpoint is lost then"
