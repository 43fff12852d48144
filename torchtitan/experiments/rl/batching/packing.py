"""Which samples share a row and a prefix, which rank gets which row, and what lies in a row's tensors. Deterministic."""

import heapq
from bisect import bisect_left, insort
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch

from torchtitan.experiments.rl.types import (
    STREAMS,
    PrefixTrees,
    Stream,
    TrainingBatch,
    TrainingSample,
)

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
        length - own + ATTENTION_COST * (length * length - own * own)
        for length, own in zip(lengths, shared, strict=True)
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


LEAST_SHARE = 1 / 32
"""A prefix is shared where it is at least this part of a sample. Attention to a branch has a cost of its own, on CPU."""


def prefix_tokens(sample: TrainingSample) -> np.ndarray:
    """[L]: what two samples must have alike to share a token: its id, and the experts that are to compute it."""
    ids = sample.token_ids.astype(np.int32, copy=False)
    if sample.routes is None:
        return ids
    parts = [
        np.ascontiguousarray(part).reshape(len(ids), -1).view(np.uint8)
        for part in (ids, sample.routes)
    ]
    both = np.concatenate(parts, axis=1)
    return both.view(f"V{both.shape[1]}")[:, 0]


def prefix_order(samples: Sequence[tuple[float, np.ndarray]]) -> tuple[list[int], np.ndarray]:
    """Order samples so that those that begin alike are side by side.

    A walk through the samples in this order visits their prefix tree depth first: each sample leaves the path to the one
    before it where their tokens part.

    Args:
        samples: temperature and ``prefix_tokens`` of each. Samples of unequal temperature share nothing.

    Returns:
        Indices of the samples in order, and int64 [samples]: how many tokens of each are also the first of the one before it.
    """
    begins: dict[tuple[float, bytes], list[int]] = {}
    for index, (temperature, tokens) in enumerate(samples):
        begins.setdefault((temperature, tokens[:1].tobytes()), []).append(index)
    order: list[int] = []
    shared = np.zeros(len(samples), np.int64)
    for alike in begins.values():
        if len(alike) > 1:
            # Any order of the tokens will do, so their bytes are compared as they are.
            alike.sort(key=lambda index: samples[index][1].tobytes())
            pairs = zip(alike, alike[1:], strict=False)
            shared[len(order) + 1 : len(order) + len(alike)] = [
                _common(samples[i][1], samples[j][1]) for i, j in pairs
            ]
        order += alike
    return order, shared


def shared_in_row(ranks: Sequence[int], lengths: np.ndarray, shared: np.ndarray) -> np.ndarray:
    """What each sample of a row shares with the one before it in the row, where that is worth it.

    Args:
        ranks: the row's samples by their place in the order, ascending.
        lengths, shared: of all samples in the order.

    Returns:
        int64 [ranks]. 0 begins a tree.
    """
    own = np.zeros(len(ranks), np.int64)
    if len(ranks) > 1:
        # Two samples share what all neighbours between them share.
        own[1:] = np.minimum.reduceat(shared[1 : ranks[-1] + 1], ranks[:-1])
    own[own < LEAST_SHARE * lengths[ranks]] = 0
    return own


def tree_units(lengths: np.ndarray, shared: np.ndarray, most: int) -> list[range]:
    """Cut the order into trees of at most ``most`` tokens, where the least is shared.

    The strongest links are made first. A sample that is longer by itself is a tree of its own.
    """
    count = len(lengths)
    tokens, end, start = lengths.tolist(), list(range(1, count + 1)), list(range(-1, count))
    links = np.flatnonzero((shared > 0) & (shared >= LEAST_SHARE * lengths))
    for link in sorted(links.tolist(), key=lambda at: (-shared[at], at)):
        left = start[link]  # of the unit that ends here; another one starts here
        joined = tokens[left] + tokens[link] - int(shared[link])
        if joined <= most:
            tokens[left], end[left] = joined, end[link]
            start[end[link]] = left
    units, at = [], 0
    while at < count:
        units.append(range(at, end[at]))
        at = end[at]
    return units


LENGTH_MULTIPLE = 8
"""Rows are cut after the longest of their microbatch, rounded up to this: what tensor cores and sequence shards like."""


@dataclass(kw_only=True, frozen=True)
class Row:
    """Samples in the order in which they lie in a row."""

    samples: Sequence[TrainingSample]
    shared: Sequence[int]
    """First tokens of each that are those of the sample before it, and that the model computes once; 0 begins a tree."""

    @cached_property
    def tokens(self) -> int:
        """That the model computes."""
        return sum(map(len, self.samples)) - sum(self.shared)

    @cached_property
    def cost(self) -> float:
        return row_cost([len(sample) for sample in self.samples], self.shared)


def padded_length(rows: Sequence[Row], row_length: int) -> int:
    """T: tokens of each row of a microbatch, padding included."""
    return _rounded(max((row.tokens for row in rows), default=0), row_length)


def fill(
    rows: Sequence[Row],
    task_names: tuple[str, ...],
    row_length: int,
    *,
    conditioned: bool = False,
    adapter: str = "",
) -> TrainingBatch:
    """The microbatch of these rows, one row of padding where there is none.

    Args:
        task_names: of all samples of the step.
        row_length: most tokens of a row that the model computes.
        conditioned: some sample of the step has reference_ids.
        adapter: of all samples.
    """
    rows = rows or [Row(samples=[], shared=[])]
    # What samples share is in the batch as often as in the samples: such a row may be longer than one that the model computes.
    length = _rounded(max(sum(map(len, row.samples)) for row in rows), row_length)
    # The row by row sequence of samples and paddings (None): one concatenation of it gives a whole [B, L] stream.
    pieces: list[TrainingSample | None] = []
    sizes: list[int] = []
    for row in rows:
        pieces += row.samples
        sizes += map(len, row.samples)
        if padding := length - sum(map(len, row.samples)):
            pieces.append(None)
            sizes.append(padding)

    def shaped(flat: np.ndarray) -> torch.Tensor:
        return torch.from_numpy(flat.reshape(len(rows), length, *flat.shape[1:]))

    def stream(name: str, declared: Stream) -> torch.Tensor:
        given = []
        for sample in pieces:
            values = None if sample is None else getattr(sample, name)
            if values is None and sample is not None and declared.like is not None:
                values = getattr(sample, declared.like)
            given.append(values)
        absent = declared.padding(
            length, next((values for values in given if values is not None), None)
        )
        parts = [
            absent[:size] if values is None else values
            for values, size in zip(given, sizes, strict=True)
        ]
        return shaped(
            np.concatenate(
                parts, out=np.empty((len(rows) * length, *absent.shape[1:]), absent.dtype)
            )
        )

    def constant(values: list[float] | list[int], dtype: type) -> torch.Tensor:
        return shaped(np.repeat(np.array(values, dtype), sizes))

    ramp = (
        np.arange(length, dtype=np.int32) % row_length
    )  # padding may be longer than the model has positions for
    task_ids = {name: index for index, name in enumerate(task_names)}
    return TrainingBatch(
        positions=shaped(np.concatenate([ramp[:size] for size in sizes])),
        temperatures=constant(
            [1.0 if sample is None else sample.temperature for sample in pieces], np.float32
        ),
        task_ids=constant(
            [-1 if sample is None else task_ids[sample.task_name] for sample in pieces], np.int32
        ),
        task_names=task_names,
        adapter=adapter,
        trees=_trees(rows, length, row_length) if any(any(row.shared) for row in rows) else None,
        conditioned=_conditioned(rows, length, row_length) if conditioned else None,
        **{name: stream(name, declared) for name, declared in STREAMS.items()},
    )


def _trees(rows: Sequence[Row], length: int, row_length: int) -> PrefixTrees:
    """The same rows with what is shared in them once, for a batch of ``length`` tokens a row."""
    width = padded_length(rows, row_length)
    slots = np.zeros((len(rows), length), np.int64)
    laid: list[list[Piece]] = [[] for _ in rows]
    for number, row in enumerate(rows):
        at, filled = 0, number * width  # in the row of the batch, and in the rows of trees
        path = slots[number, :0]
        for sample, shared in zip(row.samples, row.shared, strict=True):
            own, end = slots[number, at : at + len(sample)], filled + len(sample) - shared
            own[:shared] = path[:shared]
            own[shared:] = np.arange(filled, end)
            path, at, filled = own, at + len(sample), end
            laid[number].append((sample.token_ids, shared, sample.temperature))
    return _laid_out(laid, width, slots)


def _conditioned(rows: Sequence[Row], length: int, row_length: int) -> PrefixTrees:
    """The samples' reference_ids in as few rows as hold them, for a batch of ``length`` tokens a row."""
    places: list[tuple[TrainingSample, np.ndarray, np.ndarray]] = []
    slots = np.full((len(rows), length), -1, np.int64)
    for number, row in enumerate(rows):
        at = 0
        for sample in row.samples:
            if sample.reference_ids is not None:
                places.append((sample, sample.reference_ids, slots[number, at : at + len(sample)]))
            at += len(sample)
    packed = pack_rows([len(ids) for _, ids, _ in places], row_length) or [[]]
    width = _rounded(max(sum(len(places[index][1]) for index in row) for row in packed), row_length)
    for number, indices in enumerate(packed):
        end = number * width
        for sample, ids, own in map(places.__getitem__, indices):
            end += len(ids)
            scored = len(sample) - int(np.argmax(sample.loss_mask)) if sample.loss_mask.any() else 0
            own[len(sample) - scored :] = np.arange(end - scored, end)
    laid = [
        [(places[index][1], 0, places[index][0].temperature) for index in indices]
        for indices in packed
    ]
    return _laid_out(laid, width, slots)


Piece = tuple[np.ndarray, int, float]
"""Token ids, how many of them are left out at the beginning, and their temperature."""


def _laid_out(rows: Sequence[Sequence[Piece]], width: int, slots: np.ndarray) -> PrefixTrees:
    """The pieces of each row side by side, in rows of ``width`` tokens."""
    shape = len(rows), width
    token_ids, temperatures = np.zeros(shape, np.int32), np.ones(shape, np.float32)
    positions = np.empty(shape, np.int32)
    for number, row in enumerate(rows):
        filled = 0
        for ids, first, temperature in row:
            end = filled + len(ids) - first
            token_ids[number, filled:end], positions[number, filled:end] = (
                ids[first:],
                np.arange(first, len(ids)),
            )
            temperatures[number, filled:end] = temperature
            filled = end
        positions[number, filled:] = np.arange(width - filled)
    tensors = dict(token_ids=token_ids, positions=positions, temperatures=temperatures, slots=slots)
    return PrefixTrees(**{name: torch.from_numpy(array) for name, array in tensors.items()})


def _rounded(longest: int, row_length: int) -> int:
    multiple = max(1, -(-longest // LENGTH_MULTIPLE)) * LENGTH_MULTIPLE
    return max(longest, min(multiple, row_length))


def _common(left: np.ndarray, right: np.ndarray) -> int:
    """Tokens that two samples begin with alike."""
    length = min(len(left), len(right))
    parted = left[:length] != right[:length]
    first = int(parted.argmax())
    return first if parted[first] else length


def _longest_first(lengths: Sequence[int]) -> list[int]:
    return sorted(range(len(lengths)), key=lambda index: (-lengths[index], index))
