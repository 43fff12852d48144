"""Shards of a version from one host's memory to another's, by Monarch's RDMA buffers.

These use InfiniBand or RoCE where the hosts have it, and TCP elsewhere.
"""

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from torchtitan.experiments.rl.weights.host_shards import HeldShard, HostShards, Transfer, transfers
from torchtitan.experiments.rl.weights.snapshot import SnapshotLayout, index_of, views

READS_AT_ONCE = 16
READ_TIMEOUT_S = 600
"""Of one read. A host that is gone is noticed by others first; Monarch's own 60 s are short on a network that is busy."""


@dataclass(kw_only=True, slots=True, frozen=True)
class RemoteShards:
    """What a trainer host says of its buffers. They stay where they are: it says so once."""

    shards: HostShards
    handles: list[list[list[Any]]]
    """RDMABuffer by buffer, transfer and read."""


def offer(shards: HostShards, layout: SnapshotLayout, buffers: Sequence[torch.Tensor]) -> list[list[list[Any]]]:
    """``RemoteShards.handles`` of this host's flat uint8 buffers. Call it in an actor, or a thread with its context."""
    from monarch.rdma import RDMABuffer  # imported, it changes Python's warning filters

    return [
        [[RDMABuffer(buffer[start:stop]) for start, stop in transfer.reads()] for transfer in transfers(shards, layout)]
        for buffer in buffers
    ]


async def fetch(remote: RemoteShards, layout: SnapshotLayout, buffer: int, snapshot: torch.Tensor) -> int:
    """Read what another host holds in its buffer of this index into a snapshot, each byte once. Returns how many.

    Raises:
        Exception: what Monarch raises where the other host can't be read.
    """
    seats = asyncio.Semaphore(READS_AT_ONCE)

    async def read(transfer: Transfer, handles: Sequence[Any], target: torch.Tensor) -> None:
        async def read_one(handle: Any, start: int, stop: int) -> None:
            async with seats:
                await handle.read_into(target[start - transfer.start : stop - transfer.start], timeout=READ_TIMEOUT_S)

        await _all(*(read_one(handle, *span) for handle, span in zip(handles, transfer.reads(), strict=True)))

    found = list(zip(transfers(remote.shards, layout), remote.handles[buffer], strict=True))
    direct = [(transfer, transfer.target, handles) for transfer, handles in found if transfer.target is not None]
    await _all(*(read(each, handles, snapshot[first : first + each.stop - each.start]) for each, first, handles in direct))
    for transfer, handles in found:
        if transfer.target is None:  # one at a time: each takes as much memory again
            packed = torch.empty(transfer.stop - transfer.start, dtype=torch.uint8)
            await read(transfer, handles, packed)
            await asyncio.to_thread(place, [transfer.held], packed, transfer.start, layout, snapshot)
    return sum(transfer.stop - transfer.start for transfer, _ in found)


def place(held: Sequence[HeldShard], buffer: torch.Tensor, first: int, layout: SnapshotLayout, snapshot: torch.Tensor) -> None:
    """Copy shards from a host's buffer, of which ``buffer`` begins with byte ``first``, to where they belong in a snapshot."""
    tensors = dict(views(snapshot, layout))
    for each in held:
        tensors[each.name][index_of(each.shard)].copy_(each.view(buffer, first))


async def _all(*work: Any) -> None:
    """Await all; where one fails, cancel the others and raise what it raised."""
    try:
        async with asyncio.TaskGroup() as tasks:
            for each in work:
                tasks.create_task(each)
    except ExceptionGroup as group:
        raise group.exceptions[0] from None
