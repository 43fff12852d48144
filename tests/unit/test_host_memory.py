"""Memory of hosts: what there is, what a run on GPUs takes of it, and the refusal of too little."""

import os
import resource
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest

from tests.fakes.gpus import fake_gpus
from torchtitan.experiments.rl import config_registry
from torchtitan.experiments.rl.command import machine
from torchtitan.experiments.rl.command.checks import plan_run
from torchtitan.experiments.rl.errors import RunError
from torchtitan.experiments.rl.fleet.hosts import check_host_memory
from torchtitan.experiments.rl.hosts.job import gib_of
from torchtitan.experiments.rl.hosts.jobs import KubernetesJob, SlurmJob
from torchtitan.experiments.rl.models.lora import LoRA
from torchtitan.experiments.rl.plan.placement import needed_gpus
from torchtitan.experiments.rl.plan.plan import GIB, PROCESS_GIB, RunPlan, host_memory
from torchtitan.experiments.rl.process import host
from torchtitan.experiments.rl.train import main
from torchtitan.experiments.rl.training.reference import ReferenceConfig

ROOT = Path(__file__).resolve().parents[2]
QWEN3_0_6B, QWEN3_8B, QWEN3_32B = 596_049_920, 8_190_735_360, 32_762_123_264
"""Parameters, of the model cards."""

# ---- what a host has

MEMINFO = f"MemTotal: {64 * 2**20} kB\nMemAvailable: {60 * 2**20} kB\n" + "".join(
    f"{name}: 1 kB\n" for name in "MemFree Buffers Cached Shmem Active Inactive".split()
)
"""Excerpt of /proc/meminfo on a machine of 64 GiB, of which 60 are free."""
UNLIMITED = str(2**63 - 4096)
"""Limit that version 1 of control groups has where there is none."""


def group(limit: str, used_gib: int, *, unused_gib: int = 0, version: int = 2) -> dict[str, str]:
    """Files of a control group."""
    names = (
        ("memory.max", "memory.current")
        if version == 2
        else ("memory.limit_in_bytes", "memory.usage_in_bytes")
    )
    inactive = "inactive_file" if version == 2 else "total_inactive_file"
    statistics = f"anon 7\n{inactive} {unused_gib * GIB}\n"
    return {names[0]: limit, names[1]: str(used_gib * GIB), "memory.stat": statistics}


GIBS = {gib: f"{gib * GIB}\n" for gib in (8, 16, 100)}
CASES = {
    "no groups": ("", {}, (60, 64)),
    "a limit below the machine": ("0::/job\n", {"job": group(GIBS[16], 4)}, (12, 16)),
    "pages of files that nobody uses": (
        "0::/job\n",
        {"job": group(GIBS[16], 10, unused_gib=3)},
        (9, 16),
    ),
    "a lower limit further up": (
        "0::/pod/job\n",
        {"pod": group(GIBS[8], 2), "pod/job": group(GIBS[16], 1)},
        (6, 8),
    ),
    "no limit": ("0::/job\n", {"job": group("max\n", 4)}, (60, 64)),
    "a limit above the machine": ("0::/job\n", {"job": group(GIBS[100], 1)}, (60, 64)),
    "a container that sees its group as the root": (
        "0::/docker/abc\n",
        {"": group(GIBS[8], 1)},
        (7, 8),
    ),
    "the first version": (
        "5:cpu:/job\n4:memory:/job\n0::/\n",
        {
            "memory/job": group(GIBS[16], 5, unused_gib=1, version=1),
            "memory": group(UNLIMITED, 30, version=1),
        },
        (12, 16),
    ),
    "a group that is full": ("0::/job\n", {"job": group(GIBS[16], 17)}, (0, 16)),
}


@pytest.mark.parametrize("groups, files, expected", CASES.values(), ids=CASES)
def test_the_memory_of_a_host_is_the_lowest_limit_that_this_process_is_under(
    monkeypatch, tmp_path, groups, files, expected
):
    (tmp_path / "proc/self").mkdir(parents=True)
    (tmp_path / "proc/meminfo").write_text(MEMINFO)
    if groups:
        (tmp_path / "proc/self/cgroup").write_text(groups)
    for path, contents in files.items():
        folder = tmp_path / "sys/fs/cgroup" / path
        folder.mkdir(parents=True, exist_ok=True)
        for name, text in contents.items():
            (folder / name).write_text(text)
    monkeypatch.setattr(host, "PROC", tmp_path / "proc")
    monkeypatch.setattr(psutil, "PROCFS_PATH", str(tmp_path / "proc"))
    monkeypatch.setattr(host, "SYS", tmp_path / "sys")
    assert host.memory_gib() == expected


def test_an_agent_raises_its_limit_of_descriptors_which_the_processes_of_its_host_inherit(tmp_path):
    code = """
import resource, sys
import monarch.actor
from torchtitan.experiments.rl.hosts import agent
monarch.actor.run_worker_loop_forever = lambda **_: print(*resource.getrlimit(resource.RLIMIT_NOFILE))
sys.argv = ["agent", "--socket", sys.argv[1]]
agent.main()
"""
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    words = [
        "bash",
        "-c",
        'ulimit -Sn 256; exec "$@"',
        "bash",
        sys.executable,
        "-c",
        code,
        str(tmp_path / "socket"),
    ]
    done = subprocess.run(
        words, cwd=ROOT, capture_output=True, text=True, timeout=240, env=os.environ
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == [str(hard), str(hard)]


# ---- what a run takes


def plan_of(name: str, **trainer) -> RunPlan:
    config = getattr(config_registry, name)()
    config.trainer = replace(config.trainer, **trainer)
    here = list(range(needed_gpus(config))) if needed_gpus(config) <= 8 else None
    return plan_run(config, device="cuda", available=here)


def test_a_host_of_the_8b_keeps_a_checkpoints_copy_two_versions_and_the_processes_by_hand():
    plan = plan_of("rl_grpo_qwen3_8b")
    (needed,) = host_memory(plan, plan.placement).values()
    assert needed.checkpoint == 12 * QWEN3_8B, "float32 weights and two moments"
    assert needed.versions == 2 * 2 * QWEN3_8B and needed.offloaded == 0
    workers = plan.config.rollout_workers
    assert needed.processes == (4 + 4 + workers + 1) * PROCESS_GIB * GIB, (
        "ranks, engines, workers, the command"
    )
    total = (12 + 4) * QWEN3_8B / GIB + (9 + workers) * 0.5
    assert needed.total == pytest.approx(total * GIB)
    assert (
        f"host memory    {total:.2f} GiB (a checkpoint's copy 91.54, two versions of the weights 30.51, processes "
        f"{(9 + workers) * 0.5:.2f}) on host 0"
    ) in plan.lines()


def test_each_trainer_host_copies_what_its_ranks_hold_and_others_copy_nothing():
    plan = plan_of("rl_grpo_qwen3_32b_32")
    needed = host_memory(plan, plan.placement)
    assert [needed[number].checkpoint for number in range(4)] == [
        6 * QWEN3_32B,
        6 * QWEN3_32B,
        0,
        0,
    ]
    assert {number: size.versions for number, size in needed.items()} == plan.shared_weights
    (line,) = [line for line in plan.lines() if line.startswith("host memory")]
    assert "a checkpoint's copy 183.07, two versions of the weights 61.02" in line and "; " in line
    # Two copies of the model: each rank's shard is twice as large, and both copies are copied.
    parallelism = replace(plan.config.trainer.parallelism, data_parallel_replicate_degree=2)
    twice = plan_of("rl_grpo_qwen3_32b_32", parallelism=parallelism)
    needed = host_memory(twice, twice.placement)
    assert [needed[number].checkpoint for number in range(4)] == [
        12 * QWEN3_32B,
        12 * QWEN3_32B,
        0,
        0,
    ]


@pytest.mark.parametrize(
    "trainer, saved, offloaded",
    [
        (dict(), 12, 0),
        (dict(dtype="bfloat16", mixed_precision_param="bfloat16"), 6, 0),
        (dict(reference=ReferenceConfig()), 16, 0),
        (dict(enable_cpu_offload=True), 12, 16),
        (dict(enable_cpu_offload=True, reference=ReferenceConfig()), 16, 20),
    ],
    ids=["float32", "bfloat16", "with a reference", "offloaded", "offloaded, with a reference"],
)
def test_bytes_a_parameter_of_each_kind_of_trainer(trainer, saved, offloaded):
    plan = plan_of("rl_grpo_qwen3_0_6b_1gpu", **trainer)
    (needed,) = host_memory(plan, plan.placement).values()
    assert (needed.checkpoint, needed.offloaded) == (saved * QWEN3_0_6B, offloaded * QWEN3_0_6B)
    assert plan.checkpoint_gib * GIB == saved * QWEN3_0_6B, "the same on the disk"


def test_adapters_are_copied_without_their_base():
    plan = plan_of("rl_grpo_qwen3_0_6b_1gpu", lora=LoRA.Config(rank=8))
    (needed,) = host_memory(plan, plan.placement).values()
    assert needed.checkpoint == 12 * plan.sizes.trained < 0.02 * 12 * QWEN3_0_6B


# ---- what is said before a run


def gate(capsys, tmp_path, *words: str) -> tuple[int, str, str]:
    code = main([*words, "--run-dir", str(tmp_path / "r"), "--dry-run"])
    return code, *capsys.readouterr()


NEEDED = "the run needs about 126.55 GiB (a checkpoint's copy 91.54, two versions of the weights 30.51, processes 4.50)"


@pytest.mark.parametrize(
    "free, total, refused, warned",
    [(200, 256, False, False), (100, 256, False, True), (100, 126, True, False)],
    ids=["enough", "others have some of it", "too little"],
)
def test_a_host_with_too_little_memory_is_refused_and_one_that_is_in_use_is_warned_of(
    monkeypatch, capsys, tmp_path, free, total, refused, warned
):
    fake_gpus(monkeypatch, 8, host_gib=(free, total))
    monkeypatch.setattr(
        machine.shutil, "disk_usage", lambda folder: SimpleNamespace(free=2**50, total=2**51)
    )
    code, out, err = gate(
        capsys, tmp_path, "--config", "rl_grpo_qwen3_8b", "--rollout-workers", "0"
    )
    assert code == 0
    line = f"before a run   host memory = '{total:.1f} GiB': {NEEDED}: raise the limit of the container or job"
    assert (line in out) == refused
    assert (
        f"warning: {free:.1f} GiB of this host's memory are free, and {NEEDED}: end other programs"
        in err
    ) == warned


@pytest.mark.parametrize(
    "words, field",
    [
        (
            ["kubernetes", "--provision.job.resources", "memory", "{}Gi"],
            "resources.memory = '{}Gi'",
        ),
        (["slurm", "--provision.job.memory-per-host", "{}G"], "memory_per_host = '{}G'"),
    ],
    ids=["kubernetes", "slurm"],
)
def test_a_job_that_asks_for_too_little_memory_is_refused_by_its_field(
    capsys, tmp_path, words, field
):
    kubernetes = ["--provision.job.image", "registry/rl:1", "--provision.job.volume-claim", "runs"]
    for gib, refused in ((200, True), (300, False)):
        own = [word.format(gib) for word in words] + (
            kubernetes if words[0] == "kubernetes" else []
        )
        code, out, _ = gate(
            capsys, tmp_path, "--config", "rl_grpo_qwen3_32b_32", "--provision.job", *own
        )
        assert code == 0
        # 183.07 for half of the checkpoint, 61.02 for two halves of a version, and the processes.
        line = f"provision.job.{field.format(gib)}: on host 0 the run needs about 24"
        assert (line in out) == refused


@pytest.mark.parametrize(
    "text, options, gib",
    [
        ("800Gi", {}, 800),
        ("512Mi", {}, 0.5),
        ("1Ti", {}, 1024),
        ("1G", {}, 1e9 / 2**30),
        ("1073741824", {}, 1),
        ("1.5Gi", {}, 1.5),
        ("500G", dict(binary=True, unit="M"), 500),
        ("2048", dict(binary=True, unit="M"), 2),
        ("much", {}, None),
        ("", {}, None),
    ],
)
def test_a_schedulers_quantity_of_memory_in_gib(text, options, gib):
    assert gib_of(text, **options) == (gib if gib is None else pytest.approx(gib))


def test_a_job_that_asks_for_no_memory_says_nothing_of_it():
    assert KubernetesJob(image="i", volume_claim="c").memory is None
    assert SlurmJob().memory is None and SlurmJob(memory_per_host="0").memory is None


def test_a_host_of_several_says_itself_that_it_has_too_little():
    plan = plan_of("rl_grpo_qwen3_32b_32")
    hosts = [
        SimpleNamespace(name=f"host {number} (node{number})", memory_gib=gib)
        for number, gib in enumerate((500, 200, 500, 500))
    ]
    with pytest.raises(
        RunError,
        match=r"host 1 \(node1\) has 200.0 GiB of memory: the run needs about 24\d.\d\d GiB",
    ):
        check_host_memory(plan, plan.placement, SimpleNamespace(hosts=hosts))
    hosts[1].memory_gib = 300
    check_host_memory(plan, plan.placement, SimpleNamespace(hosts=hosts))
    check_host_memory(plan, plan.placement, None)
