"""Digests: any other bit, order or name gives another one, and neither the cores nor the strides do."""

import numpy as np
import pytest
import torch
import xxhash
from hypothesis import given, settings
from hypothesis import strategies as st

from torchtitan.experiments.rl.weights import snapshot as snapshot_module
from torchtitan.experiments.rl.weights.snapshot import (
    SharedBuffer,
    SnapshotLayout,
    digest,
    fingerprint,
    of_copies,
    tensor_digests,
)


@settings(max_examples=50)
@given(st.binary(min_size=1, max_size=300), st.data())
def test_digest_changes_with_any_byte(content, data):
    at = data.draw(st.integers(0, len(content) - 1))
    flip = data.draw(st.integers(1, 255))
    original = torch.frombuffer(bytearray(content), dtype=torch.uint8)
    changed = original.clone()
    changed[at] ^= flip
    assert digest(original) == digest(original.clone()) != digest(changed)


def test_digest_changes_with_the_order_of_bytes_and_of_parts():
    size = 40 * 2**20  # more than one part, the last one short
    content = torch.from_numpy(np.random.default_rng(0).integers(0, 256, size, dtype=np.uint8))
    half = size // 2
    swapped = torch.cat([content[half:], content[:half]])
    part = 16 * 2**20
    parts_swapped = torch.cat([content[part : 2 * part], content[:part], content[2 * part :]])
    reversed_bytes = content.flip(0)
    last_byte = content.clone()
    last_byte[-1] ^= 1
    versions = (content, swapped, parts_swapped, reversed_bytes, last_byte, content[:-1])
    assert len({digest(version) for version in versions}) == len(versions)


@pytest.mark.parametrize("cores", [1, 4])
def test_digest_does_not_depend_on_the_number_of_cores(cores, monkeypatch):
    content = torch.arange(5 * 2**20, dtype=torch.int64).view(torch.uint8)[3:]  # three parts, the last one short
    parts = [xxhash.xxh3_128_digest(content[i : i + 2**24].numpy()) for i in range(0, len(content), 2**24)]
    monkeypatch.setattr(snapshot_module.os, "sched_getaffinity", lambda _: set(range(cores)))
    assert digest(content) == xxhash.xxh3_128_hexdigest(b"".join(parts))


def test_copies_that_differ_have_no_digest_of_either():
    assert of_copies(["a", "a"]) == "a" and of_copies(iter(["b", "a", "b"])) == "a and b" and of_copies([]) == ""


def test_swapped_tensors_of_equal_shape_have_another_fingerprint():
    tensors = {"a": torch.ones(4), "b": torch.zeros(4)}
    layout = SnapshotLayout.of({name: tuple(tensor.shape) for name, tensor in tensors.items()}, torch.float32)
    buffer = SharedBuffer.create(layout.nbytes)
    seen = set()
    for first, second in (("a", "b"), ("b", "a")):
        views = dict(buffer.views(layout))
        views["a"].copy_(tensors[first])
        views["b"].copy_(tensors[second])
        seen.add(fingerprint(tensor_digests(buffer.bytes, layout)))
    assert len(seen) == 2


def test_fingerprint_changes_with_a_name_a_digest_and_the_order():
    versions = ({"a": "1", "b": "2"}, {"b": "2", "a": "1"}, {"a": "2", "b": "1"}, {"a": "1", "c": "2"}, {"a": "1"}, {})
    assert len({fingerprint(digests) for digests in versions}) == len(versions)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_digest_of_a_tensor_is_of_its_values_wherever_they_lie(dtype):
    whole = torch.randn(6, 4, generator=torch.Generator().manual_seed(0)).to(dtype)
    assert digest(whole[1:3]) == digest(whole[1:3].clone())
    assert digest(whole.t()) == digest(whole.t().contiguous()) != digest(whole)
    assert digest(whole[0, 0]) == digest(whole[:1, 0])
