"""Stand-in for the GPUs of a host, for code that asks about GPUs and computes nothing on them.

    fake_gpus(monkeypatch, 8, memory_gib=80, capability=(9, 0))

From then on torch answers this process as it would on such a host: availability, count,
capability, memory, names, PCI addresses. Nothing can be computed: what tries to, fails as it does
where there is no CUDA.
"""

from types import SimpleNamespace
from typing import Any

import torch

from torchtitan.experiments.rl.command import machine

CAPABILITIES = ((8, 0), (9, 0), (10, 0))
"""Compute capabilities of an A100, of an H100 or H200, and of a B200."""
SHARED_MEMORY = {
    (8, 0): 166_912,
    (8, 6): 101_376,
    (8, 9): 101_376,
    (9, 0): 232_448,
    (10, 0): 232_448,
    (12, 0): 101_376,
}
"""Bytes of shared memory that a block may have, by capability: NVIDIA's CUDA C++ programming guide,
"maximum amount of shared memory per thread block"."""
GIB = 2**30


def fake_gpus(
    monkeypatch: Any,
    count: int,
    *,
    memory_gib: float = 80,
    capability: tuple[int, int] = (9, 0),
    host_gib: tuple[float, float] = (2000, 2000),
) -> None:
    """Have torch answer as on a host with these GPUs until the test ends.

    Args:
        monkeypatch: pytest's; the stand-in goes with its test.
        count: GPUs of this host.
        memory_gib: memory of each GPU.
        capability: compute capability (major, minor) of each GPU.
        host_gib: memory of the host that is free, and all that it has.
    """

    def properties(device: Any = 0) -> Any:
        index = getattr(device, "index", device)
        return SimpleNamespace(
            name=f"stand-in of capability {capability}",
            major=capability[0],
            minor=capability[1],
            total_memory=int(memory_gib * GIB),
            shared_memory_per_block_optin=SHARED_MEMORY[capability],
            multi_processor_count=132,
            pci_domain_id=0,
            pci_bus_id=index + 1,
            pci_device_id=0,
        )

    answers = {
        "is_available": lambda: True,
        "device_count": lambda: count,
        "get_device_capability": lambda device=None: capability,
        "get_device_properties": properties,
        "get_device_name": lambda device=None: properties().name,
        "mem_get_info": lambda device=None: (int(memory_gib * GIB), int(memory_gib * GIB)),
    }
    for name, answer in answers.items():
        monkeypatch.setattr(torch.cuda, name, answer)
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(machine, "memory_gib", lambda: host_gib)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
