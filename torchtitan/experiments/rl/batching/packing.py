"""Lays training samples out in rows, and rows in batches. All of it is deterministic.

In the order of use: `prefix_order` and `tree_units` find samples that begin alike, `pack_rows` and
`spread_rows` choose the samples of each row, `balance_rows` divides rows among ranks, and `fill`
makes the tensors of a microbatch.
"""

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
"""Coefficient of attention: a sample of n tokens costs n + ATTENTION_COST * n².

The unit is the cost of one token in the linear layers. Per token and layer, a causal dense
transformer of width d spends about 24·d² operations in linear layers and 2·n·d in attention, so the
coefficient is 1 / (12·d), here for a width of 2,700. It only orders rows: a factor of two hardly
matters."""


def pack_rows(lengths: Sequence[int], row_length: int) -> list[list[int]]:
    """Pack samples into few rows of at most ``row_length`` tokens, by best-fit decreasing.

    Longest first, each sample goes to the fullest row that still holds it. That gives at most 11/9
    of the fewest possible rows, plus one (Johnson et al., 1974), by O(n log n) comparisons.

    Args:
        lengths: number of tokens of each sample, from 1 to ``row_length``.

    Returns:
        Ascending indices of the samples of each row.

    Raises:
        ValueError: a length is out of range.
    """
    rows: list[list[int]] = []
    space: list[tuple[int, int]] = []  # (tokens left, row) of rows that are not full, sorted
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
    """Spread samples evenly over ``row_count`` rows. Returns None if that overfills a row.

    Longest first, each sample goes to the emptiest row (LPT, Graham, 1969). Rows of even length pad
    each other least, if something else than their capacity has decided on their number.

    Returns:
        Ascending indices of the samples of each row, without empty rows.
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
    """Return the cost of a row of samples, in units of one token in the linear layers.

    Attention does not cross samples.

    Args:
        lengths: number of tokens of each sample.
        shared: number of first tokens of each sample that are computed for another one. None if
            nothing is shared.
    """
    shared = [0] * len(lengths) if shared is None else shared
    return sum(
        length - prefix + ATTENTION_COST * (length * length - prefix * prefix)
        for length, prefix in zip(lengths, shared, strict=True)
    )


def balance_rows(row_costs: Sequence[float], ranks: int) -> list[list[int]]:
    """Divide rows among data-parallel ranks, so that the costliest rank is cheap.

    Numbers of rows differ by at most 1. Rows are dealt in rounds of one row for each rank,
    costliest rows first. Within a round the rank with the least so far gets the costliest row. So
    ranks end close to each other, and so do the rows of a round, which sharded ranks compute in
    step.

    Returns:
        Indices of the rows of each rank, in the order of rounds.
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
"""Smallest share of a sample that a prefix must be to be shared. On a CPU attention to a branch has
a cost of its own."""


def prefix_tokens(sample: TrainingSample) -> np.ndarray:
    """Return an array [L] whose entries two samples must have alike to share a token.

    An entry is the token's id, and the experts that are to compute it if they are replayed.
    """
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
    """Order samples so that those that begin alike stand side by side.

    A walk through the samples in this order visits their prefix tree depth first: each sample
    leaves the path to the one before it where their tokens differ.

    Args:
        samples: temperature and `prefix_tokens` of each. Samples of different temperature share
            nothing.

    Returns:
        Indices of the samples in order; and int64 [samples]: for each sample in that order, the
        number of first tokens that it shares with the one before it.
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
    """Return how many first tokens each sample of a row shares with the one before it in the row.

    Args:
        ranks: places of the row's samples in the order of `prefix_order`, ascending.
        lengths: number of tokens of all samples, in that order.
        shared: shared first tokens of all samples, in that order.

    Returns:
        int64 [ranks]. 0 begins a tree; so does a sample for which sharing is not worth it.
    """
    in_row = np.zeros(len(ranks), np.int64)
    if len(ranks) > 1:
        # Two samples share as many tokens as all neighbours between them do.
        in_row[1:] = np.minimum.reduceat(shared[1 : ranks[-1] + 1], ranks[:-1])
    in_row[in_row < LEAST_SHARE * lengths[ranks]] = 0
    return in_row


def tree_units(lengths: np.ndarray, shared: np.ndarray, most: int) -> list[range]:
    """Cut the order of samples into trees of at most ``most`` tokens, where least is shared.

    The links between neighbours that share most are made first. A sample that is longer than
    ``most`` is a tree of its own.

    Returns:
        Ranges of places in the order of `prefix_order`.
    """
    count = len(lengths)
    # A unit's tokens and its end are indexed by its start, and its start is indexed by its end.
    tokens = lengths.tolist()
    end = list(range(1, count + 1))
    start = list(range(-1, count))
    links = np.flatnonzero((shared > 0) & (shared >= LEAST_SHARE * lengths))
    for link in sorted(links.tolist(), key=lambda at: (-shared[at], at)):
        left = start[link]  # joins the unit that ends here with the one that starts here
        joined = tokens[left] + tokens[link] - int(shared[link])
        if joined <= most:
            tokens[left] = joined
            end[left] = end[link]
            start[end[link]] = left
    units = []
    at = 0
    while at < count:
        units.append(range(at, end[at]))
        at = end[at]
    return units


LENGTH_MULTIPLE = 8
"""Number that the length of a microbatch's rows is rounded up to a multiple of, for tensor cores
and sequence shards."""


@dataclass(kw_only=True, frozen=True)
class Row:
    """A row: its samples in order, and what they share."""

    samples: Sequence[TrainingSample]
    shared: Sequence[int]
    """Number of first tokens that each sample shares with the one before it, and that the model
    computes once. 0 begins a tree."""

    @cached_property
    def tokens(self) -> int:
        """Number of tokens that the model computes."""
        return sum(map(len, self.samples)) - sum(self.shared)

    @cached_property
    def cost(self) -> float:
        return row_cost([len(sample) for sample in self.samples], self.shared)


def padded_length(rows: Sequence[Row], row_length: int) -> int:
    """Return T, the length of the rows that the model computes in a microbatch, with padding."""
    return _rounded(max((row.tokens for row in rows), default=0), row_length)


def fill(
    rows: Sequence[Row],
    task_names: tuple[str, ...],
    row_length: int,
    *,
    conditioned: bool = False,
    adapter: str = "",
) -> TrainingBatch:
    """Make the microbatch of some rows; of one row of padding if there is none.

    Args:
        task_names: names of the tasks of all samples of the step.
        row_length: maximum number of tokens of a row that the model computes.
        conditioned: True if some sample of the step has ``reference_ids``.
        adapter: name of the adapter that all samples train.
    """
    rows = rows or [Row(samples=[], shared=[])]
    # The batch repeats what samples share, so its rows may be longer than those that the model
    # computes.
    length = _rounded(max(sum(map(len, row.samples)) for row in rows), row_length)
    # Samples and paddings (None), row by row: their concatenation is a whole [B, L] stream.
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

    # Modulo, because padding may be longer than the model has positions for.
    ramp = np.arange(length, dtype=np.int32) % row_length
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
    """Lay out the same rows with each shared prefix once.

    Args:
        length: number of tokens of a row of the batch.
    """
    width = padded_length(rows, row_length)
    slots = np.zeros((len(rows), length), np.int64)
    laid: list[list[Piece]] = [[] for _ in rows]
    for number, row in enumerate(rows):
        at = 0  # in the row of the batch
        filled = number * width  # in the rows of trees
        path = slots[number, :0]
        for sample, shared in zip(row.samples, row.shared, strict=True):
            of_sample = slots[number, at : at + len(sample)]
            end = filled + len(sample) - shared
            of_sample[:shared] = path[:shared]
            of_sample[shared:] = np.arange(filled, end)
            laid[number].append((sample.token_ids, shared, sample.temperature))
            path = of_sample
            at += len(sample)
            filled = end
    return _laid_out(laid, width, slots)


def _conditioned(rows: Sequence[Row], length: int, row_length: int) -> PrefixTrees:
    """Lay out the samples' ``reference_ids``, for a batch of ``length`` tokens a row."""
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
"""Token ids, number of them that are left out at the beginning, and their temperature."""


def _laid_out(rows: Sequence[Sequence[Piece]], width: int, slots: np.ndarray) -> PrefixTrees:
    """Lay the pieces of each row side by side, in rows of ``width`` tokens."""
    shape = (len(rows), width)
    token_ids = np.zeros(shape, np.int32)
    temperatures = np.ones(shape, np.float32)
    positions = np.empty(shape, np.int32)
    for number, row in enumerate(rows):
        filled = 0
        for ids, first, temperature in row:
            end = filled + len(ids) - first
            token_ids[number, filled:end] = ids[first:]
            positions[number, filled:end] = np.arange(first, len(ids))
            temperatures[number, filled:end] = temperature
            filled = end
        positions[number, filled:] = np.arange(width - filled)
    tensors = dict(token_ids=token_ids, positions=positions, temperatures=temperatures, slots=slots)
    return PrefixTrees(**{name: torch.from_numpy(array) for name, array in tensors.items()})


def _rounded(longest: int, row_length: int) -> int:
    """Round a length up to a multiple of LENGTH_MULTIPLE, but not above ``row_length``."""
    multiple = max(1, -(-longest // LENGTH_MULTIPLE)) * LENGTH_MULTIPLE
    return max(longest, min(multiple, row_length))


def _common(left: np.ndarray, right: np.ndarray) -> int:
    """Return the number of tokens that two samples begin with alike."""
    length = min(len(left), len(right))
    differs = left[:length] != right[:length]
    first = int(differs.argmax())
    return first if differs[first] else length


def _longest_first(lengths: Sequence[int]) -> list[int]:
    return sorted(range(len(lengths)), key=lambda index: (-lengths[index], index))
