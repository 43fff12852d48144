"""Compares what a run needs with what this machine has, before processes are spawned.

    fit_rows             rows of a microbatch, halved until a run on CPU fits into memory
    shortages            descriptors, shared memory, disk, memory and GPUs that are too few or small
    checkpoint_seconds   duration of a checkpoint on the disk of the run's folder
    memory_warning       memory that other programs have, and a run on GPUs needs

The gate calls them when it has the run's plan.
"""

import hashlib
import math
import os
import resource
import shutil
import tempfile
import time
from dataclasses import replace
from importlib.util import find_spec

import torch

from torchtitan.experiments.rl.command.checks import plan_run
from torchtitan.experiments.rl.errors import MissingError
from torchtitan.experiments.rl.models.attention import (
    LARGEST_HEADS,
    needs_small_blocks,
    shared_memory,
)
from torchtitan.experiments.rl.models.policy import is_of_transformers
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

MIB = 2**20
DESCRIPTORS = 128
DESCRIPTORS_PER_PROCESS = 64
"""File descriptors that a run takes beside ``DESCRIPTORS``, for each of its processes. With 2
processes and a limit of 128 a run hung at its start, and with 256 it ran."""
PROBE_BYTES = 64 * MIB
"""Bytes that are written to learn how fast a disk is."""
FLOAT8_CAPABILITY = (8, 9)
"""Lowest compute capability of a GPU that multiplies in float8."""
SHARED_MEMORY_PER_ENGINE = 64 * MIB
"""Bytes of shared memory through which an engine's several processes talk. A write beyond its end
kills the process."""
_LESS_MEMORY = (
    "lower it to the longest rollout, set trainer.activation_checkpoint, lower "
    "generator.engine.cpu_kv_cache_gib"
)
"""Cure for a run that takes too much memory, behind the name of ``batcher.row_length``."""


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
    wanted = config.batcher.rows_per_microbatch
    free_gib, total_gib = memory_gib()
    if plan.generator_gib > total_gib:
        needed, there = _needed_and_there(plan.generator_gib, total_gib)
        cure = (
            f"it needs {needed} GiB and this host has {there}: lower "
            "generator.engine.cpu_kv_cache_gib"
        )
        raise MissingError("generator.engine", type(config.generator.engine).__name__, cure)
    rows = wanted
    fitted = plan
    while _run_gib(fitted) > free_gib and rows > 1:
        rows //= 2
        batcher = replace(config.batcher, rows_per_microbatch=rows)
        fitted = plan_run(replace(config, batcher=batcher))
    needed_gib = _run_gib(fitted)
    if needed_gib > total_gib:
        needed, there = _needed_and_there(needed_gib, total_gib)
        cure = (
            f"this host has {there} GiB of memory, and with one such row at a time the run needs "
            f"{needed}: {_LESS_MEMORY}, or take a smaller model"
        )
        raise MissingError("batcher.row_length", config.batcher.row_length, cure)
    fits = needed_gib <= free_gib
    if fits and rows == wanted:
        return plan, None
    line = (
        f"rows        {rows} a microbatch: batcher.rows_per_microbatch = {wanted} would need "
        f"{_run_gib(plan):.2f} GiB, and {free_gib:.2f} are free here"
    )
    if not fits:
        line += (
            f"; this needs {needed_gib:.2f} still. If the system kills it: batcher.row_length, "
            f"{_LESS_MEMORY}"
        )
    return fitted, line


def _run_gib(plan: RunPlan) -> float:
    """Return the memory of a run on one host, on CPU, in GiB."""
    trainer_gib = plan.config.trainer.ranks * plan.trainer_gib
    engines_gib = engine_processes(plan.config) * plan.generator_gib
    weights_gib = sum(plan.shared_weights.values()) / GIB
    processes_gib = (1 + plan.processes) * PROCESS_GIB
    # The copy of a checkpoint in memory stays from the first one on.
    return trainer_gib + engines_gib + weights_gib + plan.copied_gib + processes_gib


def checkpoint_seconds(plan: RunPlan, folder: str) -> float | None:
    """Return about how long a checkpoint of this run takes in ``folder``.

    A file is written, synced, read and digested there, as the checkpoint's files will be. Return
    None if the checkpoint is small or the folder can't be written.
    """
    if plan.checkpoint_gib < 1:
        return None
    block = os.urandom(MIB)
    try:
        with tempfile.NamedTemporaryFile(dir=_existing(folder)) as file:
            began = time.perf_counter()
            for _ in range(PROBE_BYTES // MIB):
                file.write(block)
            file.flush()
            os.fsync(file.fileno())
            file.seek(0)
            hashlib.file_digest(file, "sha256")
            seconds = time.perf_counter() - began
    except OSError:
        return None
    return seconds * plan.checkpoint_gib * GIB / PROBE_BYTES


def shortages(
    plan: RunPlan, folder: str, *, field: str, checkpoints: int = 0, runs_here: bool = True
) -> list[MissingError]:
    """Return what this host, or the job that the config asks for, has too little of for the run.

    Args:
        folder: folder of the run, or the one in which it will be made; it need not exist yet.
        field: option or field that names ``folder``, for errors.
        checkpoints: number of complete checkpoints that ``folder`` holds already.
        runs_here: True if the whole run is computed on this host.
    """
    found = [
        _descriptor_shortage(plan),
        _shared_memory_shortage(plan),
        _disk_shortage(plan, folder, field=field, checkpoints=checkpoints),
        job_memory_shortage(plan),
        _head_size_excess(plan),
    ]
    if runs_here:
        found += [_float8_shortage(plan), _attention_shortage(plan)]
    if runs_here and plan.device == "cuda":
        found.append(_host_memory_shortage(plan))
        found += _gpu_shortages(plan)
    return [shortage for shortage in found if shortage is not None]


def _descriptor_shortage(plan: RunPlan) -> MissingError | None:
    """Compare the file descriptors that this process may open with those that a run opens."""
    limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    needed = DESCRIPTORS + DESCRIPTORS_PER_PROCESS * plan.processes
    if limit == resource.RLIM_INFINITY or limit >= needed:
        return None
    cure = (
        f"the run's {plan.processes} processes need {needed}: raise the limit (ulimit -n {needed})"
    )
    return MissingError("file descriptors", limit, cure)


def _needed_and_there(needed_gib: float, there_gib: float) -> tuple[str, str]:
    """Return both sizes in GiB, rounded up and down: a shortage never reads as two equal sizes."""
    return f"{math.ceil(needed_gib * 100) / 100:,.2f}", f"{math.floor(there_gib * 100) / 100:,.2f}"


def _shared_memory_shortage(plan: RunPlan) -> MissingError | None:
    """Compare /dev/shm with what the engines of several processes need of it."""
    generator = plan.config.generator
    if generator.engine.tensor_parallel_degree == 1 or not SHARED_MEMORY.is_dir():
        return None
    engines = generator.replicas
    needed = engines * SHARED_MEMORY_PER_ENGINE
    free = shutil.disk_usage(SHARED_MEMORY).free
    if free >= needed:
        return None
    cure = (
        f"{engines} engine(s) of several processes need {needed / MIB:.0f} MiB there: enlarge it "
        "(docker: --shm-size)"
    )
    return MissingError("shared memory", f"{SHARED_MEMORY} with {free / MIB:.0f} MiB free", cure)


def _disk_shortage(
    plan: RunPlan, folder: str, *, field: str, checkpoints: int
) -> MissingError | None:
    """Compare the disk of the run's folder with the files that the run has still to write there."""
    kept = min(checkpoints, plan.config.checkpoint.keep)
    needed_gib = plan.disk_gib - kept * plan.checkpoint_gib
    try:
        disk = shutil.disk_usage(_existing(folder))
    except (OSError, ValueError):
        return None  # making the folder says what is wrong with it
    # /proc and /sys have no space; no folder can be made there.
    if disk.total == 0 or disk.free / GIB >= needed_gib:
        return None
    needed, free = _needed_and_there(needed_gib, disk.free / GIB)
    cure = (
        f"its disk has {free} GiB free, and the run's checkpoints and policy need {needed}: free "
        "space, lower checkpoint.keep, or name a folder on another disk"
    )
    return MissingError(field, folder, cure)


def _float8_shortage(plan: RunPlan) -> MissingError | None:
    """Return what products in float8, if the config asks for them, lack on this host."""
    compiled = plan.config.trainer.compile
    if compiled is None or compiled.float8 == "off":
        return None
    on_older_gpu = (
        torch.cuda.is_available() and torch.cuda.get_device_capability() < FLOAT8_CAPABILITY
    )
    if plan.device == "cpu" or on_older_gpu:
        cure = 'needs GPUs of capability 8.9 and above (H100, B200): set it to "off"'
    elif find_spec("torchao") is None:
        cure = "needs torchao: pip install torchao==0.18.0"
    else:
        return None
    return MissingError("trainer.compile.float8", compiled.float8, cure)


def _head_size_excess(plan: RunPlan) -> MissingError | None:
    """Return what is wrong if heads are too large for flex attention's kernels on any GPU.

    torch's own blocks for heads of 512 take 201,216 bytes of shared memory on capability 8.0, which
    has 166,912, and 263,168 on 9.0, which has 232,448. Sizes between are padded to 512.
    """
    heads = plan.sizes.head_width
    if plan.device == "cpu" or heads <= LARGEST_HEADS:
        return None
    cure = (
        f"its heads of {heads} need more shared memory than a GPU has: take a model with heads of "
        f"{LARGEST_HEADS} or less"
    )
    return MissingError("model.hf_assets_path", plan.config.model.hf_assets_path, cure)


def _attention_shortage(plan: RunPlan) -> MissingError | None:
    """Return what keeps flex attention's kernels from fitting the shared memory of these GPUs.

    The figures are of ``python -m tests.flex_kernels``.
    """
    if plan.device == "cpu" or not torch.cuda.is_available():
        return None
    config = plan.config
    heads = plan.sizes.head_width
    available = shared_memory(torch.device("cuda", 0))
    needs = (
        f"heads of {heads} needs more than {available:,} bytes of shared memory a block, as on "
        "GPUs of capability 8.6, 8.9, 12.0"
    )
    in_float32 = config.trainer.mixed_precision_param == "float32"
    if in_float32 and needs_small_blocks(2 * heads, available):
        cure = f"attention in float32 with {needs}: set it to bfloat16"
        return MissingError("trainer.mixed_precision_param", "float32", cure)
    if needs_small_blocks(heads, available) and not is_of_transformers(config.model):
        cure = f"torchtitan's attention with {needs}: set it to transformers"
        return MissingError("model.trained_by", config.model.trained_by, cure)
    return None


def _host_memory_shortage(plan: RunPlan) -> MissingError | None:
    """Compare this host's memory with what a run on its GPUs needs."""
    total_gib = memory_gib()[1]
    cause = memory_shortage(host_memory(plan, plan.placement)[0], total_gib)
    return None if cause is None else MissingError("host memory", f"{total_gib:.1f} GiB", cause)


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


def memory_shortage(needed: HostMemory, total_gib: float) -> str | None:
    """Return how much memory a host lacks and the cure, or None if it has enough."""
    if needed.total / GIB <= total_gib:
        return None
    return (
        f"the run needs about {needed}: raise the limit of the container or job (docker --memory, "
        "Kubernetes resources.memory, Slurm --mem), or give the trainer more hosts"
    )


def job_memory_shortage(plan: RunPlan) -> MissingError | None:
    """Return the memory that the config's job asks for, if it is less than a host needs."""
    asked = plan.config.provision.job.memory
    if asked is None or plan.device == "cpu":
        return None
    field, text, gib = asked
    hosts = host_memory(plan, plan.placement)
    largest = max(hosts, key=lambda host: hosts[host].total)
    cause = memory_shortage(hosts[largest], gib)
    if cause is None:
        return None
    return MissingError(f"provision.job.{field}", text, f"on host {largest} {cause}")


def _gpu_shortages(plan: RunPlan) -> list[MissingError]:
    """Return why the run can't be computed on this host's GPUs, an error for each reason."""
    causes = [_gpu_count_shortage(plan), _gpu_memory_shortage(plan)]
    causes += [f"this host {what}" for what in gpu_host_lacks(several_hosts=False)]
    return [MissingError("provision.device", "cuda", cause) for cause in causes if cause]


def _gpu_count_shortage(plan: RunPlan) -> str | None:
    """Return that this host has fewer GPUs than the run needs, and the cure."""
    present = len(visible_gpus())
    needed = needed_gpus(plan.config)
    if present >= needed:
        return None
    cure = "run it where they are, or on other hosts (provision.job)"
    if plan.hosts > 1:
        of_hosts = plan.hosts * GPUS_PER_HOST
        unused = f", of whose {of_hosts} GPUs it uses {needed}" if needed < of_hosts else ""
        cure = (
            f"--provision.job slurm or kubernetes asks for {plan.hosts} whole hosts of "
            f"{GPUS_PER_HOST}{unused}"
        )
    return f"the run needs {needed} GPUs and this host has {present}: {cure}"


def _gpu_memory_shortage(plan: RunPlan) -> str | None:
    """Return that a GPU of this host has less memory than the run needs of one, and the cure."""
    present_gib = gpu_memory_gib()
    if present_gib is None or plan.gpu_gib <= present_gib:
        return None
    if plan.shared_gpu is None:
        takers = "a trainer rank takes"
        cure = "lower batcher.row_length, or name more GPUs (--gpus)"
    else:
        takers = "trainer rank and engine take"
        cure = "lower generator.engine.kv_cache_gib or batcher.row_length"
    return f"{takers} about {plan.gpu_gib:.1f} GiB and a GPU here has {present_gib:.1f}: {cure}"


def _existing(folder: str) -> str:
    """Return the folder, or the nearest above it that is there."""
    path = os.path.abspath(folder)
    while not os.path.exists(path):
        path = os.path.dirname(path)
    return path
