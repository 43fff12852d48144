"""One policy version's weights in shared memory: whoever fills it writes, every generator on the host maps.

A snapshot is one flat buffer and a layout that says where each tensor lies in it. The buffer's pages are made once and reused:
touching fresh shared-memory pages costs as much as the copy itself. Digests say which weights a snapshot, or an engine, holds.
"""

import mmap
import os
import weakref
from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cache
from typing import NamedTuple

import numpy as np
import torch
import xxhash

from torchtitan.experiments.rl.errors import PeerGone

_ALIGNMENT = 64
_PART = 16 * 2**20
"""Bytes that a thread hashes at once."""

Shard = tuple[tuple[int, int], ...]
"""A part of a tensor: start and stop in each dimension."""


class TensorEntry(NamedTuple):
    name: str
    """Hub name."""
    shape: tuple[int, ...]
    dtype: torch.dtype
    offset: int
    """Bytes from the start of the buffer."""
    shards: tuple[Shard, ...] = ()
    """How the trainer's hosts divide it, sorted: no host can take its digest alone, so its digest is that of theirs. Empty:
    one host holds it whole."""

    @property
    def nbytes(self) -> int:
        return torch.Size(self.shape).numel() * self.dtype.itemsize

    @property
    def whole(self) -> Shard:
        return tuple((0, size) for size in self.shape)


@dataclass(kw_only=True, slots=True, frozen=True)
class SnapshotLayout:
    """Where each tensor lies. A trainer has one for all its versions."""

    entries: tuple[TensorEntry, ...]
    nbytes: int

    @classmethod
    def of(
        cls, shapes: Mapping[str, tuple[int, ...]], dtype: torch.dtype, shards: Mapping[str, tuple[Shard, ...]] | None = None
    ) -> "SnapshotLayout":
        """Lay the tensors out one after the other, each as ``dtype``.

        Args:
            shards: of those tensors that several hosts divide, by name.
        """
        entries, offset = [], 0
        for name, shape in shapes.items():
            entry = TensorEntry(name=name, shape=shape, dtype=dtype, offset=offset, shards=(shards or {}).get(name, ()))
            entries.append(entry)
            offset += aligned(entry.nbytes)
        return cls(entries=tuple(entries), nbytes=offset)


@dataclass(kw_only=True, slots=True, frozen=True)
class Manifest:
    """What a generator needs to load one version. Small: it travels through torchstore and actor messages."""

    version: int
    layout: SnapshotLayout
    paths: dict[str, str]
    """Of the trainer's SharedBuffer on each host that holds something of the version, by the host's identity."""
    publication: str
    """Names what was written, and no other: a trainer that is made again may publish a version again, with other weights. The
    digests come later (``weights.store.published_digests``): the trainer takes them while generators load."""

    def whole_on(self, host: str) -> str | None:
        """Path of the trainer's own buffer where that is the whole snapshot, on ``host``."""
        return self.paths.get(host) if len(self.paths) == 1 else None


@dataclass(kw_only=True, slots=True)
class WeightReceipt:
    """A generator's proof of what it loaded."""

    version: int
    fingerprint: str
    """Of the weights that its engine holds, not of the bytes that were sent."""
    canary_logprobs: np.ndarray
    """float32 [L] of the canary tokens under the loaded weights."""
    verify_s: float
    reload_s: float


class SharedBuffer:
    """Shared memory as one uint8 tensor. It has no name in any folder: it is gone when the last process that maps it ends,
    however that process ends."""

    def __init__(self, descriptor: int, path: str):
        # Whoever maps the memory keeps it; an open descriptor keeps it too.
        weakref.finalize(self, os.close, descriptor)
        self.path = path
        """Where other processes of this host find it, while this object lives in the one that created it."""
        self.bytes = torch.frombuffer(mmap.mmap(descriptor, os.fstat(descriptor).st_size), dtype=torch.uint8)

    @classmethod
    def create(cls, nbytes: int, used: Iterable[tuple[int, int]] | None = None) -> "SharedBuffer":
        """
        Args:
            used: start and stop of the bytes that take memory. None: all.
        """
        descriptor = os.memfd_create("policy-weights")
        os.ftruncate(descriptor, nbytes)
        for start, stop in ((0, nbytes),) if used is None else used:
            os.posix_fallocate(descriptor, start, stop - start)
        return cls(descriptor, f"/proc/{os.getpid()}/fd/{descriptor}")

    @classmethod
    def attach(cls, path: str) -> "SharedBuffer":
        """Map the buffer another process created.

        Raises:
            PeerGone: that process has closed it, as it does when it ends.
        """
        try:
            return cls(os.open(path, os.O_RDWR), path)
        except (FileNotFoundError, ProcessLookupError) as error:
            raise PeerGone(
                f"the weights at {path} are gone ({error.strerror}): the process that published them has ended"
            ) from error

    def views(self, layout: SnapshotLayout) -> Iterator[tuple[str, torch.Tensor]]:
        """Name and tensor of each entry, sharing the buffer's memory."""
        return views(self.bytes, layout)


class SnapshotReader:
    """A generator's side of the shared memory: maps each buffer once."""

    def __init__(self):
        self._buffers: dict[str, SharedBuffer] = {}
        """The two that were read last, by path: those of a process that has been made again are other ones."""

    def map(self, path: str) -> SharedBuffer:
        """The shared memory at ``path``.

        Raises:
            PeerGone: there is none any more.
        """
        buffer = self._buffers.pop(path) if path in self._buffers else SharedBuffer.attach(path)
        self._buffers[path] = buffer
        while len(self._buffers) > 2:
            del self._buffers[next(iter(self._buffers))]
        return buffer


def aligned(nbytes: int) -> int:
    """Bytes that so many take in a buffer, up to where the next tensor begins."""
    return -(-nbytes // _ALIGNMENT) * _ALIGNMENT


def views(buffer: torch.Tensor, layout: SnapshotLayout) -> Iterator[tuple[str, torch.Tensor]]:
    """Name and tensor of each entry, sharing the memory of ``buffer``, which is flat and of uint8."""
    for entry in layout.entries:
        flat = buffer[entry.offset : entry.offset + entry.nbytes]
        yield entry.name, flat.view(entry.dtype).view(entry.shape)


def index_of(shard: Shard) -> tuple[slice, ...]:
    """What picks a shard out of its tensor."""
    return tuple(slice(start, stop) for start, stop in shard)


def digest(tensor: torch.Tensor) -> str:
    """XXH3-128 of those of the 16 MB parts of a tensor's bytes, in their order.

    Parts are hashed in parallel, where there are cores: xxhash releases the GIL, and reads at memory speed.
    """
    content = _content(tensor).data
    parts = [content[start : start + _PART] for start in range(0, len(content), _PART)]
    spread = _threads().map if len(parts) > 1 else map
    return xxhash.xxh3_128_hexdigest(b"".join(spread(xxhash.xxh3_128_digest, parts)))


def tensor_digest(tensor: torch.Tensor, shards: tuple[Shard, ...] = ()) -> str:
    """Of a whole tensor that is divided as ``TensorEntry.shards`` says: its ``digest``, or one of those of its shards."""
    if not shards:
        return digest(tensor)
    return combined([digest(tensor[index_of(shard)]) for shard in shards])


def tensor_digests(buffer: torch.Tensor, layout: SnapshotLayout) -> dict[str, str]:
    """``tensor_digest`` of each tensor in a snapshot's flat uint8 buffer, by name in the layout's order."""
    shards = [entry.shards for entry in layout.entries]
    return {name: tensor_digest(view, own) for (name, view), own in zip(views(buffer, layout), shards, strict=True)}


def digests_of_shards(found: Mapping[tuple[str, Shard], str], layout: SnapshotLayout) -> dict[str, str]:
    """``tensor_digests`` of the snapshot whose shards have these digests, by name and shard. A tensor of no values has none."""
    return {
        entry.name: combined([found.get((entry.name, shard), _NOTHING) for shard in entry.shards or (entry.whole,)])
        for entry in layout.entries
    }


def combined(found: list[str]) -> str:
    """Digest of a tensor from those of its shards, in their order."""
    return found[0] if len(found) == 1 else xxhash.xxh3_128_hexdigest("\n".join(found).encode())


def of_copies(found: Iterable[str]) -> str:
    """The digest that all copies of a tensor have; where they differ, all of theirs, which equals none."""
    return " and ".join(sorted(set(found)))


def fingerprint(digests: Mapping[str, str]) -> str:
    """Of a version: of its tensors' names and digests, in their order."""
    return xxhash.xxh3_128_hexdigest("\n".join(f"{name} {value}" for name, value in digests.items()).encode())


def _content(tensor: torch.Tensor) -> np.ndarray:
    """A tensor's values as flat uint8: its own memory where they lie on the CPU, one after the other."""
    if not (tensor.is_cpu and tensor.is_contiguous()):  # asking costs less than either call, for each tensor of a model
        tensor = tensor.cpu().contiguous()
    # A lone value counts as contiguous with any stride, and then view(-1) keeps that.
    return tensor.detach().as_strided((tensor.numel(),), (1,)).view(torch.uint8).numpy()


@cache
def _threads() -> ThreadPoolExecutor:
    """One for each core of this process."""
    return ThreadPoolExecutor(max_workers=len(os.sched_getaffinity(0)), thread_name_prefix="hashing")


_NOTHING = digest(torch.empty(0))
