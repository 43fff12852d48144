"""Packing of lengths into rows, and of rows onto ranks."""

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from torchtitan.experiments.rl.batching.packing import (
    ATTENTION_COST,
    balance_rows,
    pack_rows,
    row_cost,
    spread_rows,
)

LENGTHS = st.lists(st.integers(1, 100), max_size=60)


def tokens(lengths: list[int], row: list[int]) -> int:
    return sum(lengths[index] for index in row)


@settings(deadline=None)
@given(lengths=LENGTHS)
def test_every_sample_is_in_exactly_one_row_and_no_row_overflows(lengths):
    rows = pack_rows(lengths, 100)
    assert sorted(index for row in rows for index in row) == list(range(len(lengths)))
    assert all(0 < tokens(lengths, row) <= 100 for row in rows)


@settings(deadline=None)
@given(lengths=LENGTHS)
def test_no_two_rows_would_fit_into_one_so_all_but_one_are_over_half_full(lengths):
    filled = sorted(tokens(lengths, row) for row in pack_rows(lengths, 100))
    assert all(a + b > 100 for a, b in zip(filled, filled[1:], strict=False))
    assert all(fill > 50 for fill in filled[1:])


def test_packing_is_close_to_the_lower_bound_on_typical_lengths():
    rng = np.random.default_rng(0)
    lengths = np.minimum(rng.lognormal(6, 1, 2000).astype(int) + 1, 8192).tolist()
    assert len(pack_rows(lengths, 8192)) <= math.ceil(sum(lengths) / 8192) * 1.01


def test_best_fit_decreasing_worked_out_on_paper():
    # 7, 6, 5 open rows (of 10); 4 goes to the 6, which it fills; 3 to the 7, which it fills; 2 and 1 to the 5.
    assert pack_rows([1, 2, 3, 4, 5, 6, 7], 10) == [[2, 6], [3, 5], [0, 1, 4]]


def test_equal_lengths_pack_in_order_and_the_same_way_every_time():
    assert pack_rows([5] * 5, 10) == [[0, 1], [2, 3], [4]]
    assert pack_rows([], 10) == []


@pytest.mark.parametrize("length", [0, 11])
def test_a_length_no_row_can_hold_is_refused(length):
    with pytest.raises(ValueError, match=f"sample 1 has {length} tokens: a row holds 1 to 10"):
        pack_rows([3, length], 10)


@settings(deadline=None)
@given(lengths=LENGTHS, row_count=st.integers(1, 20))
def test_spread_rows_are_even_or_refused(lengths, row_count):
    rows = spread_rows(lengths, row_count, 100)
    if rows is None:
        assert (
            sum(lengths) + row_count * max(lengths) > row_count * 100
        )  # else the emptiest row always has room
        return
    assert sorted(index for row in rows for index in row) == list(range(len(lengths)))
    filled = [tokens(lengths, row) for row in rows] + [0] * (row_count - len(rows))
    assert max(filled) <= 100
    assert max(filled) - min(filled) <= max(
        lengths, default=0
    )  # the last sample of the fullest row went to the emptiest


def test_a_rows_cost_is_linear_in_tokens_and_quadratic_in_each_sample():
    n = round(1 / ATTENTION_COST)
    assert row_cost([n]) == 2 * n  # at this length attention costs as much as everything else
    assert row_cost([n // 2, n // 2]) == 1.5 * n


@settings(deadline=None)
@given(costs=st.lists(st.floats(1, 1e6), max_size=60), ranks=st.integers(1, 9))
def test_every_row_goes_to_one_rank_and_counts_differ_by_at_most_one(costs, ranks):
    shares = balance_rows(costs, ranks)
    assert len(shares) == ranks
    assert sorted(row for share in shares for row in share) == list(range(len(costs)))
    counts = [len(share) for share in shares]
    assert max(counts) - min(counts) <= 1


@settings(deadline=None)
@given(costs=st.lists(st.floats(1, 1e6), min_size=1, max_size=60), ranks=st.integers(1, 9))
def test_no_rank_is_ahead_of_another_by_more_than_the_costliest_row(costs, ranks):
    totals = [sum(costs[row] for row in share) for share in balance_rows(costs, ranks)]
    assert max(totals) - min(totals) <= max(costs) * (1 + 1e-9)


def test_balancing_worked_out_on_paper():
    # Rounds: 9, 8 | 7, 4 | 3, 1. Ranks: 9 | 8, then 9 + 4 | 8 + 7, then 13 + 3 | 15 + 1.
    assert balance_rows([1, 3, 4, 7, 8, 9], 2) == [[5, 2, 1], [4, 3, 0]]


def test_rows_of_one_round_are_alike_so_ranks_in_step_wait_little():
    costs = [100, 1, 50, 99, 2, 51]
    first, second = balance_rows(costs, 2)
    assert [sorted((costs[a], costs[b])) for a, b in zip(first, second, strict=True)] == [
        [99, 100],
        [50, 51],
        [1, 2],
    ]
