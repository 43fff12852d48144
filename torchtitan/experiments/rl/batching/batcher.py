"""A step's training samples to every data-parallel rank's microbatches."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated

import numpy as np
import torch
from annotated_types import Ge

from torchtitan.config import Configurable
from torchtitan.experiments.rl.batching.packing import balance_rows, pack_rows, row_cost, spread_rows
from torchtitan.experiments.rl.batching.sample_checks import check_sample
from torchtitan.experiments.rl.bounds import PositiveInt
from torchtitan.experiments.rl.types import STREAMS, Stream, TrainingBatch, TrainingSample

LENGTH_MULTIPLE = 8
"""Rows are cut after the longest of their microbatch, rounded up to this: what tensor cores and sequence shards like."""

Row = list[TrainingSample]


@dataclass(kw_only=True, slots=True)
class BatchPlan:
    """One optimizer step's batches."""

    microbatches: list[list[TrainingBatch]]
    """[data-parallel rank][microbatch]. Each has the same number, at least 1: sharded ranks must run forward together."""
    efficiency: float
    """Share of the B * L slots that hold a sample's token, over all ranks."""
    rows: int
    """Rows that hold a sample."""
    tokens: int
    """Tokens of all samples."""


class Batcher(Configurable):
    """Packs whole samples into rows, rows into microbatches. Never truncates and never drops: ask ``fits`` first.

    The same samples in the same order give the same plan.
    """

    @dataclass(kw_only=True, slots=True)
    class Config(Configurable.Config):
        row_length: Annotated[int, Ge(2)] = 2048
        """L, in tokens: the longest sample that can be trained on."""
        rows_per_microbatch: PositiveInt = 8
        """B at most. What fits in memory: B * L tokens are in flight at once."""

    def __init__(self, config: Config):
        self.config = config

    def fits(self, sample: TrainingSample) -> bool:
        return len(sample) <= self.config.row_length

    def oversized(self, samples: Sequence[TrainingSample]) -> bool:
        """Whether any of a rollout's samples doesn't fit, so that the rollout can't be trained on whole."""
        return not all(self.fits(sample) for sample in samples)

    def plan(self, samples: Sequence[TrainingSample], ranks: int) -> BatchPlan:
        """Pack one step's samples for ``ranks`` data-parallel ranks. Rank means data-parallel rank here.

        Rows are shared out so that ranks have nearly equal work, and where a rank would otherwise wait, samples are spread
        over more and shorter rows. A rank with no row left gets one short row of padding.

        Raises:
            ValueError: a sample that doesn't fit or is empty, streams of unequal length, a token with an rl weight in a sample
                without advantages, one with a ref_kl weight in a sample without ref_logprobs or outside the loss mask, or a
                first token with a weight (it has no log-probability). The message names the rollout.
        """
        for sample in samples:
            self._check(sample)
        lengths = [len(sample) for sample in samples]
        packed = self._rows(lengths, ranks)
        costs = [row_cost([lengths[index] for index in row]) for row in packed]
        shares = [[[samples[index] for index in packed[row]] for row in share] for share in balance_rows(costs, ranks)]

        count = max(1, -(-max(map(len, shares)) // self.config.rows_per_microbatch))
        task_names = tuple(sorted({sample.task_name for sample in samples}))
        microbatches = [[self._fill(rows, task_names) for rows in _split(share, count)] for share in shares]
        tokens = sum(lengths)
        slots = sum(batch.token_ids.numel() for rank in microbatches for batch in rank)
        return BatchPlan(microbatches=microbatches, efficiency=tokens / slots, rows=len(packed), tokens=tokens)

    def _rows(self, lengths: list[int], ranks: int) -> list[list[int]]:
        """Sample indices of each row: as few rows as fit, evened out to a whole number for each rank where there is room."""
        packed = pack_rows(lengths, self.config.row_length)
        even = -(-len(packed) // ranks) * ranks
        return spread_rows(lengths, even, self.config.row_length) or packed

    def _check(self, sample: TrainingSample) -> None:
        if not self.fits(sample):
            raise ValueError(
                f"a sample of rollout {sample.rollout_id!r} has {len(sample)} tokens and a row holds {self.config.row_length}: "
                "drop the rollout (Batcher.fits), lower max_rollout_tokens or raise row_length"
            )
        check_sample(sample)

    def _fill(self, rows: list[Row], task_names: tuple[str, ...]) -> TrainingBatch:
        rows = rows or [[]]
        longest = max(max(sum(map(len, row)) for row in rows), 1)
        length = min(-(-longest // LENGTH_MULTIPLE) * LENGTH_MULTIPLE, self.config.row_length)
        # The row by row sequence of samples and paddings (None): one concatenation of it gives a whole [B, L] stream.
        pieces: list[TrainingSample | None] = []
        sizes: list[int] = []
        for row in rows:
            pieces += row
            sizes += map(len, row)
            if padding := length - sum(map(len, row)):
                pieces.append(None)
                sizes.append(padding)

        def shaped(flat: np.ndarray) -> torch.Tensor:
            return torch.from_numpy(flat.reshape(len(rows), length))

        def stream(name: str, declared: Stream) -> torch.Tensor:
            absent = np.full(length, declared.fill, declared.dtype)
            parts = []
            for sample, size in zip(pieces, sizes, strict=True):
                values = None if sample is None else getattr(sample, name)
                if values is None and sample is not None and declared.like is not None:
                    values = getattr(sample, declared.like)
                parts.append(absent[:size] if values is None else values)
            return shaped(np.concatenate(parts, out=np.empty(len(rows) * length, declared.dtype)))

        def constant(values: list[float] | list[int], dtype: type) -> torch.Tensor:
            return shaped(np.repeat(np.array(values, dtype), sizes))

        ramp = np.arange(length, dtype=np.int32)
        task_ids = {name: index for index, name in enumerate(task_names)}
        return TrainingBatch(
            positions=shaped(np.concatenate([ramp[:size] for size in sizes])),
            temperatures=constant([1.0 if sample is None else sample.temperature for sample in pieces], np.float32),
            task_ids=constant([-1 if sample is None else task_ids[sample.task_name] for sample in pieces], np.int32),
            task_names=task_names,
            **{name: stream(name, declared) for name, declared in STREAMS.items()},
        )


def _split(rows: list[Row], count: int) -> list[list[Row]]:
    """Cut into ``count`` consecutive parts whose sizes differ by at most 1, longer parts first; some may be empty."""
    size, extra = divmod(len(rows), count)
    ends = [size * part + min(part, extra) for part in range(count + 1)]
    return [rows[start:end] for start, end in zip(ends, ends[1:], strict=False)]
