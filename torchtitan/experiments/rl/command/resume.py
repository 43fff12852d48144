"""``--resume`` and ``--init-from``: the verified checkpoint, and what changed in the config."""

import dataclasses
import json
import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO

import torch

from torchtitan.components.optimizer import LRSchedulersContainer
from torchtitan.experiments.rl.bounds import declared, walk
from torchtitan.experiments.rl.checkpointing.folder import (
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

ABSENT = "(absent)"


@dataclass(frozen=True, slots=True)
class Change:
    field: str
    saved: Any
    """The value the run was started with; ABSENT where it had no such field."""
    new: Any
    allowed: bool = False

    def __str__(self) -> str:
        return f"{self.field} = {self.new!r} (was {self.saved!r})"


def compare(saved: Any, config: Any) -> list[Change]:
    """Return what differs between a resolved config and a config, in the order of the latter.

    The fields of the config say which of them may.
    """
    may = [path for path, _, annotation in walk(config) if declared(annotation).may_change]
    return [
        Change(
            path,
            before,
            now,
            any(f"{path}.".startswith((f"{field}.", f"{field}[")) for field in may),
        )
        for path, before, now in _differences(saved, resolved_config(config), "")
    ]


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
    """Yield path, old and new value of each difference of two resolved configs.

    The value of a part is the class that its config builds.
    """
    if isinstance(before, list) and isinstance(now, list) and before and now:
        before, now = (
            {f"[{index}]": entry for index, entry in enumerate(entries)}
            for entries in (before, now)
        )
    if isinstance(before, dict) and isinstance(now, dict):
        # Fields of two classes say nothing about each other.
        same_class = before.get("class") == now.get("class")
        for key in {**now, **before} if same_class else ("class",):
            inside = f"{path}.{key}".removeprefix(".").replace(".[", "[")
            yield from _differences(before.get(key, ABSENT), now.get(key, ABSENT), inside)
    elif before != now:
        old, new = (
            value["class"] if isinstance(value, dict) and "class" in value else value
            for value in (before, now)
        )
        yield path, old, new


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


RESUME, INIT_FROM = "--resume", "--init-from"
AUTO = "auto"


@dataclass(slots=True)
class ResumedRun:
    """A run that this command goes on with. The run folder is locked for this process."""

    run_dir: Path
    checkpoint: Path
    """Verified."""
    saved: SavedCommand
    saved_config: dict[str, Any]
    lock: BinaryIO
    lines: list[str] = field(default_factory=list)
    """Lines for the person who resumes: checkpoints that were refused, fields that changed."""

    @property
    def step(self) -> int:
        return step_of(self.checkpoint)

    @property
    def checkpoints(self) -> int:
        """Complete ones in the run folder."""
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
        """Return whether every step is taken, and the policy saved if the config asks for it."""
        saved = any(path.name == f"step-{self.step}" for path in policies(self.run_dir))
        return self.step >= config.steps and (saved or not config.trainer.save_final_model)

    def check_config(self, config: RunConfig) -> None:
        """Compare the config with the run's, and add a line for each field that may change and has.

        Raises:
            ConfigError: a field differs that may not change.
        """
        files = files_of_models(config)
        for path, now in files.items():
            before = self.saved.model_files.get(path)
            if before is not None and (
                other := [name for name in {**before, **now} if before.get(name) != now.get(name)]
            ):
                cure = (
                    f"its {sorted(other)[0]} is not the one the run began with: put that back, or "
                    "start a new run"
                )
                raise ConfigError(
                    "model.hf_assets_path" if path == config.model.hf_assets_path else "path",
                    path,
                    cure,
                )
        changes = compare(self.saved_config, config)
        check_changes([change for change in changes if not self._moved(change, files)])
        self.lines += [f"changed     {change}" for change in changes]
        if (stretched := self._schedule_line(config)) is not None:
            self.lines.append(stretched)

    def _schedule_line(self, config: RunConfig) -> str | None:
        """Return how the learning rate goes on, if the resumed run has another schedule."""
        trainer, own = self.saved_config.get("trainer") or {}, config.trainer.lr_scheduler
        rate, schedule = (trainer.get("optimizer") or {}).get("lr"), trainer.get("lr_scheduler")
        if not rate or not schedule or not self.step:
            return None
        names = [entry.name for entry in dataclasses.fields(own)]
        saved = dataclasses.replace(
            own, **{name: schedule[name] for name in names if name in schedule}
        )
        before = rate * learning_rate_factor(saved, self.saved_config["steps"], self.step)
        after = config.trainer.optimizer.lr * learning_rate_factor(own, config.steps, self.step + 1)
        planned = rate * learning_rate_factor(saved, self.saved_config["steps"], self.step + 1)
        if math.isclose(after, planned, rel_tol=1e-6):
            return None
        return (
            f"schedule    the learning rate goes from {before:.3g} at step {self.step} to "
            f"{after:.3g} at step {self.step + 1}: "
            f"its schedule is now one of {own.total_steps or config.steps} steps "
            "(trainer.lr_scheduler, trainer.optimizer.lr)"
        )

    def _moved(self, change: Change, files: dict[str, dict[str, str]]) -> bool:
        """Return whether a model's folder has another path and holds the same model."""
        before = self.saved.model_files.get(change.saved) if isinstance(change.saved, str) else None
        return bool(before) and files.get(change.new) == before


def learning_rate_factor(schedule: LRSchedulersContainer.Config, steps: int, step: int) -> float:
    """Return the share of the learning rate that a step is taken with; 0 after the schedule's end.

    Args:
        steps: of the run.
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
    """Return the run to go on with, and its newest valid checkpoint.

    Args:
        given: a run folder, a checkpoint in one, or "auto": the newest run of ``config_name`` in
            ``output_dir``.

    Returns:
        None: "auto" found no run with a checkpoint.

    Raises:
        ConfigError: there is no such run, it has no valid checkpoint, or another process runs in
            it.
    """
    if given == AUTO:
        newest = _newest_run(Path(output_dir or "."), str(config_name))
        if newest is None or not checkpoints(newest):
            return None
        return _opened(newest, None, given)
    run_dir, checkpoint = _located(given, RESUME)
    return _opened(run_dir, checkpoint, given)


def find_initial(given: str, config: RunConfig) -> tuple[Path, list[str]]:
    """Return the checkpoint whose weights a new run begins with, and why newer ones were refused.

    Raises:
        ConfigError: there is none, or it is of another model.
    """
    run_dir, checkpoint = _located(given, INIT_FROM)
    path, refused = _verified(run_dir, checkpoint, given, INIT_FROM)
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
    before, now = (
        (side.get("trainer") or {}).get("lora") for side in (saved, resolved_config(config))
    )
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
    run_dir, checkpoint = _located(given, option)
    return run_dir, _verified(run_dir, checkpoint, given, option)[0]


def files_of_models(config: RunConfig) -> dict[str, dict[str, str]]:
    """Return ``model_files`` of the policy's folder and of each model that the run serves."""
    paths = [
        config.model.hf_assets_path,
        *(model.path for model in hosted_models(config.tasks).values()),
    ]
    return {path: model_files(path) for path in paths}


def read_saved(*folders: Path) -> tuple[SavedCommand | None, dict[str, Any] | None]:
    """Return command and config of a run, each from the first folder that has one.

    The folders are the run's, then its checkpoints with their copies.
    """
    commands, configs = map(read_command, folders), map(read_config, folders)
    return next(filter(None, commands), None), next(filter(None, configs), None)


def _opened(run_dir: Path, checkpoint: Path | None, given: str) -> ResumedRun:
    saved, saved_config = read_saved(run_dir, *reversed(checkpoints(run_dir)))
    if saved is None or saved_config is None:
        cure = (
            "holds no run that can be resumed: it has no readable command.json and config.json; "
            "name a run's folder"
        )
        raise ConfigError(RESUME, str(run_dir), cure)
    lock = lock_run_folder(run_dir, field=RESUME)
    try:
        path, refused = _verified(run_dir, checkpoint, given, RESUME)
    except ConfigError:
        lock.close()
        raise
    lines = [
        *(f"refused     {reason}" for reason in refused),
        f"resumed     step {step_of(path)}, from {path}",
    ]
    return ResumedRun(run_dir, path, saved, saved_config, lock, lines)


def _located(given: str, option: str) -> tuple[Path, Path | None]:
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


def _verified(
    run_dir: Path, checkpoint: Path | None, given: str, option: str
) -> tuple[Path, list[str]]:
    try:
        if checkpoint is None:
            path, refused = newest_valid(run_dir)
        else:
            verify(checkpoint)
            step_of(checkpoint)
            path, refused = checkpoint, []
        for folder in (path / TRAINER_FOLDER).glob("step-*"):
            check_pickles(folder)
        return path, refused
    except (CheckpointError, ValueError) as error:
        raise ConfigError(option, given, str(error)) from None


def _newest_run(output_dir: Path, config_name: str) -> Path | None:
    """Return the run of a config that was started or resumed last; None if there is none."""
    commands = {
        path: read_command(path) for path in (output_dir.iterdir() if output_dir.is_dir() else ())
    }
    started = {
        path: saved.started
        for path, saved in commands.items()
        if saved and saved.config_name == config_name
    }
    return max(started, key=started.__getitem__).resolve() if started else None
