"""The kind of a folder that a command line names: hub folder, run, checkpoint or PEFT folder."""

from pathlib import Path

import pytest

from torchtitan.experiments.rl.command.folder_kinds import (
    AdapterFolder,
    CheckpointFolder,
    Folder,
    HubFolder,
    OtherFolder,
    PolicyFolder,
    RunFolder,
    folder_kind,
)
from torchtitan.experiments.rl.command.hub import command_of_run
from torchtitan.experiments.rl.command.run_folder import SavedCommand, save_command

CHECKPOINT = "run/checkpoints/step-000000003"
FILES = (
    "run/config.json",
    f"{CHECKPOINT}/manifest.json",
    "run/policy/step-3/config.json",
    "run/policy/step-3/model.safetensors",
    "run/policy/step-3/adapter/adapter_config.json",
    "checkpoints/mine/config.json",
    "checkpoints/mine/model.safetensors",
    "policy/theirs/model.safetensors",
    "peft/adapter_config.json",
    "moved/manifest.json",
)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for file in FILES:
        (tmp_path / file).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / file).touch()
    (tmp_path / "run/checkpoints/step-000000004").mkdir()
    (tmp_path / "empty").mkdir()
    save_command(tmp_path / "run", SavedCommand(config_name="c", module="m", overrides=[]))
    return tmp_path


@pytest.mark.parametrize(
    ("named", "kind"),
    [
        ("run", RunFolder),
        (CHECKPOINT, CheckpointFolder),
        ("run/checkpoints/step-000000004", CheckpointFolder),
        ("moved", CheckpointFolder),
        ("run/policy/step-3", PolicyFolder),
        ("run/policy/step-3/adapter", AdapterFolder),
        ("peft", AdapterFolder),
        ("checkpoints/mine", HubFolder),
        ("policy/theirs", HubFolder),
        ("checkpoints", OtherFolder),
        ("empty", OtherFolder),
    ],
)
def test_a_folder_has_one_kind(folder: Path, named: str, kind: type[Folder]):
    assert folder_kind(folder / named) == kind(folder / named)


@pytest.mark.parametrize("named", ["run/checkpoints", "run/policy"])
def test_the_folder_of_a_runs_checkpoints_or_policies_stands_for_the_run(folder: Path, named: str):
    assert folder_kind(folder / named) == RunFolder(folder / "run")


@pytest.mark.parametrize("named", ["run", CHECKPOINT, "run/policy/step-3", "run/policy"])
def test_the_command_of_a_run_is_found_from_each_of_its_folders(folder: Path, named: str):
    saved = command_of_run(str(folder / named))
    assert saved is not None and saved.config_name == "c"
    assert command_of_run(str(folder / "checkpoints/mine")) is None


def test_a_policys_adapters_stand_for_the_policy_that_has_them_merged(folder: Path):
    policy = folder / "run/policy/step-3"
    assert AdapterFolder(policy / "adapter").merged == policy
    assert AdapterFolder(folder / "peft").merged is None
