"""Snapshots in shared memory: what is written is what is read, and a changed byte shows."""

import subprocess

import pytest
import torch

from torchtitan.experiments.rl.errors import PeerGone
from torchtitan.experiments.rl.weights.snapshot import SharedBuffer, SnapshotLayout, digest, tensor_digests

SHAPES: dict[str, tuple[int, ...]] = {"embed": (7, 5), "norm": (5,), "head": (3, 11), "scalar": ()}


def tensors_of(seed: int = 0, dtype=torch.float32) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {name: torch.randn(shape, generator=generator).to(dtype) for name, shape in SHAPES.items()}


# ---- layout


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_entries_are_aligned_apart_and_in_order(dtype):
    layout = SnapshotLayout.of(SHAPES, dtype)
    assert [entry.name for entry in layout.entries] == ["embed", "norm", "head", "scalar"]
    assert [entry.shape for entry in layout.entries] == [(7, 5), (5,), (3, 11), ()]
    ends = [entry.offset + entry.nbytes for entry in layout.entries]
    assert all(entry.offset % 64 == 0 for entry in layout.entries)
    assert all(end <= entry.offset for end, entry in zip(ends, layout.entries[1:], strict=False))
    assert ends[-1] <= layout.nbytes


def test_offsets_by_hand():
    # 35 * 4 = 140 -> 192; 5 * 4 = 20 -> 64; 33 * 4 = 132 -> 192; 4 -> 64.
    layout = SnapshotLayout.of(SHAPES, torch.float32)
    assert [entry.offset for entry in layout.entries] == [0, 192, 256, 448] and layout.nbytes == 512


# ---- buffers


def test_another_mapping_reads_what_one_wrote():
    tensors = tensors_of()
    layout = SnapshotLayout.of(SHAPES, torch.float32)
    writer = SharedBuffer.create(layout.nbytes)
    for name, view in writer.views(layout):
        view.copy_(tensors[name])
    reader = SharedBuffer.attach(writer.path)
    read = dict(reader.views(layout))
    assert list(read) == list(tensors)
    for name, tensor in tensors.items():
        assert read[name].shape == tensor.shape and torch.equal(read[name], tensor)
    assert digest(reader.bytes[: layout.nbytes]) == digest(writer.bytes[: layout.nbytes])
    assert tensor_digests(reader.bytes, layout) == {name: digest(tensor) for name, tensor in tensors.items()}


def test_another_process_finds_it_by_its_path():
    buffer = SharedBuffer.create(100)
    buffer.bytes.copy_(torch.arange(100))
    assert subprocess.run(["cat", buffer.path], capture_output=True, check=True).stdout[:100] == bytes(range(100))


def test_views_share_the_buffers_memory():
    layout = SnapshotLayout.of(SHAPES, torch.float32)
    buffer = SharedBuffer.create(layout.nbytes)
    dict(buffer.views(layout))["norm"][2] = 5.0
    assert dict(buffer.views(layout))["norm"].tolist() == [0, 0, 5, 0, 0]


def test_views_convert_to_the_layouts_dtype():
    layout = SnapshotLayout.of(SHAPES, torch.bfloat16)
    view = dict(SharedBuffer.create(layout.nbytes).views(layout))["embed"]
    view.copy_(tensors_of()["embed"])
    assert view.dtype == torch.bfloat16 and torch.equal(view, tensors_of(dtype=torch.bfloat16)["embed"])


def test_buffers_are_apart_and_start_empty():
    first, second = SharedBuffer.create(64), SharedBuffer.create(64)
    first.bytes.fill_(7)
    assert first.path != second.path and set(second.bytes.tolist()) == {0}


def test_a_buffer_that_its_process_has_closed_is_gone_with_its_publisher():
    publisher = subprocess.Popen(["sleep", "600"])
    path = f"/proc/{publisher.pid}/fd/57"
    with pytest.raises(PeerGone, match=f"^the weights at {path} are gone .*: the process that published them has ended$"):
        SharedBuffer.attach(path)  # being taken down: its files are closed first
    publisher.kill()
    publisher.wait()
    with pytest.raises(PeerGone):
        SharedBuffer.attach(path)
