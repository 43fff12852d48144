"""The controller's side of the PolicyTrainer mesh: one optimizer step, and the policy at the end."""

import asyncio
import io
import pickle
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from torchtitan.experiments.rl.batching.batcher import BatchPlan
from torchtitan.experiments.rl.compat.monarch import ask, ranks_of
from torchtitan.experiments.rl.process.lifetime import Lifetime, ProcessLost
from torchtitan.experiments.rl.types import DataParallel, TrainingBatch


class _Pickler(pickle.Pickler):
    def reducer_override(self, value: Any) -> Any:
        """A tensor is pickled as an array: torch writes an archive for each, which takes five times as long."""
        return (
            (torch.from_numpy, (value.numpy(),))
            if isinstance(value, torch.Tensor)
            else NotImplemented
        )


def pickled(microbatches: Sequence[TrainingBatch]) -> bytes:
    """For ``PolicyTrainer.train_step``: ``pickle.loads`` gives them back."""
    file = io.BytesIO()
    _Pickler(file, protocol=5).dump(microbatches)
    return file.getvalue()


class TrainerClient:
    """``connect``, then steps. Every call raises ProcessLost as soon as a rank of the mesh has ended."""

    def __init__(self, mesh: Any, run_dir: Path, life: Lifetime, *, keep_logprobs: bool = False):
        """
        Args:
            life: ends with the first rank that does.
            keep_logprobs: set ``trainer_logprobs`` of the samples of each step.
        """
        self._keep_logprobs = keep_logprobs
        self._mesh, self._run_dir, self._life = mesh, run_dir, life
        self.failed_batch: Path | None = None
        """Where a batch was written on which a step failed."""
        self._coordinates: list[DataParallel] = []
        """Of each rank."""
        self._ranks: list[Any] = []
        """The actor of each rank."""

    async def connect(self) -> None:
        """Ask every rank, once it is set up, for its data-parallel coordinate."""
        self._coordinates = list((await self._life.call(self._mesh.data_parallel.call())).values())
        self._ranks = ranks_of(self._mesh)

    @property
    def data_parallel_size(self) -> int:
        """Shares that a step's rows are planned in."""
        return self._coordinates[0].size

    async def step(self, packed: BatchPlan, step: int) -> dict[str, float]:
        """Take optimizer step ``step`` on the policy version before it. Returns metrics.

        The rows of a data-parallel coordinate are sent once, to the first of its ranks, which gives them to the others. They
        are pickled in a thread: 1.6M tokens held up the event loop for 0.6 s before, once for each tensor-parallel rank.

        Raises:
            ValueError: ``packed`` was planned for another number of data-parallel ranks.
            Exception: what a rank raised; the batch is on disk then.
        """
        if len(packed.microbatches) != self.data_parallel_size:
            planned, size = len(packed.microbatches), self.data_parallel_size
            raise ValueError(
                f"rows planned for {planned} data-parallel ranks, and the trainer has {size}"
            )
        unsent = [await asyncio.to_thread(pickled, own) for own in packed.microbatches]
        calls = []
        for rank, coordinate in zip(self._ranks, self._coordinates, strict=True):
            rows, unsent[coordinate.rank] = unsent[coordinate.rank], b""
            calls.append(ask(rank.train_step, rows, step - 1))
        try:
            metrics = (await self._life.call(asyncio.gather(*calls)))[0]
            if self._keep_logprobs:
                await self._set_logprobs(packed)
            return metrics
        except ProcessLost:  # the batch need not be to blame
            raise
        except Exception:
            self.failed_batch = self._run_dir / f"failed-batch-{step}.pt"
            torch.save(packed.microbatches, self.failed_batch)
            raise

    async def _set_logprobs(self, packed: BatchPlan) -> None:
        rank_of = {
            coordinate.rank: rank
            for rank, coordinate in zip(self._ranks, self._coordinates, strict=True)
        }
        asked = (ask(rank_of[place].logprobs) for place in range(self.data_parallel_size))
        for sample, logprobs in packed.of_samples(await self._life.call(asyncio.gather(*asked))):
            # A replayed sample has its own: its record may be written at this moment.
            if sample.trainer_logprobs is None and sample.loss_mask.any():
                # A copy: a view would keep the log-probabilities of the whole step.
                sample.amend(trainer_logprobs=logprobs.copy())

    async def begin_checkpoint(self, folder: Path, step: int) -> None:
        """Copy the state after ``step``; every rank writes its part into ``folder`` meanwhile.

        Raises:
            RunError: the trainer's state is another.
        """
        await self._life.call(self._mesh.begin_checkpoint.call(folder, step))

    async def finish_checkpoint(self) -> None:
        """Return when every rank has written its part.

        Raises:
            RunError: a rank could not; the disk is full, or failed.
        """
        await self._life.call(self._mesh.finish_checkpoint.call())

    async def save_final(self, step: int) -> Path | None:
        """Write the policy as a hub folder; None where the config says not to."""
        return next(iter((await self._life.call(self._mesh.save_final.call(step))).values()))
