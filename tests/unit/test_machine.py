"""A machine's lacks are told before a process is spawned."""

import dataclasses
import resource
import shutil
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from tests.fakes.gpus import fake_gpus
from tests.fakes.models import SMOLLM2, write_model
from torchtitan.experiments.rl import evaluate, play
from torchtitan.experiments.rl.command import machine
from torchtitan.experiments.rl.command.checks import checked_plan, missing, plan_run
from torchtitan.experiments.rl.command.machine import (
    checkpoint_seconds,
    fit_rows,
    shortages,
)
from torchtitan.experiments.rl.compat import vllm as compat_vllm
from torchtitan.experiments.rl.config_registry import rl_grpo_qwen3_debug, rl_opd_qwen3_debug
from torchtitan.experiments.rl.plan.plan import GIB, RunPlan
from torchtitan.experiments.rl.process import host
from torchtitan.experiments.rl.process.host import raise_descriptor_limit
from torchtitan.experiments.rl.train import main

PINS = Path(__file__).resolve().parents[2] / "requirements"


@pytest.fixture(scope="module")
def plan():
    return checked_plan(rl_grpo_qwen3_debug())


def room(monkeypatch, gib: float) -> None:
    monkeypatch.setattr(
        shutil, "disk_usage", lambda path: SimpleNamespace(total=1000 * GIB, free=gib * GIB)
    )


def test_a_checkpoint_is_three_values_a_parameter_and_the_disk_holds_one_more_than_are_kept(plan):
    eight = of_billions(plan, 8, kept=2)
    assert eight.checkpoint_gib == 96.0 and eight.disk_gib == 3 * 96 + 32
    assert any(
        line.startswith("disk           about 320.00 GiB: 2 checkpoints of 96.00 GiB")
        for line in eight.lines()
    )
    eight.config.trainer = dataclasses.replace(eight.config.trainer, dtype="bfloat16")
    assert eight.checkpoint_gib == 48.0


def of_billions(plan: RunPlan, parameters: int, *, kept: int = 3) -> RunPlan:
    """The plan for a model of so many times 2**30 parameters, with so many checkpoints kept."""
    checkpoint = dataclasses.replace(plan.config.checkpoint, keep=kept)
    sizes = dataclasses.replace(
        plan.sizes, parameters=parameters * 2**30, trained=parameters * 2**30
    )
    config = dataclasses.replace(plan.config, checkpoint=checkpoint)
    return dataclasses.replace(plan, config=config, sizes=sizes)


def test_too_little_room_on_the_disk_is_one_line_that_names_the_folder(plan, monkeypatch, tmp_path):
    plan = of_billions(plan, 8, kept=2)
    room(monkeypatch, 321)
    assert lacking(plan, str(tmp_path / "a/b")) == []
    room(monkeypatch, 319)
    assert lacking(plan, str(tmp_path / "a/b")) == [
        f"output_dir = '{tmp_path}/a/b': its disk has 319.00 GiB free, and the run's checkpoints and policy need 320.00: "
        "free space, lower checkpoint.keep, or name a folder on another disk"
    ]


def test_a_shortage_of_a_few_bytes_is_not_printed_as_two_equal_sizes(plan, monkeypatch, tmp_path):
    plan = of_billions(plan, 8, kept=2)
    room(monkeypatch, 320 - 2**-20)
    assert "has 319.99 GiB free, and the run's checkpoints and policy need 320.00: " in "".join(
        lacking(plan, str(tmp_path))
    )


def lacking(plan: RunPlan, folder: str, checkpoints: int = 0) -> list[str]:
    return [
        str(lack) for lack in shortages(plan, folder, field="output_dir", checkpoints=checkpoints)
    ]


def test_checkpoints_that_are_there_already_need_no_more_room(plan, monkeypatch, tmp_path):
    plan = of_billions(plan, 8, kept=2)
    room(monkeypatch, 129)
    assert lacking(plan, str(tmp_path), checkpoints=9) == []
    assert len(lacking(plan, str(tmp_path), checkpoints=1)) == 1


def test_too_few_file_descriptors_are_one_line(plan, monkeypatch, tmp_path):
    monkeypatch.setattr(resource, "getrlimit", lambda which: (255, 255))
    line = "file descriptors = 255: the run's 2 processes need 256: raise the limit (ulimit -n 256)"
    assert lacking(plan, str(tmp_path)) == [line]
    for enough in (256, resource.RLIM_INFINITY):
        monkeypatch.setattr(resource, "getrlimit", lambda which, enough=enough: (enough, enough))
        assert lacking(plan, str(tmp_path)) == []


def test_the_limit_of_descriptors_is_raised_as_far_as_it_may():
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (min(soft, 300), hard))
        raise_descriptor_limit()
        assert resource.getrlimit(resource.RLIMIT_NOFILE) == (hard, hard)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_engines_of_several_processes_need_shared_memory(plan, monkeypatch, tmp_path):
    wide = dataclasses.replace(plan, config=dataclasses.replace(plan.config))
    engine = dataclasses.replace(plan.config.generator.engine, tensor_parallel_degree=2)
    wide.config.generator = dataclasses.replace(plan.config.generator, replicas=2, engine=engine)
    real = shutil.disk_usage
    monkeypatch.setattr(
        shutil,
        "disk_usage",
        lambda path: (
            SimpleNamespace(free=100 * 2**20) if path == machine.SHARED_MEMORY else real(path)
        ),
    )
    assert lacking(wide, str(tmp_path)) == [
        "shared memory = '/dev/shm with 100 MiB free': 2 engine(s) of several processes need 128 MiB there: enlarge it "
        "(docker: --shm-size)"
    ]
    assert lacking(plan, str(tmp_path)) == []


@pytest.mark.parametrize("words", [[], ["--dry-run"]], ids=["run", "dry run"])
def test_an_engine_that_is_not_installed_is_one_line_and_a_dry_run_only_notes_it(
    words, monkeypatch, capsys
):
    monkeypatch.setitem(sys.modules, "vllm", None)  # as Python has it: not to be imported
    assert main(["--config", "rl_grpo_qwen3_debug", *words]) == (0 if words else 2)
    output = capsys.readouterr()
    line = f"generator.engine = 'vllm': is not installed: pip install --no-deps -r {PINS}/cpu.txt, or gpu.txt for GPUs\n"
    assert (
        (output.out.endswith(f"before a run   {line}") and output.err == "")
        if words
        else output.err == f"error: {line.strip()} (--dry-run lists all that is missing)\n"
    )


LACK = "its CPU build can't load a library of the system (libgone.so.1: cannot open"


@pytest.mark.parametrize(
    "command, words, shown",
    [
        (main, [], f"error: generator.engine = 'vllm': {LACK}"),
        (main, ["--dry-run"], f"before a run   generator.engine = 'vllm': {LACK}"),
        (evaluate.main, [], f"error: generator.engine = 'vllm': {LACK}"),
        (
            play.main,
            ["--scripted", "/model", "--scripted", "7"],
            f"error: generator.engine = 'vllm': {LACK}",
        ),
    ],
    ids=["rl-train", "dry run", "rl-evaluate", "rl-play"],
)
def test_a_library_that_the_engine_lacks_is_one_line_of_every_command_that_starts_it(
    command, words, shown, monkeypatch, capsys, tmp_path
):
    monkeypatch.setattr(compat_vllm, "CPU_LIBRARIES", {"libgone.so.1": "libgone1"})
    code = command(["--config", "rl_grpo_qwen3_debug", "--run-dir", str(tmp_path / "r"), *words])
    output = capsys.readouterr()
    lines = [line for line in (output.out + output.err).splitlines() if "libgone" in line]
    assert len(lines) == 1 and lines[0].startswith(shown)
    assert "apt-get install libgone1" in lines[0]
    # A dry run lists what is missing; a person who plays answers in place of the model.
    assert code == (0 if "--dry-run" in words or command is play.main else 2)


def test_a_hosted_model_needs_its_engine_too(monkeypatch):
    monkeypatch.setitem(sys.modules, "vllm", None)
    assert str(missing(rl_opd_qwen3_debug())["sum_digits"]).startswith(
        "tasks.sum_digits.algorithm.teacher.engine = 'vllm': is not installed"
    )


# ---- a checkpoint's time


def test_a_checkpoints_time_is_that_of_a_file_in_the_same_folder_by_its_size(
    plan, monkeypatch, tmp_path
):
    now = iter([10.0, 10.5])
    monkeypatch.setattr(machine.time, "perf_counter", lambda: next(now))
    monkeypatch.setattr(machine, "PROBE_BYTES", 2**20)
    large = of_billions(plan, 2)
    assert checkpoint_seconds(large, str(tmp_path / "not/there/yet")) == 0.5 * 24 * 1024, (
        "half a second for each MiB"
    )
    assert list(tmp_path.iterdir()) == []
    assert checkpoint_seconds(plan, str(tmp_path)) is None, "that of the tiny model takes no time"
    assert checkpoint_seconds(large, "/proc/self") is None, "nothing can be written there"


def test_a_run_whose_checkpoint_outlasts_sigterm_is_warned_of(monkeypatch, capsys, tmp_path):
    monkeypatch.setattr(machine, "checkpoint_seconds", lambda plan, folder: 140.0)
    words = ["--config", "rl_grpo_qwen3_debug", "--dry-run", "--run-dir", str(tmp_path / "r")]
    assert main(words) == 0
    out, err = capsys.readouterr()
    assert "checkpoint     about 140 s, at the speed of this folder's disk" in out
    assert err.startswith(
        "warning: a checkpoint takes about 140 s here, and SIGTERM leaves the run 25 s: raise checkpoint.grace_s"
    )
    assert main([*words, "--checkpoint.grace-s", "150"]) == 0
    assert "warning" not in capsys.readouterr().err


# ---- what kernels need


def test_a_gpu_host_needs_a_compiler_headers_and_lockable_memory(monkeypatch, tmp_path):
    monkeypatch.setattr(host.shutil, "which", lambda name: None)
    monkeypatch.delenv("CC", raising=False)
    monkeypatch.setattr(host.sysconfig, "get_path", lambda name: str(tmp_path))
    monkeypatch.setattr(host.resource, "getrlimit", lambda which: (65536, 65536))
    monkeypatch.setattr(host.Path, "glob", lambda path, pattern: iter(["mlx5_0"]))
    compiler, headers, locked = host.gpu_host_lacks(several_hosts=True)
    assert "no C compiler" in compiler and "install gcc" in compiler
    assert f"{tmp_path}/Python.h" in headers and f"python3.{sys.version_info.minor}-dev" in headers
    assert "64 KiB" in locked and "ulimit -l unlimited" in locked
    assert len(host.gpu_host_lacks(several_hosts=False)) == 2, "one host uses no RDMA"
    (tmp_path / "Python.h").touch()
    monkeypatch.setenv("CC", "clang")
    monkeypatch.setattr(
        host.resource, "getrlimit", lambda which: (resource.RLIM_INFINITY, resource.RLIM_INFINITY)
    )
    assert host.gpu_host_lacks(several_hosts=True) == []


def test_the_command_says_before_a_run_on_gpus_what_kernels_lack_here(
    monkeypatch, capsys, tmp_path
):
    fake_gpus(monkeypatch, 2)
    monkeypatch.setattr(machine, "gpu_host_lacks", lambda several_hosts: ["has no Python.h"])
    words = [
        "--config",
        "rl_grpo_qwen3_debug",
        "--provision.device",
        "cuda",
        "--run-dir",
        str(tmp_path / "r"),
    ]
    assert main(words) == 2
    assert "provision.device = 'cuda': this host has no Python.h" in capsys.readouterr().err
    assert main([*words, "--dry-run"]) == 0
    assert (
        "before a run   provision.device = 'cuda': this host has no Python.h"
        in capsys.readouterr().out
    )


@pytest.fixture(scope="module")
def smollm2(tmp_path_factory):
    return write_model(tmp_path_factory.mktemp("models") / "smollm2", SMOLLM2)


def rows_with(free, total, model, monkeypatch):
    """Rows and line that the demo with ``model`` gets on a host with so many GiB."""
    monkeypatch.setattr(machine, "memory_gib", lambda: (free, total))
    config = rl_grpo_qwen3_debug()
    config.model.hf_assets_path = str(model)
    plan, line = fit_rows(plan_run(config))
    assert config.batcher.rows_per_microbatch == 8, "the user's own config stays as it is"
    return plan.config.batcher.rows_per_microbatch, plan.trainer_gib, line


def test_rows_are_halved_until_the_run_fits_the_free_memory(smollm2, monkeypatch):
    # By hand, in GiB: state 2.01, the head at work 0.38, activations 0.615 a row of 512; a checkpoint's copy of 3 float32
    # values a parameter 1.50; generator 0.78; two versions of the weights 1.00; three processes 1.50. With 8, 4, 2 and 1
    # rows: 12.09, 9.63, 8.40 and 7.78.
    assert rows_with(12.5, 16, smollm2, monkeypatch)[::2] == (8, None)
    rows, gib, line = rows_with(9.7, 16, smollm2, monkeypatch)
    assert rows == 4 and gib == pytest.approx(2.01 + 0.38 + 4 * 0.615, abs=0.1)
    assert line.startswith(
        "rows        4 a microbatch: batcher.rows_per_microbatch = 8 would need 12."
    )
    assert rows_with(8.5, 16, smollm2, monkeypatch)[0] == 2
    rows, _, line = rows_with(3, 16, smollm2, monkeypatch)
    assert (
        rows == 1
        and "still. If the system kills it: batcher.row_length, lower it to the longest rollout"
        in line
    )


def test_a_run_beyond_the_hosts_memory_is_one_line_with_what_to_lower(smollm2, monkeypatch, capsys):
    monkeypatch.setattr(machine, "memory_gib", lambda: (3.0, 4.0))
    assert main(["--config", "rl_grpo_qwen3_debug", "--model", str(smollm2)]) == 2
    assert capsys.readouterr().err.startswith(
        "error: batcher.row_length = 512: this host has 4.00 GiB of memory, and with one "
    )
