"""What this machine must have before a run's processes are spawned: file descriptors, room on the disk, shared memory."""

import contextlib
import hashlib
import os
import resource
import shutil
import tempfile
import time
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

import torch

from torchtitan.experiments.rl.config.checks import plan_run
from torchtitan.experiments.rl.config.placement import engine_processes, needed_gpus
from torchtitan.experiments.rl.config.plan import GIB, RunPlan
from torchtitan.experiments.rl.errors import MissingError
from torchtitan.experiments.rl.process.host import (
    gpu_host_lacks,
    gpu_memory_gib,
    visible_gpus,
)
from torchtitan.experiments.rl.process.temporary import SHARED_MEMORY

DESCRIPTORS = 128
DESCRIPTORS_PER_PROCESS = 64
"""With 2 processes and a limit of 128 a run hung at its start, and with 256 it ran."""
PROBE_BYTES = 64 * 2**20
"""Written to learn how fast a disk is."""
PROCESS_GIB = 0.5
"""Of a process before it holds anything: torch and its libraries."""
SHARED_MEMORY_PER_ENGINE = 64 * 2**20
"""Of an engine with several processes, which talk through shared memory. A write beyond its end kills the process."""


def raise_descriptor_limit() -> None:
    """Raise this process's limit of file descriptors, which children inherit, as far as it may."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != hard:
        try:
            resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
        except (OSError, ValueError):  # some systems refuse "unlimited"
            pass


def fit_rows(plan: RunPlan) -> tuple[RunPlan, str | None]:
    """Halve ``batcher.rows_per_microbatch`` of the plan's config until a run that is all on this host, on CPU, fits its free
    memory. The samples that it trains on stay the same.

    Returns:
        The plan, and a line for people on what was chosen; None where the config's rows fit.

    Raises:
        MissingError: one row needs more memory than this host has.
    """
    config, first = plan.config, plan
    wanted = config.batcher.rows_per_microbatch
    free, total = memory_gib()
    if plan.generator_gib > total:
        cure = f"it needs {plan.generator_gib:,.0f} GiB and this host has {total:.0f}: lower generator.engine.cpu_kv_cache_gib"
        raise MissingError("generator.engine", type(config.generator.engine).__name__, cure)
    while _run_gib(plan) > free and config.batcher.rows_per_microbatch > 1:
        config.batcher.rows_per_microbatch //= 2
        plan = plan_run(config)
    rows = config.batcher.rows_per_microbatch
    lower = "lower it to the longest rollout, set trainer.activation_checkpoint, lower generator.engine.cpu_kv_cache_gib"
    if _run_gib(plan) > total:
        config.batcher.rows_per_microbatch = wanted  # a dry run goes on
        cure = f"this host has {total:.2f} GiB of memory, and with one such row at a time the run needs {_run_gib(plan):.2f}"
        raise MissingError("batcher.row_length", config.batcher.row_length, f"{cure}: {lower}, or take a smaller model")
    if plan is first and _run_gib(plan) <= free:
        return plan, None
    said = f"{_run_gib(first):.2f} GiB, and {free:.2f} are free here"
    line = f"rows        {rows} a microbatch: batcher.rows_per_microbatch = {wanted} would need {said}"
    if _run_gib(plan) > free:
        line += f"; this needs {_run_gib(plan):.2f} still. If the system kills it: batcher.row_length, {lower}"
    return plan, line


def memory_gib() -> tuple[float, float]:
    """Memory of this host that processes can still take, and all of it."""
    lines = dict(line.split(":", 1) for line in Path("/proc/meminfo").read_text().splitlines())
    free, total = (int(lines[name].split()[0]) * 1024 / GIB for name in ("MemAvailable", "MemTotal"))
    return free, total


def _run_gib(plan: RunPlan) -> float:
    """Of a run on one host, on CPU."""
    engines = engine_processes(plan.config) * plan.generator_gib
    weights = sum(plan.shared_weights.values()) / GIB
    return plan.config.trainer.ranks * plan.trainer_gib + engines + weights + (1 + plan.processes) * PROCESS_GIB


def checkpoint_seconds(plan: RunPlan, folder: str) -> float | None:
    """About how long a checkpoint of this run takes in ``folder``: a file is written, synced, read and digested there, as its
    files will be. None: it is small, or the folder can't be written.
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


def lacks(plan: RunPlan, folder: str, *, field: str, checkpoints: int = 0, here: bool = True) -> Iterator[MissingError]:
    """What this host has too little of for the run.

    Args:
        folder: the run's, or the one it will be made in; it need not exist yet.
        field: names ``folder`` in the error.
        checkpoints: complete ones that are in it already.
        here: the run is computed on this host, and on no other.
    """
    generator, limit = plan.config.generator, resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    if resource.RLIM_INFINITY != limit < (needed := DESCRIPTORS + DESCRIPTORS_PER_PROCESS * plan.processes):
        cure = f"the run's {plan.processes} processes need {needed}: raise the limit (ulimit -n {needed})"
        yield MissingError("file descriptors", limit, cure)
    engines = generator.replicas if generator.engine.tensor_parallel_degree > 1 else 0
    shared = engines * SHARED_MEMORY_PER_ENGINE / 2**20
    if shared and SHARED_MEMORY.is_dir() and (free := shutil.disk_usage(SHARED_MEMORY).free / 2**20) < shared:
        cure = f"{engines} engine(s) of several processes need {shared:.0f} MiB there: enlarge it (docker: --shm-size)"
        yield MissingError("shared memory", f"{SHARED_MEMORY} with {free:.0f} MiB free", cure)
    needed_gib = plan.disk_gib - min(checkpoints, plan.config.checkpoint.keep) * plan.checkpoint_gib
    with contextlib.suppress(OSError, ValueError):  # making the folder says what is wrong with it
        disk = shutil.disk_usage(_existing(folder))
        if disk.total and disk.free / GIB < needed_gib:  # /proc and /sys have no space; no folder can be made there
            cure = (
                f"its disk has {disk.free / GIB:,.2f} GiB free, and the run's checkpoints and policy need {needed_gib:,.2f}: "
                "free space, lower checkpoint.keep, or name a folder on another disk"
            )
            yield MissingError(field, folder, cure)
    if here and (recipe := plan.config.trainer.float8) != "off":
        if plan.device == "cpu" or torch.cuda.is_available() and torch.cuda.get_device_capability() < (8, 9):
            cure = 'needs GPUs of capability 8.9 and above (H100, B200): set it to "off"'
            yield MissingError("trainer.float8", recipe, cure)
        elif find_spec("torchao") is None:
            yield MissingError("trainer.float8", recipe, "needs torchao: pip install torchao==0.18.0")
    if here and plan.device == "cuda":
        yield from (MissingError("provision.device", "cuda", lack) for lack in _gpus_lack(plan))


def _gpus_lack(plan: RunPlan) -> Iterator[str]:
    if (there := len(visible_gpus())) < (needed := needed_gpus(plan.config)):
        yield f"the run needs {needed} GPUs and this host has {there}: run it where they are, or on other hosts (provision.job)"
    memory_gib = gpu_memory_gib()
    if memory_gib is not None and plan.gpu_gib > memory_gib:
        if plan.shared_gpu is None:
            who, cure = "a trainer rank takes", "lower batcher.row_length, or name more GPUs (--gpus)"
        else:
            who, cure = "trainer rank and engine take", "lower generator.engine.kv_cache_gib or batcher.row_length"
        yield f"{who} about {plan.gpu_gib:.1f} GiB and a GPU here has {memory_gib:.1f}: {cure}"
    for what in gpu_host_lacks(several_hosts=False):
        yield f"this host {what}"


def _existing(folder: str) -> str:
    """The folder, or the nearest above it that is there."""
    path = os.path.abspath(folder)
    while not os.path.exists(path):
        path = os.path.dirname(path)
    return path
