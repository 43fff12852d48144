"""One policy version's weights in shared memory: whoever fills it writes, every generator on the host maps.

A snapshot is one flat buffer and a layout that says where each tensor lies in it. The buffer's pages are made once and reused:
touching fresh shared-memory pages costs as much as the copy itself. Digests say which weights a snapshot, or an engine, holds.
"""

import hashlib
import logging
import mmap
import os
import weakref
from collections import UserDict
from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cache
from typing import Any, NamedTuple

import numpy as np
import torch

from torchtitan.experiments.rl.compat.torch import opened_memory, take_cuda_error
from torchtitan.experiments.rl.errors import PeerGone

logger = logging.getLogger(__name__)

_ALIGNMENT = 64
_WORDS_ON_CPU, _WORDS_OF_A_THREAD = 2**16, 2**19
"""Words that are digested at once, 512 KB, which stay in a core's cache, and those that are worth another thread."""
_WORDS = 2**24
"""Words that a GPU digests at once: it has room for 128 MB."""

CPU = torch.device("cpu")
Shard = tuple[tuple[int, int], ...]
"""A part of a tensor: start and stop in each dimension."""
Handle = str | tuple[Any, ...]
"""By which processes of a host open memory of another one: the path of a SharedBuffer, or of a GPU's what CUDA gives."""


class TensorEntry(NamedTuple):
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
    """Where each tensor lies. A trainer has one for all its versions."""

    entries: tuple[TensorEntry, ...]
    nbytes: int

    @classmethod
    def of(cls, shapes: Mapping[str, tuple[int, ...]], dtype: torch.dtype) -> "SnapshotLayout":
        """Lay the tensors out one after the other, each as ``dtype``."""
        entries, offset = [], 0
        for name, shape in shapes.items():
            entry = TensorEntry(name=name, shape=shape, dtype=dtype, offset=offset)
            entries.append(entry)
            offset += aligned(entry.nbytes)
        return cls(entries=tuple(entries), nbytes=offset)

    @classmethod
    def of_shards(cls, shards: Mapping[str, Shard], dtype: torch.dtype) -> "SnapshotLayout":
        """The same for parts of tensors."""
        return cls.of({name: tuple(stop - start for start, stop in shard) for name, shard in shards.items()}, dtype)


class RankParts(NamedTuple):
    """What one trainer rank holds of a version on its own device, in a flat buffer."""

    handle: Handle
    shards: dict[str, Shard]
    """As ``SnapshotLayout.of_shards`` lays them out."""


@dataclass(kw_only=True, slots=True, frozen=True)
class Manifest:
    """What a generator needs to load one version. Small: it travels through torchstore and actor messages."""

    version: int
    layout: SnapshotLayout
    paths: dict[str, str]
    """Of the trainer's SharedBuffer on each host that holds something of the version, by the host's identity."""
    publication: str
    """Names what was written, and no other: a trainer that is made again may publish a version again, with other weights."""
    digests: dict[str, str]
    """Of each tensor, by name in the layout's order, as the trainer took them where its own tensors lie."""
    parts: tuple[RankParts, ...] = ()
    """Of the ranks, where versions stay on their devices (``generator.weights``). There are no ``paths`` then."""

    def whole_on(self, host: str) -> str | None:
        """Path of the trainer's own buffer where that is the whole snapshot, on ``host``."""
        return self.paths.get(host) if len(self.paths) == 1 else None


@dataclass(kw_only=True, slots=True)
class WeightReceipt:
    """A generator's proof of what it loaded."""

    version: int
    fingerprint: str
    """Of the weights that its engine holds, not of the bytes that were sent. "" of a version that was not verified."""
    canary_logprobs: np.ndarray
    """float32 [adapters * L] of the canary tokens under the loaded weights, with each adapter in turn."""
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


class PartedTensors(UserDict[str, torch.Tensor]):
    """Tensors of a version that ranks hold in parts, by hub name. One is put together whenever it is asked for, and nothing
    keeps it; one that a rank holds whole is in that rank's own memory."""

    def __init__(self, layout: SnapshotLayout, ranks: Iterable[tuple[torch.Tensor, Mapping[str, Shard]]]):
        """``ranks``: of each its flat uint8 buffer, and the shards in it."""
        self.data: dict[str, Any] = {entry.name: (entry, []) for entry in layout.entries}
        for buffer, shards in ranks:
            for name, part in views(buffer, SnapshotLayout.of_shards(shards, layout.entries[0].dtype)):
                self.data[name][1].append((index_of(shards[name]), part))

    def __getitem__(self, name: str) -> torch.Tensor:
        entry, parts = self.data[name]
        if len(parts) == 1:
            return parts[0][1]
        whole = torch.empty(entry.shape, dtype=entry.dtype, device=parts[0][1].device if parts else CPU)
        for place, part in parts:
            whole[place] = part
        return whole


class SnapshotReader:
    """A generator's side of the shared memory: maps each of the host's buffers once. It keeps no memory of a GPU open: that of
    a trainer which has ended would not be free for the next one."""

    def __init__(self):
        self._buffers: dict[str, SharedBuffer] = {}
        """Those that were read last, by path: those of a process that has been made again are other ones."""

    def tensors(self, manifest: Manifest, path: str, device: torch.device = CPU) -> Mapping[str, torch.Tensor]:
        """Of a version, by hub name in the layout's order, for a model on ``device``. They lie in the memory of those who wrote
        them: keep none after the load.

        Args:
            path: of the snapshot in this host's memory. It is not read where ranks hold the version on their devices.

        Raises:
            PeerGone: there is none any more.
        """
        if not (parts := manifest.parts):
            return dict(views(self._open(path, device, 2), manifest.layout))
        return PartedTensors(manifest.layout, [(self._open(own.handle, device, len(parts)), own.shards) for own in parts])

    def _open(self, handle: Handle, device: torch.device, kept: int) -> torch.Tensor:
        """``kept``: how many buffers of the host a trainer has."""
        if not isinstance(handle, str):
            return opened_memory(handle, device)
        buffer = self._buffers.pop(handle, None)
        if buffer is None:
            buffer = SharedBuffer.attach(handle)
            if device.type == "cuda":  # it then reads by itself, and at the full speed of its bus
                page_lock([buffer.bytes])
        self._buffers[handle] = buffer
        while len(self._buffers) > kept:
            del self._buffers[next(iter(self._buffers))]
        return buffer.bytes


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


def digest(part: torch.Tensor, shard: Shard | None = None, shape: tuple[int, ...] | None = None) -> torch.Tensor:
    """A part's share of its tensor's digest: int64 [], on the part's device. Shares of parts that make up the tensor add up to
    its digest, modulo 2**64, however it is divided.

    The bytes of a row, which is the last dimension, are little-endian words w of 8 bytes; the last is filled up with zeros::

        digest = sum over rows r and words c of (w + (w >> 32)) * key(r) * key(c)

    The keys are odd and look random, so a change in the low or the high half of one word is always seen, and of other changes
    one in 2**32 at most is missed. The second term is for a word's high bits, which otherwise only meet the sum's own.

    Args:
        shard, shape: where the part lies, in a tensor of that shape. None: it is the tensor.
    """
    shape = shape if shape is not None else tuple(part.shape)
    total = torch.zeros((), dtype=torch.int64, device=part.device)
    if not part.numel():
        return total
    if not shape:
        part, shape = part.reshape(1), (1,)
    shard = shard or tuple((0, size) for size in shape)
    words_RC, first = _words(part.detach().reshape(-1, part.shape[-1]), shard[-1][0] * part.element_size())
    row_keys_R, keys_C = _row_keys(shape[:-1], shard[:-1], part.device), _keys(first + words_RC.shape[1], part.device)[first:]
    if part.is_cpu:
        shares = -(-words_RC.numel() // _WORDS_OF_A_THREAD)
        cut = [np.array_split(values.numpy(), shares) for values in (words_RC, row_keys_R)]
        for share in (_threads().map if shares > 1 else map)(_sum_on_cpu, *cut, [keys_C.numpy()] * shares):
            total += share
        return total
    most = max(1, _WORDS // len(keys_C))
    for words, row_keys in zip(words_RC.split(most), row_keys_R.split(most), strict=True):
        total += (words >> 32).add_(words).mul_(keys_C).sum(1).mul_(row_keys).sum()
    return total


def _sum_on_cpu(words_RC: np.ndarray, row_keys_R: np.ndarray, keys_C: np.ndarray) -> int:
    """Twice as quick as torch's operations, which a GPU has: the last pass has no result of its own. numba would be as quick as
    memory, but vLLM 0.32 can't make an engine in a process that has imported it."""
    total, width = 0, min(_WORDS_ON_CPU, words_RC.shape[1])
    height = _WORDS_ON_CPU // width
    mixed = np.empty(height * width, np.int64)
    for top in range(0, len(words_RC), height):
        for left in range(0, words_RC.shape[1], width):
            words = words_RC[top : top + height, left : left + width]
            own = mixed[: words.size].reshape(words.shape)
            np.add(np.right_shift(words, 32, out=own), words, out=own)
            sums = np.einsum("rc,c->r", own, keys_C[left : left + width])
            total += int(sums @ row_keys_R[top : top + height])
    return (total + 2**63) % 2**64 - 2**63


@cache
def _threads() -> ThreadPoolExecutor:
    """One for each core of this process."""
    return ThreadPoolExecutor(max_workers=len(os.sched_getaffinity(0)), thread_name_prefix="digests")


def _words(part_RX: torch.Tensor, start: int) -> tuple[torch.Tensor, int]:
    """Rows as words, and the number of the first: their own memory where that lies right. ``start``: byte in the whole row."""
    size, width = part_RX.element_size(), part_RX.shape[1] * part_RX.element_size()
    if part_RX.stride(1) != 1:
        part_RX = part_RX.clone(memory_format=torch.contiguous_format)
    places = (start, width, part_RX.storage_offset() * size, part_RX.stride(0) * size if len(part_RX) > 1 else 0)
    if not any(place % 8 for place in places):
        return part_RX.view(torch.int64), start // 8
    begin = start % 8
    filled = torch.zeros((len(part_RX), -(-(begin + width) // 8) * 8), dtype=torch.uint8, device=part_RX.device)
    filled[:, begin : begin + width] = part_RX.contiguous().view(torch.uint8).view(len(part_RX), width)
    return filled.view(torch.int64), start // 8


@cache
def _filled_keys(count: int, device: torch.device) -> torch.Tensor:
    """Odd numbers that look random: int64 [count] of SplitMix64, whose first are the same for any ``count``."""
    mixed = torch.arange(1, count + 1, dtype=torch.int64) * -7046029254386353131
    for shift, factor in ((30, -4658895280553007687), (27, -7723592293110705685)):
        mixed = (mixed ^ (mixed >> shift)) * factor
    return ((mixed ^ (mixed >> 31)) | 1).to(device)


@cache
def _row_keys(shape: tuple[int, ...], shard: Shard, device: torch.device) -> torch.Tensor:
    """Of the rows of a part, by the tensor's dimensions but the last."""
    return _keys(torch.Size(shape).numel(), device).view(shape)[index_of(shard)].flatten()


def _keys(count: int, device: torch.device) -> torch.Tensor:
    return _filled_keys(1 << max(count - 1, 0).bit_length(), device)[:count]


def named(digests: Iterable[tuple[str, int]]) -> dict[str, str]:
    """Digests as they are compared and shown: 16 hexadecimal digits, by the tensor's name."""
    return {name: f"{value % 2**64:016x}" for name, value in digests}


def tensor_digests(buffer: torch.Tensor, layout: SnapshotLayout) -> dict[str, str]:
    """Digest of each tensor in a snapshot's flat uint8 buffer, by name in the layout's order."""
    return named((name, int(digest(view))) for name, view in views(buffer, layout))


def of_copies(found: Iterable[str]) -> str:
    """The digest that all copies of a tensor have; where they differ, all of theirs, which equals none."""
    return " and ".join(sorted(set(found)))


def fingerprint(digests: Mapping[str, str]) -> str:
    """Of a version: of its tensors' names and digests, in their order."""
    content = "\n".join(f"{name} {value}" for name, value in digests.items())
    return hashlib.blake2b(content.encode(), digest_size=16).hexdigest()


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
    return start // mmap.PAGESIZE * mmap.PAGESIZE, -(-end // mmap.PAGESIZE) * mmap.PAGESIZE
