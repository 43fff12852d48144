"""The gate: every check that a run passes before a process of it is spawned.

Consumes:  a config, its command and, with ``--resume``, the run that goes on.
Produces:  a ``Start``: the plan and the folder of a run, the script of a job, or nothing to do.
Refuses:   by the first check that fails, in one line with field, value and cure.

The checks go from cheap to expensive: the config by itself, the model's folder and the plan, the
tasks with their data, this machine, and a try of each task; then the checkpoint that the run begins
with, and its folder. A dry run passes the same checks and keeps no folder. It notes what this
machine lacks (GPUs, keys, files and, where the config names the architecture, the model) instead of
refusing it.
"""

import functools
import os
import shlex
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from torchtitan.experiments.rl.command import briefing, checks, machine
from torchtitan.experiments.rl.command.build import (
    PolicyTokenizer,
    build_parts,
    build_tasks,
    read_policy_tokenizer,
)
from torchtitan.experiments.rl.command.command_line import Command
from torchtitan.experiments.rl.command.preflight import PreflightResult, run_preflight
from torchtitan.experiments.rl.command.resume import (
    ResumedRun,
    digests_of_datasets,
    files_of_models,
    find_initial,
)
from torchtitan.experiments.rl.command.run_folder import (
    SavedCommand,
    check_run_folder,
    lock_run_folder,
    make_run_folder,
    save_command,
)
from torchtitan.experiments.rl.command.start import NothingToStart, Ready, Start, ToSubmit
from torchtitan.experiments.rl.command.teachers import check_servers, check_teachers
from torchtitan.experiments.rl.compat.huggingface_hub import push_fault
from torchtitan.experiments.rl.config.run_config import RunConfig
from torchtitan.experiments.rl.envs.renderer import AUTO, DEFAULT, renderer_name
from torchtitan.experiments.rl.errors import ConfigError, MissingError, user_code
from torchtitan.experiments.rl.observability.console import typed_command, write_line
from torchtitan.experiments.rl.plan.placement import needed_gpus
from torchtitan.experiments.rl.plan.plan import RunPlan
from torchtitan.experiments.rl.printable import printable_line
from torchtitan.experiments.rl.process.host import raise_descriptor_limit
from torchtitan.experiments.rl.tasks.task import Task


def pass_gate(config: RunConfig, command: Command, resumed: ResumedRun | None) -> Start:
    """Check all that can be checked before a process is spawned, and print what to know of the run.

    Raises:
        ConfigError: the first check that failed.
    """
    # Methods of the user's classes run inside the checks, also where no check expects their errors.
    with user_code("--config", str(command.config_name), "the check failed"):
        return _Gate(config, command, resumed).run()


@dataclass
class _Gate:
    """One pass of a command through the checks, with what they have found out so far."""

    config: RunConfig
    command: Command
    resumed: ResumedRun | None
    lines: list[str] = field(default_factory=list)
    """Lines that are printed once every check has passed."""
    lacks: list[MissingError] = field(default_factory=list)
    """Things that a dry run has noted as missing on this machine."""
    has_model: bool = True
    """False if the policy's folder is not on this machine; only a dry run goes on then."""
    policy: PolicyTokenizer | None = None
    """Tokenizer and renderer of the policy; None until they are loaded, and where there is no
    model."""
    tasks: Mapping[str, Task] = field(default_factory=dict)
    """Tasks built for these checks alone; the run builds its own (`build_tasks` says why)."""
    preflights: Mapping[str, PreflightResult] = field(default_factory=dict)
    checkpoint_s: float | None = None
    """Time that a checkpoint takes; None where it is short or can't be measured."""

    @functools.cached_property
    def datasets(self) -> Mapping[str, str]:
        """Digests of the tasks' examples, by the fields of their datasets."""
        return digests_of_datasets(self.tasks)

    @property
    def runs_here(self) -> bool:
        """True if the whole run is computed on this host."""
        job = self.config.provision.job
        return job.host_count == 1 and job.has_gpus is None

    def run(self) -> Start:
        checks.check(self.config)
        build_parts(self.config)
        self._check_model()
        plan = self._make_plan()
        self.config = plan.config
        self._check_tasks()
        self._check_machine(plan)
        self.preflights = run_preflight(self.config, self.tasks, self.policy)

        if self.resumed is not None and self._has_ended(self.resumed):
            return NothingToStart()
        init_from = self._find_initial()
        run_dir = self._run_folder()
        words = self.command.words_in(run_dir, resumes=self.resumed is not None)
        script = self.config.provision.job.script(words, run_dir, plan.hosts)
        self._print_lines()
        start: Start
        if self.command.dry_run:
            self._print_plan(plan, run_dir, script, init_from)
            start = NothingToStart()
        elif script is not None:
            start = ToSubmit(plan=plan, run_dir=run_dir, script=script)
        else:
            start = self._take_folder(plan, run_dir, init_from)
        self._print_warnings(plan)
        return start

    def _note(self, lack: MissingError) -> None:
        """Raise because the run lacks something; in a dry run, keep the lack to print it."""
        if not self.command.dry_run:
            cure = f"{lack.cure} (--dry-run lists all that is missing)"
            raise MissingError(lack.field, lack.value, cure, lines=lack.lines)
        self.lacks.append(lack)

    def _check_model(self) -> None:
        try:
            checks.check_model_folder(self.config.model)
        except MissingError as error:
            if self.config.model.flavor is None:
                raise  # without a flavor only the folder says what the model is
            self._note(error)
            self.has_model = False
        if self.resumed is None:
            checks.check_first_adapters(self.config)

    def _make_plan(self) -> RunPlan:
        config = self.config
        if self.command.dry_run and config.provision.device == "cuda" and self.runs_here:
            gpus = list(range(needed_gpus(config)))
            plan = checks.plan_run(config, device="cuda", available=gpus)
        else:
            plan = checks.plan_run(config)
        if plan.device == "cpu" and self.runs_here:
            try:
                plan, fitted = machine.fit_rows(plan)
                if fitted is not None:
                    self.lines.append(fitted)
            except MissingError as error:
                self._note(error)
        return plan

    def _check_tasks(self) -> None:
        config = self.config
        dry_run = self.command.dry_run
        missing = checks.missing(config)
        for lack in missing.values():
            self._note(lack)
        if self.has_model:
            self.policy = read_policy_tokenizer(config)
            self.tasks = build_tasks(config, self.policy, left_out=missing)
            check_teachers(config, self.policy.tokenizer, ask_servers=not dry_run)
        if not dry_run:
            check_servers(config)

    def _check_machine(self, plan: RunPlan) -> None:
        """Check this machine's engine, GPUs, memory and disk, and the hub that is pushed to."""
        config = self.config
        hub = self.command.push_to_hub
        raise_descriptor_limit()
        if hub is not None and not config.trainer.save_final_model:
            cure = "there is nothing to push: trainer.save_final_model is False"
            raise ConfigError("--push-to-hub", hub, cure)
        try:
            config.generator.engine.check_present(field="generator.engine")
        except MissingError as error:
            self._note(error)
        option, folder = self._folder_option()
        saved = 0 if self.resumed is None else self.resumed.checkpoints
        for shortage in machine.shortages(
            plan, folder, field=option, checkpoints=saved, runs_here=self.runs_here
        ):
            self._note(shortage)
        fault = None if hub is None else push_fault(hub)
        if fault is not None:
            self._note(MissingError("--push-to-hub", hub, fault))
        self.checkpoint_s = machine.checkpoint_seconds(plan, folder)

    def _folder_option(self) -> tuple[str, str]:
        """Return the option or field that names the folder of the run's files, and the folder."""
        if self.resumed is not None:
            return "--resume", str(self.resumed.run_dir)
        if self.command.run_dir is not None:
            return "--run-dir", self.command.run_dir
        return "output_dir", self.config.output_dir

    def _has_ended(self, resumed: ResumedRun) -> bool:
        """Compare the config with the resumed run's.

        Returns:
            True if that run has taken all its steps, after a line that says so.
        """
        resumed.check_config(self.config, self.datasets)
        check_run_folder(resumed.run_dir, field="--resume")
        self.lines = resumed.lines + self.lines
        if not resumed.has_ended(self.config):
            return False
        steps = f"the run has taken its {self.config.steps} steps; a higher --steps goes on"
        for line in [*resumed.lines, steps]:
            write_line(sys.stdout, printable_line(line))
        return True

    def _find_initial(self) -> Path | None:
        """Return the checkpoint that ``--init-from`` names, if the command has that option.

        A run that begins again has that of the command which started it.
        """
        given = self._init_from()
        if given is None:
            return None
        checkpoint, refused = find_initial(given, self.config)
        said = [*(f"refused     {reason}" for reason in refused), f"weights     of {checkpoint}"]
        self.lines = said + self.lines
        return checkpoint

    def _init_from(self) -> str | None:
        return self.command.init_from if self.resumed is None else self.resumed.init_from

    def _run_folder(self) -> str:
        """Return the resumed run's folder, or make one; a dry run removes it again."""
        if self.resumed is not None:
            return str(self.resumed.run_dir)
        return make_run_folder(
            self.command.run_dir,
            self.config.output_dir,
            str(self.command.config_name),
            keep=not self.command.dry_run,
            may_hold=self.config.provision.job.files,
        )

    def _take_folder(self, plan: RunPlan, run_dir: str, init_from: Path | None) -> Ready:
        """Lock the run folder for this process, and save the command there for ``--resume``."""
        resumed = self.resumed
        command = self.command
        folder = Path(run_dir)
        files: dict[str, Mapping[str, str]] = {**files_of_models(self.config)}
        datasets = self.datasets
        checkpoint = None
        if resumed is None:
            lock = lock_run_folder(folder, field="--run-dir")
        else:
            lock = resumed.lock
            checkpoint = resumed.checkpoint
            files = {**resumed.saved.model_files, **files}
            datasets = {**resumed.saved.datasets, **datasets}
        began_with = command.init_from if resumed is None else resumed.saved.init_from
        saved = SavedCommand(
            config_name=str(command.config_name),
            module=command.module,
            overrides=command.overrides,
            folder=command.started_in or os.getcwd(),
            model_files=files,
            datasets=datasets,
            init_from=None if began_with is None else os.path.abspath(began_with),
        )
        save_command(folder, saved)
        return Ready(
            plan=plan, run_dir=run_dir, lock=lock, resume_from=checkpoint, init_from=init_from
        )

    def _print_lines(self) -> None:
        if self._default_renderer_was_picked() and not self.command.dry_run:
            why = (
                "no family's makes the prompts of the template; each turn may become a training "
                "sample of its own"
            )
            self.lines.append(f"renderer    default: {why}")
        for line in self.lines:
            write_line(sys.stdout, printable_line(line))

    def _default_renderer_was_picked(self) -> bool:
        if self.policy is None or not self.tasks:
            return False
        picked = renderer_name(self.policy.renderer) == DEFAULT
        return picked and self.config.renderer.name == AUTO

    def _print_plan(
        self, plan: RunPlan, run_dir: str, script: str | None, init_from: Path | None
    ) -> None:
        """Print the plan, the tasks with their first prompts, and what is missing here."""
        config = self.config
        job = config.provision.job
        shown = plan.lines() + plan.placement.lines(plan.device, submitted=script is not None)
        if self.checkpoint_s is not None:
            takes = f"about {self.checkpoint_s:,.0f} s, at the speed of this folder's disk"
            shown.append(f"checkpoint     {takes}")
        shown.append(f"metrics        {', '.join(config.metrics.destinations()) or 'nowhere'}")
        if self.command.push_to_hub is not None:
            best_by = config.checkpoint.keep_best
            policy = "policy of the last step" if best_by is None else f"best policy by {best_by}"
            shown.append(f"hub            the {policy} is pushed to {self.command.push_to_hub}")
        scheduled = script or job.plan(run_dir, plan.hosts)
        if scheduled:
            shown.append(scheduled)
        shown += briefing.task_lines(
            config,
            self.preflights,
            self.policy if self.tasks else None,
            tasks=self.tasks,
            begins_from=init_from,
        )
        if plan.device == "cuda":
            simulation = f"{typed_command('simulate')} {shlex.join(self.command.tool_words())}"
            shown.append(f"what it takes  {simulation}   (simulated: docs/scale.md)")
            shown.append(f"best split     {simulation} --sweep replicas,max_offpolicy_steps")
        shown += [f"before a run   {printable_line(str(lack))}" for lack in self.lacks]
        print("\n".join(shown))

    def _print_warnings(self, plan: RunPlan) -> None:
        config = self.config
        engine = config.generator.engine
        rate = self.command.whole_model_rate
        warnings = [
            self._checkpoint_warning(),
            briefing.learning_rate_warning(config, plan.sizes.parameters, whole_model_rate=rate),
        ]
        if engine.warning is not None:
            warnings.append(f"generator.engine.{engine.warning}")
        warnings += [task.examples_warning for task in self.tasks.values()]
        warnings += briefing.validation_warnings(config, self.tasks)
        for result in self.preflights.values():
            warnings += result.warnings
        if self.runs_here and plan.device == "cuda":
            warnings.append(machine.memory_warning(plan))
        for warning in warnings:
            if warning is not None:
                write_line(sys.stderr, f"warning: {printable_line(warning)}")

    def _checkpoint_warning(self) -> str | None:
        """Return a line if a checkpoint takes longer than the run has after SIGTERM."""
        job = self.config.provision.job
        takes_s = self.checkpoint_s
        grace_s = max(self.config.checkpoint.grace_s, job.seconds_left())
        if takes_s is None or takes_s <= grace_s:
            return None
        raised = "provision.job.stop_before_s" if job.name == "slurm" else "checkpoint.grace_s"
        return (
            f"a checkpoint takes about {takes_s:,.0f} s here, and SIGTERM leaves the run "
            f"{grace_s:,.0f} s: raise {raised}, or what follows the last checkpoint is lost then"
        )
