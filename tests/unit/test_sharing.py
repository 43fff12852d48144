"""Samples that share a prefix are found, as by a loop over all pairs and a trie of dictionaries."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.unit.tree_samples import random_tree, tree_sample, trees_of_samples
from torchtitan.experiments.rl.batching.batcher import Batcher
from torchtitan.experiments.rl.batching.packing import (
    ATTENTION_COST,
    LEAST_SHARE,
    prefix_order,
    row_cost,
    shared_in_row,
    tree_units,
)

TREES = st.builds(random_tree, st.integers(0, 2**32), st.integers(1, 15), st.integers(1, 25))


def common(left, right) -> int:
    """Tokens that two sequences begin with alike."""
    count = 0
    while count < min(len(left), len(right)) and left[count] == right[count]:
        count += 1
    return count


def trie_tokens(sequences) -> int:
    """Tokens of the trie of these sequences: different beginnings of any length."""
    return len(
        {tuple(sequence[:end]) for sequence in sequences for end in range(1, len(sequence) + 1)}
    )


def ordered(sequences, temperatures=None):
    arrays = [np.array(sequence, np.int32) for sequence in sequences]
    order, shared = prefix_order(
        list(zip(temperatures or [1.0] * len(arrays), arrays, strict=True))
    )
    return (
        [sequences[index] for index in order],
        np.array([len(sequences[index]) for index in order]),
        shared,
    )


def test_order_and_shared_tokens_worked_out_on_paper():
    sequences = [[1, 2, 3, 7], [5], [1, 2, 3], [1, 2, 3, 7], [1, 2, 4]]
    in_order, _, shared = ordered(sequences)
    assert in_order == [[1, 2, 3], [1, 2, 3, 7], [1, 2, 3, 7], [1, 2, 4], [5]]
    assert shared.tolist() == [0, 3, 4, 2, 0]


@given(TREES)
def test_samples_in_order_share_with_the_one_before_all_that_they_share_with_any_before(sequences):
    in_order, lengths, shared = ordered(sequences)
    assert sorted(in_order) == sorted(sequences)
    for at in range(1, len(in_order)):
        assert (
            shared[at]
            == common(in_order[at - 1], in_order[at])
            == max(common(s, in_order[at]) for s in in_order[:at])
        )
    assert lengths.sum() - shared.sum() == trie_tokens(sequences)


def test_samples_of_unequal_temperature_share_nothing():
    _, _, shared = ordered([[1, 2, 3]] * 4, [1.0, 0.7, 1.0, 0.7])
    assert shared.tolist() == [0, 3, 0, 3]


@given(TREES, st.data())
def test_samples_of_a_row_share_what_all_neighbours_between_them_share(sequences, data):
    in_order, lengths, shared = ordered(sequences)
    ranks = sorted(data.draw(st.sets(st.integers(0, len(sequences) - 1), min_size=1)))
    own = shared_in_row(ranks, lengths, shared).tolist()
    expected = [0] + [
        common(in_order[left], in_order[right])
        for left, right in zip(ranks, ranks[1:], strict=False)
    ]
    assert own == [
        count if count >= LEAST_SHARE * len(in_order[rank]) else 0
        for rank, count in zip(ranks, expected, strict=True)
    ]


@given(TREES, st.integers(1, 60))
def test_units_hold_every_sample_once_and_no_more_tokens_than_they_may(sequences, most):
    in_order, lengths, shared = ordered(sequences)
    units = tree_units(lengths, shared, most)
    assert [place for unit in units for place in unit] == list(range(len(sequences)))
    for unit in units:
        assert len(unit) == 1 or trie_tokens([in_order[place] for place in unit]) <= most
        assert all(shared[place] for place in unit[1:])


def test_a_tree_is_cut_where_the_least_is_shared():
    # Two groups of three: 6 tokens of prompt, 4 of which are the template that both begin with; 2 tokens each.
    lengths, shared = np.full(6, 8), np.array([0, 6, 6, 4, 6, 6])
    assert tree_units(lengths, shared, 20) == [range(6)]  # 4 + 2 * (2 + 3 * 2)
    assert tree_units(lengths, shared, 19) == [range(3), range(3, 6)]
    assert tree_units(lengths, shared, 11) == [range(2), range(2, 3), range(3, 5), range(5, 6)]
    assert tree_units(lengths, shared, 5) == [range(at, at + 1) for at in range(6)]


def test_a_prefix_that_is_a_small_part_of_a_sample_is_not_shared():
    lengths, shared = np.array([100, 100, 10]), np.array([0, 3, 3])
    assert tree_units(lengths, shared, 1000) == [range(1), range(1, 3)]
    assert shared_in_row([0, 1, 2], lengths, shared).tolist() == [0, 0, 3]


def test_cost_of_a_branch_is_that_of_the_sample_less_that_of_its_prefix():
    assert row_cost([10, 10], [0, 4]) == pytest.approx(16 + ATTENTION_COST * (100 + 100 - 16))
    assert row_cost([10, 4]) == row_cost([10, 4], [0, 0])


# ---- through the batcher


def plan_of(samples, *, row_length=32, rows_per_microbatch=2, ranks=1, **options):
    config = Batcher.Config(
        row_length=row_length, rows_per_microbatch=rows_per_microbatch, **options
    )
    return config.build().plan(samples, ranks)


def batches_of(plan):
    return [batch for rank in plan.microbatches for batch in rank]


@given(trees_of_samples(longest=32), st.integers(1, 3), st.integers(1, 3))
def test_each_sample_is_a_path_through_a_tree_that_holds_every_beginning_once(
    samples, rows_per_microbatch, ranks
):
    plan = plan_of(samples, rows_per_microbatch=rows_per_microbatch, ranks=ranks)
    found, computed, slots = [], 0, 0
    for batch in batches_of(plan):
        rows = batch.trees or batch
        slots += rows.token_ids.numel()
        assert rows.token_ids.shape[0] == batch.token_ids.shape[0] <= rows_per_microbatch
        assert (
            rows.token_ids.shape[1] <= 32 and max(rows.positions.max(), batch.positions.max()) < 32
        )
        at = (
            torch.arange(batch.token_ids.numel()).view_as(batch.token_ids)
            if batch.trees is None
            else batch.trees.slots
        )
        used = set()
        for row in range(len(at)):
            starts = (batch.positions[row] == 0).nonzero()[:, 0].tolist() + [
                batch.positions.shape[1]
            ]
            for start, end in zip(starts, starts[1:], strict=False):
                part = slice(start, end)
                if batch.task_ids[row, start] < 0:
                    continue
                path = at[row, part]
                used.update(path.tolist())
                assert set((path // rows.token_ids.shape[1]).tolist()) == {row}
                assert rows.positions.flatten()[path].tolist() == list(range(end - start))
                assert set(rows.temperatures.flatten()[path].tolist()) == set(
                    batch.temperatures[row, part].tolist()
                )
                tokens = rows.token_ids.flatten()[path].tolist()
                assert tokens == batch.token_ids[row, part].tolist()
                found.append(
                    (
                        tokens,
                        batch.advantages[row, part].tolist(),
                        batch.temperatures[row, start].item(),
                    )
                )
        computed += len(used)
    expected = [
        (s.token_ids.tolist(), s.advantages.tolist(), np.float32(s.temperature).item())
        for s in samples
    ]
    assert sorted(found) == sorted(expected)
    assert plan.tokens == sum(map(len, samples))
    assert plan.shared_fraction == pytest.approx(1 - computed / plan.tokens)
    assert plan.efficiency == pytest.approx(computed / slots)


def test_a_tree_is_laid_out_as_the_contract_draws_it():
    samples = [tree_sample([1, 2, 3, 4], 0), tree_sample([1, 2, 9], 1)]
    (batch,) = batches_of(plan_of(samples, row_length=7))
    trees = batch.trees
    assert batch.token_ids.tolist() == [[1, 2, 3, 4, 1, 2, 9]]
    assert batch.positions.tolist() == [[0, 1, 2, 3, 0, 1, 2]]
    assert trees.slots.tolist() == [[0, 1, 2, 3, 0, 1, 4]]
    assert trees.token_ids.tolist() == [[1, 2, 3, 4, 9, 0, 0]]
    assert trees.positions.tolist() == [[0, 1, 2, 3, 2, 0, 1]]
    assert trees.values_to_batch(trees.token_ids).tolist() == batch.token_ids.tolist()
    # Needed in one sample only, and in both.
    assert trees.mask_to_trees(batch.token_ids == 9).tolist() == [
        [False] * 4 + [True, False, False]
    ]
    second = batch.positions == 1
    second[0, 1] = False
    assert trees.mask_to_trees(second).tolist() == [[False, True] + [False] * 5]


def test_a_tree_longer_than_a_row_is_cut_and_nothing_is_dropped():
    samples = [
        tree_sample([*range(10), 20 + index, 40 + index, 60 + index], index) for index in range(9)
    ]
    plan = plan_of(
        samples, row_length=20, rows_per_microbatch=8
    )  # a row holds the prompt and three completions
    assert plan.rows == 3 and plan.shared_fraction == pytest.approx(1 - 3 * 19 / (9 * 13))
    assert sorted(batches_of(plan)[0].trees.positions.eq(9).sum(1).tolist()) == [1, 1, 1]


def test_a_group_is_spread_over_ranks_that_would_otherwise_wait():
    samples = [
        tree_sample([*range(16), 20 + index, *[40 + index] * 15], index) for index in range(4)
    ]
    plan = plan_of(samples, row_length=128, ranks=2)
    assert [rank[0].trees.token_ids.shape for rank in plan.microbatches] == [
        (1, 48),
        (1, 48),
    ]  # 16 + 2 * 16 tokens each


def test_what_shares_nothing_is_laid_out_as_without_sharing():
    rng = np.random.default_rng(0)
    samples = [
        tree_sample([index, *rng.integers(0, 50, rng.integers(0, 30))], index)
        for index in range(60)
    ]
    on, off = (
        batches_of(plan_of(samples, ranks=2, share_prefixes=share)) for share in (True, False)
    )
    for left, right in zip(on, off, strict=True):
        assert left.trees is None and right.trees is None
        for name in left.__slots__:
            value = getattr(left, name)
            assert (
                value is None or isinstance(value, tuple | str) or value.equal(getattr(right, name))
            )


def test_sharing_can_be_turned_off():
    plan = plan_of([tree_sample([1, 2, 3], 0)] * 4, share_prefixes=False)
    assert plan.shared_fraction == 0 and all(batch.trees is None for batch in batches_of(plan))
    plan = plan_of([tree_sample([1, 2, 3], 0)] * 4)
    assert plan.shared_fraction == 0.75 and batches_of(plan)[0].trees.token_ids.shape == (1, 8)


def test_trees_travel_with_their_batch():
    (batch,) = batches_of(plan_of([tree_sample([1, 2, 3], seed) for seed in range(2)]))
    moved = batch.to("meta")
    assert moved.trees.slots.device.type == moved.trees.positions.device.type == "meta"
