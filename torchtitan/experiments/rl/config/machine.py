"""What this machine must have before a run's processes are spawned: file descriptors, room on the disk, shared memory."""

import os
import resource
import shutil
from typing import Literal

from torchtitan.experiments.rl.config.placement import ranges
from torchtitan.experiments.rl.config.plan import GIB, RunPlan
from torchtitan.experiments.rl.errors import MissingError
from torchtitan.experiments.rl.process.gpus import pci_addresses, visible_gpus
from torchtitan.experiments.rl.process.numa import cores_by_node, cores_near
from torchtitan.experiments.rl.process.shared_memory import SHARED_MEMORY

DESCRIPTORS = 128
DESCRIPTORS_PER_PROCESS = 64
"""With 2 processes and a limit of 128 a run hung at its start, and with 256 it ran."""
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


def machine_lacks(plan: RunPlan, folder: str, *, field: str, checkpoints: int = 0) -> list[MissingError]:
    """What a run of this plan would fail on here.

    Args:
        folder: the run's, or the one it will be made in; it need not exist yet.
        field: names ``folder`` in an error.
        checkpoints: complete ones that are in it already.
    """
    found = (_descriptors(plan), _shared_memory(plan), _disk(plan, folder, field, checkpoints))
    return [problem for problem in found if problem is not None]


def missing_gpus(needed: int) -> list[MissingError]:
    """What a run of ``needed`` GPUs lacks on this host."""
    if (there := len(visible_gpus())) >= needed:
        return []
    cure = f"the run needs {needed} GPUs and this host has {there}: run it where they are, or on other hosts (provision.job)"
    return [MissingError("provision.device", "cuda", cure)]


def numa_lines(device: Literal["cpu", "cuda"], *, elsewhere: bool) -> list[str]:
    """Which cores are near which GPUs, or each other, for ``--dry-run``. Nothing where all are equally near.

    Args:
        elsewhere: the run's hosts are not there yet, and this is none of them.
    """
    if elsewhere:
        return ["NUMA           on its host, each process gets the cores near its GPUs"] if device == "cuda" else []
    if device == "cpu":
        nodes = cores_by_node()
        said = "; ".join(ranges(cores) for cores in nodes)
        return [f"NUMA           each process stays on the nodes of its share: {said}"] if len(nodes) > 1 else []
    near: dict[tuple[int, ...], list[int]] = {}
    for gpu, address in enumerate(pci_addresses()):
        near.setdefault(cores_near([address]), []).append(gpu)
    near.pop((), None)
    said = "; ".join(
        f"GPU{'s' if len(gpus) > 1 else ''} {ranges(gpus)} with cores {ranges(cores)}" for cores, gpus in near.items()
    )
    return [f"NUMA           {said}"] if said else []


def _descriptors(plan: RunPlan) -> MissingError | None:
    needed, limit = DESCRIPTORS + DESCRIPTORS_PER_PROCESS * plan.processes, resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    if limit == resource.RLIM_INFINITY or limit >= needed:
        return None
    cure = f"the run's {plan.processes} processes need {needed}: raise the limit (ulimit -n {needed})"
    return MissingError("file descriptors", limit, cure)


def _shared_memory(plan: RunPlan) -> MissingError | None:
    engines = plan.generator_replicas if plan.tensor_parallel_degree > 1 else 0
    needed = engines * SHARED_MEMORY_PER_ENGINE
    if not needed or not SHARED_MEMORY.is_dir() or (free := shutil.disk_usage(SHARED_MEMORY).free) >= needed:
        return None
    cure = f"{engines} engine(s) of several processes need {needed / 2**20:.0f} MiB there: enlarge it (docker: --shm-size)"
    return MissingError("shared memory", f"{SHARED_MEMORY} with {free / 2**20:.0f} MiB free", cure)


def _disk(plan: RunPlan, folder: str, field: str, checkpoints: int) -> MissingError | None:
    path = os.path.abspath(folder)
    try:
        while not os.path.exists(path):
            path = os.path.dirname(path)
        usage = shutil.disk_usage(path)
        free = usage.free / GIB if usage.total else float("inf")  # /proc and /sys have no space; no folder can be made there
    except (OSError, ValueError):  # making the folder says what is wrong with it
        return None
    needed = plan.disk_gib - min(checkpoints, plan.checkpoints_kept) * plan.checkpoint_gib
    if free >= needed:
        return None
    cure = f"its disk has {free:,.2f} GiB free, and the run's checkpoints and policy need {needed:,.2f}: free space, lower "
    return MissingError(field, folder, cure + "checkpoint.keep, or name a folder on another disk")
