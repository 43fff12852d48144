"""Which part of a version each trainer host holds, and how other hosts read it.

Every buffer is laid out as the whole snapshot, and ranks write their shards where these belong. What no rank of a host writes
is left out of that host's memory::

    ranks of host a: rows 0-1, rows 2-3 of each tensor     its buffer:  0 1 2 3 . . . .
    ranks of host b: rows 4-5, rows 6-7                    its buffer:  . . . . 4 5 6 7
    a generator's host reads both                          snapshot:    0 1 2 3 4 5 6 7

Other hosts read by Monarch's RDMA buffers, which use InfiniBand or RoCE where the hosts have it, and TCP elsewhere.
"""

import asyncio
import math
from collections.abc import Coroutine, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from torchtitan.experiments.rl.weights.snapshot import Shard, SnapshotLayout, TensorEntry, aligned, index_of, views

READ_BYTES = 8 * 2**20
"""Of one read from another host. Over TCP, 256 MB took 0.2 s in reads of 8 MB side by side, and 0.7 s in reads of 32 MB."""
READS_AT_ONCE = 16
READ_TIMEOUT_S = 600
"""Of one read. A host that is gone is noticed by others first; Monarch's own 60 s are short on a network that is busy."""

HostShards = Mapping[str, Sequence[Shard]]
"""What the ranks of one host write, by hub name. Shards that fill a larger one are that one."""


def volume(shard: Shard) -> int:
    return math.prod(stop - start for start, stop in shard)


def written_by_rank(held: Sequence[Mapping[str, Shard]]) -> list[dict[str, Shard]]:
    """What each rank writes of what it holds, by name: of ranks that hold the same shard, the lowest writes it.

    Args:
        held: of each rank the shard that it holds of each tensor. Shards of a tensor are equal or apart.
    """
    taken: set[tuple[str, Shard]] = set()
    written = []
    for own in held:
        written.append({name: shard for name, shard in own.items() if volume(shard) and (name, shard) not in taken})
        taken |= own.items()
    return written


def written_by_host(written: Sequence[Mapping[str, Shard]], hosts: Sequence[str]) -> dict[str, HostShards]:
    """What each host writes, from what each rank writes and the host of each rank. Hosts that write nothing are left out."""
    found: dict[str, dict[str, list[Shard]]] = {}
    for host, own in zip(hosts, written, strict=True):
        for name, shard in own.items():
            found.setdefault(host, {}).setdefault(name, []).append(shard)
    return {host: {name: _joined(shards) for name, shards in own.items()} for host, own in found.items()}


def check_all_written(hosts: Mapping[str, HostShards], shapes: Mapping[str, tuple[int, ...]]) -> None:
    """
    Raises:
        AssertionError: the hosts write less than a tensor.
    """
    for name, shape in shapes.items():
        size = sum(volume(shard) for own in hosts.values() for shard in own.get(name, ()))
        assert size == math.prod(shape), f"the ranks write {size} values of {name}, which has {math.prod(shape)}"


def held_tensors(
    buffer: torch.Tensor, layout: SnapshotLayout, shards: HostShards
) -> Iterator[tuple[tuple[str, Shard], torch.Tensor]]:
    """Name, shard and tensor of what a host holds in a flat uint8 buffer. The tensor shares the buffer's memory."""
    for name, whole in views(buffer, layout):
        for shard in shards.get(name, ()):
            yield (name, shard), whole[index_of(shard)]


@dataclass(kw_only=True, slots=True, frozen=True)
class Span:
    """Bytes that a host holds. They have the same place in its buffer and in a snapshot."""

    start: int
    stop: int
    gaps: tuple[str, Shard] | None = None
    """A shard of which the span is from the first value to the last: bytes in between are not the host's."""

    def reads(self) -> list[slice]:
        """What is read at once."""
        return [slice(start, min(start + READ_BYTES, self.stop)) for start in range(self.start, self.stop, READ_BYTES)]


def spans(shards: HostShards, layout: SnapshotLayout) -> list[Span]:
    """All that a host holds, in the layout's order. Tensors that lie side by side are one span: a whole snapshot is."""
    found: list[Span] = []
    at_end = False  # the last span ends where its tensor does, so that only alignment lies before the next tensor
    for entry in layout.entries:
        for shard in shards.get(entry.name, ()):
            start, stop = _extent(entry, shard)
            if stop - start > volume(shard) * entry.dtype.itemsize:
                found.append(Span(start=start, stop=stop, gaps=(entry.name, shard)))
            elif at_end and start == entry.offset == aligned(found[-1].stop):
                found[-1] = replace(found[-1], stop=stop)
            else:
                found.append(Span(start=start, stop=stop))
            at_end = found[-1].gaps is None and stop == entry.offset + entry.nbytes
    return found


@dataclass(kw_only=True, slots=True, frozen=True)
class RemoteShards:
    """What a trainer host says of its buffers. They stay where they are: it says so once."""

    shards: HostShards
    handles: list[list[list[Any]]]
    """RDMABuffer by buffer, span and read."""


def offer(shards: HostShards, layout: SnapshotLayout, buffers: Sequence[torch.Tensor]) -> RemoteShards:
    """Let other hosts read this host's flat uint8 buffers. Call it in an actor, or a thread with its context."""
    from monarch.rdma import RDMABuffer  # imported, it changes Python's warning filters

    found = spans(shards, layout)
    handles = [[[RDMABuffer(buffer[read]) for read in span.reads()] for span in found] for buffer in buffers]
    return RemoteShards(shards=shards, handles=handles)


async def fetch(remote: RemoteShards, layout: SnapshotLayout, buffer: int, snapshot: torch.Tensor) -> int:
    """Read what another host holds in its buffer of this index into a snapshot. Returns the bytes that were read.

    Raises:
        Exception: what Monarch raises where the other host can't be read.
    """
    seats = asyncio.Semaphore(READS_AT_ONCE)

    async def read(handle: Any, target: torch.Tensor) -> None:
        async with seats:
            await handle.read_into(target, timeout=READ_TIMEOUT_S)

    found = list(zip(spans(remote.shards, layout), remote.handles[buffer], strict=True))
    await _all(
        read(handle, snapshot[part])
        for span, handles in found
        if span.gaps is None
        for handle, part in zip(handles, span.reads(), strict=True)
    )
    tensors = dict(views(snapshot, layout))
    for span, handles in found:
        if span.gaps is None:
            continue
        name, shard = span.gaps
        scratch = torch.empty(span.stop - span.start, dtype=torch.uint8)
        await _all(read(handle, part) for handle, part in zip(handles, scratch.split(READ_BYTES), strict=True))
        target = tensors[name][index_of(shard)]
        await asyncio.to_thread(target.copy_, scratch.view(target.dtype).as_strided(target.shape, target.stride()))
    return sum(span.stop - span.start for span, _ in found)


def copy_held(shards: HostShards, layout: SnapshotLayout, buffer: torch.Tensor, snapshot: torch.Tensor) -> None:
    """Copy what a host holds in its buffer into a snapshot."""
    for (_, source), (_, target) in zip(
        held_tensors(buffer, layout, shards), held_tensors(snapshot, layout, shards), strict=True
    ):
        target.copy_(source)


def _extent(entry: TensorEntry, shard: Shard) -> tuple[int, int]:
    """Bytes of the snapshot from a shard's first value to the end of its last."""
    first = last = 0
    for (start, stop), size in zip(shard, entry.shape, strict=True):
        first, last = first * size + start, last * size + stop - 1
    return entry.offset + first * entry.dtype.itemsize, entry.offset + (last + 1) * entry.dtype.itemsize


def _joined(shards: Sequence[Shard]) -> list[Shard]:
    """One shard where they fill one together, else they themselves, sorted."""
    box = tuple((min(start for start, _ in sides), max(stop for _, stop in sides)) for sides in zip(*shards, strict=True))
    return [box] if volume(box) == sum(map(volume, shards)) else sorted(shards)


async def _all(work: Iterator[Coroutine[Any, Any, None]]) -> None:
    """Await all; where one fails, cancel the others and raise what it raised."""
    try:
        async with asyncio.TaskGroup() as tasks:
            for each in work:
                tasks.create_task(each)
    except ExceptionGroup as group:
        raise group.exceptions[0] from None
