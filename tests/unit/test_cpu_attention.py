"""Attention over packed rows on CPU against a loop over documents that writes the softmax out."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from torchtitan.experiments.rl.models.attention import (
    CPUVarlenAttention,
    PackedDocuments,
    packed_metadata,
)

torch.set_num_threads(1)

HEAD_DIM = 8


def positions_of(rows: list[list[int]]) -> torch.Tensor:
    """[B, L]: each row's documents, by length, one after the other."""
    return torch.stack([torch.cat([torch.arange(length) for length in row]) for row in rows]).int()


def inputs_of(
    rows: int, length: int, *, heads: int = 4, kv_heads: int = 2, dtype=torch.float64, seed: int = 0
):
    generator = torch.Generator().manual_seed(seed)

    def random(n):
        return torch.randn(
            rows, length, n, HEAD_DIM, generator=generator, dtype=dtype
        ).requires_grad_()

    return random(heads), random(kv_heads), random(kv_heads)


def attend(q, k, v, positions, **options):
    attention = CPUVarlenAttention.Config().build()
    return attention(
        q,
        k,
        v,
        attention_masks=packed_metadata(positions),
        enable_gqa=q.shape[2] != k.shape[2],
        **options,
    )


def by_hand(q, k, v, rows: list[list[int]], scale=HEAD_DIM**-0.5):
    """softmax(mask(q kT scale)) v of each document by itself, each query head with the key head of its group."""
    repeat = q.shape[2] // k.shape[2]
    k, v = (t.repeat_interleave(repeat, dim=2) for t in (k, v))
    out = []
    for row, documents in enumerate(rows):
        start = 0
        for length in documents:
            part = slice(start, start + length)
            scores = torch.einsum("qnh,knh->nqk", q[row, part], k[row, part]) * scale
            scores = scores.masked_fill(torch.ones(length, length).triu(1).bool(), -torch.inf)
            out.append(torch.einsum("nqk,knh->qnh", scores.softmax(-1), v[row, part]))
            start += length
    return torch.cat(out).view_as(q)


ROWS = {
    "one document": [[12]],
    "one token": [[1]],
    "documents of one token": [[1, 1, 1]],
    "two documents": [[5, 7]],
    "very different lengths": [[1, 2, 40, 3, 18]],
    "several rows": [[10, 6], [16], [1, 15], [3, 3, 3, 7]],
}


@pytest.mark.parametrize("rows", ROWS.values(), ids=ROWS)
@pytest.mark.parametrize("heads, kv_heads", [(4, 4), (4, 2), (6, 1)], ids=["mha", "gqa", "mqa"])
def test_output_and_gradients_are_those_of_each_document_alone(rows, heads, kv_heads):
    shape = dict(rows=len(rows), length=sum(rows[0]), heads=heads, kv_heads=kv_heads)
    results = []
    for ours in (True, False):
        q, k, v = inputs_of(**shape)
        out = attend(q, k, v, positions_of(rows)) if ours else by_hand(q, k, v, rows)
        upstream = torch.randn(
            out.shape, generator=torch.Generator().manual_seed(9), dtype=out.dtype
        )
        (out * upstream).sum().backward()
        results.append((out.detach(), q.grad, k.grad, v.grad))
    for ours, expected in zip(*results, strict=True):
        torch.testing.assert_close(ours, expected, rtol=1e-10, atol=1e-12)


def test_scale_can_be_given():
    rows = [[3, 6]]
    q, k, v = inputs_of(1, 9)
    torch.testing.assert_close(
        attend(q, k, v, positions_of(rows), scale=0.25), by_hand(q, k, v, rows, scale=0.25)
    )


def test_packed_rows_never_attend_across_samples():
    rows = [[4, 5, 7], [9, 7]]
    q, k, v = inputs_of(2, 16)
    before = attend(q, k, v, positions_of(rows)).detach()
    for row, start, end in ((0, 0, 4), (0, 4, 9), (0, 9, 16), (1, 0, 9), (1, 9, 16)):
        changed = [t.detach().clone() for t in (q, k, v)]
        for t in changed:
            t[row, start:end] += 3.0
        after = attend(*changed, positions_of(rows))
        same = (before == after).flatten(2).all(-1)
        inside = torch.zeros(2, 16, dtype=torch.bool)
        inside[row, start:end] = True
        assert torch.equal(same, ~inside), (
            "other samples' outputs changed, or the sample's own did not"
        )


def test_no_token_sees_a_later_one():
    q, k, v = inputs_of(1, 10)
    before = attend(q, k, v, positions_of([[10]])).detach()
    k2, v2 = k.detach().clone(), v.detach().clone()
    k2[0, 6:], v2[0, 6:] = 7.0, 7.0
    after = attend(q.detach(), k2, v2, positions_of([[10]]))
    assert (
        torch.equal(before[0, :6], after[0, :6])
        and not torch.isclose(before[0, 6:], after[0, 6:]).all()
    )


def test_not_a_number_in_one_sample_stays_there():
    q, k, v = inputs_of(1, 8)
    with torch.no_grad():
        v[0, 2] = torch.nan
    out = attend(q, k, v, positions_of([[4, 4]]))
    assert out[0, 2:4].isnan().all() and out[0, 4:].isfinite().all()


@settings(max_examples=60)
@given(st.lists(st.lists(st.integers(1, 33), min_size=1, max_size=6), min_size=1, max_size=4))
def test_documents_are_found_whatever_their_number_and_lengths(documents):
    length = max(map(sum, documents))
    # What is left of a row is one more document, as a batch's padding is.
    rows = [[*row, length - sum(row)] if sum(row) < length else row for row in documents]
    packed = PackedDocuments.of(positions_of(rows))
    tokens = torch.arange(len(rows) * length)
    assert torch.equal(
        torch.cat([index.flatten() for index in packed.gather])[packed.restore_T], tokens
    )
    assert sum(len(index) for index in packed.gather) == sum(map(len, rows))
    for index in packed.gather:
        # Padding of a group is at most half of it, and never more documents than there are.
        real = sum(len(set(document.tolist())) for document in index)
        assert real * 2 >= index.numel()
