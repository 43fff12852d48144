"""A step's training samples to every data-parallel rank's microbatches."""

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
from torchtitan.experiments.rl.batching.sample_checks import check_sample
from torchtitan.experiments.rl.bounds import Changeable, PositiveInt
from torchtitan.experiments.rl.types import TrainingBatch, TrainingSample

_LEAST_SHARED = 0.01
"""Share of a step's tokens below which trees are not worth planning: samples then keep the order in which they came."""
_TREE_SIZES = 5
"""Sizes of trees that are tried: rows of full length, and halves of it."""


@dataclass(kw_only=True, slots=True)
class BatchPlan:
    """One optimizer step's batches."""

    microbatches: list[list[TrainingBatch]]
    """[data-parallel rank][microbatch]. Each has the same number, at least 1: sharded ranks must run forward together."""
    efficiency: float
    """Share of the slots of the model's rows that hold a token, over all ranks."""
    rows: int
    """Rows that hold a sample."""
    tokens: int
    """Tokens of all samples."""
    shared_fraction: float = 0.0
    """Share of them that the model does not compute, because they are those of another sample in the row."""
    samples: list[list[list[Sequence[TrainingSample]]]] = field(default_factory=list)
    """[data-parallel rank][microbatch][row]: the samples in the order in which they lie in the row, from its first token on."""

    def of_samples(
        self, values: Sequence[Sequence[np.ndarray]]
    ) -> Iterator[tuple[TrainingSample, np.ndarray]]:
        """Each sample with its part, [L] of its own length, of ``values``: [data-parallel rank][microbatch], each [B, L]."""
        for of_rank, parts in zip(self.samples, values, strict=True):
            for rows, batch in zip(of_rank, parts, strict=True):
                for samples, row in zip(
                    rows, batch, strict=False
                ):  # a batch without rows has one of padding
                    at = 0
                    for sample in samples:
                        yield sample, row[at : at + len(sample)]
                        at += len(sample)


class Batcher(Configurable):
    """Packs whole samples into rows, rows into microbatches. Never truncates and never drops: ask ``fits`` first.

    Samples that begin with the same tokens, by the same experts where these are replayed, share them: they lie in one row as a
    prefix tree, as far as the row holds them, and the model computes the tree. A tree that is longer than a row is cut into
    several, each with the prefix.

    The same samples in the same order give the same plan.
    """

    @dataclass(kw_only=True, slots=True)
    class Config(Configurable.Config):
        row_length: Changeable[Annotated[int, Ge(2)]] = 2048
        """L, in tokens. The longest sample that can be trained on, where the model has positions for so many."""
        rows_per_microbatch: Changeable[PositiveInt] = 8
        """B at most. What fits in memory: B * L tokens are in flight at once."""
        share_prefixes: Changeable[bool] = True
        """Compute what samples of a row begin with alike once. Changes nothing but time, memory, and rounding."""

    def __init__(self, config: Config, *, positions: int | None = None):
        """``positions``: of the model, where a row is longer."""
        self.config = config
        self._longest = (
            config.row_length if positions is None else min(positions, config.row_length)
        )

    def fits(self, sample: TrainingSample) -> bool:
        return (
            max(len(sample), 0 if sample.reference_ids is None else len(sample.reference_ids))
            <= self._longest
        )

    def oversized(self, samples: Sequence[TrainingSample]) -> bool:
        """Whether any of a rollout's samples doesn't fit, so that the rollout can't be trained on whole."""
        return not all(self.fits(sample) for sample in samples)

    def plan(self, samples: Sequence[TrainingSample], ranks: int) -> BatchPlan:
        """Pack one step's samples for ``ranks`` data-parallel ranks. Rank means data-parallel rank here.

        Samples of several adapters are planned apart, and a rank's microbatches of each lie side by side.

        Rows are shared out so that ranks have nearly equal work, and where a rank would otherwise wait, samples are spread
        over more and shorter rows. A rank with no row left gets one short row of padding.

        Raises:
            ValueError: a sample that doesn't fit or is empty, streams of unequal length, a token with an rl weight in a sample
                without advantages, one with a ref_kl weight in a sample without ref_logprobs or outside the loss mask, or a
                first token with a weight (it has no log-probability). The message names the rollout.
        """
        for sample in samples:
            self._check(sample)
        task_names = tuple(sorted({sample.task_name for sample in samples}))
        conditioned = any(sample.reference_ids is not None for sample in samples)
        microbatches: list[list[TrainingBatch]] = [[] for _ in range(ranks)]
        laid_out: list[list[list[Row]]] = [[] for _ in range(ranks)]
        for adapter in sorted({sample.adapter for sample in samples}) or [""]:
            own = [sample for sample in samples if sample.adapter == adapter]
            split = self._split(min(self._candidates(own, ranks), key=self._cost))
            for rank, parts in enumerate(split):
                laid_out[rank] += parts
                microbatches[rank] += [
                    fill(
                        rows,
                        task_names,
                        self.config.row_length,
                        conditioned=conditioned,
                        adapter=adapter,
                    )
                    for rows in parts
                ]
        every_row = [row for parts in laid_out for rows in parts for row in rows]
        tokens, computed = sum(map(len, samples)), sum(row.tokens for row in every_row)
        slots = sum(
            (batch.trees or batch).token_ids.numel()
            for of_rank in microbatches
            for batch in of_rank
        )
        return BatchPlan(
            microbatches=microbatches,
            efficiency=computed / slots,
            rows=len(every_row),
            tokens=tokens,
            shared_fraction=1 - computed / max(tokens, 1),
            samples=[[[row.samples for row in rows] for rows in parts] for parts in laid_out],
        )

    def _candidates(
        self, samples: Sequence[TrainingSample], ranks: int
    ) -> Iterator[list[list[Row]]]:
        """Ways to pack and share out the rows. They differ in how large trees may be: large ones share most, small ones fill
        rows and ranks evenly."""
        order, shared = list(range(len(samples))), np.zeros(len(samples), np.int64)
        if self.config.share_prefixes:
            tree_order, tree_shared = prefix_order(
                [(sample.temperature, prefix_tokens(sample)) for sample in samples]
            )
            if tree_shared.sum() >= _LEAST_SHARED * sum(map(len, samples)) > 0:
                order, shared = tree_order, tree_shared
        lengths, sharing = (
            np.array([len(samples[index]) for index in order], np.int64),
            bool(shared.any()),
        )
        for halvings in range(_TREE_SIZES):
            units = tree_units(lengths, shared, self.config.row_length >> halvings)
            starts = np.array([unit.start for unit in units], np.int64)
            sizes = (
                (np.add.reduceat(lengths - shared, starts) + shared[starts]).tolist()
                if units
                else []
            )
            rows = []
            for packed in self._rows(sizes, ranks):
                places = [place for unit in packed for place in units[unit]]
                own = (
                    shared_in_row(places, lengths, shared).tolist()
                    if sharing
                    else [0] * len(places)
                )
                rows.append(Row(samples=[samples[order[place]] for place in places], shared=own))
            yield [
                [rows[row] for row in share]
                for share in balance_rows([row.cost for row in rows], ranks)
            ]
            if len(units) == len(samples):
                return

    def _rows(self, sizes: list[int], ranks: int) -> list[list[int]]:
        """Unit indices of each row: as few rows as fit, evened out to a whole number for each rank where there is room."""
        packed = pack_rows(sizes, self.config.row_length)
        even = -(-len(packed) // ranks) * ranks
        return spread_rows(sizes, even, self.config.row_length) or packed

    def _split(self, shares: list[list[Row]]) -> list[list[list[Row]]]:
        """[rank][microbatch]: rows. A rank's microbatches differ by at most 1 row, longer ones first; some may be empty."""
        count = max(1, -(-max(map(len, shares)) // self.config.rows_per_microbatch))
        return [
            [[share[row] for row in part] for part in np.array_split(range(len(share)), count)]
            for share in shares
        ]

    def _cost(self, shares: list[list[Row]]) -> float:
        """Of the rank that has most to compute, padding included."""

        def cost(part: list[Row]) -> float:
            return sum(row.cost - row.tokens for row in part) + len(part) * padded_length(
                part, self.config.row_length
            )

        return max(sum(map(cost, parts)) for parts in self._split(shares))

    def _check(self, sample: TrainingSample) -> None:
        if not self.fits(sample):
            raise ValueError(
                f"a sample of rollout {sample.rollout_id!r} has {len(sample)} tokens and a row takes {self._longest}: "
                "drop the rollout (Batcher.fits), lower max_rollout_tokens or raise row_length"
            )
        check_sample(sample)
