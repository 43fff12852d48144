"""The trainer's side of weight synchronisation: sharded parameters to one shared snapshot per version."""

import asyncio
from collections.abc import Mapping
from typing import Any, TypeVar

import torch
import torch.distributed as dist
import torchstore
from torch.distributed.tensor import DTensor

from torchtitan.experiments.rl.compat.torch import local_shard
from torchtitan.experiments.rl.weights.device_copy import copy_to_host, page_lock, wait_for_copies
from torchtitan.experiments.rl.weights.host_shards import HostShards, divide, divided_tensors, written_by
from torchtitan.experiments.rl.weights.remote import RemoteShards, offer
from torchtitan.experiments.rl.weights.snapshot import (
    Manifest,
    Shard,
    SharedBuffer,
    SnapshotLayout,
    combined,
    copy_with_digest,
    digest,
    fingerprint,
)
from torchtitan.experiments.rl.weights.store import manifest_key, shards_key

T = TypeVar("T")


class SnapshotPublisher:
    """Writes versions to two buffers alternately, so that generators may read one version while the next is written.

    Every rank copies its own shards straight into the buffers of its host: gathering is that copy. Of several ranks that hold
    the same shard, the lowest writes it, and a host of which no rank writes anything has no buffers. The lowest rank of each
    host owns its buffers, and takes the digests of what is in them: of what it copies by itself, while it copies.
    """

    def __init__(self, *, rank: int, host: str, dtype: torch.dtype):
        """``host``: its identity. Ranks of one host share memory."""
        self._rank = rank
        self._host = host
        self._dtype = dtype
        self._layout: SnapshotLayout | None = None
        self._shards: dict[str, HostShards] = {}
        """By host."""
        self._owns_buffers = False
        self._buffers: list[SharedBuffer] = []
        """Of this host."""
        self._paths: list[dict[str, str]] = [{}, {}]
        """Of the buffers, by host."""
        self._page_locked = False
        self._targets: list[dict[str, torch.Tensor]] = [{}, {}]
        """By buffer and name: where this rank copies its part of a tensor. Found once: it takes a tenth of the copying."""
        self._alone: dict[str, Shard] = {}
        """By name: what the owner of the buffers copies and no other rank has a part of."""
        self._digests: list[dict[str, str]] = [{}, {}]
        """Of the snapshot in each buffer."""
        self._offered = False
        """Whether readers of other hosts can read this host's buffers."""

    @torch.no_grad()
    def write(self, version: int, tensors: Mapping[str, torch.Tensor]) -> None:
        """Copy ``tensors`` (hub names; DTensor or plain) into this version's buffer. Collective: every rank calls it."""
        if self._layout is None:
            self._lay_out(tensors)
        targets = self._targets[version % 2]
        device = torch.device("cpu")
        copied: dict[tuple[str, Shard], str] = {}
        for name, tensor in tensors.items():
            if name in targets:
                local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
                device = self._reach(local.device)
                if name in self._alone and device.type == "cpu":
                    copied[name, self._alone[name]] = copy_with_digest(targets[name], local)
                else:
                    copy_to_host(targets[name], local)
        wait_for_copies(device)
        _barrier()
        self._digests[version % 2] = self._take_digests(version % 2, copied)

    async def publish(self, version: int, *, remote_readers: bool) -> str:
        """Put a written version into torchstore: every rank calls it, and generators may read when all have returned.

        Rank 0 puts the manifest, and returns the version's fingerprint; the others return "". It replaces that of version
        ``v - 2``, which had the same buffer: every generator has answered for it.

        Args:
            remote_readers: some generator is on a host without trainer ranks.
        """
        assert self._layout is not None, "publish comes after write"
        if (remote_readers or len(self._shards) > 1) and self._owns_buffers and not self._offered:
            buffers = [buffer.bytes for buffer in self._buffers]
            # In a thread: it takes 0.3 ms for each 8 MB. The thread has the actor's context, which Monarch needs.
            handles = await asyncio.to_thread(offer, self._shards[self._host], self._layout, buffers)
            await torchstore.put(shards_key(self._host), RemoteShards(shards=self._shards[self._host], handles=handles))
            self._offered = True
        if self._rank:
            return ""
        found = self._digests[version % 2]
        manifest = Manifest(
            version=version,
            layout=self._layout,
            paths=self._paths[version % 2],
            fingerprint=fingerprint(found),
            digests=found,
        )
        await torchstore.put(manifest_key(version), manifest)
        return manifest.fingerprint

    def _reach(self, device: torch.device) -> torch.device:
        """``device``, from which the buffers can be written at its own speed now."""
        if device.type == "cuda" and not self._page_locked:
            self._page_locked = True
            for buffer in self._buffers:
                page_lock(buffer.bytes)
        return device

    def _lay_out(self, tensors: Mapping[str, torch.Tensor]) -> None:
        """Decide who writes what, and make or map this host's buffers."""
        shapes = {name: tuple(tensor.shape) for name, tensor in tensors.items()}
        everyones = _of_every_rank((self._host, {name: _shard_of(tensor) for name, tensor in tensors.items()}))
        hosts, held = [host for host, _ in everyones], [shards for _, shards in everyones]
        self._shards = divide(held, hosts, self._dtype)
        self._layout = SnapshotLayout.of(tensors, self._dtype, divided_tensors(self._shards, shapes))
        own = self._shards.get(self._host)
        self._owns_buffers = own is not None and hosts.index(self._host) == self._rank
        if own is not None and self._owns_buffers:
            self._buffers = [SharedBuffer.create(own.nbytes) for _ in range(2)]
        offered = _of_every_rank([buffer.path for buffer in self._buffers])
        self._paths = [{host: paths[index] for host, paths in zip(hosts, offered, strict=True) if paths} for index in range(2)]
        if own is None:
            return
        if not self._owns_buffers:
            self._buffers = [SharedBuffer.attach(paths[self._host]) for paths in self._paths]
        written = written_by(self._rank, held)
        self._targets = [own.targets(buffer.bytes, written) for buffer in self._buffers]
        if self._owns_buffers:
            self._alone = {each.name: each.shard for each in own.held if written.get(each.name) == each.shard}

    def _take_digests(self, index: int, copied: Mapping[tuple[str, Shard], str]) -> dict[str, str]:
        """Of the snapshot in the buffers of this index, by name. Each host's are taken there; ``copied`` has some of them."""
        assert self._layout is not None
        found = dict(copied)
        if self._owns_buffers:
            held = [each for each in self._shards[self._host].held if (each.name, each.shard) not in copied]
            found |= {(each.name, each.shard): digest(each.view(self._buffers[index].bytes)) for each in held}
        if len(self._shards) > 1:
            found = {key: value for own in _of_every_rank(found) for key, value in own.items()}
        if self._rank:
            return {}
        empty = digest(torch.empty(0, dtype=torch.uint8))
        return {
            entry.name: combined([found.get((entry.name, shard), empty) for shard in entry.shards or (entry.whole,)])
            for entry in self._layout.entries
        }


def _shard_of(tensor: torch.Tensor) -> Shard:
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


def _barrier() -> None:
    if _many_ranks():
        dist.barrier()
