"""Tensors that ranks hold in parts: each part is written once, and whoever reads a version puts all together again."""

import itertools
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from torchtitan.experiments.rl.weights.publisher import written_by_rank
from torchtitan.experiments.rl.weights.snapshot import (
    Manifest,
    PartedTensors,
    RankParts,
    Shard,
    buffer_bytes,
    digest,
    index_of,
    named,
    views,
    volume,
)


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
    """Tensors, what each rank holds of each, and their dtype."""
    copies, first, second = (
        draw(st.integers(1, 2)),
        draw(st.integers(1, 3)),
        draw(st.integers(1, 3)),
    )
    shapes = draw(
        st.lists(st.lists(st.integers(1, 5), max_size=3).map(tuple), min_size=1, max_size=4)
    )
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
    dtype = draw(st.sampled_from([torch.float32, torch.bfloat16]))
    tensors = {
        f"t{n}": (torch.arange(math.prod(shape)) + 1 + n).reshape(shape).to(dtype)
        for n, shape in enumerate(shapes)
    }
    return tensors, held, dtype


@settings(max_examples=200, deadline=None)
@given(meshes())
def test_what_ranks_write_is_every_tensor_once(mesh):
    tensors, held, dtype = mesh
    shapes = {name: tuple(tensor.shape) for name, tensor in tensors.items()}
    parts, buffers, sums = [], [], dict.fromkeys(tensors, 0)
    for rank, own in enumerate(written_by_rank(held, shapes)):
        buffer = torch.full((buffer_bytes(own, dtype),), 255, dtype=torch.uint8)
        for name, part in views(buffer, own, dtype).items():
            part.copy_(tensors[name][index_of(own[name])])
            sums[name] += int(digest(part, own[name], shapes[name]))
        parts.append(RankParts("here", f"rank {rank}", own))
        buffers.append(buffer)
    assert sum(volume(shard) for own in parts for shard in own.shards.values()) == sum(
        map(torch.numel, tensors.values())
    )
    manifest = Manifest(
        version=1, shapes=shapes, dtype=dtype, parts=tuple(parts), publication="", digests={}
    )
    found = PartedTensors(manifest, buffers)
    assert list(found) == list(tensors) and len(found) == len(tensors)
    memory = {buffer.untyped_storage().data_ptr() for buffer in buffers}
    for name, tensor in found.items():
        assert tensor.dtype == dtype and torch.equal(tensor, tensors[name])
        whole = any(
            name in own.shards and volume(own.shards[name]) == tensor.numel() for own in parts
        )
        assert (tensor.untyped_storage().data_ptr() in memory) is (whole and tensor.numel() > 0), (
            "a whole one is not copied"
        )
    # What the ranks say of their own parts adds up to what anyone finds in the whole.
    assert named(sums.items()) == named(
        (name, int(digest(tensor))) for name, tensor in found.items()
    )


def test_shards_in_a_buffer_by_hand():
    # float32 [2, 6] has 48 bytes, and [4, 1] 16: each takes 64.
    shards = {"rows": ((0, 2), (0, 6)), "columns": ((0, 4), (3, 4)), "scalar": ()}
    assert buffer_bytes(shards, torch.float32) == 192
    buffer = torch.arange(48, dtype=torch.float32).view(torch.uint8)
    found = views(buffer, shards, torch.float32)
    assert found["rows"].tolist() == [[0, 1, 2, 3, 4, 5], [6, 7, 8, 9, 10, 11]]
    assert found["columns"].tolist() == [[16], [17], [18], [19]] and found["scalar"].item() == 32


def test_of_copies_the_lowest_rank_writes_and_the_other_writes_nothing():
    held = {"t": ((0, 4), (0, 2))}
    assert written_by_rank([held, held], {"t": (4, 2)}) == [held, {}]


def test_ranks_that_hold_less_than_a_tensor_are_an_error():
    with pytest.raises(AssertionError, match="the ranks write 2 values of t, which has 3"):
        written_by_rank([{"t": ((0, 2),)}], {"t": (3,)})
