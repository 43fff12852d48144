"""``--resume`` and ``--init-from``: the verified checkpoint, and what changed in the config."""

import contextlib
import dataclasses
import json
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO

import torch

from torchtitan.components.optimizer import LRSchedulersContainer
from torchtitan.experiments.rl.bounds import declared, walk
from torchtitan.experiments.rl.checkpointing.folder import (
    SET_ASIDE_FOLDER,
    TRAINER_FOLDER,
    CheckpointError,
    checkpoints,
    newest_valid,
    policies,
    step_of,
    verify,
    write_durably,
)
from torchtitan.experiments.rl.command.command_line import Command
from torchtitan.experiments.rl.command.folder_kinds import (
    AdapterFolder,
    CheckpointFolder,
    HubFolder,
    OtherFolder,
    PolicyFolder,
    RunFolder,
    folder_kind,
)
from torchtitan.experiments.rl.command.run_folder import (
    CONFIG_FILE,
    SavedCommand,
    has_no_checkpoint_yet,
    lock_run_folder,
    model_files,
    read_command,
    read_config,
)
from torchtitan.experiments.rl.compat.torch import check_pickles
from torchtitan.experiments.rl.compat.torchtitan import built_class
from torchtitan.experiments.rl.config.run_config import RunConfig
from torchtitan.experiments.rl.errors import ConfigError
from torchtitan.experiments.rl.generation.references import hosted_models
from torchtitan.experiments.rl.observability.console import near
from torchtitan.experiments.rl.observability.metrics import read_metrics
from torchtitan.experiments.rl.rollouts.record_file import METRICS_FILE
from torchtitan.experiments.rl.tasks.task import Task

ABSENT = "(absent)"


@dataclass(frozen=True, slots=True)
class Change:
    """Field whose value differs between a resumed run and the command that resumes it."""

    field: str
    """Path of the field."""
    saved: Any
    """Value that the run was started with; ABSENT if it had no such field."""
    new: Any
    """Value that the command gives; ABSENT if its config has no such field."""
    allowed: bool = False
    """True if a resumed run may change the field."""

    def __str__(self) -> str:
        return f"{self.field} = {self.new!r} (was {self.saved!r})"


def compare(saved: Any, config: Any) -> list[Change]:
    """Return the differences between a run's resolved config and a config, in the latter's order.

    The annotations of the config's fields say which of them may change.
    """
    changeable = [path for path, _, annotation in walk(config) if declared(annotation).may_change]
    return [
        Change(path, before, now, any(_is_or_lies_in(path, field) for field in changeable))
        for path, before, now in _differences(saved, resolved_config(config), "")
    ]


def _is_or_lies_in(path: str, field: str) -> bool:
    """Return True if a path names a field, or a place inside the field's value."""
    return path == field or path.startswith((f"{field}.", f"{field}["))


def check_changes(changes: list[Change]) -> None:
    """Refuse a change of a field that may not change.

    Raises:
        ConfigError: names the first such field, both values and the cure.
    """
    for change in changes:
        if not change.allowed:
            cure = (
                f"the run that is resumed has {change.saved!r}: keep it, or start a new run "
                "(--init-from takes the weights)"
            )
            raise ConfigError(change.field, change.new, cure)


def _differences(before: Any, now: Any, path: str) -> Iterator[tuple[str, Any, Any]]:
    """Yield path, old and new value of each place in which two resolved configs differ.

    Args:
        path: path of the two values in their configs; "" for whole configs.
    """
    if isinstance(before, dict) and isinstance(now, dict):
        yield from _differences_of_entries(before, now, path)
    elif isinstance(before, list) and isinstance(now, list) and before and now:
        yield from _differences_of_entries(_by_index(before), _by_index(now), path)
    elif before != now:
        yield path, _class_or_value(before), _class_or_value(now)


def _differences_of_entries(
    before: dict[str, Any], now: dict[str, Any], path: str
) -> Iterator[tuple[str, Any, Any]]:
    """Yield the differences of two dicts' entries: those of ``now`` first, then those that went.

    Of parts of two classes the classes alone are compared: their fields say nothing about each
    other.
    """
    keys = [*now, *(key for key in before if key not in now)]
    if before.get("class") != now.get("class"):
        keys = ["class"]
    for key in keys:
        inside = f"{path}{key}" if key.startswith("[") else f"{path}.{key}".removeprefix(".")
        yield from _differences(before.get(key, ABSENT), now.get(key, ABSENT), inside)


def _by_index(entries: list[Any]) -> dict[str, Any]:
    """Return the entries of a list by the ends of their paths, such as ``[0]``."""
    return {f"[{index}]": entry for index, entry in enumerate(entries)}


def _class_or_value(value: Any) -> Any:
    """Return the class that a part's resolved config builds; any other value as it is."""
    return value["class"] if isinstance(value, dict) and "class" in value else value


def save_config(run_dir: Path, config: Any) -> Any:
    """Save the resolved config in the run folder, and return it."""
    resolved = resolved_config(config)
    write_durably(run_dir / CONFIG_FILE, json.dumps(resolved, indent=2) + "\n")
    return resolved


def resolved_config(value: Any) -> Any:
    """Return a config as plain JSON values.

    A dataclass becomes a dict, whose ``class`` names what the Config builds; functions and classes
    become their qualified names.
    """
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        fields = {
            field.name: resolved_config(getattr(value, field.name))
            for field in dataclasses.fields(value)
        }
        return {"class": _qualified_name(built_class(value)), **fields}
    if isinstance(value, dict):
        return {str(key): resolved_config(entry) for key, entry in value.items()}
    if isinstance(value, list | tuple):
        return [resolved_config(entry) for entry in value]
    if value is None or isinstance(value, str | int | float | bool):
        return value
    return _qualified_name(value) if callable(value) else repr(value)


def _qualified_name(value: Any) -> str:
    return f"{value.__module__}.{getattr(value, '__qualname__', type(value).__qualname__)}"


RESUME = "--resume"
INIT_FROM = "--init-from"
AUTO = "auto"


@dataclass(slots=True)
class ResumedRun:
    """A run that this command goes on with. The run folder is locked for this process."""

    run_dir: Path
    checkpoint: Path | None
    """Verified checkpoint from which the run goes on; None for a run that ended before its first
    checkpoint, and begins again."""
    saved: SavedCommand
    """Command that started the run."""
    saved_config: dict[str, Any]
    """Resolved config that the run was started with; empty if it ended before it was saved."""
    lock: BinaryIO
    """Locked file of the run folder; the lock is held until the file is closed."""
    lines: list[str] = field(default_factory=list)
    """Lines for the person who resumes: checkpoints that were refused, fields that changed."""

    @property
    def step(self) -> int:
        return 0 if self.checkpoint is None else step_of(self.checkpoint)

    @property
    def init_from(self) -> str | None:
        """Run or checkpoint of another run with whose weights this run begins, if it does again."""
        return self.saved.init_from if self.checkpoint is None else None

    @property
    def checkpoints(self) -> int:
        """Number of complete checkpoints in the run folder."""
        return len(checkpoints(self.run_dir))

    def command(self, given: Command) -> Command:
        """Return ``given``; without --config, the run's command and the overrides of ``given``."""
        if given.config_name is not None:
            return given
        overrides = [*self.saved.overrides, *given.overrides]
        command = dataclasses.replace(
            given, config_name=self.saved.config_name, module=self.saved.module, overrides=overrides
        )
        command.find_modules_of(self.saved.folder)
        return command

    def has_ended(self, config: RunConfig) -> bool:
        """Return True if every step is taken, and the policy saved if the config asks for it."""
        saved = any(path.name == f"step-{self.step}" for path in policies(self.run_dir))
        return self.step >= config.steps and (saved or not config.trainer.save_final_model)

    def check_config(self, config: RunConfig, datasets: Mapping[str, str]) -> None:
        """Compare the config with the run's, and add a line for each field that may change and has.

        A run without a checkpoint may change in every field: nothing of it goes on.

        Args:
            config: the resolved config.
            datasets: digests of the examples, by the path of each dataset's field.

        Raises:
            ConfigError: a field differs that may not change, or the examples that are trained on.
        """
        changes = compare(self.saved_config, config) if self.saved_config else []
        if self.checkpoint is None:
            self.lines += [f"changed     {change}" for change in changes]
            return
        files = files_of_models(config)
        self._check_model_files(config, files)
        self._check_optimizer(config)
        check_changes(
            [
                change
                for change in changes
                if not self._moved(change, files) and not self._moved_data(change, datasets)
            ]
        )
        self._check_datasets(config, datasets)
        self.lines += [f"changed     {change}" for change in changes]
        self.lines += self._goal_lines(config)
        stretched = self._schedule_line(config)
        if stretched is not None:
            self.lines.append(stretched)

    def _check_model_files(self, config: RunConfig, files: dict[str, dict[str, str]]) -> None:
        """Refuse a model's folder, named as when the run began, whose files have changed since.

        Args:
            files: digests of the files of each model, by the path of its folder.

        Raises:
            ConfigError: names the folder and the first file that differs.
        """
        for path, now in files.items():
            before = self.saved.model_files.get(path)
            if before is None or before == now:
                continue
            first = min(name for name in {**before, **now} if before.get(name) != now.get(name))
            field = "model.hf_assets_path" if path == config.model.hf_assets_path else "path"
            cure = (
                f"its {first} is not the one the run began with: put that back, or start a new run"
            )
            raise ConfigError(field, path, cure)

    def _check_optimizer(self, config: RunConfig) -> None:
        """Refuse another optimizer than the one whose moments the checkpoint has.

        A run of an older version has AdamW, and names none.

        Raises:
            ConfigError: names both optimizers.
        """
        saved = (self.saved_config.get("trainer") or {}).get("optimizer") or {}
        before = saved.get("name", "adamw")
        now = config.trainer.optimizer.name
        if now != before:
            cure = (
                f"the checkpoint has the moments of {before}: keep it, or start a new run "
                "(--init-from takes the weights)"
            )
            raise ConfigError("trainer.optimizer.name", now, cure)

    def _check_datasets(self, config: RunConfig, datasets: Mapping[str, str]) -> None:
        """Refuse other examples to train on, and add a line for others to validate on.

        Raises:
            ConfigError: names the first such dataset.
        """
        for path, now in datasets.items():
            before = self.saved.datasets.get(path, now)
            if before == now:
                continue
            counts = f"{_rows_of(now)} now, {_rows_of(before)} when the run began"
            task, _, part = path.removeprefix("tasks.").rpartition(".")
            if part == "validation":
                self.lines.append(f"changed     {path}: other examples ({counts})")
                continue
            kind = built_class(config.tasks[task].dataset).__name__
            cure = (
                f"its examples are not those that the run began with ({counts}): put those back, "
                "or start a new run (--init-from takes the weights)"
            )
            raise ConfigError(path, kind, cure)

    def _moved_data(self, change: Change, datasets: Mapping[str, str]) -> bool:
        """Return True if the change is another path of a dataset with the same examples."""
        field, _, last = change.field.rpartition(".")
        return last == "path" and datasets.get(field, "") == self.saved.datasets.get(field)

    def _goal_lines(self, config: RunConfig) -> list[str]:
        """Return which earlier evaluations no longer count, if others are asked for now."""
        saved = self.saved_config
        before = saved.get("checkpoint") or {}
        by = before.get("keep_best")
        now = config.checkpoint
        lines = []
        if by is not None and (by, before.get("best_is")) != (now.keep_best, now.best_is):
            lines.append(
                f"best        no checkpoint up to step {self.step} counts as the best any more: "
                f"they were compared by the {before.get('best_is')} {by}"
            )
        goal = saved.get("stop_at") or {}
        was_set = goal.get("value") is not None or goal.get("patience") is not None
        is_other = (goal.get("metric"), goal.get("best_is")) != (
            config.stop_at.metric,
            config.stop_at.best_is,
        )
        if was_set and is_other:
            lines.append(
                f"stop        no evaluation up to step {self.step} counts for stop_at any more: it "
                f"was for the {goal.get('best_is')} {goal.get('metric')}"
            )
        return lines

    def _schedule_line(self, config: RunConfig) -> str | None:
        """Return how the learning rate goes on, if the resumed run has another schedule."""
        saved_trainer = self.saved_config.get("trainer") or {}
        saved_rate = (saved_trainer.get("optimizer") or {}).get("lr")
        saved_fields = saved_trainer.get("lr_scheduler")
        if not saved_rate or not saved_fields or not self.step:
            return None
        schedule = config.trainer.lr_scheduler
        names = [entry.name for entry in dataclasses.fields(schedule)]
        saved_schedule = dataclasses.replace(
            schedule, **{name: saved_fields[name] for name in names if name in saved_fields}
        )
        saved_steps = self.saved_config["steps"]
        step = self.step
        before = saved_rate * learning_rate_factor(saved_schedule, saved_steps, step)
        planned = saved_rate * learning_rate_factor(saved_schedule, saved_steps, step + 1)
        after = config.trainer.optimizer.lr * learning_rate_factor(schedule, config.steps, step + 1)
        if math.isclose(after, planned, rel_tol=1e-6):
            return None
        return (
            f"schedule    the learning rate goes from {before:.3g} at step {step} to "
            f"{after:.3g} at step {step + 1}: "
            f"its schedule is now one of {schedule.total_steps or config.steps} steps "
            "(trainer.lr_scheduler, trainer.optimizer.lr)"
        )

    def _moved(self, change: Change, files: dict[str, dict[str, str]]) -> bool:
        """Return True if the change is another path of a model's folder with the same files."""
        before = self.saved.model_files.get(change.saved) if isinstance(change.saved, str) else None
        return bool(before) and files.get(change.new) == before


def learning_rate_factor(schedule: LRSchedulersContainer.Config, steps: int, step: int) -> float:
    """Return the share of the learning rate that a step is taken with; 0 after the schedule's end.

    Args:
        steps: number of steps of the run.
        step: number of the step, counted from 1.
    """
    total = schedule.total_steps or steps
    if step > total:
        return 0.0
    parameter = torch.nn.Parameter(torch.zeros(1))
    optimizer = torch.optim.SGD([parameter], lr=1.0)
    built = schedule.build(optimizers=[optimizer], training_steps=steps)
    return built.schedulers[0].lr_lambdas[0](step - 1)


def find_resumed(
    given: str, *, config_name: str | None = None, output_dir: str | None = None
) -> ResumedRun | None:
    """Return the run that goes on, with its newest valid checkpoint or the one that is named.

    Args:
        given: run folder, checkpoint in one, or "auto" for the newest run of ``config_name`` in
            ``output_dir``.

    Returns:
        The run; None if "auto" found no run with a checkpoint.

    Raises:
        ConfigError: there is no such run, none of its checkpoints is valid, or another process runs
            in it.
    """
    if given == AUTO:
        newest = _newest_run(Path(output_dir or "."), str(config_name))
        if newest is None or not checkpoints(newest):
            return None
        return _open_run(newest, None, given)
    run_dir, checkpoint = _locate(given, RESUME)
    return _open_run(run_dir, checkpoint, given)


def find_initial(given: str, config: RunConfig) -> tuple[Path, list[str]]:
    """Return the checkpoint whose weights a new run begins with, and why newer ones were refused.

    Raises:
        ConfigError: there is none, or it is of another model.
    """
    run_dir, checkpoint = _locate(given, INIT_FROM)
    path, refused = _verify_checkpoint(run_dir, checkpoint, given, INIT_FROM)
    saved, saved_config = read_saved(run_dir, path)
    old_path = str(((saved_config or {}).get("model") or {}).get("hf_assets_path"))
    old = saved.model_files.get(old_path, {}).get("config.json") if saved is not None else None
    new = model_files(config.model.hf_assets_path).get("config.json")
    if old is not None and new is not None and old != new:
        cure = (
            f"its model ({old_path}) has another config.json than {config.model.hf_assets_path}: "
            "name a run of the same model"
        )
        raise ConfigError(INIT_FROM, given, cure)
    if saved_config is not None:
        _check_adapters(given, saved_config, config)
    return path, refused


def _check_adapters(given: str, saved: dict[str, Any], config: RunConfig) -> None:
    """Refuse a checkpoint that holds other weights than those which the run trains.

    Raises:
        ConfigError: what the checkpoint holds is not what is trained.
    """
    before = (saved.get("trainer") or {}).get("lora")
    now = resolved_config(config.trainer.lora)
    if before is None and now is None:
        return
    if before is None:
        cure = (
            "it has trained the whole model, and this run trains adapters: --model takes its policy"
        )
        raise ConfigError(INIT_FROM, given, cure)
    if now is None:
        cure = (
            "it has trained adapters, and this run the whole model: --model takes its policy, or "
            "set trainer.lora"
        )
        raise ConfigError(INIT_FROM, given, cure)
    for name in ("rank", "targets"):
        if before[name] != now[name]:
            cure = f"its adapters have {name} {before[name]!r}: set this to it"
            raise ConfigError(f"trainer.lora.{name}", now[name], cure)


def find_checkpoint(given: str) -> tuple[Path, Path]:
    """Return the run folder and the verified checkpoint of a run, or the one that is named.

    Raises:
        ConfigError: there is none.
    """
    option = "RUN_OR_CHECKPOINT"
    run_dir, checkpoint = _locate(given, option)
    return run_dir, _verify_checkpoint(run_dir, checkpoint, given, option)[0]


def files_of_models(config: RunConfig) -> dict[str, dict[str, str]]:
    """Return ``model_files`` of the policy's folder and of each model that the run serves."""
    paths = [
        config.model.hf_assets_path,
        *(model.path for model in hosted_models(config.tasks).values()),
    ]
    return {path: model_files(path) for path in paths}


def digests_of_datasets(tasks: Mapping[str, Task]) -> dict[str, str]:
    """Return the digest of each task's examples, by the field of its dataset's config.

    A dataset that has no digest is left out.
    """
    digests = {}
    for name, task in tasks.items():
        for part in ("dataset", "validation"):
            dataset = getattr(task, part)
            digest = None if dataset is None else dataset.digest()
            if digest is not None:
                digests[f"tasks.{name}.{part}"] = digest
    return digests


def _rows_of(digest: str) -> str:
    """Return the number of rows that a digest begins with."""
    return digest.rpartition(",")[0] or "others"


def read_saved(*folders: Path) -> tuple[SavedCommand | None, dict[str, Any] | None]:
    """Return command and config of a run, each from the first folder that has one.

    The folders are the run's, then its checkpoints with their copies.
    """
    command = next(filter(None, map(read_command, folders)), None)
    config = next(filter(None, map(read_config, folders)), None)
    return command, config


def _open_run(run_dir: Path, checkpoint: Path | None, given: str) -> ResumedRun:
    """Read a run's command and config, lock its folder, and verify the checkpoint to go on from.

    A run that ended before its first checkpoint begins again.

    Args:
        checkpoint: checkpoint that the command names; None for the newest that is valid.

    Raises:
        ConfigError: the folder holds no such run, its checkpoint is not valid, or another process
            runs in it.
    """
    saved, saved_config = read_saved(run_dir, *reversed(checkpoints(run_dir)))
    if saved is not None and checkpoint is None and has_no_checkpoint_yet(run_dir):
        lock = lock_run_folder(run_dir, field=RESUME)
        line = _line_of_new_beginning(run_dir)
        return ResumedRun(run_dir, None, saved, saved_config or {}, lock, [line])
    if saved is None or saved_config is None:
        cure = (
            "holds no run that can be resumed: it has no readable command.json and config.json; "
            "name a run's folder"
        )
        raise ConfigError(RESUME, str(run_dir), cure)
    lock = lock_run_folder(run_dir, field=RESUME)
    try:
        path, refused = _verify_checkpoint(run_dir, checkpoint, given, RESUME)
    except ConfigError:
        lock.close()
        raise
    lines = [
        *(f"refused     {reason}" for reason in refused),
        f"resumed     step {step_of(path)}, from {path}",
    ]
    return ResumedRun(run_dir, path, saved, saved_config, lock, lines)


def _line_of_new_beginning(run_dir: Path) -> str:
    """Return the line that says that a run begins again, and how many of its steps are dropped."""
    steps = 0
    with contextlib.suppress(OSError, ValueError, LookupError):  # no metrics, or damaged ones
        steps = int(read_metrics(run_dir / METRICS_FILE)[-1]["step"])
    line = "resumed     step 0: the run has no checkpoint, and begins again"
    if steps:
        line += f"; its {steps} step{'s' * (steps != 1)} are taken anew"
    return line


def _locate(given: str, option: str) -> tuple[Path, Path | None]:
    """Return the run folder, and the checkpoint where ``given`` names one.

    A folder of no known kind may be a run whose checkpoints are gone, and is refused as such later.

    Raises:
        ConfigError: there is no such folder, or it is a model or an adapter.
    """
    path = Path(given)
    try:
        if not given or not path.is_dir():
            raise FileNotFoundError
        kind = folder_kind(path.resolve())
    except (OSError, ValueError):
        cure = "no such folder; name a run's folder, or a checkpoint in it"
        raise ConfigError(option, given, cure) from None
    match kind:
        case CheckpointFolder() as later if option == RESUME and _is_set_aside(later.path):
            cure = (
                "the run went back to an earlier step, and its files say nothing of this one any "
                f"more: start a new run with its weights ({INIT_FROM} {given})"
            )
        case CheckpointFolder() as checkpoint:
            return checkpoint.run, checkpoint.path
        case PolicyFolder() as policy:
            cure = (
                "a run's policy, and a hub folder already: --model takes it as it is, and the run "
                f"is {near(policy.run)}"
            )
        case AdapterFolder():
            cure = "a folder of PEFT, and no run: --init-adapter takes it, and rl-export merges it"
        case HubFolder():
            cure = "a hub folder, and no run: --model takes it as it is"
        case RunFolder(run) | OtherFolder(run):
            return run, None
    raise ConfigError(option, given, cure)


def _is_set_aside(checkpoint: Path) -> bool:
    return checkpoint.parent.name == SET_ASIDE_FOLDER


def _verify_checkpoint(
    run_dir: Path, checkpoint: Path | None, given: str, option: str
) -> tuple[Path, list[str]]:
    """Return a checkpoint that is whole and safe to read, and why newer ones were refused.

    Args:
        checkpoint: checkpoint that the command names; None for the run's newest that is valid.

    Raises:
        ConfigError: there is none.
    """
    try:
        if checkpoint is None:
            path, refused = newest_valid(run_dir)
        else:
            verify(checkpoint)
            step_of(checkpoint)  # raises if its name says no step
            path = checkpoint
            refused = []
        for folder in (path / TRAINER_FOLDER).glob("step-*"):
            check_pickles(folder)
        return path, refused
    except (CheckpointError, ValueError) as error:
        raise ConfigError(option, given, str(error)) from None


def _newest_run(output_dir: Path, config_name: str) -> Path | None:
    """Return the run of a config that was started or resumed last; None if there is none."""
    folders = output_dir.iterdir() if output_dir.is_dir() else ()
    started = {}
    for folder in folders:
        command = read_command(folder)
        if command is not None and command.config_name == config_name:
            started[folder] = command.started
    return max(started, key=started.__getitem__).resolve() if started else None
