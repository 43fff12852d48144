"""Snapshots in shared memory: what is written is what is read, and a changed byte shows."""

import subprocess

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from torchtitan.experiments.rl.errors import PeerGone
from torchtitan.experiments.rl.weights import snapshot as snapshot_module
from torchtitan.experiments.rl.weights.snapshot import (
    SharedBuffer,
    buffer_bytes,
    digest,
    fingerprint,
    index_of,
    named,
    of_copies,
    views,
    whole,
)

SHAPES: dict[str, tuple[int, ...]] = {"embed": (7, 5), "norm": (5,), "head": (3, 11), "scalar": ()}
SHARDS = {name: whole(shape) for name, shape in SHAPES.items()}


def tensors_of(seed: int = 0, dtype=torch.float32) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {
        name: torch.randn(shape, generator=generator).to(dtype) for name, shape in SHAPES.items()
    }


# ---- layout


@pytest.mark.parametrize("dtype, size", [(torch.float32, 512), (torch.bfloat16, 384)])
def test_tensors_are_aligned_apart_and_in_order(dtype, size):
    # 35 * 4 = 140 -> 192; 5 * 4 = 20 -> 64; 33 * 4 = 132 -> 192; 4 -> 64. In bfloat16 70 -> 128, 10 -> 64, 66 -> 128, 2 -> 64.
    offsets = {512: [0, 192, 256, 448], 384: [0, 128, 192, 320]}[size]
    assert buffer_bytes(SHARDS, dtype) == size
    found = views(torch.zeros(size, dtype=torch.uint8), SHARDS, dtype)
    assert [(name, tuple(view.shape)) for name, view in found.items()] == list(SHAPES.items())
    assert [view.storage_offset() * dtype.itemsize for view in found.values()] == offsets
    assert all(view.dtype == dtype for view in found.values())


# ---- buffers


def test_another_mapping_reads_what_one_wrote():
    tensors = tensors_of()
    writer = SharedBuffer.create(buffer_bytes(SHARDS, torch.float32))
    for name, view in views(writer.bytes, SHARDS, torch.float32).items():
        view.copy_(tensors[name])
    reader = SharedBuffer.attach(writer.path)
    assert reader.inode == writer.inode
    read = views(reader.bytes, SHARDS, torch.float32)
    for name, tensor in tensors.items():
        assert torch.equal(read[name], tensor) and digest(read[name]) == digest(tensor)


def test_another_process_finds_it_by_its_path():
    buffer = SharedBuffer.create(100)
    buffer.bytes.copy_(torch.arange(100))
    assert subprocess.run(["cat", buffer.path], capture_output=True, check=True).stdout[
        :100
    ] == bytes(range(100))


def test_views_share_the_buffers_memory_and_convert_what_is_copied_to_them():
    buffer = SharedBuffer.create(buffer_bytes(SHARDS, torch.bfloat16))
    views(buffer.bytes, SHARDS, torch.bfloat16)["embed"].copy_(tensors_of()["embed"])
    assert torch.equal(
        views(buffer.bytes, SHARDS, torch.bfloat16)["embed"],
        tensors_of(dtype=torch.bfloat16)["embed"],
    )


def test_buffers_are_apart_and_start_empty():
    first, second = SharedBuffer.create(64), SharedBuffer.create(64)
    first.bytes.fill_(7)
    assert (first.path, first.inode) != (second.path, second.inode) and set(
        second.bytes.tolist()
    ) == {0}


def test_a_buffer_that_its_process_has_closed_is_gone_with_its_publisher():
    publisher = subprocess.Popen(["sleep", "600"])
    path = f"/proc/{publisher.pid}/fd/57"
    with pytest.raises(
        PeerGone,
        match=f"^the weights at {path} are gone .*: the process that published them has ended$",
    ):
        SharedBuffer.attach(path)  # being taken down: its files are closed first
    publisher.kill()
    publisher.wait()
    with pytest.raises(PeerGone):
        SharedBuffer.attach(path)


# ---- digests


@settings(max_examples=50)
@given(st.binary(min_size=1, max_size=300), st.data())
def test_digest_changes_with_any_byte(content, data):
    at = data.draw(st.integers(0, len(content) - 1))
    flip = data.draw(st.integers(1, 255))
    original = torch.frombuffer(bytearray(content), dtype=torch.uint8)
    changed = original.clone()
    changed[at] ^= flip
    assert int(digest(original)) == int(digest(original.clone())) != int(digest(changed))


def test_digest_changes_with_the_order_of_bytes_and_of_parts():
    size = 5 * 2**18  # more than one part, the last one short
    content = torch.from_numpy(np.random.default_rng(0).integers(0, 256, size, dtype=np.uint8))
    half = size // 2
    swapped = torch.cat([content[half:], content[:half]])
    part = 2**19
    parts_swapped = torch.cat([content[part : 2 * part], content[:part], content[2 * part :]])
    reversed_bytes = content.flip(0)
    last_byte = content.clone()
    last_byte[-1] ^= 1
    versions = (content, swapped, parts_swapped, reversed_bytes, last_byte, content[:-1])
    assert len({int(digest(version)) for version in versions}) == len(versions)


def by_hand(content: np.ndarray) -> int:
    """Of uint8 [rows, bytes], in Python's own integers."""

    def key(place: int) -> int:  # SplitMix64 with shifts that keep the sign
        mixed = signed((place + 1) * -7046029254386353131)
        for shift, factor in ((30, -4658895280553007687), (27, -7723592293110705685)):
            mixed = signed((mixed ^ (mixed >> shift)) * factor)
        return (mixed ^ (mixed >> 31)) | 1

    def signed(value: int) -> int:
        return (value + 2**63) % 2**64 - 2**63

    total = 0
    for row, values in enumerate(content):
        for place in range(0, len(values), 8):
            word = signed(int.from_bytes(values[place : place + 8].tobytes(), "little"))
            total += (word + (word >> 32)) * key(row) * key(place // 8)
    return signed(total)


@given(st.integers(1, 5), st.integers(1, 40), st.integers(0, 2**32 - 1))
def test_a_digest_is_the_sum_that_its_definition_says(rows, width, seed):
    content = np.random.default_rng(seed).integers(0, 256, (rows, width), dtype=np.uint8)
    assert int(digest(torch.from_numpy(content))) == by_hand(content)


@settings(max_examples=200, deadline=None)
@given(
    st.sampled_from([torch.float32, torch.bfloat16, torch.uint8]),
    st.lists(st.integers(1, 9), min_size=1, max_size=3),
    st.data(),
)
def test_shares_add_up_however_a_tensor_is_divided(dtype, shape, data):
    whole = torch.randint(
        0, 256, (*shape[:-1], shape[-1] * dtype.itemsize), dtype=torch.uint8
    ).view(dtype)
    dim = data.draw(st.integers(0, whole.ndim - 1))
    cuts = sorted(data.draw(st.lists(st.integers(0, whole.shape[dim]), max_size=3)))
    shares = []
    for start, stop in zip([0, *cuts], [*cuts, whole.shape[dim]], strict=True):
        shard = tuple(
            (start, stop) if d == dim else (0, size) for d, size in enumerate(whole.shape)
        )
        part = whole[index_of(shard)]
        shares.append(int(digest(part, shard, tuple(whole.shape))))
        assert shares[-1] == int(digest(part.clone(), shard, tuple(whole.shape))), (
            "wherever it lies"
        )
    assert named([("t", sum(shares))]) == named([("t", int(digest(whole)))])


def test_a_part_of_one_row_is_digested_whatever_the_stride_of_the_row():
    part = torch.arange(3.0).view(1, 3)[:, :2]  # 8 bytes of a row of 12
    assert int(digest(part)) == int(digest(torch.tensor([[0.0, 1.0]])))


@pytest.mark.parametrize("most", [1, 8, 64])
def test_a_digest_does_not_depend_on_how_much_is_summed_at_once_or_where(most, monkeypatch):
    gates = torch.randn(5, 8, 6)[:, :4]  # of experts, each of which has its up between
    tensors = [torch.randn(7, 10), torch.randn(33, 2), torch.randn(50), gates]
    expected = [
        int(digest(tensor.clone(memory_format=torch.contiguous_format))) for tensor in tensors
    ]
    monkeypatch.setattr(snapshot_module, "_WORDS_OF_A_THREAD", most)
    monkeypatch.setattr(snapshot_module, "_WORDS_ON_CPU", most)
    assert [int(digest(tensor)) for tensor in tensors] == expected
    monkeypatch.setattr(snapshot_module, "_WORDS_ON_GPU", most)
    on_gpu = [tensor.as_subclass(SaysGpu) for tensor in tensors]
    assert [int(digest(tensor)) for tensor in on_gpu] == expected


class SaysGpu(torch.Tensor):
    """A CPU tensor that is digested by the operations that a GPU has."""

    is_cpu = False


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_stack_of_experts_has_another_digest_where_experts_or_their_rows_change_places(dtype):
    stack = torch.randn(4, 6, 8, generator=torch.Generator().manual_seed(0)).to(dtype)
    changed = [
        stack[[1, 0, 2, 3]],
        stack.roll(1, 0),
        stack[:, [1, 0, 2, 3, 4, 5]],
        stack.flip(0),
        stack.flip(1),
    ]
    moved = stack.clone()
    moved[0, 5], moved[1, 0] = stack[1, 0], stack[0, 5]  # over the border of two experts
    assert len({int(digest(each)) for each in [stack, moved, *changed]}) == len(changed) + 2


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_changes_that_cancel_in_a_plain_sum_are_seen(dtype):
    whole = torch.randn(64, 64, generator=torch.Generator().manual_seed(0)).to(dtype)
    changed = [
        whole.flip(0),
        whole.flip(1),
        whole.t().contiguous(),
        whole[[1, 0, *range(2, 64)]],
        -whole,
        whole.roll(1, 1),
    ]
    for column in range(
        4
    ):  # the signs of an even number of values, each in the same place of its word
        signs = whole.clone()
        signs[:, column] *= -1
        pair = whole.clone()
        pair[5:7, column] *= -1
        changed += [signs, pair]
    moved = whole.clone()
    moved[3, 4], moved[9, 20] = whole[9, 20], whole[3, 4]
    assert len({int(digest(each)) for each in [whole, moved, *changed]}) == len(changed) + 2


def test_copies_that_differ_have_no_digest_of_either():
    assert (
        of_copies(["a", "a"]) == "a"
        and of_copies(iter(["b", "a", "b"])) == "a and b"
        and of_copies([]) == ""
    )


def test_fingerprint_changes_with_a_name_a_digest_and_the_order():
    versions = (
        {"a": "1", "b": "2"},
        {"b": "2", "a": "1"},
        {"a": "2", "b": "1"},
        {"a": "1", "c": "2"},
        {"a": "1"},
        {},
    )
    assert len({fingerprint(digests) for digests in versions}) == len(versions)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_digest_of_a_tensor_is_of_its_values_wherever_they_lie(dtype):
    whole = torch.randn(6, 4, generator=torch.Generator().manual_seed(0)).to(dtype)
    assert digest(whole[1:3]) == digest(whole[1:3].clone())
    assert digest(whole.t()) == digest(whole.t().contiguous()) != digest(whole)
    assert digest(whole[0, 0]) == digest(whole[:1, 0])
