"""Where the trainer's ranks meet."""

import os
import socket
from datetime import timedelta
from typing import Literal

import torch
import torch.distributed as dist

LOOPBACK = "lo"
"""Linux's name of the interface that no other host reaches."""
COLLECTIVE_TIMEOUT = timedelta(minutes=30)
"""Ranks may compile, and write checkpoints, at different speeds. A rank that hangs is noticed and killed long before."""


def init_process_group(*, device: Literal["cpu", "cuda"], rank: int, world_size: int, url: str) -> None:
    """Join the trainer's process group.

    Args:
        url: where the ranks meet: ``tcp://host:port`` of rank 0, or on one host ``file:///path`` of a new file.
            The store behind a port listens on all interfaces and asks nobody who they are; ranks that meet in a file use the
            loopback interface alone.
    """
    if device == "cuda":
        torch.cuda.set_device(0)  # the only one this process sees: controller/provision.py
    # gloo beside NCCL: parameters that are kept in the host's memory, and objects that ranks compare.
    backend = "gloo" if device == "cpu" else "cpu:gloo,cuda:nccl"
    if url.startswith("file:") and LOOPBACK in (name for _, name in socket.if_nameindex()):
        for variable in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"):
            os.environ.setdefault(variable, LOOPBACK)
    dist.init_process_group(backend, init_method=url, rank=rank, world_size=world_size, timeout=COLLECTIVE_TIMEOUT)
