"""Packs a step's training samples into the microbatches of each data-parallel rank."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Annotated

import numpy as np
from annotated_types import Ge

from torchtitan.config import Configurable
from torchtitan.experiments.rl.batching.packing import (
    Row,
    balance_rows,
    fill,
    pack_rows,
    padded_length,
    prefix_order,
    prefix_tokens,
    shared_in_row,
    spread_rows,
    tree_units,
)
from torchtitan.experiments.rl.bounds import Changeable, PositiveInt
from torchtitan.experiments.rl.types import TrainingBatch, TrainingSample

_LEAST_SHARED = 0.01
"""Smallest share of a step's tokens for which trees are planned. Below it, samples keep the order
in which they came."""
_TREE_SIZES = 5
"""Number of tree sizes that are tried: a whole row, then half of the last."""


@dataclass(kw_only=True, slots=True)
class BatchPlan:
    """Batches of one optimizer step."""

    microbatches: list[list[TrainingBatch]]
    """[data-parallel rank][microbatch]. All ranks have the same number, at least 1, because sharded
    ranks compute together."""
    efficiency: float
    """Share of the places in the rows that the model computes that hold a token, over all ranks."""
    rows: int
    """Number of rows that hold a sample."""
    tokens: int
    """Number of tokens of all samples."""
    shared_fraction: float = 0.0
    """Share of these tokens that the model does not compute, because another sample of the row has
    them."""
    samples: list[list[list[Sequence[TrainingSample]]]] = field(default_factory=list)
    """[data-parallel rank][microbatch][row]: samples in their order in the row, from its first
    token."""

    def of_samples(
        self, values: Sequence[Sequence[np.ndarray]]
    ) -> Iterator[tuple[TrainingSample, np.ndarray]]:
        """Generate each sample with its part of some values.

        Args:
            values: [data-parallel rank][microbatch], each [B, L].

        Yields:
            A sample and its values, [L] of its own length.
        """
        for of_rank, parts in zip(self.samples, values, strict=True):
            for rows, batch in zip(of_rank, parts, strict=True):
                # A batch without rows has one of padding.
                for samples, row in zip(rows, batch, strict=False):
                    at = 0
                    for sample in samples:
                        yield sample, row[at : at + len(sample)]
                        at += len(sample)


class Batcher(Configurable):
    """Packs whole samples into rows, and rows into microbatches.

    It never truncates or drops a sample: ask `fits` first. Samples that begin with the same tokens
    share them (computed by the same experts, if these are replayed): they stand in one row as a
    prefix tree, as far as the row holds them, and the model computes the tree. A tree that is
    longer than a row is cut into several, each with the prefix.

    The same samples in the same order give the same plan.
    """

    @dataclass(kw_only=True, slots=True)
    class Config(Configurable.Config):
        row_length: Changeable[Annotated[int, Ge(2)]] = 2048
        """Length L of a row in tokens. It is the length of the longest sample that can be trained
        on, if the model has so many positions."""
        rows_per_microbatch: Changeable[PositiveInt] = 8
        """Maximum number B of rows in a microbatch. Its B * L tokens are in memory at once."""
        share_prefixes: Changeable[bool] = True
        """True to compute once what samples of a row begin with alike. It changes nothing but time,
        memory and rounding."""

    def __init__(self, config: Config, *, positions: int | None = None):
        """Make a batcher.

        Args:
            positions: number of positions of the model; None if it has at least ``row_length``.
        """
        self.config = config
        self._longest = (
            config.row_length if positions is None else min(positions, config.row_length)
        )

    def fits(self, sample: TrainingSample) -> bool:
        """Return True if a row holds the sample, and its ``reference_ids`` if it has any."""
        reference_length = 0 if sample.reference_ids is None else len(sample.reference_ids)
        return max(len(sample), reference_length) <= self._longest

    def oversized(self, samples: Sequence[TrainingSample]) -> bool:
        """Return True if any of a rollout's samples does not fit: it can't be trained on whole."""
        return not all(self.fits(sample) for sample in samples)

    def plan(self, samples: Sequence[TrainingSample], ranks: int) -> BatchPlan:
        """Pack the samples of one step for a number of data-parallel ranks, called ranks here.

        Rows are divided so that ranks have nearly equal work. If a rank would otherwise wait,
        samples are spread over more and shorter rows. A rank without rows gets a short row of
        padding. Samples of different adapters are planned apart, and a rank's microbatches of each
        adapter stand side by side.

        Args:
            samples: samples that have passed `check_sample` (`rollouts/samples.py`).

        Raises:
            ValueError: a sample does not fit. The message names the rollout.
        """
        for sample in samples:
            if not self.fits(sample):
                raise ValueError(
                    f"a sample of rollout {sample.rollout_id!r} has {len(sample)} tokens and a row "
                    f"takes {self._longest}: drop the rollout (Batcher.fits), lower "
                    "max_rollout_tokens or raise row_length"
                )
        task_names = tuple(sorted({sample.task_name for sample in samples}))
        conditioned = any(sample.reference_ids is not None for sample in samples)
        microbatches: list[list[TrainingBatch]] = [[] for _ in range(ranks)]
        laid_out: list[list[list[Row]]] = [[] for _ in range(ranks)]
        for adapter in sorted({sample.adapter for sample in samples}) or [""]:
            of_adapter = [sample for sample in samples if sample.adapter == adapter]
            cheapest = min(self._candidates(of_adapter, ranks), key=self._cost)
            for rank, parts in enumerate(self._split(cheapest)):
                laid_out[rank] += parts
                for rows in parts:
                    batch = fill(
                        rows,
                        task_names,
                        self.config.row_length,
                        conditioned=conditioned,
                        adapter=adapter,
                    )
                    microbatches[rank].append(batch)
        every_row = [row for parts in laid_out for rows in parts for row in rows]
        tokens = sum(map(len, samples))
        computed = sum(row.tokens for row in every_row)
        batches = [batch for of_rank in microbatches for batch in of_rank]
        places = sum((batch.trees or batch).token_ids.numel() for batch in batches)
        return BatchPlan(
            microbatches=microbatches,
            efficiency=computed / places,
            rows=len(every_row),
            tokens=tokens,
            shared_fraction=1 - computed / max(tokens, 1),
            samples=[[[row.samples for row in rows] for rows in parts] for parts in laid_out],
        )

    def _candidates(
        self, samples: Sequence[TrainingSample], ranks: int
    ) -> Iterator[list[list[Row]]]:
        """Generate ways to pack rows and to divide them among ranks.

        They differ in how large trees may be: large trees share most, small ones fill rows and
        ranks evenly.

        Yields:
            Rows of each rank.
        """
        order = list(range(len(samples)))
        shared = np.zeros(len(samples), np.int64)
        if self.config.share_prefixes:
            prefixes = [(sample.temperature, prefix_tokens(sample)) for sample in samples]
            tree_order, tree_shared = prefix_order(prefixes)
            if tree_shared.sum() >= _LEAST_SHARED * sum(map(len, samples)) > 0:
                order, shared = tree_order, tree_shared
        lengths = np.array([len(samples[index]) for index in order], np.int64)
        shares_prefixes = bool(shared.any())
        for halvings in range(_TREE_SIZES):
            units = tree_units(lengths, shared, self.config.row_length >> halvings)
            rows = []
            for packed in self._rows(_unit_sizes(units, lengths, shared), ranks):
                places = [place for unit in packed for place in units[unit]]
                in_row = [0] * len(places)
                if shares_prefixes:
                    in_row = shared_in_row(places, lengths, shared).tolist()
                rows.append(Row(samples=[samples[order[place]] for place in places], shared=in_row))
            shares = balance_rows([row.cost for row in rows], ranks)
            yield [[rows[row] for row in share] for share in shares]
            if len(units) == len(samples):
                return

    def _rows(self, sizes: list[int], ranks: int) -> list[list[int]]:
        """Return the units of each row: as few rows as fit, or a whole number a rank if these fit.

        Args:
            sizes: number of tokens of each unit.
        """
        packed = pack_rows(sizes, self.config.row_length)
        even = -(-len(packed) // ranks) * ranks
        return spread_rows(sizes, even, self.config.row_length) or packed

    def _split(self, shares: list[list[Row]]) -> list[list[list[Row]]]:
        """Split each rank's rows into microbatches.

        A rank's microbatches differ by at most one row, longer ones first. Some may be empty.

        Returns:
            [rank][microbatch]: rows.
        """
        count = max(1, -(-max(map(len, shares)) // self.config.rows_per_microbatch))
        return [
            [[share[row] for row in part] for part in np.array_split(range(len(share)), count)]
            for share in shares
        ]

    def _cost(self, shares: list[list[Row]]) -> float:
        """Return the cost of the rank that has most to compute, with padding."""

        def cost(part: list[Row]) -> float:
            attention = sum(row.cost - row.tokens for row in part)
            return attention + len(part) * padded_length(part, self.config.row_length)

        return max(sum(map(cost, parts)) for parts in self._split(shares))


def _unit_sizes(units: list[range], lengths: np.ndarray, shared: np.ndarray) -> list[int]:
    """Return the number of tokens of each unit, with what its samples share counted once."""
    if not units:
        return []
    starts = np.array([unit.start for unit in units], np.int64)
    # What the first sample of a unit shares with the one before it is not in this unit.
    return (np.add.reduceat(lengths - shared, starts) + shared[starts]).tolist()
