"""One version of the policy's weights, in the host's memory or on the trainer's devices.

Each rank of the trainer writes its shards, and every generator puts them together. A snapshot is a
flat buffer of each trainer rank, and a manifest that says which parts of which tensors lie in it::

    rank 0: rows 0-1 of each tensor      its buffer:  embed[0:2]  norm  head[0:2]
    rank 1: rows 2-3                     its buffer:  embed[2:4]        head[2:4]

The experts of a layer are published as three stacks, and not as the hub's tensors, three for each
expert: 30B-A3B has 579 tensors so, and 18,867 in the hub. A stack's name has a star in place of
the expert's number: ``model.layers.0.mlp.experts.*.up_proj.weight``, [experts, ...]. The hub's
tensor of expert 3 is the stack's [3].

The buffers' pages are made once and reused: touching fresh shared-memory pages costs as much as the
copy itself. Digests say which weights a snapshot, or an engine, holds.
"""

import hashlib
import logging
import math
import mmap
import os
import re
import weakref
from collections.abc import Iterable, Iterator, Mapping
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
"""Bytes of which each shard's offset in a buffer is a multiple."""

_WORDS_ON_CPU = 2**17
"""Number of words that a core digests at once: 1 MB, which stays in its cache."""

_WORDS_OF_A_THREAD = 2**21
"""Number of words that are worth another thread."""

_WORDS_ON_GPU = 2**24
"""Number of words that a GPU digests at once: it has room for 128 MB."""

CPU = torch.device("cpu")

Shard = tuple[tuple[int, int], ...]
"""A part of a tensor: start and stop in each dimension."""

Handle = str | tuple[Any, ...]
"""Name by which processes of a host open another one's memory: the path of a SharedBuffer, or what
CUDA gives for a GPU's memory."""


class RankParts(NamedTuple):
    """Shards of a version that one trainer rank has written into a flat buffer."""

    host: str
    """Identity of the host whose processes open the buffer."""
    handle: Handle
    shards: dict[str, Shard]
    """Shard of each tensor, by name, in the order in which they lie (`views`). Of a stack of
    experts a rank may have written some experts, or some rows of each."""


@dataclass(kw_only=True, slots=True, frozen=True)
class Manifest:
    """Description of one version, for generators that load it.

    It is small: it travels through torchstore and actor messages.
    """

    version: int
    shapes: dict[str, tuple[int, ...]]
    """Shapes of the whole tensors, by hub name; of experts, by the name of their stack."""
    dtype: torch.dtype
    parts: tuple[RankParts, ...]
    """Parts of all ranks. They make up the tensors, and no two overlap."""
    publication: str
    """Name of what was written. A trainer that is made again may publish a version again, with
    other weights and under another name."""
    digests: dict[str, str]
    """Digest of each tensor, in the order of ``shapes``, as the trainer took them where its own
    tensors lie. Empty until it has."""


@dataclass(kw_only=True, slots=True)
class WeightReceipt:
    """A generator's proof of what it loaded."""

    version: int
    fingerprint: str
    """Fingerprint of the weights that its engine holds, not of the bytes that were sent. "" for a
    version that was not verified."""
    canary_logprobs: np.ndarray
    """float32 [adapters * L]. Log-probabilities of the canary under the loaded weights, with each
    adapter in turn."""
    verify_s: float
    """Seconds that mapping the version and taking digests took."""
    reload_s: float
    """Seconds that copying the version into the model took."""


class SharedBuffer:
    """Shared memory as one uint8 tensor.

    It has no name in any folder, so it is freed when the last process that maps it ends, however
    that process ends.
    """

    def __init__(self, descriptor: int, path: str):
        # The memory lives as long as a process maps it or has it open, so the descriptor is closed
        # with this object.
        weakref.finalize(self, os.close, descriptor)
        self.path = path
        """Path by which other processes of this host open the buffer, while this object lives in
        the process that created it."""
        status = os.fstat(descriptor)
        self.inode = status.st_ino
        """Identity of the buffer, the same in all processes. A path may become another buffer's
        once its process has let go of the first."""
        self.bytes = torch.frombuffer(mmap.mmap(descriptor, status.st_size), dtype=torch.uint8)

    @classmethod
    def create(cls, nbytes: int) -> "SharedBuffer":
        """Make a buffer, with all its pages."""
        descriptor = os.memfd_create("policy-weights")
        # Before the pages are made: the kernel takes large pages only within the file's size.
        os.ftruncate(descriptor, nbytes)
        os.posix_fallocate(descriptor, 0, nbytes)
        return cls(descriptor, f"/proc/{os.getpid()}/fd/{descriptor}")

    @classmethod
    def attach(cls, path: str) -> "SharedBuffer":
        """Map the buffer that another process created.

        Raises:
            PeerGone: that process has closed it, as it does when it ends.
        """
        try:
            return cls(os.open(path, os.O_RDWR), path)
        except (FileNotFoundError, ProcessLookupError) as error:
            raise PeerGone(
                f"the weights at {path} are gone ({error.strerror}): the process that published "
                "them has ended"
            ) from error


class PartedTensors(Mapping[str, torch.Tensor]):
    """Tensors of a version, by the manifest's names.

    A tensor that ranks hold in parts is put together on ``device`` whenever it is asked for, and is
    not kept. A tensor that a rank holds whole is in that rank's own memory.
    """

    def __init__(
        self, manifest: Manifest, buffers: Iterable[torch.Tensor], device: torch.device = CPU
    ):
        """Find each shard in its buffer.

        Args:
            buffers: flat uint8 buffer of each of the manifest's parts.
            device: device on which tensors are put together.
        """
        self.shapes = manifest.shapes
        self._manifest = manifest
        self._buffers = [*buffers]
        self._dtype = manifest.dtype
        self._device = device
        self._shards: dict[str, list[tuple[tuple[slice, ...], torch.Tensor]]] = {
            name: [] for name in manifest.shapes
        }
        """Shards of each tensor, each with its place in the tensor."""
        for parts, buffer in zip(manifest.parts, self._buffers, strict=True):
            for name, values in views(buffer, parts.shards, manifest.dtype).items():
                self._shards[name].append((index_of(parts.shards[name]), values))

    def __getitem__(self, name: str) -> torch.Tensor:
        shards = self._shards[name]
        if len(shards) == 1:
            _, tensor = shards[0]
            return tensor
        tensor = torch.empty(self.shapes[name], dtype=self._dtype, device=self._device)
        self.copy_to(name, tensor)
        return tensor

    def __contains__(self, name: object) -> bool:
        return name in self._shards  # Mapping's own would put the tensor together

    def __iter__(self) -> Iterator[str]:
        return iter(self._shards)

    def __len__(self) -> int:
        return len(self._shards)

    def in_host_memory(self) -> "PartedTensors":
        """Return the same tensors in the host's memory, each rank's buffer copied at once."""
        return PartedTensors(self._manifest, [buffer.cpu() for buffer in self._buffers])

    def copy_to(self, name: str, target: torch.Tensor) -> None:
        """Copy each shard of a tensor to its place in ``target``.

        Putting the tensor together first would take fresh memory: on a CPU, three times as long.
        """
        for place, values in self._shards[name]:
            target[place].copy_(values, non_blocking=True)


class SnapshotReader:
    """Opens versions, as one generator. It maps each of its host's buffers once.

    It keeps no memory of a GPU open: that of a trainer which has ended would not be free for the
    next one.
    """

    def __init__(self) -> None:
        self._last: dict[int, SharedBuffer] = {}
        """Buffers of the last version, by inode."""
        self._before: dict[int, SharedBuffer] = {}
        """Buffers of the version before, by inode."""

    def tensors(self, manifest: Manifest, device: torch.device = CPU) -> PartedTensors:
        """Return the tensors of a version whose parts are this host's.

        They may lie in the memory of the processes that wrote them: keep none after the load.

        Args:
            device: device of the model that they are loaded into.

        Raises:
            PeerGone: a process that wrote them has ended.
        """
        known = self._before | self._last
        self._before = self._last
        self._last = {}
        buffers = []
        for part in manifest.parts:
            if isinstance(part.handle, str):
                buffer = self._mapped(part.handle, known, device)
                self._last[buffer.inode] = buffer
                buffers.append(buffer.bytes)
            else:
                buffers.append(opened_memory(part.handle, device))
        return PartedTensors(manifest, buffers, device)

    def _mapped(
        self, path: str, known: Mapping[int, SharedBuffer], device: torch.device
    ) -> SharedBuffer:
        """Return the buffer at a path; the one whose pages are mapped already, if it is known."""
        attached = SharedBuffer.attach(path)
        if attached.inode in known:
            return known[attached.inode]
        if device.type == "cuda":  # it then reads by itself, and at the full speed of its bus
            page_lock([attached.bytes])
        return attached


def stack_name(hub_name: str) -> str:
    """Return the name of the stack that an expert's tensor is published in.

    A tensor that belongs to no expert keeps its name.
    """
    return re.sub(r"\.experts\.\d+\.", ".experts.*.", hub_name)


def whole(shape: Iterable[int]) -> Shard:
    """Return the shard that is all of a tensor."""
    return tuple((0, size) for size in shape)


def volume(shard: Shard) -> int:
    """Return the number of a shard's values."""
    return math.prod(stop - start for start, stop in shard)


def _aligned_bytes(shard: Shard, dtype: torch.dtype) -> int:
    """Return the bytes of a shard in a buffer, up to where the next one begins."""
    return -(-volume(shard) * dtype.itemsize // _ALIGNMENT) * _ALIGNMENT


def buffer_bytes(shards: Mapping[str, Shard], dtype: torch.dtype) -> int:
    """Return the size of a buffer for these shards."""
    return sum(_aligned_bytes(shard, dtype) for shard in shards.values())


def views(
    buffer: torch.Tensor, shards: Mapping[str, Shard], dtype: torch.dtype
) -> dict[str, torch.Tensor]:
    """Return the shards in a flat uint8 buffer. They share its memory.

    They lie one after the other, each at a multiple of 64 bytes.
    """
    tensors = {}
    offset = 0
    for name, shard in shards.items():
        flat = buffer[offset : offset + volume(shard) * dtype.itemsize].view(dtype)
        tensors[name] = flat.view([stop - start for start, stop in shard])
        offset += _aligned_bytes(shard, dtype)
    return tensors


def index_of(shard: Shard) -> tuple[slice, ...]:
    """Return the index that picks a shard out of its tensor."""
    return tuple(slice(start, stop) for start, stop in shard)


def digest(
    part: torch.Tensor, shard: Shard | None = None, shape: tuple[int, ...] | None = None
) -> torch.Tensor:
    """Return a part's share of its tensor's digest, int64 [], on the part's device.

    Shares of parts that make up the tensor add up to its digest, modulo 2**64, however it is
    divided. The bytes of a row, which is the last dimension, are little-endian words w of 8 bytes;
    the last word is filled up with zeros::

        digest = sum over rows r and words c of (w + (w >> 32)) * key(r) * key(c)

    The keys are odd and look random, so a change in the low or the high half of one word is always
    seen, and of other changes one in 2**32 at most is missed. The second term is for a word's high
    bits, which otherwise only meet the sum's own.

    Args:
        shard: place of the part in the tensor; None if it is the tensor.
        shape: shape of the tensor; None if the part is the tensor.
    """
    shape = shape if shape is not None else tuple(part.shape)
    if not part.numel():
        return torch.zeros((), dtype=torch.int64, device=part.device)
    if not shape:  # a scalar is a row of one value
        part = part.reshape(1)
        shape = (1,)
    shard = shard or whole(shape)
    words, first = _words(part.detach(), shard[-1][0] * part.element_size())
    words_BRC = _blocks(words)
    keys, keys_C = _keys_of(shape[:-1], shard[:-1], first, words.shape[-1], part.device)
    row_keys_BR = keys.view(words_BRC.shape[:2])
    if part.is_cpu:
        return _digest_on_cpu(words_BRC.numpy(), row_keys_BR.numpy(), keys_C.numpy())
    along = 0 if len(words_BRC) > 1 else 1  # by blocks; one block by its rows
    rows_at_once = max(1, _WORDS_ON_GPU * words_BRC.shape[along] // words_BRC.numel())
    total = torch.zeros((), dtype=torch.int64, device=part.device)
    for piece, piece_keys in zip(
        words_BRC.split(rows_at_once, along), row_keys_BR.split(rows_at_once, along), strict=True
    ):
        total += (piece >> 32).add_(piece).mul_(keys_C).sum(-1).mul_(piece_keys).sum()
    return total


def _digest_on_cpu(
    words_BRC: np.ndarray, row_keys_BR: np.ndarray, keys_C: np.ndarray
) -> torch.Tensor:
    """Return the sum of the words by their keys, computed by as many threads as it is worth."""
    along = 0 if len(words_BRC) > 1 else 1  # by blocks; one block by its rows
    shares = min(words_BRC.shape[along], -(-words_BRC.size // _WORDS_OF_A_THREAD))
    if shares == 1:
        total = _sum_on_cpu(words_BRC, row_keys_BR, keys_C)
    else:
        words = np.array_split(words_BRC, shares, along)
        row_keys = np.array_split(row_keys_BR, shares, along)
        total = sum(_threads().map(_sum_on_cpu, words, row_keys, [keys_C] * shares))
    return torch.tensor((total + 2**63) % 2**64 - 2**63, dtype=torch.int64)  # as int64 wraps


def _sum_on_cpu(words_BRC: np.ndarray, row_keys_BR: np.ndarray, keys_C: np.ndarray) -> int:
    """Return the sum of the words by their keys, as many at a time as a core's cache holds.

    It is twice as quick as torch's operations, which a GPU uses, because the last pass writes no
    result of its own. numba would be as quick as memory, but vLLM 0.32 can't make an engine in a
    process that has imported it.
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
        high = mixed[: words.size].reshape(words.shape)
        np.right_shift(words, 32, out=high)
        np.add(high, words, out=high)
        sums = np.einsum("brc,c->br", high, keys_C[left : left + width])
        total += int(sums.ravel() @ row_keys_BR[place].ravel())
    return total


@cache
def _threads() -> ThreadPoolExecutor:
    """Return a pool with one thread for each core of this process."""
    return ThreadPoolExecutor(
        max_workers=len(os.sched_getaffinity(0)), thread_name_prefix="digests"
    )


def _words(part: torch.Tensor, start: int) -> tuple[torch.Tensor, int]:
    """Return a part's rows as int64 words [..., C], and the number of the first word in its row.

    The words are the part's own memory if that is aligned, and else a copy.

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
    # A copy, because `contiguous` leaves a row alone in its old stride, which may be no multiple
    # of 8.
    rows = part.clone(memory_format=torch.contiguous_format).view(torch.uint8)
    padded = torch.nn.functional.pad(rows, (begin, -(begin + width) % 8))
    return padded.view(torch.int64), start // 8


def _blocks(words: torch.Tensor) -> torch.Tensor:
    """Return a view [B, R, C] of words [..., C].

    It is one block, or of a stack with gaps a block for each expert. The gate of an engine's
    experts is such a stack: each expert's gate lies above its up.
    """
    if words.ndim == 3 and not words.is_contiguous():
        return words
    return words.reshape(-1, words.shape[-1])[None]


@cache
def _filled_keys(count: int, device: torch.device) -> torch.Tensor:
    """Return odd numbers that look random, int64 [count], by SplitMix64.

    The first ones are the same for any ``count``.
    """
    mixed = torch.arange(1, count + 1, dtype=torch.int64) * -7046029254386353131
    for shift, factor in ((30, -4658895280553007687), (27, -7723592293110705685)):
        mixed = (mixed ^ (mixed >> shift)) * factor
    return ((mixed ^ (mixed >> 31)) | 1).to(device)


@cache
def _keys_of(
    shape: tuple[int, ...], shard: Shard, first: int, count: int, device: torch.device
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the keys of a part's rows and of the words of a row.

    Args:
        shape: the tensor's dimensions but the last.
        shard: place of the part in these dimensions.
        first: number of the part's first word in its row.
        count: number of the part's words in a row.
    """
    row_keys = _keys(torch.Size(shape).numel(), device).view(shape)[index_of(shard)]
    return row_keys.flatten(), _keys(first + count, device)[first:]


def _keys(count: int, device: torch.device) -> torch.Tensor:
    """Return the first keys, out of a cached power of two."""
    return _filled_keys(1 << max(count - 1, 0).bit_length(), device)[:count]


def read_together(shares: Iterable[torch.Tensor]) -> list[int]:
    """Return the values of digests that lie on one device. The device is asked once for all."""
    values = [*shares]
    return torch.stack(values).cpu().tolist() if values else []


def digest_text(value: int) -> str:
    """Return a digest as it is compared and shown: 16 hexadecimal digits."""
    return f"{value % 2**64:016x}"


def named(digests: Iterable[tuple[str, int]]) -> dict[str, str]:
    """Return the texts of digests, by tensor."""
    return {name: digest_text(value) for name, value in digests}


def of_copies(digests: Iterable[str]) -> str:
    """Return the digest that all copies of a tensor have.

    If they differ, all of theirs are returned, a text that equals no digest.
    """
    return " and ".join(sorted(set(digests)))


def fingerprint(digests: Mapping[str, str]) -> str:
    """Return the fingerprint of a version: a hash of its tensors' names and digests, in order."""
    content = "\n".join(f"{name} {value}" for name, value in digests.items())
    return hashlib.blake2b(content.encode(), digest_size=16).hexdigest()


def page_lock(buffers: Iterable[torch.Tensor]) -> bool:
    """Keep the pages of flat CPU buffers in place, so that a GPU reads and writes them itself.

    They stay so until this process ends.

    Returns:
        True if the system allowed it. Otherwise copies wait for the CPU, and nothing else changes.
    """
    for buffer in buffers:
        code = int(torch.cuda.cudart().cudaHostRegister(buffer.data_ptr(), buffer.nbytes, 0))
        if code:
            take_cuda_error()  # else the next kernel launch would raise it
            logger.warning(
                "shared memory of the weights can't be page-locked (CUDA error %d): publishing "
                "takes longer",
                code,
            )
            return False
    return True
