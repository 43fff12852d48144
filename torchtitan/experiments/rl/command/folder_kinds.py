"""Kinds of the folders that a command line names: runs, checkpoints, policies, adapters.

outputs/run                                 RunFolder
outputs/run/checkpoints/step-000000100      CheckpointFolder
outputs/run/policy/step-100                 PolicyFolder, in hub format
outputs/run/policy/step-100/adapter         AdapterFolder, in the format of PEFT
assets/hf/Qwen3-0.6B                        HubFolder
"""

from dataclasses import dataclass
from pathlib import Path

from torchtitan.experiments.rl.checkpointing.folder import (
    CHECKPOINTS_FOLDER,
    MANIFEST_FILE,
    OLD_POLICY_FOLDER,
    POLICY_FOLDER,
    checkpoints,
)
from torchtitan.experiments.rl.command.run_folder import read_command
from torchtitan.experiments.rl.models.hub import ADAPTER_FOLDER, has_config, is_adapter

_POLICY_FOLDERS = (POLICY_FOLDER, OLD_POLICY_FOLDER)


@dataclass(frozen=True, slots=True)
class RunFolder:
    """Folder of a run, also where the folder of its policies or of its checkpoints was named."""

    path: Path


@dataclass(frozen=True, slots=True)
class CheckpointFolder:
    """Checkpoint of a run."""

    path: Path

    @property
    def run(self) -> Path:
        return self.path.parent.parent


@dataclass(frozen=True, slots=True)
class PolicyFolder:
    """Policy that a run has saved, in hub format; of tasks with adapters, one folder for each."""

    path: Path

    @property
    def run(self) -> Path:
        return self.path.parent.parent


@dataclass(frozen=True, slots=True)
class AdapterFolder:
    """Folder of PEFT: adapters, without the model that they belong to."""

    path: Path

    @property
    def merged(self) -> Path | None:
        """Folder of the policy that has the same adapters merged, if a run has saved both."""
        is_of_policy = self.path.name == ADAPTER_FOLDER and has_config(str(self.path.parent))
        return self.path.parent if is_of_policy else None


@dataclass(frozen=True, slots=True)
class HubFolder:
    """Weights of a model that no run has saved here."""

    path: Path


@dataclass(frozen=True, slots=True)
class OtherFolder:
    """Folder that is none of these; it may be empty, or lack the files that say what it is."""

    path: Path


Folder = RunFolder | CheckpointFolder | PolicyFolder | AdapterFolder | HubFolder | OtherFolder


def folder_kind(path: Path) -> Folder:
    """Return what a folder is, by its files and by where it stands.

    A run is known by the command that it has saved or by its checkpoints; a checkpoint by its
    manifest, or by its place in a run.

    Args:
        path: absolute path of a folder that is there.
    """
    if is_adapter(path):
        return AdapterFolder(path)
    if (path / MANIFEST_FILE).is_file():
        return CheckpointFolder(path)
    of_run = _kind_in_run(path)
    if of_run is not None:
        return of_run
    # A run's config.json is not a model's, so weights tell a model.
    return HubFolder(path) if any(path.glob("*.safetensors")) else OtherFolder(path)


def _kind_in_run(path: Path) -> RunFolder | CheckpointFolder | PolicyFolder | None:
    """Return what a folder is by its place in a run; None if it lies in none."""
    if _is_run(path):
        return RunFolder(path)
    if path.name in (*_POLICY_FOLDERS, CHECKPOINTS_FOLDER) and _is_run(path.parent):
        return RunFolder(path.parent)
    if path.parent.name == CHECKPOINTS_FOLDER and _is_run(path.parent.parent):
        return CheckpointFolder(path)
    if path.parent.name in _POLICY_FOLDERS and _is_run(path.parent.parent):
        return PolicyFolder(path)
    return None


def _is_run(path: Path) -> bool:
    return read_command(path) is not None or bool(checkpoints(path))
