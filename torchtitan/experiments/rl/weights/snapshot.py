"""One policy version's weights, in the host's memory or on the trainer's devices: each rank writes its parts, every generator
puts them together.

A snapshot is a flat buffer of each trainer rank, and a manifest that says which parts of which tensors lie in it::

    rank 0: rows 0-1 of each tensor      its buffer:  embed[0:2]  norm  head[0:2]
    rank 1: rows 2-3                     its buffer:  embed[2:4]        head[2:4]

The experts of a layer are published as three stacks, and not as the hub's tensors, three for each
expert: 30B-A3B has 579 tensors so, and 18,867 in the hub. A stack's name has a star in place of
the expert's number: ``model.layers.0.mlp.experts.*.up_proj.weight``, [experts, ...]. The hub's
tensor of expert 3 is the stack's [3].

The buffers' pages are made once and reused: touching fresh shared-memory pages costs as much as the copy itself. Digests say
which weights a snapshot, or an engine, holds.
"""

import hashlib
import logging
import math
import mmap
import os
import re
import weakref
from collections import UserDict
from collections.abc import Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cache
from itertools import product
from typing import Any, NamedTuple

import numpy as np
import torch

from torchtitan.experiments.rl.compat.torch import opened_memory, take_cuda_error
from torchtitan.experiments.rl.errors import PeerGone

logger = logging.getLogger(__name__)

_ALIGNMENT = 64
_WORDS_ON_CPU, _WORDS_OF_A_THREAD = 2**17, 2**21
"""Words that are digested at once, 1 MB, which stay in a core's cache, and those that are worth another thread."""
_WORDS = 2**24
"""Words that a GPU digests at once: it has room for 128 MB."""

CPU = torch.device("cpu")
Shard = tuple[tuple[int, int], ...]
"""A part of a tensor: start and stop in each dimension."""
Handle = str | tuple[Any, ...]
"""By which processes of a host open memory of another one: the path of a SharedBuffer, or of a GPU's what CUDA gives."""


class RankParts(NamedTuple):
    """What one trainer rank has written of a version, in a flat buffer."""

    host: str
    """Identity of the host whose processes open the buffer."""
    handle: Handle
    shards: dict[str, Shard]
    """By name of the tensor: where they lie is what ``views`` says. Of a stack of experts a rank may
    have written some experts, or some rows of each."""


@dataclass(kw_only=True, slots=True, frozen=True)
class Manifest:
    """What a generator needs to load one version. Small: it travels through torchstore and actor messages."""

    version: int
    shapes: dict[str, tuple[int, ...]]
    """Shapes of the whole tensors, by hub name; of experts, by the name of their stack."""
    dtype: torch.dtype
    parts: tuple[RankParts, ...]
    """They make up the tensors, and no two overlap."""
    publication: str
    """Names what was written, and no other: a trainer that is made again may publish a version again, with other weights."""
    digests: dict[str, str]
    """Of each tensor, in the order of ``shapes``, as the trainer took them where its own tensors lie."""


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
        status = os.fstat(descriptor)
        self.inode = status.st_ino
        """The same in all processes, and of no other buffer. A path is another one's once its process has let go of it."""
        self.bytes = torch.frombuffer(mmap.mmap(descriptor, status.st_size), dtype=torch.uint8)

    @classmethod
    def create(cls, nbytes: int) -> "SharedBuffer":
        descriptor = os.memfd_create("policy-weights")
        os.ftruncate(descriptor, nbytes)  # large pages are for what lies within the file's size
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


class PartedTensors(UserDict[str, torch.Tensor]):
    """Tensors of a version, by the manifest's names.

    One that ranks hold in parts is put together on ``device`` whenever it is asked for, and nothing
    keeps it. One that a rank holds whole is in that rank's own memory.
    """

    def __init__(
        self, manifest: Manifest, buffers: Iterable[torch.Tensor], device: torch.device = CPU
    ):
        """``buffers``: flat uint8, of each of the manifest's parts."""
        self.shapes = manifest.shapes
        self._manifest = manifest
        self._buffers = [*buffers]
        self._dtype = manifest.dtype
        self._device = device
        self.data: dict[str, Any] = {name: [] for name in manifest.shapes}
        for own, buffer in zip(manifest.parts, self._buffers, strict=True):
            for name, part in views(buffer, own.shards, manifest.dtype).items():
                self.data[name].append((index_of(own.shards[name]), part))

    def __getitem__(self, name: str) -> torch.Tensor:
        parts = self.data[name]
        if len(parts) == 1:
            return parts[0][1]
        tensor = torch.empty(self.shapes[name], dtype=self._dtype, device=self._device)
        self.copy_to(name, tensor)
        return tensor

    def in_host_memory(self) -> "PartedTensors":
        """Return the same tensors in the host's memory. A device copies each rank's buffer at once."""
        return PartedTensors(self._manifest, [buffer.cpu() for buffer in self._buffers])

    def copy_to(self, name: str, target: torch.Tensor) -> None:
        """Copy each part to where it belongs. Putting a tensor together first would take fresh memory for it: on a CPU, three
        times as long."""
        for place, part in self.data[name]:
            target[place].copy_(part, non_blocking=True)


class SnapshotReader:
    """A generator's side: maps each of the host's buffers once. It keeps no memory of a GPU open: that of a trainer which has
    ended would not be free for the next one."""

    def __init__(self):
        self._last: dict[int, SharedBuffer] = {}
        self._before: dict[int, SharedBuffer] = {}
        """What the last two versions lie in, by inode."""

    def tensors(self, manifest: Manifest, device: torch.device = CPU) -> PartedTensors:
        """Of a version whose parts are this host's, for a model on ``device``. They may lie in the memory of those who wrote
        them: keep none after the load.

        Raises:
            PeerGone: there is none any more.
        """
        known, self._before, self._last = self._before | self._last, self._last, {}
        buffers = []
        for _, handle, _ in manifest.parts:
            if not isinstance(handle, str):
                buffers.append(opened_memory(handle, device))
                continue
            found = SharedBuffer.attach(handle)
            buffer = known.get(found.inode, found)  # whose pages are mapped
            if (
                buffer is found and device.type == "cuda"
            ):  # it then reads by itself, and at the full speed of its bus
                page_lock([buffer.bytes])
            self._last[buffer.inode] = buffer
            buffers.append(buffer.bytes)
        return PartedTensors(manifest, buffers, device)


def stack_name(hub_name: str) -> str:
    """Return the name of the stack that an expert's tensor is published in.

    A tensor that belongs to no expert keeps its name.
    """
    return re.sub(r"\.experts\.\d+\.", ".experts.*.", hub_name)


def whole(shape: Iterable[int]) -> Shard:
    """All of a tensor."""
    return tuple((0, size) for size in shape)


def volume(shard: Shard) -> int:
    return math.prod(stop - start for start, stop in shard)


def _aligned(shard: Shard, dtype: torch.dtype) -> int:
    """Bytes that it takes in a buffer, up to where the next one begins."""
    return -(-volume(shard) * dtype.itemsize // _ALIGNMENT) * _ALIGNMENT


def buffer_bytes(shards: Mapping[str, Shard], dtype: torch.dtype) -> int:
    """Of the buffer that has room for them."""
    return sum(_aligned(shard, dtype) for shard in shards.values())


def views(
    buffer: torch.Tensor, shards: Mapping[str, Shard], dtype: torch.dtype
) -> dict[str, torch.Tensor]:
    """The shards in a flat uint8 buffer, one after the other, each at a multiple of 64 bytes. They share its memory."""
    found, offset = {}, 0
    for name, shard in shards.items():
        flat = buffer[offset : offset + volume(shard) * dtype.itemsize].view(dtype)
        found[name] = flat.view([stop - start for start, stop in shard])
        offset += _aligned(shard, dtype)
    return found


def index_of(shard: Shard) -> tuple[slice, ...]:
    """What picks a shard out of its tensor."""
    return tuple(slice(start, stop) for start, stop in shard)


def digest(
    part: torch.Tensor, shard: Shard | None = None, shape: tuple[int, ...] | None = None
) -> torch.Tensor:
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
    if not part.numel():
        return torch.zeros((), dtype=torch.int64, device=part.device)
    if not shape:
        part, shape = part.reshape(1), (1,)
    shard = shard or whole(shape)
    words, first = _words(part.detach(), shard[-1][0] * part.element_size())
    words_BRC = _blocks(words)
    keys, keys_C = _keys_of(shape[:-1], shard[:-1], first, words.shape[-1], part.device)
    row_keys_BR = keys.view(words_BRC.shape[:2])
    along = 0 if len(words_BRC) > 1 else 1  # dimension that is divided
    if part.is_cpu:
        shares = min(words_BRC.shape[along], -(-words_BRC.numel() // _WORDS_OF_A_THREAD))
        values, row_keys = words_BRC.numpy(), row_keys_BR.numpy()
        if shares == 1:
            found = _sum_on_cpu(values, row_keys, keys_C.numpy())
        else:
            divided = (np.array_split(array, shares, along) for array in (values, row_keys))
            found = sum(_threads().map(_sum_on_cpu, *divided, [keys_C.numpy()] * shares))
        return torch.tensor((found + 2**63) % 2**64 - 2**63, dtype=torch.int64, device=part.device)
    total = torch.zeros((), dtype=torch.int64, device=part.device)
    most = max(1, _WORDS * words_BRC.shape[along] // words_BRC.numel())
    parts = zip(words_BRC.split(most, along), row_keys_BR.split(most, along), strict=True)
    for own, own_keys in parts:
        total += (own >> 32).add_(own).mul_(keys_C).sum(-1).mul_(own_keys).sum()
    return total


def _sum_on_cpu(words_BRC: np.ndarray, row_keys_BR: np.ndarray, keys_C: np.ndarray) -> int:
    """Return the sum of the words by their keys, as many at a time as a core's cache holds.

    Twice as quick as torch's operations, which a GPU has: the last pass has no result of its own.
    numba would be as quick as memory, but vLLM 0.32 can't make an engine in a process that has
    imported it.
    """
    total = 0
    blocks, rows, columns = words_BRC.shape
    width = min(_WORDS_ON_CPU, columns)
    height = min(_WORDS_ON_CPU // width, rows)
    depth = min(_WORDS_ON_CPU // (width * height), blocks)
    mixed = np.empty(depth * height * width, np.int64)
    starts = range(0, blocks, depth), range(0, rows, height), range(0, columns, width)
    for front, top, left in product(*starts):
        place = slice(front, front + depth), slice(top, top + height)
        words = words_BRC[(*place, slice(left, left + width))]
        own = mixed[: words.size].reshape(words.shape)
        np.add(np.right_shift(words, 32, out=own), words, out=own)
        sums = np.einsum("brc,c->br", own, keys_C[left : left + width])
        total += int(sums.ravel() @ row_keys_BR[place].ravel())
    return total


@cache
def _threads() -> ThreadPoolExecutor:
    """One for each core of this process."""
    return ThreadPoolExecutor(
        max_workers=len(os.sched_getaffinity(0)), thread_name_prefix="digests"
    )


def _words(part: torch.Tensor, start: int) -> tuple[torch.Tensor, int]:
    """Return a part's rows as int64 words [..., C], and the number of the first word in its row.

    They are the part's own memory where that lies right, and a copy elsewhere.

    Args:
        start: byte of the whole row at which the part begins.
    """
    size = part.element_size()
    width = part.shape[-1] * size
    if part.stride(-1) != 1:
        part = part.clone(memory_format=torch.contiguous_format)
    steps = [stride * size for stride in (part.storage_offset(), *part.stride()[:-1])]
    if not any(place % 8 for place in (start, width, *steps)):
        return part.view(torch.int64), start // 8
    begin = start % 8
    rows = part.contiguous().view(torch.uint8)
    return torch.nn.functional.pad(rows, (begin, -(begin + width) % 8)).view(
        torch.int64
    ), start // 8


def _blocks(words: torch.Tensor) -> torch.Tensor:
    """Return a view [B, R, C] of words [..., C]: one block, or of a stack with gaps a block an expert.

    The gate of an engine's experts is such a stack: each expert's gate lies above its up.
    """
    if words.ndim == 3 and not words.is_contiguous():
        return words
    return words.reshape(-1, words.shape[-1])[None]


@cache
def _filled_keys(count: int, device: torch.device) -> torch.Tensor:
    """Odd numbers that look random: int64 [count] of SplitMix64, whose first are the same for any ``count``."""
    mixed = torch.arange(1, count + 1, dtype=torch.int64) * -7046029254386353131
    for shift, factor in ((30, -4658895280553007687), (27, -7723592293110705685)):
        mixed = (mixed ^ (mixed >> shift)) * factor
    return ((mixed ^ (mixed >> 31)) | 1).to(device)


@cache
def _keys_of(
    shape: tuple[int, ...], shard: Shard, first: int, count: int, device: torch.device
) -> tuple[torch.Tensor, torch.Tensor]:
    """Of the rows of a part, by the tensor's dimensions but the last, and of their words, which begin with number ``first``."""
    return _keys(torch.Size(shape).numel(), device).view(shape)[index_of(shard)].flatten(), _keys(
        first + count, device
    )[first:]


def _keys(count: int, device: torch.device) -> torch.Tensor:
    return _filled_keys(1 << max(count - 1, 0).bit_length(), device)[:count]


def read_together(shares: Iterable[torch.Tensor]) -> list[int]:
    """Return the values of digests that lie on one device. The device is asked once for all."""
    found = [*shares]
    return torch.stack(found).cpu().tolist() if found else []


def named(digests: Iterable[tuple[str, int]]) -> dict[str, str]:
    """Digests as they are compared and shown: 16 hexadecimal digits, by the tensor's name."""
    return {name: f"{value % 2**64:016x}" for name, value in digests}


def of_copies(found: Iterable[str]) -> str:
    """The digest that all copies of a tensor have; where they differ, all of theirs, which equals none."""
    return " and ".join(sorted(set(found)))


def fingerprint(digests: Mapping[str, str]) -> str:
    """Of a version: of its tensors' names and digests, in their order."""
    content = "\n".join(f"{name} {value}" for name, value in digests.items())
    return hashlib.blake2b(content.encode(), digest_size=16).hexdigest()


def page_lock(buffers: Iterable[torch.Tensor]) -> bool:
    """Keep the pages of flat CPU buffers where they are, so that a GPU reads and writes them itself, until this process ends.

    Returns:
        Whether it could. Without it copies wait for the CPU, and nothing else changes: CUDA keeps the refusal and the next
        kernel launch would raise it, so it is taken here.
    """
    for buffer in buffers:
        code = int(torch.cuda.cudart().cudaHostRegister(buffer.data_ptr(), buffer.nbytes, 0))
        if code:
            take_cuda_error()
            logger.warning(
                "shared memory of the weights can't be page-locked (CUDA error %d): publishing takes longer",
                code,
            )
            return False
    return True
