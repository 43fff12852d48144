"""The GPUs that this process may use, and how a process that it launches is to be shown some of them."""

import os
import resource
import shutil
import sysconfig
from collections.abc import Iterable
from pathlib import Path
from typing import Any

MASK = "CUDA_VISIBLE_DEVICES"


def visible_gpus() -> list[int]:
    """Indices of the GPUs that this process sees, from 0 on."""
    entries = _entries()
    if entries and entries[0].startswith("MIG-"):
        # CUDA shows a process one of its slices and no more. Each process of a run gets a slice of its own.
        return list(range(len(entries)))
    import torch  # here: the command sets its process up before torch is imported

    return list(range(torch.cuda.device_count()))


def gpu_memory_gib() -> float | None:
    """Of the smallest GPU that this process sees. None: it sees none, or CUDA does not say."""
    import torch

    try:
        sizes = [torch.cuda.get_device_properties(index).total_memory for index in range(torch.cuda.device_count())]
    except RuntimeError:  # as below
        return None
    return min(sizes, default=0) / 2**30 or None


def pci_addresses() -> list[str]:
    """Of the GPUs that this process sees, by index, as Linux names them ("0000:3b:00.0"). Empty where CUDA does not say."""
    import torch

    try:
        found: list[Any] = [torch.cuda.get_device_properties(index) for index in range(torch.cuda.device_count())]
    except RuntimeError:  # a broken driver: who computes on the GPU says it better
        return []
    return [f"{gpu.pci_domain_id:04x}:{gpu.pci_bus_id:02x}:{gpu.pci_device_id:02x}.0" for gpu in found]


def gpu_host_lacks(*, several_hosts: bool) -> list[str]:
    """What this host lacks for a run on its GPUs, the end of a sentence each.

    Triton compiles a launcher when a kernel first runs, in trainer and engine, so it needs a C compiler and Python's headers
    there. Between hosts weights go through InfiniBand or RoCE where a host has it; these devices lock the memory they reach.
    """
    found = []
    if not (os.environ.get("CC") or shutil.which("gcc") or shutil.which("clang")):
        found.append("has no C compiler, with which Triton builds its kernels: install gcc, or name a compiler in CC")
    header = Path(sysconfig.get_path("include"), "Python.h")
    if not header.is_file():
        found.append(f"has no {header}, which Triton's kernels are built with: install Python's headers (python3.11-dev)")
    soft, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    if several_hosts and soft != resource.RLIM_INFINITY and any(Path("/sys/class/infiniband").glob("*")):
        cure = "ulimit -l unlimited; docker: --ulimit memlock=-1; Kubernetes: the capability IPC_LOCK"
        found.append(
            f"may lock {soft // 2**10} KiB of memory, and its InfiniBand devices lock all weights: raise the limit ({cure})"
        )
    return found


def sliced() -> bool:
    """Whether what this process sees are slices of GPUs (MIG), of which a process can use one."""
    return bool(_entries()) and _entries()[0].startswith("MIG-")


def mask_of(gpus: Iterable[int]) -> str:
    """CUDA_VISIBLE_DEVICES of a process that is to see ``gpus`` only.

    Args:
        gpus: indices, of ``visible_gpus``. Where this process has a mask itself, of indices, UUIDs or MIG ids, an index is a
            place in that mask, and the other process is given what stands there.

    Raises:
        ValueError: the mask has no such place.
    """
    entries = _entries()
    if os.environ.get(MASK) is None:
        return ",".join(map(str, gpus))
    hidden = [gpu for gpu in gpus if not 0 <= gpu < len(entries)]
    if hidden:
        raise ValueError(f"{MASK}={os.environ[MASK]!r} shows {len(entries)} GPUs, and none of index {hidden[0]}")
    return ",".join(entries[gpu] for gpu in gpus)


def _entries() -> list[str]:
    """Of the mask, as CUDA reads it: it ends at the first entry that is no device."""
    entries: list[str] = []
    for entry in os.environ.get(MASK, "").split(","):
        if not entry.strip() or entry.strip().startswith("-"):
            break
        entries.append(entry.strip())
    return entries
