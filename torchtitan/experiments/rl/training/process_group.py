"""Where the trainer's ranks meet."""

import os
import socket
from datetime import timedelta
from typing import Literal

import torch
import torch.distributed as dist

from torchtitan.experiments.rl.process.network import LOOPBACK, interface_towards

COLLECTIVE_TIMEOUT = timedelta(minutes=30)
"""Ranks may compile, and write checkpoints, at different speeds. A rank that hangs is noticed and killed long before."""


def init_process_group(*, device: Literal["cpu", "cuda"], rank: int, world_size: int, url: str) -> None:
    """Join the trainer's process group.

    Args:
        url: where the ranks meet: ``tcp://host:port`` of rank 0, or on one host ``file:///path`` of a new file.
            The store behind a port listens on all interfaces and asks nobody who they are; ranks that meet in a file use the
            loopback interface alone. Others use the interface that leads to rank 0, unless GLOO_SOCKET_IFNAME names another.
    """
    if device == "cuda":
        torch.cuda.set_device(0)  # the only one this process sees: operations/provision.py
    # gloo beside NCCL: parameters that are kept in the host's memory, and objects that ranks compare.
    backend = "gloo" if device == "cpu" else "cpu:gloo,cuda:nccl"
    interface = LOOPBACK if url.startswith("file:") else interface_towards(url.removeprefix("tcp://").rpartition(":")[0])
    if interface in (name for _, name in socket.if_nameindex()):
        # gloo takes the interface that the host's own name leads to, which may be the loopback one.
        os.environ.setdefault("GLOO_SOCKET_IFNAME", interface)
    if interface == LOOPBACK:  # NCCL knows itself which interfaces lead to other hosts
        os.environ.setdefault("NCCL_SOCKET_IFNAME", LOOPBACK)
    dist.init_process_group(backend, init_method=url, rank=rank, world_size=world_size, timeout=COLLECTIVE_TIMEOUT)
