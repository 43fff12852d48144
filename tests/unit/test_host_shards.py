"""Tensors that the ranks of several hosts hold in parts: each part is written once, and every host puts all together again."""

import asyncio
import itertools
import math
from dataclasses import dataclass

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from torchtitan.experiments.rl.weights import host_shards
from torchtitan.experiments.rl.weights.host_shards import (
    HostShards,
    RemoteShards,
    check_all_written,
    copy_held,
    fetch,
    held_tensors,
    spans,
    volume,
    written_by_host,
    written_by_rank,
)
from torchtitan.experiments.rl.weights.snapshot import (
    PartedTensors,
    Shard,
    SnapshotLayout,
    digest,
    index_of,
    named,
    tensor_digests,
    views,
)


@dataclass
class Handle:
    """Memory of another host. Stands in for Monarch's RDMABuffer, and counts."""

    memory: torch.Tensor
    bytes_read: int = 0

    async def read_into(self, target: torch.Tensor, *, timeout: int) -> None:
        assert target.numel() == self.memory.numel()
        await asyncio.sleep(0)
        target.copy_(self.memory)
        self.bytes_read += target.numel()


def shard_of(shape: tuple[int, ...], cuts: dict[int, tuple[int, int]]) -> Shard:
    """As torch shards: part ``index`` of ``parts`` of each dimension in ``cuts``; the last parts may be smaller, or empty."""
    sides = []
    for dimension, size in enumerate(shape):
        index, parts = cuts.get(dimension, (0, 1))
        step = math.ceil(size / parts)
        sides.append((min(index * step, size), min((index + 1) * step, size)))
    return tuple(sides)


@st.composite
def meshes(draw):
    """Tensors, what each rank holds of each, and each rank's host."""
    copies, first, second = draw(st.integers(1, 2)), draw(st.integers(1, 3)), draw(st.integers(1, 3))
    shapes = draw(st.lists(st.lists(st.integers(1, 5), max_size=3).map(tuple), min_size=1, max_size=4))
    held = []
    # Each tensor is cut along at most two of its dimensions, whichever, by the two sides of the mesh; or held whole by all.
    plans = []
    for shape in shapes:
        sides = draw(st.permutations(range(len(shape)))) if shape else []
        plans.append(sides[: draw(st.integers(0, 2))])
    for _, i, j in itertools.product(range(copies), range(first), range(second)):
        places = ((i, first), (j, second))
        held.append(
            {
                f"t{n}": shard_of(shape, dict(zip(plan, places, strict=False)))
                for n, (shape, plan) in enumerate(zip(shapes, plans, strict=True))
            }
        )
    hosts = draw(st.lists(st.sampled_from("abc"), min_size=len(held), max_size=len(held)))
    dtype = draw(st.sampled_from([torch.float32, torch.bfloat16]))
    tensors = {f"t{n}": (torch.arange(math.prod(shape)) + 1 + n).reshape(shape).to(dtype) for n, shape in enumerate(shapes)}
    return tensors, held, hosts, dtype


def laid_out(tensors, held, hosts, dtype) -> tuple[dict[str, HostShards], SnapshotLayout]:
    divided = written_by_host(written_by_rank(held), hosts)
    shapes = {name: tuple(tensor.shape) for name, tensor in tensors.items()}
    check_all_written(divided, shapes)
    return divided, SnapshotLayout.of(shapes, dtype)


def written(layout, tensors, held, hosts) -> dict[str, torch.Tensor]:
    """Each host's buffer, as its ranks write it. No byte of a tensor is written twice, by any host."""
    writers = torch.zeros(layout.nbytes, dtype=torch.uint8)
    buffers = {host: torch.full((layout.nbytes,), 255, dtype=torch.uint8) for host in hosts}
    for host, own in zip(hosts, written_by_rank(held), strict=True):
        mine = {name: [shard] for name, shard in own.items()}
        for ((name, shard), target), (_, seen) in zip(
            held_tensors(buffers[host], layout, mine), held_tensors(writers, layout, mine), strict=True
        ):
            assert not seen.any()
            seen.fill_(1)
            target.copy_(tensors[name][index_of(shard)])
    return buffers


@settings(max_examples=100, deadline=None)
@given(meshes(), st.integers(4, 64))
def test_what_hosts_write_and_others_fetch_is_every_tensor_once(mesh, read_bytes):
    tensors, held, hosts, dtype = mesh
    divided, layout = laid_out(*mesh)
    buffers = written(layout, tensors, held, hosts)
    # Fetched by a host that holds nothing, and put together by one that holds a part.
    fetched, shared = torch.zeros(layout.nbytes, dtype=torch.uint8), torch.zeros(layout.nbytes, dtype=torch.uint8)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(host_shards, "READ_BYTES", read_bytes)
        for host, own in divided.items():
            handles = [[Handle(buffers[host][read]) for read in span.reads()] for span in spans(own, layout)]
            nbytes = asyncio.run(fetch(RemoteShards(shards=own, handles=[[], handles]), layout, 1, fetched))
            reads = [handle for each in handles for handle in each]
            assert all(handle.bytes_read == handle.memory.numel() <= read_bytes for handle in reads), "each byte once"
            held_bytes = sum(volume(shard) for shards in own.values() for shard in shards) * dtype.itemsize
            assert held_bytes <= nbytes == sum(h.bytes_read for h in reads) <= layout.nbytes * max(map(len, own.values()))
            copy_held(own, layout, buffers[host], shared)
    for snapshot in (fetched, shared):
        assert all(torch.equal(view, tensors[name]) for name, view in views(snapshot, layout))
    # What the ranks say of their own parts adds up to what anyone finds in the whole.
    shapes = {name: tuple(tensor.shape) for name, tensor in tensors.items()}
    sums = dict.fromkeys(shapes, 0)
    for own in written_by_rank(held):
        for name, shard in own.items():
            sums[name] += int(digest(tensors[name][index_of(shard)], shard, shapes[name]))
    assert named(sums.items()) == tensor_digests(fetched, layout)


@settings(max_examples=100, deadline=None)
@given(meshes())
def test_what_ranks_keep_on_their_devices_is_every_tensor_once(mesh):
    tensors, held, hosts, dtype = mesh
    _, layout = laid_out(*mesh)
    parts = []
    for own in written_by_rank(held):
        own_layout = SnapshotLayout.of_shards(own, dtype)
        buffer = torch.full((own_layout.nbytes,), 255, dtype=torch.uint8)
        for name, part in views(buffer, own_layout):
            part.copy_(tensors[name][index_of(own[name])])
        parts.append((buffer, own))
    assert sum(volume(shard) for _, own in parts for shard in own.values()) == sum(map(torch.numel, tensors.values()))
    found = PartedTensors(layout, parts)
    assert list(found) == list(tensors) and len(found) == len(tensors)
    memory = {buffer.untyped_storage().data_ptr() for buffer, _ in parts}
    for name, tensor in found.items():
        assert tensor.dtype == dtype and torch.equal(tensor, tensors[name])
        whole = any(name in own and volume(own[name]) == tensor.numel() for _, own in parts)
        assert (tensor.untyped_storage().data_ptr() in memory) is (whole and tensor.numel() > 0), "a whole one is not copied"


@settings(max_examples=50, deadline=None)
@given(meshes())
def test_one_hosts_buffer_is_the_snapshot_itself(mesh):
    tensors, held, _, dtype = mesh
    divided, layout = laid_out(tensors, held, ["here"] * len(held), dtype)
    (only,) = spans(divided["here"], layout)
    assert (only.start, only.gaps) == (0, None) and only.stop <= layout.nbytes


def test_shards_of_two_hosts_by_hand():
    # Two float32 tensors, [4, 6] by rows and [2, 4] by columns, and a bias that all four ranks hold.
    rows = [((rank, rank + 1), (0, 6)) for rank in range(4)]
    columns = [((0, 2), (rank, rank + 1)) for rank in range(4)]
    held = [{"rows": rows[r], "columns": columns[r], "bias": ((0, 3),)} for r in range(4)]
    tensors = {name: torch.empty(shape) for name, shape in {"rows": (4, 6), "columns": (2, 4), "bias": (3,)}.items()}
    divided, layout = laid_out(tensors, held, ["a", "a", "b", "b"], torch.float32)
    assert divided == {
        "a": {"rows": [((0, 2), (0, 6))], "columns": [((0, 2), (0, 2))], "bias": [((0, 3),)]},
        "b": {"rows": [((2, 4), (0, 6))], "columns": [((0, 2), (2, 4))]},
    }
    # In the snapshot: rows at 0 (96 bytes), columns at 128 (32 bytes, 16 a row), bias at 192.
    assert [(each.start, each.stop, each.gaps and each.gaps[0]) for each in spans(divided["a"], layout)] == [
        (0, 48, None),
        (128, 152, "columns"),
        (192, 204, None),
    ]
    assert [(each.start, each.stop) for each in spans(divided["b"], layout)] == [(48, 96), (136, 160)]


def test_tensors_side_by_side_are_read_at_once_and_never_what_another_host_holds_between_them():
    # t0 ends on host b, so that host a holds its first row, and then t1 and t2 whole.
    tensors = {"t0": torch.empty(2, 1), "t1": torch.empty(16), "t2": torch.empty(3)}
    held = [{"t0": ((0, 1), (0, 1)), "t1": ((0, 16),), "t2": ((0, 3),)}, {"t0": ((1, 2), (0, 1))}]
    divided, layout = laid_out(tensors, held, ["a", "b"], torch.float32)
    assert [(each.start, each.stop) for each in spans(divided["a"], layout)] == [(0, 4), (64, 140)]
    assert [(each.start, each.stop) for each in spans(divided["b"], layout)] == [(4, 8)]


def test_of_copies_the_host_of_the_lowest_rank_writes_and_the_other_has_nothing():
    whole = {"t": ((0, 4), (0, 2))}
    assert written_by_rank([whole, whole]) == [whole, {}]
    assert written_by_host([whole, {}], ["a", "b"]) == {"a": {"t": [whole["t"]]}}


def test_ranks_that_hold_less_than_a_tensor_are_an_error():
    divided = {"a": {"t": [((0, 2),)]}}
    with pytest.raises(AssertionError, match="the ranks write 2 values of t, which has 3"):
        check_all_written(divided, {"t": (3,)})


async def test_a_read_that_fails_ends_the_fetch_and_the_reads_beside_it():
    ended = []

    class Broken(Handle):
        async def read_into(self, target: torch.Tensor, *, timeout: int) -> None:
            raise ConnectionError("the host is gone")

    class Slow(Handle):
        async def read_into(self, target: torch.Tensor, *, timeout: int) -> None:
            try:
                await asyncio.Event().wait()
            finally:
                ended.append(True)

    tensors = {"t": torch.zeros(host_shards.READ_BYTES // 2)}  # 2 reads
    layout = SnapshotLayout.of({"t": tuple(tensors["t"].shape)}, torch.float32)
    offered = RemoteShards(
        shards={"t": [tuple((0, size) for size in layout.entries[0].shape)]},
        handles=[[[Slow(tensors["t"]), Broken(tensors["t"])]]],
    )
    with pytest.raises(ConnectionError, match="the host is gone"):
        await fetch(offered, layout, 0, torch.zeros(layout.nbytes, dtype=torch.uint8))
    assert ended == [True]
