"""The trainer's side of weight synchronisation: sharded parameters to one shared snapshot per version."""

import socket
from collections.abc import Mapping

import torch
import torch.distributed as dist
import torchstore
from torch.distributed.tensor import DTensor, Replicate
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

from torchtitan.experiments.rl.weights.snapshot import (
    Manifest,
    SharedBuffer,
    SnapshotLayout,
    fingerprint,
)
from torchtitan.experiments.rl.weights.store import manifest_key, payload_key


class SnapshotPublisher:
    """Writes versions to two buffers in turn, so that the one before may still be read while the next is written.

    On one host every rank copies its own shards straight into the buffer: gathering is that copy. Ranks on several hosts
    gather each tensor, and rank 0 writes.
    """

    def __init__(self, *, rank: int, one_host: bool, dtype: torch.dtype):
        self._rank = rank
        self._one_host = one_host
        self._dtype = dtype
        self._layout: SnapshotLayout | None = None
        self._buffers: list[SharedBuffer] = []
        self._targets: list[dict[str, torch.Tensor]] = []
        """By buffer and name: where this rank copies its part of a tensor. Found once: that takes a tenth of the copying."""
        self._fingerprints = ["", ""]
        """Of the buffers' bytes, taken by rank 0."""
        self._published: list[tuple[int, bool]] = []

    @torch.no_grad()
    def write(self, version: int, tensors: Mapping[str, torch.Tensor]) -> None:
        """Copy ``tensors`` (hub names; DTensor or plain) into this version's buffer. Collective: every rank calls it."""
        if self._layout is None:
            self._layout = SnapshotLayout.of(tensors, self._dtype)
            self._open_buffers()
            self._targets = [self._targets_in(buffer, tensors) for buffer in self._buffers] or [{}, {}]
        targets = self._targets[version % 2]
        for name, tensor in tensors.items():
            if isinstance(tensor, DTensor):
                tensor = tensor.to_local() if self._one_host else tensor.full_tensor()
            if name in targets:
                targets[name].copy_(tensor)
        _barrier()
        if self._rank == 0:
            self._fingerprints[version % 2] = fingerprint(self._buffers[version % 2].bytes)

    async def publish(self, version: int, *, remote_readers: bool) -> None:
        """Rank 0: put a written version into torchstore: its manifest, and its bytes when some generator can't map them.

        Version ``v - 2`` shares the buffer of ``v`` and leaves the store: by now every generator has answered for it.
        """
        buffer = self._buffers[version % 2]
        manifest = Manifest(
            version=version,
            layout=self._layout,
            path=buffer.path,
            host=socket.gethostname(),
            fingerprint=self._fingerprints[version % 2],
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

    def _open_buffers(self) -> None:
        paths: list[str | None] = [None, None]
        if self._rank == 0:
            self._buffers = [SharedBuffer.create(self._layout.nbytes) for _ in paths]
            paths = [buffer.path for buffer in self._buffers]
        if dist.is_initialized() and dist.get_world_size() > 1:
            dist.broadcast_object_list(paths)
        if self._rank != 0 and self._one_host:
            self._buffers = [SharedBuffer.attach(path) for path in paths]

    def _targets_in(self, buffer: SharedBuffer, tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        targets = {}
        for name, view in buffer.views(self._layout):
            part = self._part(tensors[name])
            if part is not None:
                targets[name] = view[part]
        return targets

    def _part(self, tensor: torch.Tensor) -> tuple[slice, ...] | None:
        """What this rank writes of a tensor; None for nothing."""
        if not isinstance(tensor, DTensor) or not self._one_host:
            return (...,) if self._rank == 0 else None
        mesh, placements = tensor.device_mesh, tensor.placements
        # Where a mesh dimension holds copies, its first rank writes.
        if any(isinstance(p, Replicate) and mesh.get_local_rank(i) != 0 for i, p in enumerate(placements)):
            return None
        shape, offset = compute_local_shape_and_global_offset(tensor.shape, mesh, placements)
        return tuple(slice(o, o + s) for o, s in zip(offset, shape, strict=True))


def _barrier() -> None:
    if dist.is_initialized() and dist.get_world_size() > 1:
        dist.barrier()
