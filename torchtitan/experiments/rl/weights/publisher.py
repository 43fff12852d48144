"""The trainer's side of weight synchronisation: sharded parameters to one shared snapshot per version."""

from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist
import torchstore
from torch.distributed.tensor import DTensor

from torchtitan.experiments.rl.compat.torch import local_shard
from torchtitan.experiments.rl.process.host_identity import host_identity
from torchtitan.experiments.rl.weights.device_copy import copy_to_host, page_lock, wait_for_copies
from torchtitan.experiments.rl.weights.snapshot import (
    Manifest,
    SharedBuffer,
    SnapshotLayout,
    fingerprint,
    tensor_digests,
)
from torchtitan.experiments.rl.weights.store import manifest_key, payload_key


class SnapshotPublisher:
    """Writes versions to two buffers alternately, so that generators may read one version while the next is written.

    On one host every rank copies its own shards straight into the buffer: gathering is that copy. Of several ranks that hold
    the same shard, the lowest writes it. Ranks on several hosts gather each tensor, and rank 0 writes.
    """

    def __init__(self, *, rank: int, one_host: bool, dtype: torch.dtype):
        self._rank = rank
        self._one_host = one_host
        self._dtype = dtype
        self._layout: SnapshotLayout | None = None
        self._buffers: list[SharedBuffer] = []
        self._page_locked = False
        self._targets: list[dict[str, torch.Tensor]] = []
        """By buffer and name: where this rank copies its part of a tensor. Found once: it takes a tenth of the copying."""
        self._digests: list[dict[str, str]] = [{}, {}]
        """Of the buffers' tensors, taken by rank 0."""
        self._published: list[tuple[int, bool]] = []

    @torch.no_grad()
    def write(self, version: int, tensors: Mapping[str, torch.Tensor]) -> None:
        """Copy ``tensors`` (hub names; DTensor or plain) into this version's buffer. Collective: every rank calls it."""
        if self._layout is None:
            self._layout = SnapshotLayout.of(tensors, self._dtype)
            self._open_buffers(self._layout.nbytes)
            shards = self._shards_to_write(tensors)
            self._targets = [
                {name: view[shards[name]] for name, view in buffer.views(self._layout) if name in shards}
                for buffer in self._buffers
            ] or [{}, {}]
        targets = self._targets[version % 2]
        device = torch.device("cpu")
        for name, tensor in tensors.items():
            if isinstance(tensor, DTensor):
                tensor = tensor.to_local() if self._one_host else tensor.full_tensor()
            if name in targets:
                device = self._reach(tensor.device)
                copy_to_host(targets[name], tensor)
        wait_for_copies(device)
        _barrier()
        if self._rank == 0:
            self._digests[version % 2] = tensor_digests(self._buffers[version % 2].bytes, self._layout)

    async def publish(self, version: int, *, remote_readers: bool) -> str:
        """Rank 0: put a written version into torchstore: its manifest, and its bytes when some generator can't map them.
        Returns its fingerprint.

        Also deletes version ``v - 2`` from the store, which had the same buffer: every generator has answered for it.
        """
        buffer = self._buffers[version % 2]
        assert self._layout is not None, "publish comes after write"
        manifest = Manifest(
            version=version,
            layout=self._layout,
            path=buffer.path,
            host=host_identity(),
            fingerprint=fingerprint(self._digests[version % 2]),
            digests=self._digests[version % 2],
            payload_key=payload_key(version) if remote_readers else None,
        )
        if remote_readers:
            await torchstore.put(payload_key(version), buffer.bytes)
        await torchstore.put(manifest_key(version), manifest)
        self._published.append((version, remote_readers))
        while self._published[0][0] <= version - 2:
            old, had_payload = self._published.pop(0)
            await torchstore.delete(manifest_key(old))
            if had_payload:
                await torchstore.delete(payload_key(old))
        return manifest.fingerprint

    def _reach(self, device: torch.device) -> torch.device:
        """``device``, from which the buffers can be written at its own speed now."""
        if device.type == "cuda" and not self._page_locked:
            self._page_locked = True
            for buffer in self._buffers:
                page_lock(buffer.bytes)
        return device

    def _open_buffers(self, nbytes: int) -> None:
        paths = ["", ""]
        if self._rank == 0:
            self._buffers = [SharedBuffer.create(nbytes) for _ in paths]
            paths = [buffer.path for buffer in self._buffers]
        if _many_ranks():
            dist.broadcast_object_list(paths)
        if self._rank != 0 and self._one_host:
            self._buffers = [SharedBuffer.attach(path) for path in paths]

    def _shards_to_write(self, tensors: Mapping[str, torch.Tensor]) -> dict[str, tuple[Any, ...]]:
        """Index of what this rank writes in the whole tensor, by name. Collective: the ranks compare what they hold."""
        if not self._one_host:
            return dict.fromkeys(tensors, (...,)) if self._rank == 0 else {}
        mine = {name: _shard_of(tensor) for name, tensor in tensors.items()}
        held = [mine]
        if _many_ranks():
            held = [mine] * dist.get_world_size()
            dist.all_gather_object(held, mine)
        written = {entry for lower in held[: self._rank] for entry in lower.items()}
        return {
            name: tuple(slice(start, stop) for start, stop in shard)
            for name, shard in mine.items()
            if (name, shard) not in written
        }


Shard = tuple[tuple[int, int], ...]
"""Start and stop in each dimension of the whole tensor."""


def _shard_of(tensor: torch.Tensor) -> Shard:
    offset, shape = local_shard(tensor) if isinstance(tensor, DTensor) else ((0,) * tensor.ndim, tuple(tensor.shape))
    return tuple((start, start + size) for start, size in zip(offset, shape, strict=True))


def _many_ranks() -> bool:
    return dist.is_initialized() and dist.get_world_size() > 1


def _barrier() -> None:
    if _many_ranks():
        dist.barrier()
