"""Checks of this machine before processes are spawned: descriptors, room on the disk, memory."""

import contextlib
import hashlib
import os
import resource
import shutil
import tempfile
import time
from collections.abc import Iterator
from dataclasses import replace
from importlib.util import find_spec

import torch

from torchtitan.experiments.rl.command.checks import plan_run
from torchtitan.experiments.rl.errors import MissingError
from torchtitan.experiments.rl.plan.costs import GPUS_PER_HOST
from torchtitan.experiments.rl.plan.placement import engine_processes, needed_gpus
from torchtitan.experiments.rl.plan.plan import GIB, PROCESS_GIB, HostMemory, RunPlan, host_memory
from torchtitan.experiments.rl.process.host import (
    gpu_host_lacks,
    gpu_memory_gib,
    memory_gib,
    visible_gpus,
)
from torchtitan.experiments.rl.process.temporary import SHARED_MEMORY

DESCRIPTORS = 128
DESCRIPTORS_PER_PROCESS = 64
"""With 2 processes and a limit of 128 a run hung at its start, and with 256 it ran."""
PROBE_BYTES = 64 * 2**20
"""Written to learn how fast a disk is."""
SHARED_MEMORY_PER_ENGINE = 64 * 2**20
"""Bytes of shared memory through which an engine's several processes talk. A write beyond its end
kills the process."""


def fit_rows(plan: RunPlan) -> tuple[RunPlan, str | None]:
    """Return the plan with ``batcher.rows_per_microbatch`` halved until the run fits free memory.

    The run is all on this host, on CPU. The samples that it trains on stay the same.

    Returns:
        The plan, whose config is a copy where rows were halved, and a line for people on what was
        chosen; None where the config's rows fit.

    Raises:
        MissingError: one row needs more memory than this host has.
    """
    config = plan.config
    first = plan
    rows = wanted = config.batcher.rows_per_microbatch
    free, total = memory_gib()
    if plan.generator_gib > total:
        cure = (
            f"it needs {plan.generator_gib:,.0f} GiB and this host has {total:.0f}: lower "
            "generator.engine.cpu_kv_cache_gib"
        )
        raise MissingError("generator.engine", type(config.generator.engine).__name__, cure)
    while _run_gib(plan) > free and rows > 1:
        rows //= 2
        batcher = replace(config.batcher, rows_per_microbatch=rows)
        plan = plan_run(replace(config, batcher=batcher))
    lower = (
        "lower it to the longest rollout, set trainer.activation_checkpoint, lower "
        "generator.engine.cpu_kv_cache_gib"
    )
    if _run_gib(plan) > total:
        cure = (
            f"this host has {total:.2f} GiB of memory, and with one such row at a time the run "
            f"needs {_run_gib(plan):.2f}"
        )
        raise MissingError(
            "batcher.row_length",
            config.batcher.row_length,
            f"{cure}: {lower}, or take a smaller model",
        )
    if plan is first and _run_gib(plan) <= free:
        return plan, None
    said = f"{_run_gib(first):.2f} GiB, and {free:.2f} are free here"
    line = (
        f"rows        {rows} a microbatch: batcher.rows_per_microbatch = {wanted} would need {said}"
    )
    if _run_gib(plan) > free:
        line += (
            f"; this needs {_run_gib(plan):.2f} still. If the system kills it: "
            f"batcher.row_length, {lower}"
        )
    return plan, line


def _run_gib(plan: RunPlan) -> float:
    """Return the memory of a run on one host, on CPU, in GiB."""
    engines = engine_processes(plan.config) * plan.generator_gib
    weights = sum(plan.shared_weights.values()) / GIB
    held = engines + weights + plan.copied_gib  # of a checkpoint: from the first on its copy stays
    return plan.config.trainer.ranks * plan.trainer_gib + held + (1 + plan.processes) * PROCESS_GIB


def checkpoint_seconds(plan: RunPlan, folder: str) -> float | None:
    """Return about how long a checkpoint of this run takes in ``folder``.

    A file is written, synced, read and digested there, as the checkpoint's files will be. None: the
    checkpoint is small, or the folder can't be written.
    """
    if plan.checkpoint_gib < 1:
        return None
    block, count = os.urandom(2**20), PROBE_BYTES // 2**20
    try:
        with tempfile.NamedTemporaryFile(dir=_existing(folder)) as file:
            began = time.perf_counter()
            for _ in range(count):
                file.write(block)
            file.flush()
            os.fsync(file.fileno())
            file.seek(0)
            hashlib.file_digest(file, "sha256")
            seconds = time.perf_counter() - began
    except OSError:
        return None
    return seconds * plan.checkpoint_gib * GIB / PROBE_BYTES


def lacks(
    plan: RunPlan, folder: str, *, field: str, checkpoints: int = 0, here: bool = True
) -> Iterator[MissingError]:
    """Yield what this host has too little of for the run.

    Args:
        folder: the run's, or the one it will be made in; it need not exist yet.
        field: names ``folder`` in the error.
        checkpoints: complete ones that are in it already.
        here: the run is computed on this host, and on no other.
    """
    generator = plan.config.generator
    limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    needed = DESCRIPTORS + DESCRIPTORS_PER_PROCESS * plan.processes
    if limit != resource.RLIM_INFINITY and limit < needed:
        cure = (
            f"the run's {plan.processes} processes need {needed}: raise the limit (ulimit -n "
            f"{needed})"
        )
        yield MissingError("file descriptors", limit, cure)
    engines = generator.replicas if generator.engine.tensor_parallel_degree > 1 else 0
    shared = engines * SHARED_MEMORY_PER_ENGINE / 2**20
    if (
        shared
        and SHARED_MEMORY.is_dir()
        and (free := shutil.disk_usage(SHARED_MEMORY).free / 2**20) < shared
    ):
        cure = (
            f"{engines} engine(s) of several processes need {shared:.0f} MiB there: enlarge it "
            "(docker: --shm-size)"
        )
        yield MissingError("shared memory", f"{SHARED_MEMORY} with {free:.0f} MiB free", cure)
    needed_gib = plan.disk_gib - min(checkpoints, plan.config.checkpoint.keep) * plan.checkpoint_gib
    with contextlib.suppress(OSError, ValueError):  # making the folder says what is wrong with it
        disk = shutil.disk_usage(_existing(folder))
        # /proc and /sys have no space; no folder can be made there.
        if disk.total and disk.free / GIB < needed_gib:
            cure = (
                f"its disk has {disk.free / GIB:,.2f} GiB free, and the run's checkpoints and "
                f"policy need {needed_gib:,.2f}: "
                "free space, lower checkpoint.keep, or name a folder on another disk"
            )
            yield MissingError(field, folder, cure)
    if (lack := job_lacks(plan)) is not None:
        yield lack
    compiled = plan.config.trainer.compile
    if here and compiled is not None and compiled.float8 != "off":
        if (
            plan.device == "cpu"
            or torch.cuda.is_available()
            and torch.cuda.get_device_capability() < (8, 9)
        ):
            cure = 'needs GPUs of capability 8.9 and above (H100, B200): set it to "off"'
            yield MissingError("trainer.compile.float8", compiled.float8, cure)
        elif find_spec("torchao") is None:
            cure = "needs torchao: pip install torchao==0.18.0"
            yield MissingError("trainer.compile.float8", compiled.float8, cure)
    if here and plan.device == "cuda":
        total_gib = memory_gib()[1]
        if (cause := memory_lacks(host_memory(plan, plan.placement)[0], total_gib)) is not None:
            yield MissingError("host memory", f"{total_gib:.1f} GiB", cause)
        yield from (MissingError("provision.device", "cuda", lack) for lack in _gpus_lack(plan))


def memory_warning(plan: RunPlan) -> str | None:
    """Return a warning if other programs have memory that a run on this host's GPUs needs."""
    free, total = memory_gib()
    needed = host_memory(plan, plan.placement)[0]
    if not free < needed.total / GIB <= total:
        return None
    return (
        f"{free:.1f} GiB of this host's memory are free, and the run needs about {needed}: end "
        "other programs, "
        "or the system may kill a process of the run"
    )


def memory_lacks(needed: HostMemory, total_gib: float) -> str | None:
    """Return what a host has too little memory for and the cure, or None where it has enough."""
    if needed.total / GIB <= total_gib:
        return None
    return (
        f"the run needs about {needed}: raise the limit of the container or job (docker --memory, "
        "Kubernetes "
        "resources.memory, Slurm --mem), or give the trainer more hosts"
    )


def job_lacks(plan: RunPlan) -> MissingError | None:
    """Return the memory that the config's job asks for, if it is less than a host needs."""
    asked = plan.config.provision.job.memory
    if asked is None or plan.device == "cpu":
        return None
    field, text, gib = asked
    hosts = host_memory(plan, plan.placement)
    largest = max(hosts, key=lambda host: hosts[host].total)
    lack = memory_lacks(hosts[largest], gib)
    return (
        None
        if lack is None
        else MissingError(f"provision.job.{field}", text, f"on host {largest} {lack}")
    )


def _gpus_lack(plan: RunPlan) -> Iterator[str]:
    if (there := len(visible_gpus())) < (needed := needed_gpus(plan.config)):
        where = "run it where they are, or on other hosts (provision.job)"
        if plan.hosts > 1:
            there_are = plan.hosts * GPUS_PER_HOST
            unused = f", of whose {there_are} GPUs it uses {needed}" if needed < there_are else ""
            where = (
                f"--provision.job slurm or kubernetes asks for {plan.hosts} whole hosts of "
                f"{GPUS_PER_HOST}{unused}"
            )
        yield f"the run needs {needed} GPUs and this host has {there}: {where}"
    memory_gib = gpu_memory_gib()
    if memory_gib is not None and plan.gpu_gib > memory_gib:
        if plan.shared_gpu is None:
            who, cure = (
                "a trainer rank takes",
                "lower batcher.row_length, or name more GPUs (--gpus)",
            )
        else:
            who, cure = (
                "trainer rank and engine take",
                "lower generator.engine.kv_cache_gib or batcher.row_length",
            )
        yield f"{who} about {plan.gpu_gib:.1f} GiB and a GPU here has {memory_gib:.1f}: {cure}"
    for what in gpu_host_lacks(several_hosts=False):
        yield f"this host {what}"


def _existing(folder: str) -> str:
    """Return the folder, or the nearest above it that is there."""
    path = os.path.abspath(folder)
    while not os.path.exists(path):
        path = os.path.dirname(path)
    return path
