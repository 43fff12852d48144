"""The trainer's side of weight synchronisation: sharded parameters to one shared snapshot per version.

From a GPU tensors are copied without the CPU's help, into memory that is page-locked.
"""

import asyncio
import logging
import uuid
from collections.abc import Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from mmap import PAGESIZE
from typing import Any, Protocol, TypeVar

import torch
import torch.distributed as dist
import torchstore
from torch.distributed.tensor import DTensor

from torchtitan.experiments.rl.compat.torch import local_shard, take_cuda_error
from torchtitan.experiments.rl.process import trace
from torchtitan.experiments.rl.weights.host_shards import (
    HostShards,
    divided_tensors,
    held_tensors,
    offer,
    spans,
    written_by_host,
    written_by_rank,
)
from torchtitan.experiments.rl.weights.snapshot import Manifest, Shard, SharedBuffer, SnapshotLayout, digest, fingerprint
from torchtitan.experiments.rl.weights.store import (
    HostDigests,
    digests_key,
    manifest_key,
    published_digests,
    shards_key,
)

T = TypeVar("T")

logger = logging.getLogger(__name__)


class Tensors(Protocol):
    """Tensors by hub name, DTensors or plain, the same on every rank and in one order."""

    def items(self) -> Iterable[tuple[str, torch.Tensor]]: ...


class SnapshotPublisher:
    """Writes versions to two buffers alternately, so that generators may read one version while the next is written.

    Every rank copies its own shards straight into the buffers of its host: gathering is that copy. Of several ranks that hold
    the same shard, the lowest writes it, and a host of which no rank writes anything has no buffers. The lowest rank of each
    host owns its buffers. It takes the digests of what is in them when the version is published, beside what follows: neither
    training nor the generators' loads wait for them.
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
        self._life = ""
        """The same on all ranks, and of no other trainer."""
        self._written = 0
        """How often ``write`` was called."""
        self._beside = ThreadPoolExecutor(max_workers=1, thread_name_prefix="digests")
        self._digests: list[Future[dict[tuple[str, Shard], str]] | None] = [None, None]
        """Of what this host holds in each buffer, by name and shard: on the owner of the buffers, of what it published last."""
        self._offered = False
        """Whether readers of other hosts can read this host's buffers."""

    @torch.no_grad()
    def write(self, version: int, tensors: Tensors) -> None:
        """Copy ``tensors`` into this version's buffer. Collective: every rank calls it."""
        if self._layout is None:
            self._lay_out(tensors)
        if (digests := self._digests[version % 2]) is not None:
            digests.exception()  # returns when they are taken: they read this buffer
        _barrier()
        self._written += 1
        targets = self._targets[version % 2]
        device = torch.device("cpu")
        for name, tensor in tensors.items():
            if name in targets:
                local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
                device = self._reach(local.device)
                copy_to_host(targets[name], local)
        wait_for_copies(device)
        _barrier()

    async def publish(self, version: int, *, remote_readers: bool) -> asyncio.Task[str]:
        """Put what was written last into torchstore: every rank calls it, and generators may read when all have returned.

        It replaces version ``v - 2``, which had the same buffer: every generator has answered for it.

        Args:
            remote_readers: some generator is on a host without trainer ranks.

        Returns:
            A task, to be kept, that publishes the digests. It returns the fingerprint on rank 0, and "" on the others.
        """
        assert self._layout is not None, "publish comes after write"
        if (remote_readers or len(self._shards) > 1) and self._owns_buffers and not self._offered:
            buffers = [buffer.bytes for buffer in self._buffers]
            # In a thread: it takes 0.3 ms for each 8 MB. The thread has the actor's context, which Monarch needs.
            offered = await asyncio.to_thread(offer, self._shards[self._host], self._layout, buffers)
            await torchstore.put(shards_key(self._host), offered)
            self._offered = True
        paths, publication = self._paths[version % 2], f"{self._life}-{self._written}"
        manifest = Manifest(version=version, layout=self._layout, paths=paths, publication=publication)
        if self._rank == 0:
            await torchstore.put(manifest_key(version), manifest)
        if self._owns_buffers:
            self._digests[version % 2] = self._beside.submit(self._take_digests, version)
        return asyncio.create_task(self._publish_digests(manifest))

    async def _publish_digests(self, manifest: Manifest) -> str:
        digests = self._digests[manifest.version % 2]
        if digests is not None:
            own = HostDigests(publication=manifest.publication, digests=await asyncio.wrap_future(digests))
            await torchstore.put(digests_key(manifest.version, self._host), own)
        return fingerprint(await published_digests(manifest)) if self._rank == 0 else ""

    def _reach(self, device: torch.device) -> torch.device:
        """``device``, from which this rank's parts of the buffers can be written at its own speed now."""
        if device.type == "cuda" and not self._page_locked:
            self._page_locked = True
            # What this rank writes: the whole would be locked once for every rank of the host.
            page_lock(target for targets in self._targets for target in targets.values())
        return device

    def _lay_out(self, tensors: Tensors) -> None:
        """Decide who writes what, and make or map this host's buffers."""
        described = {name: (tuple(tensor.shape), _shard_of(tensor)) for name, tensor in tensors.items()}
        shapes = {name: shape for name, (shape, _) in described.items()}
        own_shards = {name: shard for name, (_, shard) in described.items()}
        everyones = _of_every_rank((self._host, own_shards, uuid.uuid4().hex))
        hosts, held = [host for host, _, _ in everyones], [shards for _, shards, _ in everyones]
        self._life = everyones[0][2]
        written = written_by_rank(held)
        self._shards = written_by_host(written, hosts)
        layout = self._layout = SnapshotLayout.of(shapes, self._dtype, divided_tensors(self._shards, shapes))
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
        mine = {name: [shard] for name, shard in written[self._rank].items()}
        self._targets = [
            {name: target for (name, _), target in held_tensors(buffer.bytes, layout, mine)} for buffer in self._buffers
        ]

    def _take_digests(self, version: int) -> dict[tuple[str, Shard], str]:
        assert self._layout is not None, "written before"
        held = held_tensors(self._buffers[version % 2].bytes, self._layout, self._shards[self._host])
        with trace.span("digests of what is published", version=version):
            return {key: digest(tensor) for key, tensor in held}


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


def page_lock(targets: Iterable[torch.Tensor]) -> bool:
    """Keep the pages of CPU tensors where they are, so that a GPU writes them by itself, until this process ends.

    Args:
        targets: views of mapped memory, which begins and ends with whole pages.

    Returns:
        Whether it could. Without it copies wait for the CPU, and nothing else changes: CUDA keeps the refusal and the next
        kernel launch would raise it, so it is taken here.
    """
    for start, nbytes in page_ranges(targets):
        code = int(torch.cuda.cudart().cudaHostRegister(start, nbytes, 0))
        if code:
            take_cuda_error()
            logger.warning("shared memory of the weights can't be page-locked (CUDA error %d): publishing takes longer", code)
            return False
    return True


def page_ranges(targets: Iterable[torch.Tensor]) -> list[tuple[int, int]]:
    """Address and bytes of the pages that CPU tensors lie on, gaps in a tensor included. CUDA locks no page twice, so ranges
    that meet are one."""
    found: list[tuple[int, int]] = []
    for start, end in sorted(_pages(target) for target in targets if target.numel()):
        if found and start <= found[-1][1]:
            start, end = found[-1][0], max(end, found.pop()[1])
        found.append((start, end))
    return [(start, end - start) for start, end in found]


def _pages(target: torch.Tensor) -> tuple[int, int]:
    """From the first page of a tensor to the end of the last."""
    last = sum((size - 1) * stride for size, stride in zip(target.shape, target.stride(), strict=True))
    start = target.data_ptr()
    end = start + (last + 1) * target.element_size()
    return start // PAGESIZE * PAGESIZE, -(-end // PAGESIZE) * PAGESIZE


def copy_to_host(target: torch.Tensor, source: torch.Tensor) -> None:
    """Copy into CPU memory, as the target's dtype. From a GPU it may return before the copy is done: ``wait_for_copies``."""
    if source.device.type == "cpu":
        target.copy_(source)
        return
    # torch would move the whole float32 and convert on the CPU.
    converted = source.to(target.dtype)
    # Into a target with gaps torch copies over a buffer of its own.
    target.copy_(converted, non_blocking=target.is_contiguous())


def wait_for_copies(device: torch.device) -> None:
    """Return when every copy from ``device`` is done."""
    if device.type == "cuda":
        torch.cuda.current_stream(device).synchronize()
