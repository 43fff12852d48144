"""The trainer's side of weight synchronisation: sharded parameters to one shared snapshot per version, or to a buffer that each
rank has on its own device.

From a GPU tensors are copied to the host without the CPU's help, into memory that is page-locked.
"""

import asyncio
import uuid
from collections.abc import Iterable
from typing import Any, NamedTuple, Protocol, TypeVar

import torch
import torch.distributed as dist
import torchstore
from torch.distributed.tensor import DTensor

from torchtitan.experiments.rl.compat.torch import local_shard, offered_memory
from torchtitan.experiments.rl.weights.host_shards import (
    HostShards,
    check_all_written,
    held_tensors,
    offer,
    spans,
    written_by_host,
    written_by_rank,
)
from torchtitan.experiments.rl.weights.snapshot import (
    Handle,
    Manifest,
    RankParts,
    Shard,
    SharedBuffer,
    SnapshotLayout,
    digest,
    named,
    page_lock,
    views,
)
from torchtitan.experiments.rl.weights.store import manifest_key, shards_key

T = TypeVar("T")


class OwnPart(NamedTuple):
    """This rank's part of a tensor that ranks share out as no DTensor can say: one expert of a stack that they share out."""

    local: torch.Tensor
    shard: Shard
    shape: tuple[int, ...]
    """Of the whole."""


class Tensors(Protocol):
    """Tensors by hub name, DTensors or plain, or parts of them, the same on every rank and in one order."""

    def items(self) -> Iterable[tuple[str, torch.Tensor | OwnPart]]: ...


class SnapshotPublisher:
    """Writes versions to two buffers alternately, so that generators may read one version while the next is written.

    Every rank copies its own shards straight into the buffers of its host: gathering is that copy. Of several ranks that hold
    the same shard, the lowest writes it, and a host of which no rank writes anything has no buffers. The lowest rank of each
    host owns its buffers. Each rank digests what it writes where that lies: shares of a tensor's digest add up.

    With a ``device`` each rank that writes has one buffer there, of its own shards alone. A second would take memory that GPUs
    lack, so a version is written when nobody reads the one before (``weights/sync.py``).
    """

    def __init__(self, *, rank: int, host: str, dtype: torch.dtype, device: torch.device | None = None):
        """
        Args:
            host: its identity. Ranks of one host share memory.
            device: where versions stay. None: in the host's memory.
        """
        self._rank = rank
        self._host = host
        self._dtype = dtype
        self._device = device
        self._layout: SnapshotLayout | None = None
        self._shards: dict[str, HostShards] = {}
        """By host."""
        self._owns_buffers = False
        self._buffers: list[SharedBuffer] = []
        """Of this host."""
        self._paths: list[dict[str, str]] = [{}, {}]
        """Of the buffers, by host."""
        self._parts: tuple[RankParts, ...] = ()
        """Of each rank that writes, where versions stay on devices."""
        self._page_locked = device is not None  # there is nothing to lock
        self._targets: list[dict[str, torch.Tensor]] = [{}, {}]
        """By buffer and name: where this rank copies its part of a tensor. Found once: it takes a tenth of the copying."""
        self._life = ""
        """The same on all ranks, and of no other trainer."""
        self._written = 0
        """How often ``write`` was called."""
        self._mine: dict[str, Shard] = {}
        """What this rank writes."""
        self._shares: dict[str, torch.Tensor] = {}
        """Of the digests of what was written last, by name: those that a GPU took."""
        self._gloo: dist.ProcessGroup | None = None
        """All ranks, for a thread beside the trainer's own. None where there is one."""
        self._offered = False
        """Whether readers of other hosts can read this host's buffers."""

    @torch.no_grad()
    def write(self, version: int, tensors: Tensors) -> None:
        """Copy ``tensors`` into this version's buffer. Collective: every rank calls it."""
        if self._layout is None:
            self._lay_out(tensors)
        self._written += 1
        targets, self._shares = self._targets[version % 2], {}
        device = torch.device("cpu")
        for name, tensor in tensors.items():
            if name not in targets:
                continue
            local = (
                tensor.local if isinstance(tensor, OwnPart) else tensor.to_local() if isinstance(tensor, DTensor) else tensor
            )
            device = self._reach(local.device)
            copied = copy_out(targets[name], local)
            if not copied.is_cpu:  # on its way to the host its memory is free then
                self._shares[name] = digest(copied, self._mine[name], tuple(tensor.shape))
        wait_for_copies(self._device or device)

    async def publish(self, version: int, *, remote_readers: bool) -> Manifest:
        """Put what was written last into torchstore: every rank calls it, and generators may read when all have returned.

        It replaces version ``v - 2``, which had the same buffer: every generator has answered for it. What lies in the host's
        memory is digested in a thread: the trainer may take its next step meanwhile.

        Args:
            remote_readers: some generator is on a host without trainer ranks.

        Returns:
            What is published, the same on every rank.
        """
        assert self._layout is not None, "publish comes after write"
        if (remote_readers or len(self._shards) > 1) and self._owns_buffers and not self._offered:
            buffers = [buffer.bytes for buffer in self._buffers]
            # In a thread: it takes 0.3 ms for each 8 MB. The thread has the actor's context, which Monarch needs.
            offered = await asyncio.to_thread(offer, self._shards[self._host], self._layout, buffers)
            await torchstore.put(shards_key(self._host), offered)
            self._offered = True
        paths, publication = self._paths[version % 2], f"{self._life}-{self._written}"
        digests = await asyncio.to_thread(self._digests, version)
        manifest = Manifest(
            version=version, layout=self._layout, paths=paths, publication=publication, digests=digests, parts=self._parts
        )
        if self._rank == 0:
            await torchstore.put(manifest_key(version), manifest)
        return manifest

    def _digests(self, version: int) -> dict[str, str]:
        """Of what all ranks have written as ``version``. Collective."""
        assert self._layout is not None
        targets, nothing = self._targets[version % 2], torch.zeros((), dtype=torch.int64)
        shares = dict.fromkeys((entry.name for entry in self._layout.entries), nothing) | self._shares
        for entry in self._layout.entries:
            if entry.name in targets and entry.name not in self._shares:
                shares[entry.name] = digest(targets[entry.name], self._mine[entry.name], entry.shape)
        sums = torch.stack([share.cpu() for share in shares.values()])
        if self._gloo is not None:
            dist.all_reduce(sums, group=self._gloo)  # returns when every rank has written
        return named(zip(shares, sums.tolist(), strict=True))

    def _reach(self, device: torch.device) -> torch.device:
        """``device``, from which this rank's parts of the buffers can be written at its own speed now."""
        if device.type == "cuda" and not self._page_locked:
            self._page_locked = True
            # What this rank writes: the whole would be locked once for every rank of the host.
            page_lock(target for targets in self._targets for target in targets.values())
        return device

    def _lay_out(self, tensors: Tensors) -> None:
        """Decide who writes what, and make or map this host's buffers, or make this rank's own."""
        if _many_ranks():
            self._gloo = dist.new_group(backend="gloo")
        described = {name: (tuple(tensor.shape), shard_of(tensor)) for name, tensor in tensors.items()}
        shapes = {name: shape for name, (shape, _) in described.items()}
        own_shards = {name: shard for name, (_, shard) in described.items()}
        everyones = _of_every_rank((self._host, own_shards, uuid.uuid4().hex))
        hosts, held = [host for host, _, _ in everyones], [shards for _, shards, _ in everyones]
        self._life = everyones[0][2]
        written = written_by_rank(held)
        self._shards = written_by_host(written, hosts)
        check_all_written(self._shards, shapes)
        layout = self._layout = SnapshotLayout.of(shapes, self._dtype)
        self._mine = written[self._rank]
        if self._device is not None:
            handle = self._keep(self._device) if self._mine else ""
            handles = _of_every_rank(handle)
            self._parts = tuple(RankParts(*own) for own in zip(handles, written, strict=True) if own[0])
            return
        own = self._shards.get(self._host)
        self._owns_buffers = own is not None and hosts.index(self._host) == self._rank
        if own is not None and self._owns_buffers:
            used = [(span.start, span.stop) for span in spans(own, layout)]
            self._buffers = [SharedBuffer.create(layout.nbytes, used) for _ in range(2)]
        offered = _of_every_rank([buffer.path for buffer in self._buffers])
        self._paths = [{host: paths[index] for host, paths in zip(hosts, offered, strict=True) if paths} for index in range(2)]
        if own is None:
            return
        if not self._owns_buffers:
            self._buffers = [SharedBuffer.attach(paths[self._host]) for paths in self._paths]
        mine = {name: [shard] for name, shard in self._mine.items()}
        self._targets = [
            {name: target for (name, _), target in held_tensors(buffer.bytes, layout, mine)} for buffer in self._buffers
        ]

    def _keep(self, device: torch.device) -> Handle:
        """Make this rank's own buffer."""
        layout = SnapshotLayout.of_shards(self._mine, self._dtype)
        if device.type == "cuda":
            torch.cuda.empty_cache()  # what is cut out of a cached block keeps all of that block, and readers map all of it
            memory = torch.empty(layout.nbytes, dtype=torch.uint8, device=device)
            handle: Handle = offered_memory(memory)
        else:
            self._buffers = [buffer := SharedBuffer.create(layout.nbytes)]
            memory, handle = buffer.bytes, buffer.path
        self._targets = [dict(views(memory, layout))] * 2
        return handle


def shard_of(tensor: torch.Tensor | OwnPart) -> Shard:
    """This rank's part of a tensor: all of one that is not shared out."""
    if isinstance(tensor, OwnPart):
        return tensor.shard
    offset, shape = local_shard(tensor) if isinstance(tensor, DTensor) else ((0,) * tensor.ndim, tuple(tensor.shape))
    return tuple((start, start + size) for start, size in zip(offset, shape, strict=True))


def _many_ranks() -> bool:
    return dist.is_initialized() and dist.get_world_size() > 1


def _of_every_rank(value: T) -> list[T]:
    """What each rank has given, by rank. Collective."""
    if not _many_ranks():
        return [value]
    values: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return values


def copy_out(target: torch.Tensor, source: torch.Tensor) -> torch.Tensor:
    """Copy as the target's dtype. From or to a GPU it may return before the copy is done: ``wait_for_copies``.

    Returns:
        What was copied, in that dtype, on a GPU where one of the two lies there.
    """
    if source.device.type == "cpu" or not target.is_cpu:
        return target.copy_(source)
    # torch would move the whole float32 and convert on the CPU.
    converted = source.to(target.dtype)
    # Into a target with gaps torch copies over a buffer of its own.
    target.copy_(converted, non_blocking=target.is_contiguous())
    return converted


def wait_for_copies(device: torch.device) -> None:
    """Return when every copy from ``device`` is done."""
    if device.type == "cuda":
        torch.cuda.current_stream(device).synchronize()
