"""The trainer's side of weight synchronisation: each rank publishes its shards of the parameters.

    write      shards ──▶ the rank's buffer, in its host's memory or on its device
    announce   manifest, without digests ──▶ torchstore; generators load
    prove      manifest, with digests    ──▶ torchstore; generators compare

From a GPU tensors are copied to the host without the CPU's help, into memory that is page-locked.
"""

import asyncio
import math
import uuid
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any, Protocol, TypeVar

import torch
import torch.distributed as dist
import torchstore
from torch.distributed.tensor import DTensor

from torchtitan.experiments.rl.compat.torch import local_shard, offered_memory
from torchtitan.experiments.rl.weights.reader import manifest_key, offer
from torchtitan.experiments.rl.weights.snapshot import (
    Handle,
    Manifest,
    RankParts,
    Shard,
    SharedBuffer,
    buffer_bytes,
    digest,
    named,
    page_lock,
    read_together,
    views,
    volume,
    whole,
)

T = TypeVar("T")


class Tensors(Protocol):
    """Tensors by hub name, or stacks of them, the same on every rank and in one order.

    They are DTensors or plain. ``items`` may make a tensor when it is read, and need not keep it:
    hold no more than one.
    """

    def items(self) -> Iterable[tuple[str, torch.Tensor]]: ...


class SnapshotPublisher:
    """Writes versions of the weights, as one rank of the trainer.

    Two buffers take turns, one for even and one for odd versions, so that generators may read one
    version while the next is written. This counts on every version being published: of even
    versions alone each would overwrite the last, while a replica that joins still reads that. Every
    rank copies its own shards into its own buffers, in memory that the processes of its host share.
    Of several ranks that hold the same shard, the lowest writes it. Each rank digests what it
    writes where that lies: shares of a tensor's digest add up.

    With a ``device`` each rank that writes has one buffer, on the device. A second buffer would
    take memory that GPUs lack, so a version is written when nobody reads the one before
    (`weights/sync.py`).
    """

    def __init__(
        self, *, rank: int, host: str, dtype: torch.dtype, device: torch.device | None = None
    ):
        """Prepare to publish; buffers are made by the first `write`.

        Args:
            host: identity of the rank's host. Ranks of one host share memory.
            dtype: dtype of the published tensors.
            device: device on which versions stay; None if they lie in the host's memory.
        """
        self._rank = rank
        self._host = host
        self._dtype = dtype
        self._device = device
        self._source = torch.device("cpu")
        """Device whose copies have to be waited for."""
        self._shapes: dict[str, tuple[int, ...]] = {}
        self._mine: dict[str, Shard] = {}
        """Shard that this rank writes of each tensor."""
        self._buffers: list[SharedBuffer] = []
        """Buffers of this rank. Empty if versions stay on a device."""
        self._targets: list[dict[str, torch.Tensor]] = [{}, {}]
        """Views of the buffers of even and of odd versions, by tensor: this rank copies its shard
        there. They are made once, because making them takes a tenth of the copying."""
        self._parts: list[tuple[RankParts, ...]] = []
        """Shards and buffers of all ranks that write, of even and of odd versions."""
        self._life = ""
        """Random name, the same on all ranks, that no other trainer has."""
        self._writes = 0
        """Number of calls of `write`."""
        self._version = -1
        """Version that was written last."""
        self._shares: dict[str, int] = {}
        """This rank's shares of the last version's digests, by tensor, as far as a GPU took
        them."""
        self._gloo: dist.ProcessGroup | None = None
        """Group of all ranks, for a thread beside the trainer's own. None if there is one rank."""
        self._manifest: Manifest
        self._offered = False
        """True if readers on other hosts can read this rank's buffers."""

    @torch.no_grad()
    def write(self, version: int, tensors: Tensors) -> None:
        """Copy the tensors into this version's buffer. Collective.

        When it returns, a GPU has copied and digested them, and nothing of this version is asked of
        it again. A question that came later would wait for the kernels of the next step.
        """
        if not self._parts:
            self._lay_out(tensors)
        self._writes += 1
        self._version = version
        targets = self._targets[version % 2]
        shares: dict[str, torch.Tensor] = {}
        for name, tensor in tensors.items():
            if name in targets:
                copied = copy_out(targets[name], local_of(tensor))
                if not copied.is_cpu:  # digested now, because what was converted is not kept
                    shares[name] = digest(copied, self._mine[name], self._shapes[name])
        self._shares = dict(zip(shares, read_together(shares.values()), strict=True))
        wait_for_copies(self._source)

    async def announce(self, remote_readers: bool) -> None:
        """Put the manifest of what was written last into torchstore, without digests.

        Every rank calls it. Generators may read the version when all have returned. The manifest
        takes the place of that of version ``v - 2``, which had the same buffer, and which every
        generator has loaded or passed over by now.

        Args:
            remote_readers: True if some generator is on a host without trainer ranks.
        """
        self._manifest = Manifest(
            version=self._version,
            shapes=self._shapes,
            dtype=self._dtype,
            parts=self._parts[self._version % 2],
            publication=f"{self._life}-{self._writes}",
            digests={},
        )
        hosts = {part.host for part in self._manifest.parts}
        if (remote_readers or len(hosts) > 1) and not self._offered:
            for buffer in self._buffers:
                await offer(self._host, buffer)
            self._offered = True
        await self._put()

    async def prove(self) -> Manifest:
        """Put the digests of what was announced last into torchstore. Collective.

        Generators load the version meanwhile, and the trainer may take its next step: what lies in
        the host's memory is digested in a thread.

        Returns:
            The manifest that is published, the same on every rank.
        """
        digests = await asyncio.to_thread(self._digests, self._manifest.version)
        self._manifest = replace(self._manifest, digests=digests)
        await self._put()
        return self._manifest

    async def _put(self) -> None:
        if self._rank == 0:
            await torchstore.put(manifest_key(self._manifest.version), self._manifest)

    def _digests(self, version: int) -> dict[str, str]:
        """Return the digests of what all ranks have written as ``version``. Collective.

        It runs beside the next step, and so asks nothing of a GPU.
        """
        targets = self._targets[version % 2]
        shares = dict.fromkeys(self._shapes, 0) | self._shares
        for name, shard in self._mine.items():
            if name not in self._shares:
                shares[name] = int(digest(targets[name], shard, self._shapes[name]))
        sums = torch.tensor([*shares.values()], dtype=torch.int64)
        if self._gloo is not None:
            dist.all_reduce(sums, group=self._gloo)  # returns when every rank has written
        return named(zip(shares, sums.tolist(), strict=True))

    def _lay_out(self, tensors: Tensors) -> None:
        """Decide who writes what, and make this rank's buffers. Collective.

        It keeps shapes alone: all tensors at once would be the gathered queries, keys and values of
        every layer, in float32 13 GB a rank at 32B.
        """
        if _many_ranks():
            self._gloo = dist.new_group(backend="gloo")
        held: dict[str, Shard] = {}
        for name, tensor in tensors.items():
            self._shapes[name] = tuple(tensor.shape)
            held[name] = shard_of(tensor)
            self._source = self._device or local_of(tensor).device
        answers = _of_every_rank((self._host, held, uuid.uuid4().hex))
        hosts, shards_held, lives = zip(*answers, strict=True)
        self._life = lives[0]
        written = written_by_rank(shards_held, self._shapes)
        self._mine = written[self._rank]
        handles = _of_every_rank(self._make_buffers() if self._mine else [])
        self._parts = [
            tuple(
                RankParts(host, handles_of_rank[parity], shards)
                for host, handles_of_rank, shards in zip(hosts, handles, written, strict=True)
                if handles_of_rank
            )
            for parity in range(2)
        ]

    def _make_buffers(self) -> list[Handle]:
        """Make this rank's buffers, and return the handle of each version's, by its parity."""
        nbytes = buffer_bytes(self._mine, self._dtype)
        if self._device is not None and self._device.type == "cuda":
            # A buffer that is cut out of a cached block keeps all of that block, and readers map
            # all of it.
            torch.cuda.empty_cache()
            memory = [torch.empty(nbytes, dtype=torch.uint8, device=self._device)]
            handles: list[Handle] = [offered_memory(memory[0])]
        else:
            self._buffers = [
                SharedBuffer.create(nbytes) for _ in range(2 if self._device is None else 1)
            ]
            memory = [buffer.bytes for buffer in self._buffers]
            handles = [buffer.path for buffer in self._buffers]
            if self._source.type == "cuda":
                page_lock(memory)
        targets = [views(buffer, self._mine, self._dtype) for buffer in memory]
        if len(memory) == 1:  # it has the even versions and the odd ones
            targets *= 2
            handles *= 2
        self._targets = targets
        return handles


def written_by_rank(
    held: Sequence[Mapping[str, Shard]], shapes: Mapping[str, tuple[int, ...]]
) -> list[dict[str, Shard]]:
    """Return what each rank writes of what it holds, by tensor.

    Of ranks that hold the same shard, the lowest writes it.

    Args:
        held: shard of each tensor that each rank holds. Shards of a tensor are equal or apart.
        shapes: shape of each tensor.

    Raises:
        AssertionError: they hold less than a tensor.
    """
    taken: set[tuple[str, Shard]] = set()
    written: list[dict[str, Shard]] = []
    for shards in held:
        written.append(
            {
                name: shard
                for name, shard in shards.items()
                if volume(shard) and (name, shard) not in taken
            }
        )
        taken |= shards.items()
    for name, shape in shapes.items():
        size = sum(volume(shards[name]) for shards in written if name in shards)
        assert size == math.prod(shape), (
            f"the ranks write {size} values of {name}, which has {math.prod(shape)}"
        )
    return written


def local_of(tensor: torch.Tensor) -> torch.Tensor:
    """Return what this rank holds of a tensor."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def shard_of(tensor: torch.Tensor) -> Shard:
    """Return this rank's shard of a tensor; all of one that is not shared out."""
    if not isinstance(tensor, DTensor):
        return whole(tensor.shape)
    offset, shape = local_shard(tensor)
    return tuple((start, start + size) for start, size in zip(offset, shape, strict=True))


def _many_ranks() -> bool:
    return dist.is_initialized() and dist.get_world_size() > 1


def _of_every_rank(value: T) -> list[T]:
    """Return what each rank has given, by rank. Collective."""
    if not _many_ranks():
        return [value]
    values: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return values


def copy_out(target: torch.Tensor, source: torch.Tensor) -> torch.Tensor:
    """Copy a tensor in the target's dtype.

    From or to a GPU it may return before the copy is done (`wait_for_copies`).

    Returns:
        What was copied, in that dtype; on the GPU if one of the two lies there.
    """
    if source.device.type == "cpu" or not target.is_cpu:
        return target.copy_(source)
    # torch would move the whole float32 and convert on the CPU.
    converted = source.to(target.dtype)
    target.copy_(converted, non_blocking=True)
    return converted


def wait_for_copies(device: torch.device) -> None:
    """Return when every copy from the device is done."""
    if device.type == "cuda":
        torch.cuda.current_stream(device).synchronize()
