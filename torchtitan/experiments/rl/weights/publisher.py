"""The trainer's side of weight synchronisation: sharded parameters to one shared snapshot per version."""

import asyncio
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
        self._published: list[tuple[int, bool]] = []

    @torch.no_grad()
    def write(self, version: int, tensors: Mapping[str, torch.Tensor]) -> None:
        """Copy ``tensors`` (hub names; DTensor or plain) into this version's buffer. Collective: every rank calls it."""
        if self._layout is None:
            self._layout = SnapshotLayout.of(tensors, self._dtype)
            self._open_buffers()
        writes = self._one_host or self._rank == 0
        buffer = self._buffers[version % 2] if writes else None
        views = dict(buffer.views(self._layout)) if buffer else {}
        for name, tensor in tensors.items():
            self._copy(views.get(name), tensor)
        _barrier()

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
            fingerprint=await asyncio.to_thread(fingerprint, buffer.bytes),
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

    def _copy(self, target: torch.Tensor | None, tensor: torch.Tensor) -> None:
        if not isinstance(tensor, DTensor):
            if self._rank == 0:
                target.copy_(tensor)
            return
        if not self._one_host:
            full = tensor.full_tensor()
            if target is not None:
                target.copy_(full)
            return
        mesh, placements = tensor.device_mesh, tensor.placements
        # Where a mesh dimension holds copies, its first rank writes.
        if any(isinstance(p, Replicate) and mesh.get_local_rank(i) != 0 for i, p in enumerate(placements)):
            return
        shape, offset = compute_local_shape_and_global_offset(tensor.shape, mesh, placements)
        target[tuple(slice(o, o + s) for o, s in zip(offset, shape, strict=True))].copy_(tensor.to_local())


def _barrier() -> None:
    if dist.is_initialized() and dist.get_world_size() > 1:
        dist.barrier()
