"""Which samples share a row, and which rank gets which row. Pure functions of lengths, deterministic."""

import heapq
from bisect import bisect_left, insort
from collections.abc import Sequence

ATTENTION_COST = 1 / 32768
"""Cost of a sample of n tokens is n + ATTENTION_COST * n²: one unit is a token's share of the linear layers.

Per token and layer, a causal dense transformer of width d spends about 24·d² operations in linear layers and 2·n·d in
attention: the coefficient is 1 / (12·d), here for a width of 2,700. It only orders rows, so a factor of two hardly matters."""


def pack_rows(lengths: Sequence[int], row_length: int) -> list[list[int]]:
    """Pack samples into few rows of at most ``row_length`` tokens, by best-fit decreasing.

    Longest first, each sample goes to the fullest row that still holds it: at most 11/9 of the fewest possible rows, plus one
    (Johnson et al., 1974); O(n log n) comparisons.

    Args:
        lengths: tokens of each sample, from 1 to ``row_length``.

    Returns:
        For each row, the indices of its samples, ascending.

    Raises:
        ValueError: a length out of range.
    """
    rows: list[list[int]] = []
    space: list[tuple[int, int]] = []  # (tokens left, row), sorted
    for index in _longest_first(lengths):
        length = lengths[index]
        if not 1 <= length <= row_length:
            raise ValueError(f"sample {index} has {length} tokens: a row holds 1 to {row_length}")
        at = bisect_left(space, (length, -1))
        if at < len(space):
            left, row = space.pop(at)
        else:
            left, row = row_length, len(rows)
            rows.append([])
        rows[row].append(index)
        if left > length:
            insort(space, (left - length, row))
    return [sorted(row) for row in rows]


def spread_rows(lengths: Sequence[int], row_count: int, row_length: int) -> list[list[int]] | None:
    """Spread samples evenly over ``row_count`` rows, or None where that overfills one.

    Longest first, each sample goes to the emptiest row (LPT, Graham, 1969). Rows of even length pad each other least, once
    ``row_count`` is given by something else than their capacity. Empty rows are left out.
    """
    rows: list[list[int]] = [[] for _ in range(row_count)]
    filled = [(0, row) for row in range(row_count)]
    for index in _longest_first(lengths):
        tokens, row = filled[0]
        if tokens + lengths[index] > row_length:
            return None
        rows[row].append(index)
        heapq.heapreplace(filled, (tokens + lengths[index], row))
    return [sorted(row) for row in rows if row]


def row_cost(lengths: Sequence[int], shared: Sequence[int] | None = None) -> float:
    """Cost of a row of samples of these lengths, in tokens' worth of linear layers. Attention doesn't cross samples.

    Args:
        shared: first tokens of each sample that are computed for another one. None: none are.
    """
    shared = [0] * len(lengths) if shared is None else shared
    return sum(
        length - own + ATTENTION_COST * (length * length - own * own) for length, own in zip(lengths, shared, strict=True)
    )


def balance_rows(row_costs: Sequence[float], ranks: int) -> list[list[int]]:
    """Share rows among data-parallel ranks: row counts differ by at most 1, and the costliest rank is kept cheap.

    In rounds of one row a rank, costliest rows first; within a round the rank with the least so far gets the costliest. So
    ranks end close to each other, and so do the rows of a round, which sharded ranks compute in step.

    Returns:
        For each rank, the indices of its rows in the order of rounds.
    """
    order = sorted(range(len(row_costs)), key=lambda row: (-row_costs[row], row))
    shares: list[list[int]] = [[] for _ in range(ranks)]
    totals = [0.0] * ranks
    for start in range(0, len(order), ranks):
        cheapest_first = sorted(range(ranks), key=lambda rank: (totals[rank], rank))
        for rank, row in zip(cheapest_first, order[start : start + ranks], strict=False):
            shares[rank].append(row)
            totals[rank] += row_costs[row]
    return shares


def _longest_first(lengths: Sequence[int]) -> list[int]:
    return sorted(range(len(lengths)), key=lambda index: (-lengths[index], index))
