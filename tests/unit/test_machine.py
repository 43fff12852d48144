"""What a machine lacks is said before a process is spawned."""

import dataclasses
import resource
import shutil
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from torchtitan.experiments.rl.config import machine
from torchtitan.experiments.rl.config.checks import checked_plan, missing
from torchtitan.experiments.rl.config.machine import machine_lacks, raise_descriptor_limit
from torchtitan.experiments.rl.config.plan import GIB, checkpoint_gib
from torchtitan.experiments.rl.config_registry import rl_grpo_qwen3_debug, rl_opd_qwen3_debug
from torchtitan.experiments.rl.grpo import main

PINS = Path(__file__).resolve().parents[2] / "requirements"


@pytest.fixture(scope="module")
def plan():
    return checked_plan(rl_grpo_qwen3_debug())


def room(monkeypatch, gib: float) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(total=1000 * GIB, free=gib * GIB))


def test_a_checkpoint_is_three_values_a_parameter_and_the_disk_holds_one_more_than_are_kept(plan):
    assert checkpoint_gib(parameters=2**30, dtype="float32") == 12.0
    assert checkpoint_gib(parameters=2**30, dtype="bfloat16") == 6.0
    eight = dataclasses.replace(plan, checkpoint_gib=96.0, checkpoints_kept=2)
    assert eight.disk_gib == 3 * 96 + 32
    assert any(line.startswith("disk           about 320.00 GiB: 2 checkpoints of 96.00 GiB") for line in eight.lines())


def test_too_little_room_on_the_disk_is_one_line_that_names_the_folder(plan, monkeypatch, tmp_path):
    plan = dataclasses.replace(plan, checkpoint_gib=96.0, checkpoints_kept=2)
    room(monkeypatch, 321)
    assert machine_lacks(plan, str(tmp_path / "a/b"), field="output_dir") == []
    room(monkeypatch, 319)
    (problem,) = machine_lacks(plan, str(tmp_path / "a/b"), field="output_dir")
    assert str(problem) == (
        f"output_dir = '{tmp_path}/a/b': its disk has 319.00 GiB free, and the run's checkpoints and policy need 320.00: "
        "free space, lower checkpoint.keep, or name a folder on another disk"
    )


def test_checkpoints_that_are_there_already_need_no_more_room(plan, monkeypatch, tmp_path):
    plan = dataclasses.replace(plan, checkpoint_gib=96.0, checkpoints_kept=2)
    room(monkeypatch, 129)
    assert machine_lacks(plan, str(tmp_path), field="--resume", checkpoints=9) == []
    assert len(machine_lacks(plan, str(tmp_path), field="--resume", checkpoints=1)) == 1


def test_too_few_file_descriptors_are_one_line(plan, monkeypatch, tmp_path):
    monkeypatch.setattr(resource, "getrlimit", lambda which: (255, 255))
    (problem,) = machine_lacks(plan, str(tmp_path), field="output_dir")
    assert str(problem) == "file descriptors = 255: the run's 2 processes need 256: raise the limit (ulimit -n 256)"
    monkeypatch.setattr(resource, "getrlimit", lambda which: (256, 256))
    assert machine_lacks(plan, str(tmp_path), field="output_dir") == []
    monkeypatch.setattr(resource, "getrlimit", lambda which: (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    assert machine_lacks(plan, str(tmp_path), field="output_dir") == []


def test_the_limit_of_descriptors_is_raised_as_far_as_it_may():
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (min(soft, 300), hard))
        raise_descriptor_limit()
        assert resource.getrlimit(resource.RLIMIT_NOFILE) == (hard, hard)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_engines_of_several_processes_need_shared_memory(plan, monkeypatch, tmp_path):
    wide = dataclasses.replace(plan, tensor_parallel_degree=2, generator_replicas=2)
    real = shutil.disk_usage
    monkeypatch.setattr(
        shutil, "disk_usage", lambda path: SimpleNamespace(free=100 * 2**20) if path == machine.SHARED_MEMORY else real(path)
    )
    (problem,) = machine_lacks(wide, str(tmp_path), field="output_dir")
    assert str(problem) == (
        "shared memory = '/dev/shm with 100 MiB free': 2 engine(s) of several processes need 128 MiB there: enlarge it "
        "(docker: --shm-size)"
    )
    assert machine_lacks(plan, str(tmp_path), field="output_dir") == []


@pytest.mark.parametrize("words", [[], ["--dry-run"]], ids=["run", "dry run"])
def test_an_engine_that_is_not_installed_is_one_line_and_a_dry_run_only_notes_it(words, monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "vllm", None)  # as Python has it: not to be imported
    assert main(["--config", "rl_grpo_qwen3_debug", *words]) == (0 if words else 2)
    output = capsys.readouterr()
    line = f"generator.engine = 'vllm': is not installed: pip install --no-deps -r {PINS}/cpu.txt, or gpu.txt for GPUs\n"
    assert (output.out.endswith(f"before a run   {line}") and output.err == "") if words else output.err == f"error: {line}"


def test_a_hosted_model_needs_its_engine_too(monkeypatch):
    monkeypatch.setitem(sys.modules, "vllm", None)
    assert str(missing(rl_opd_qwen3_debug())["sum_digits"]).startswith(
        "tasks.sum_digits.algorithm.teacher.engine = 'vllm': is not installed"
    )
