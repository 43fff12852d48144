"""Tensors that the ranks of several hosts hold in parts: each part is written once, and every host puts all together again."""

import asyncio
import itertools
import math
from dataclasses import dataclass

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from torchtitan.experiments.rl.weights import host_shards, remote
from torchtitan.experiments.rl.weights.digests import digest, digests_of_shards, tensor_digest, tensor_digests
from torchtitan.experiments.rl.weights.host_shards import HostShards, divide, divided_tensors, transfers, volume, written_by
from torchtitan.experiments.rl.weights.snapshot import Shard, SnapshotLayout, index_of, views


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


def written(divided: dict[str, HostShards], tensors, held, hosts) -> dict[str, torch.Tensor]:
    """Each host's buffer, as its ranks write it. No byte of a tensor is written twice."""
    buffers = {host: torch.zeros(own.nbytes, dtype=torch.uint8) for host, own in divided.items()}
    for rank, host in enumerate(hosts):
        own = written_by(rank, held)
        targets = divided[host].targets(buffers[host], own) if host in divided else {}
        assert set(targets) == set(own)
        for name, target in targets.items():
            assert not target.any()
            target.copy_(tensors[name][index_of(own[name])])
    return buffers


@settings(max_examples=100, deadline=None)
@given(meshes(), st.integers(4, 64))
def test_what_hosts_write_and_others_fetch_is_every_tensor_once(mesh, read_bytes):
    tensors, held, hosts, dtype = mesh
    divided = divide(held, hosts, dtype)
    layout = SnapshotLayout.of(tensors, dtype, divided_tensors(divided, {name: t.shape for name, t in tensors.items()}))
    buffers = written(divided, tensors, held, hosts)
    # Fetched by a host that holds nothing, and put together by one that holds a part.
    fetched, shared = torch.zeros(layout.nbytes, dtype=torch.uint8), torch.zeros(layout.nbytes, dtype=torch.uint8)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(host_shards, "READ_BYTES", read_bytes)
        for host, own in divided.items():
            found = transfers(own, layout)
            handles = [[Handle(buffers[host][start:stop]) for start, stop in each.reads()] for each in found]
            offered = remote.RemoteShards(shards=own, handles=[[], handles])
            nbytes = asyncio.run(remote.fetch(offered, layout, 1, fetched))
            reads = [handle for each in handles for handle in each]
            assert all(handle.bytes_read == handle.memory.numel() <= read_bytes for handle in reads), "each byte once"
            # Between tensors that lie alike in both there may be bytes that align them.
            assert sum(each.nbytes for each in own.held) <= nbytes == sum(h.bytes_read for h in reads) <= own.nbytes
            remote.place(own.held, buffers[host], 0, layout, shared)
    for snapshot in (fetched, shared):
        assert all(torch.equal(view, tensors[name]) for name, view in views(snapshot, layout))
    # What the hosts say of their own parts is what anyone finds in the whole.
    parts = {(each.name, each.shard): digest(each.view(buffers[host])) for host, own in divided.items() for each in own.held}
    published = digests_of_shards(parts, layout)
    assert published == tensor_digests(fetched, layout)
    assert published == {entry.name: tensor_digest(tensors[entry.name], entry.shards) for entry in layout.entries}


@settings(max_examples=50, deadline=None)
@given(meshes())
def test_one_hosts_buffer_is_the_snapshot_itself(mesh):
    tensors, held, _, dtype = mesh
    divided = divide(held, ["here"] * len(held), dtype)
    plain = SnapshotLayout.of(tensors, dtype)
    assert SnapshotLayout.of(tensors, dtype, divided_tensors(divided, {n: t.shape for n, t in tensors.items()})) == plain
    assert [held.offset for held in divided["here"].held] == [entry.offset for entry in plain.entries]
    (only,) = transfers(divided["here"], plain)
    assert (only.start, only.target) == (0, 0) and only.stop <= plain.nbytes == divided["here"].nbytes


def test_shards_of_two_hosts_by_hand():
    # Two float32 tensors, [4, 6] by rows and [2, 4] by columns, and a bias that all four ranks hold.
    rows = [((rank, rank + 1), (0, 6)) for rank in range(4)]
    columns = [((0, 2), (rank, rank + 1)) for rank in range(4)]
    held = [{"rows": rows[r], "columns": columns[r], "bias": ((0, 3),)} for r in range(4)]
    a, b = divide(held, ["a", "a", "b", "b"], torch.float32).values()
    assert [(each.name, each.shard, each.offset) for each in a.held] == [
        ("rows", ((0, 2), (0, 6)), 0),
        ("columns", ((0, 2), (0, 2)), 64),
        ("bias", ((0, 3),), 128),
    ]
    assert [(each.name, each.shard, each.offset) for each in b.held] == [
        ("rows", ((2, 4), (0, 6)), 0),
        ("columns", ((0, 2), (2, 4)), 64),
    ]
    shapes = {"rows": (4, 6), "columns": (2, 4), "bias": (3,)}
    shards = divided_tensors({"a": a, "b": b}, shapes)
    assert shards == {
        "rows": (((0, 2), (0, 6)), ((2, 4), (0, 6))),
        "columns": (((0, 2), (0, 2)), ((0, 2), (2, 4))),
    }
    # In the snapshot: rows at 0 (96 bytes), columns at 128 (32 bytes), bias at 192.
    layout = SnapshotLayout.of({name: torch.empty(shape) for name, shape in shapes.items()}, torch.float32, shards)
    assert [(each.start, each.stop, each.target) for each in transfers(a, layout)] == [
        (0, 48, 0),
        (64, 80, None),
        (128, 140, 192),
    ]
    assert [(each.start, each.stop, each.target) for each in transfers(b, layout)] == [(0, 48, 48), (64, 80, None)]


def test_of_copies_the_host_of_the_lowest_rank_writes_and_the_other_has_nothing():
    whole = {"t": ((0, 4), (0, 2))}
    assert list(divide([whole, whole], ["a", "b"], torch.float32)) == ["a"]
    assert written_by(1, [whole, whole]) == {}


def test_ranks_that_hold_less_than_a_tensor_are_an_error():
    divided = divide([{"t": ((0, 2),)}], ["a"], torch.float32)
    with pytest.raises(AssertionError, match="the ranks write 2 values of t, which has 3"):
        divided_tensors(divided, {"t": (3,)})


def test_a_digest_tells_equal_shards_in_another_order():
    tensor = torch.tensor([[1.0, 2.0], [3.0, 4.0]])
    shards = (((0, 1), (0, 2)), ((1, 2), (0, 2)))
    assert len({tensor_digest(tensor, shards), tensor_digest(tensor.flip(0), shards), tensor_digest(tensor)}) == 3
    assert volume(shards[0]) == 2


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
    own = divide([{"t": ((0, len(tensors["t"])),)}], ["a"], torch.float32)["a"]
    layout = SnapshotLayout.of(tensors, torch.float32)
    offered = remote.RemoteShards(shards=own, handles=[[[Slow(tensors["t"]), Broken(tensors["t"])]]])
    with pytest.raises(ConnectionError, match="the host is gone"):
        await remote.fetch(offered, layout, 0, torch.zeros(layout.nbytes, dtype=torch.uint8))
    assert ended == [True]
