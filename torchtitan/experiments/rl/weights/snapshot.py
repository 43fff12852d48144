"""One policy version's weights in shared memory: the trainer writes, every generator on the host maps.

A snapshot is one flat buffer and a layout that says where each tensor lies in it. The buffer's pages are made once and reused:
touching fresh shared-memory pages costs as much as the copy itself.
"""

import mmap
import os
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import torch
import xxhash

SHARED_MEMORY_FOLDER = "/dev/shm"
_ALIGNMENT = 64
_FINGERPRINT_CHUNK = 16 * 2**20


@dataclass(kw_only=True, slots=True, frozen=True)
class TensorEntry:
    name: str
    """Hub name."""
    shape: tuple[int, ...]
    dtype: torch.dtype
    offset: int
    """Bytes from the start of the buffer."""

    @property
    def nbytes(self) -> int:
        return torch.Size(self.shape).numel() * self.dtype.itemsize


@dataclass(kw_only=True, slots=True, frozen=True)
class SnapshotLayout:
    entries: tuple[TensorEntry, ...]
    nbytes: int

    @classmethod
    def of(cls, tensors: Mapping[str, torch.Tensor], dtype: torch.dtype) -> "SnapshotLayout":
        """Lay the tensors out one after the other, each as ``dtype``. A DTensor counts with its global shape."""
        entries, offset = [], 0
        for name, tensor in tensors.items():
            entry = TensorEntry(name=name, shape=tuple(tensor.shape), dtype=dtype, offset=offset)
            entries.append(entry)
            offset += -(-entry.nbytes // _ALIGNMENT) * _ALIGNMENT
        return cls(entries=tuple(entries), nbytes=offset)


@dataclass(kw_only=True, slots=True, frozen=True)
class Manifest:
    """What a generator needs to load one version. Small: it travels through torchstore and actor messages."""

    version: int
    layout: SnapshotLayout
    path: str
    """Shared-memory file, on the trainer's host."""
    host: str
    """Host the file lies on."""
    fingerprint: str
    """Of the buffer's bytes, taken by the trainer after writing them."""
    payload_key: str | None
    """torchstore key of the whole buffer, when some generator is on another host."""


class SharedBuffer:
    """A shared-memory file mapped into this process, as one uint8 tensor."""

    def __init__(self, path: str, *, nbytes: int | None = None):
        """Create the file when ``nbytes`` is given, else map the one that is there."""
        self.path = path
        self._owned = nbytes is not None
        flags = os.O_RDWR | (os.O_CREAT | os.O_EXCL if self._owned else 0)
        descriptor = os.open(path, flags, 0o600)
        try:
            if nbytes is not None:
                os.posix_fallocate(descriptor, 0, nbytes)
            self._map = mmap.mmap(descriptor, os.fstat(descriptor).st_size)
        finally:
            os.close(descriptor)
        self.bytes = torch.frombuffer(self._map, dtype=torch.uint8)

    def views(self, layout: SnapshotLayout) -> Iterator[tuple[str, torch.Tensor]]:
        """Name and tensor of each entry, sharing the buffer's memory."""
        for entry in layout.entries:
            flat = self.bytes[entry.offset : entry.offset + entry.nbytes]
            yield entry.name, flat.view(entry.dtype).view(entry.shape)

    def unlink(self) -> None:
        """Remove the file; mappings of it live on until their owners end."""
        if self._owned:
            self._owned = False
            os.unlink(self.path)


def fingerprint(buffer: torch.Tensor) -> str:
    """XXH3-128 of a flat uint8 tensor. Chunks are hashed in parallel: xxhash releases the GIL, and reads at memory speed."""
    view = memoryview(buffer.numpy())
    chunks = [view[i : i + _FINGERPRINT_CHUNK] for i in range(0, len(view), _FINGERPRINT_CHUNK)]
    with ThreadPoolExecutor(max_workers=max(1, len(os.sched_getaffinity(0)))) as pool:
        digests = list(pool.map(xxhash.xxh3_128_digest, chunks))
    return xxhash.xxh3_128_hexdigest(b"".join(digests))
