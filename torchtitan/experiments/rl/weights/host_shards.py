"""Which part of a version each trainer host holds, where it lies in that host's memory, and where it belongs in a snapshot.

```
ranks of host a: rows 0-1, rows 2-3     its buffer: rows 0-3 of each tensor      snapshot: rows 0-7 of each tensor
ranks of host b: rows 4-5, rows 6-7     its buffer: rows 4-7 of each tensor
```
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import torch

from torchtitan.experiments.rl.weights.snapshot import Shard, SnapshotLayout, TensorEntry, aligned, index_of

READ_BYTES = 8 * 2**20
"""Of one read from another host. Over TCP, 256 MB took 0.2 s in reads of 8 MB side by side, and 0.7 s in reads of 32 MB."""


@dataclass(kw_only=True, slots=True, frozen=True)
class HeldShard:
    name: str
    """Hub name of the tensor."""
    shard: Shard
    offset: int
    """Bytes from the start of the host's buffer."""
    dtype: torch.dtype

    @property
    def nbytes(self) -> int:
        return volume(self.shard) * self.dtype.itemsize

    def view(self, buffer: torch.Tensor, first: int = 0) -> torch.Tensor:
        """This shard in the host's flat uint8 buffer, or in a part that begins with byte ``first``; it shares the memory."""
        flat = buffer[self.offset - first : self.offset - first + self.nbytes]
        return flat.view(self.dtype).view([stop - start for start, stop in self.shard])


@dataclass(kw_only=True, slots=True, frozen=True)
class HostShards:
    """What the ranks of one host write, one after the other. Where they write everything, this is the snapshot's own layout."""

    held: tuple[HeldShard, ...]

    @property
    def nbytes(self) -> int:
        return sum(aligned(held.nbytes) for held in self.held)

    def targets(self, buffer: torch.Tensor, written: Mapping[str, Shard]) -> dict[str, torch.Tensor]:
        """Where a rank of this host writes its shards in the host's buffer, by name."""
        found = {}
        for held in self.held:
            shard = written.get(held.name)
            if shard is not None and _contains(held.shard, shard):
                within = tuple(
                    (start - first, stop - first) for (start, stop), (first, _) in zip(shard, held.shard, strict=True)
                )
                found[held.name] = held.view(buffer)[index_of(within)]
        return found


def written_by(rank: int, held: Sequence[Mapping[str, Shard]]) -> dict[str, Shard]:
    """What a rank writes, by name, of what each rank holds: of those that hold the same shard, the lowest writes it."""
    lower = {entry for own in held[:rank] for entry in own.items()}
    return {name: shard for name, shard in held[rank].items() if volume(shard) and (name, shard) not in lower}


def divide(held: Sequence[Mapping[str, Shard]], hosts: Sequence[str], dtype: torch.dtype) -> dict[str, HostShards]:
    """What each host writes, by host; hosts that write nothing are left out.

    Args:
        held: of each rank the shard that it holds of each tensor, all in the same order. Shards of a tensor are equal or apart.
        hosts: of each rank.
    """
    written: dict[str, dict[str, list[Shard]]] = {}
    for rank, host in enumerate(hosts):
        for name, shard in written_by(rank, held).items():
            written.setdefault(host, {}).setdefault(name, []).append(shard)
    divided = {}
    for host, by_name in written.items():
        found, offset = [], 0
        for name in held[0]:
            for shard in _joined(by_name.get(name, [])):
                found.append(HeldShard(name=name, shard=shard, offset=offset, dtype=dtype))
                offset += aligned(found[-1].nbytes)
        divided[host] = HostShards(held=tuple(found))
    return divided


def divided_tensors(hosts: Mapping[str, HostShards], shapes: Mapping[str, tuple[int, ...]]) -> dict[str, tuple[Shard, ...]]:
    """``TensorEntry.shards`` of the tensors that no host holds whole, by name."""
    found: dict[str, list[Shard]] = {}
    for host in hosts.values():
        for held in host.held:
            found.setdefault(held.name, []).append(held.shard)
    for name, shape in shapes.items():
        size = sum(volume(shard) for shard in found.get(name, []))
        assert size == math.prod(shape), f"the ranks write {size} values of {name}, which has {math.prod(shape)}"
    return {name: tuple(sorted(shards)) for name, shards in found.items() if len(shards) > 1}


@dataclass(kw_only=True, slots=True, frozen=True)
class Transfer:
    """Bytes of a host's buffer that another host fetches for its copy of the snapshot."""

    start: int
    stop: int
    target: int | None
    """Byte of the snapshot where they go as they are. None: they are one shard with gaps between its parts there."""
    held: HeldShard
    """That shard; else the first of those in the bytes."""

    def reads(self) -> Iterator[tuple[int, int]]:
        """Start and stop, in the host's buffer, of what is read at once."""
        for start in range(self.start, self.stop, READ_BYTES):
            yield start, min(start + READ_BYTES, self.stop)


def transfers(host: HostShards, layout: SnapshotLayout) -> list[Transfer]:
    """All that ``host`` holds, in its order. Whole tensors that lie alike in both are one transfer: a whole snapshot is."""
    entries = {entry.name: entry for entry in layout.entries}
    found: list[Transfer] = []
    after_whole = False
    for held in host.held:
        entry = entries[held.name]
        target = _place(held.shard, entry)
        start, stop = held.offset, held.offset + held.nbytes
        whole = held.shard == entry.whole
        # Between two whole tensors only their alignment lies. After a shard it may be another host's in the snapshot.
        if whole and after_whole and found[-1].target == entry.offset - (start - found[-1].start):
            found[-1] = replace(found[-1], stop=stop)
        else:
            found.append(Transfer(start=start, stop=stop, target=target, held=held))
        after_whole = whole
    return found


def volume(shard: Shard) -> int:
    return math.prod(stop - start for start, stop in shard)


def _place(shard: Shard, entry: TensorEntry) -> int | None:
    """Byte of the snapshot where a shard begins, if its values lie there one after the other."""
    divided = [index for index, ((start, stop), size) in enumerate(zip(shard, entry.shape, strict=True)) if stop - start < size]
    outer = shard[: divided[-1]] if divided else ()
    if any(stop - start > 1 for start, stop in outer):
        return None
    first = 0
    for (start, _), size in zip(shard, entry.shape, strict=True):
        first = first * size + start
    return entry.offset + first * entry.dtype.itemsize


def _joined(shards: Sequence[Shard]) -> list[Shard]:
    """One shard where they fill one together, else they themselves, sorted."""
    if len(shards) < 2:
        return list(shards)
    box = tuple((min(start for start, _ in sides), max(stop for _, stop in sides)) for sides in zip(*shards, strict=True))
    return [box] if volume(box) == sum(map(volume, shards)) else sorted(shards)


def _contains(outer: Shard, inner: Shard) -> bool:
    return all(first <= start and stop <= last for (first, last), (start, stop) in zip(outer, inner, strict=True))
