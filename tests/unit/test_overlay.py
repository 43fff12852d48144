"""`torchtitan` is two folders in one: this checkout in front, the installed distribution behind."""

import importlib
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
OURS = (
    "torchtitan",
    "torchtitan.experiments",
    "torchtitan.experiments.rl",
    "torchtitan.experiments.rl.types",
)
INSTALLED = (
    "torchtitan.models",
    "torchtitan.components",
    "torchtitan.config",
    "torchtitan.distributed",
)


def is_ours(path: str) -> bool:
    return Path(path).resolve().is_relative_to(ROOT / "torchtitan")


@pytest.mark.parametrize("name", OURS)
def test_what_this_checkout_holds_comes_from_it(name):
    assert is_ours(importlib.import_module(name).__file__)


@pytest.mark.parametrize("name", INSTALLED)
def test_what_it_does_not_hold_comes_from_the_installed_torchtitan(name):
    assert not is_ours(list(importlib.import_module(name).__path__)[0])


def test_no_module_of_the_installed_experiment_can_be_imported():
    """Its folder is behind ours on no `__path__`, so a module we lack is missing, not theirs."""
    import torchtitan.experiments.rl

    assert [is_ours(folder) for folder in torchtitan.experiments.rl.__path__] == [True]


def test_a_child_process_elsewhere_sees_the_same_packages(tmp_path):
    code = f"import importlib\nfor name in {OURS + INSTALLED[:1]}: print(importlib.import_module(name).__path__[0]"
    code = code.replace(".__path__[0]", ".__spec__.origin") + ")"
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    result = subprocess.run(
        [sys.executable, "-c", code],
        env=env,
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert result.returncode == 0, result.stderr
    assert [is_ours(path) for path in result.stdout.split()] == [True] * len(OURS) + [False]
