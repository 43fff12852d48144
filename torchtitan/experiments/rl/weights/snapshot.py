"""One policy version's weights in shared memory: the trainer writes, every generator on the host maps.

A snapshot is one flat buffer and a layout that says where each tensor lies in it. The buffer's pages are made once and reused:
touching fresh shared-memory pages costs as much as the copy itself.
"""

import mmap
import os
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import numpy as np
import torch
import xxhash

from torchtitan.experiments.rl.errors import PeerGone, RunError

_ALIGNMENT = 64
_DIGEST_CHUNK = 16 * 2**20


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
    """Of the trainer's SharedBuffer."""
    host: str
    """Identity of the host it is on."""
    fingerprint: str
    """Of ``digests``."""
    digests: dict[str, str]
    """Of each tensor, by hub name in the layout's order, taken by the trainer after writing them."""
    payload_key: str | None
    """torchstore key of the whole buffer, when some generator is on another host."""


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
        self._descriptor = descriptor
        self.path = path
        """Where other processes of this host find it, while the one that created it lives."""
        self.bytes = torch.frombuffer(mmap.mmap(descriptor, os.fstat(descriptor).st_size), dtype=torch.uint8)

    @classmethod
    def create(cls, nbytes: int) -> "SharedBuffer":
        descriptor = os.memfd_create("policy-weights")
        os.posix_fallocate(descriptor, 0, nbytes)
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
        for entry in layout.entries:
            flat = self.bytes[entry.offset : entry.offset + entry.nbytes]
            yield entry.name, flat.view(entry.dtype).view(entry.shape)


class SnapshotReader:
    """A generator's side of the shared memory: maps each buffer once, and verifies every version it reads."""

    def __init__(self):
        self._buffers: dict[str, SharedBuffer] = {}

    def tensors(self, manifest: Manifest, path: str) -> dict[str, torch.Tensor]:
        """Views of a version's tensors, by name, in the shared memory at ``path``.

        Raises:
            RunError: the bytes are not those that were published.
        """
        if path not in self._buffers:
            self._buffers[path] = SharedBuffer.attach(path)
        buffer = self._buffers[path]
        seen = fingerprint(tensor_digests(buffer.bytes, manifest.layout))
        if seen != manifest.fingerprint:
            raise RunError(
                f"weights of version {manifest.version}: fingerprint {seen} mapped, {manifest.fingerprint} published; "
                "the snapshot was overwritten or truncated while it was read"
            )
        return dict(buffer.views(manifest.layout))


def tensor_digests(buffer: torch.Tensor, layout: SnapshotLayout) -> dict[str, str]:
    """``digest`` of each tensor in a snapshot's flat uint8 buffer, by name in the layout's order."""
    found = _digests([buffer[entry.offset : entry.offset + entry.nbytes] for entry in layout.entries])
    return {entry.name: value for entry, value in zip(layout.entries, found, strict=True)}


def fingerprint(digests: Mapping[str, str]) -> str:
    """Of a version: of its tensors' names and digests, in their order."""
    return xxhash.xxh3_128_hexdigest("\n".join(f"{name} {value}" for name, value in digests.items()).encode())


def digest(flat: torch.Tensor) -> str:
    """XXH3-128 of a flat uint8 tensor."""
    return _digests([flat])[0]


def bytes_of(tensor: torch.Tensor) -> torch.Tensor:
    """A tensor's values as a flat uint8 tensor on the CPU; its own memory where they lie there one after the other."""
    return tensor.detach().cpu().contiguous().view(-1).view(torch.uint8)


def _digests(buffers: Sequence[torch.Tensor]) -> list[str]:
    """Chunks are hashed in parallel, where there are cores: xxhash releases the GIL, and reads at memory speed."""
    views = [buffer.numpy().data for buffer in buffers]
    chunks = [[view[i : i + _DIGEST_CHUNK] for i in range(0, len(view), _DIGEST_CHUNK)] for view in views]
    workers = min(len(os.sched_getaffinity(0)), sum(map(len, chunks)))
    if workers > 1:
        with ThreadPoolExecutor(max_workers=workers) as pool:
            hashed = [list(pool.map(xxhash.xxh3_128_digest, own)) for own in chunks]
    else:
        hashed = [[xxhash.xxh3_128_digest(chunk) for chunk in own] for own in chunks]
    return [xxhash.xxh3_128_hexdigest(b"".join(own)) for own in hashed]
