"""Attention over prefix trees: what positions say of a tree, the CPU kernel and flex attention against a loop over paths."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn.attention.flex_attention import create_block_mask, flex_attention

from torchtitan.experiments.rl.models import attention
from torchtitan.experiments.rl.models.attention import (
    CPUVarlenAttention,
    packed_metadata,
    parent_columns,
    subtree_ends,
    tree_mask,
)

torch.set_num_threads(1)

DRAWN = [0, 1, 2, 3, 4, 3, 4, 5, 5]
"""The tree of the docstring: P A, P B, P B'."""


@st.composite
def positions_of_trees(draw, *, most_rows: int = 3, longest: int = 40) -> torch.Tensor:
    """int32 [B, L]: each token goes on from the one before it, or from any of that one's ancestors, or begins a tree."""
    rng = np.random.default_rng(draw(st.integers(0, 2**32)))
    rows, length = draw(st.integers(1, most_rows)), draw(st.integers(1, longest))
    onward = draw(st.sampled_from([0.3, 0.8, 0.97]))
    positions = np.zeros((rows, length), np.int32)
    for row in positions:
        for column in range(1, length):
            deepest = row[column - 1] + 1
            row[column] = deepest if rng.random() < onward else rng.integers(0, deepest + 1)
    return torch.from_numpy(positions)


def paths(positions: list[int]) -> list[list[int]]:
    """Columns of each token's ancestors and of itself, by following the tree down."""
    found: list[list[int]] = []
    open_path: list[int] = []
    for column, position in enumerate(positions):
        open_path = [*open_path[:position], column]
        found.append(open_path)
    return found


def test_parents_and_ends_of_the_tree_that_is_drawn():
    positions = torch.tensor([DRAWN])
    assert parent_columns(positions)[0, 1:].tolist() == [0, 1, 2, 3, 2, 5, 6, 6]
    assert subtree_ends(positions).tolist() == [[9, 9, 9, 5, 5, 9, 9, 8, 9]]


@given(positions_of_trees())
def test_parents_and_visible_tokens_are_those_of_the_paths(positions):
    parents, sees = parent_columns(positions), tree_mask(positions)
    length = positions.shape[1]
    columns = torch.arange(length)
    for row, depths in enumerate(positions.tolist()):
        visible = sees(torch.tensor(row), torch.tensor(0), columns[:, None], columns[None])
        for column, path in enumerate(paths(depths)):
            assert visible[column].nonzero()[:, 0].tolist() == path
            assert len(path) == depths[column] + 1
            if len(path) > 1:
                assert parents[row, column] == path[-2]


def inputs_of(rows: int, length: int, heads: int = 4, kv_heads: int = 2):
    generator = torch.Generator().manual_seed(0)
    sizes = (heads, kv_heads, kv_heads)
    return [
        torch.randn(rows, length, n, 8, generator=generator, dtype=torch.float64).requires_grad_()
        for n in sizes
    ]


def by_paths(q, k, v, positions):
    """Each token attends to its path, one after the other."""
    k, v = (t.repeat_interleave(q.shape[2] // k.shape[2], dim=2) for t in (k, v))
    out = []
    for row, depths in enumerate(positions.tolist()):
        for column, path in enumerate(paths(depths)):
            scores = torch.einsum("nh,knh->nk", q[row, column], k[row, path]) * 8**-0.5
            out.append(torch.einsum("nk,knh->nh", scores.softmax(-1), v[row, path]))
    return torch.stack(out).view_as(q)


def by_kernel(q, k, v, positions):
    return CPUVarlenAttention.Config().build()(
        q, k, v, attention_masks=packed_metadata(positions), enable_gqa=True
    )


def by_flex(q, k, v, positions):
    rows, length = positions.shape
    mask = create_block_mask(
        tree_mask(positions), rows, None, length, length, device="cpu", BLOCK_SIZE=16
    )
    q, k, v = (t.detach().transpose(1, 2) for t in (q, k, v))
    return flex_attention(q, k, v, block_mask=mask, enable_gqa=True).transpose(1, 2)


def with_gradient(attend, positions):
    q, k, v = inputs_of(*positions.shape)
    out = attend(q, k, v, positions)
    upstream = torch.randn(out.shape, generator=torch.Generator().manual_seed(9), dtype=out.dtype)
    (out * upstream).sum().backward()
    return out.detach(), q.grad, k.grad, v.grad


@pytest.mark.parametrize("block", [1, 2, 7, 64])
@settings(max_examples=25)
@given(positions=positions_of_trees())
def test_kernel_and_its_gradients_are_those_of_the_paths_whatever_the_blocks(block, positions):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(attention, "BRANCH_TOKENS", block)
        ours = with_gradient(by_kernel, positions)
    for left, right in zip(ours, with_gradient(by_paths, positions), strict=True):
        torch.testing.assert_close(left, right, rtol=1e-10, atol=1e-12)


@settings(max_examples=15)
@given(positions_of_trees(longest=70))
def test_flex_attention_under_the_mask_is_the_kernel(positions):
    inputs = inputs_of(*positions.shape)
    torch.testing.assert_close(
        by_flex(*inputs, positions), by_kernel(*inputs, positions), rtol=1e-10, atol=1e-12
    )


def test_no_block_computes_a_whole_tree():
    """512 tokens of prompt and 8 completions of 128: scores computed, against those of the samples apart and of the tree."""
    positions = torch.cat([torch.arange(640), *[torch.arange(512, 640)] * 7])[None].int()
    documents = packed_metadata(positions).documents
    scores = sum(index.shape[0] * index.shape[1] ** 2 for index in documents.gather)
    scores += sum(branch.mask.numel() for branch in documents.branches)
    assert scores < 8 * 640**2 / 3 and scores < 1536**2 / 2
