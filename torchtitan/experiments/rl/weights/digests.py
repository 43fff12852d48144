"""Digests of weights: of a tensor, of a tensor that hosts divide, and of a whole version."""

import os
from collections.abc import Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from functools import cache

import numpy as np
import torch
import xxhash

from torchtitan.experiments.rl.weights.snapshot import Shard, SnapshotLayout, index_of, views

_PART = 16 * 2**20
"""Bytes that a thread hashes at once."""


def digest(tensor: torch.Tensor) -> str:
    """XXH3-128 of those of the 16 MB parts of a tensor's bytes, in their order.

    Parts are hashed in parallel, where there are cores: xxhash releases the GIL, and reads at memory speed.
    """
    content = _content(tensor).data
    parts = [content[start : start + _PART] for start in range(0, len(content), _PART)]
    spread = _threads().map if len(parts) > 1 and len(os.sched_getaffinity(0)) > 1 else map
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
