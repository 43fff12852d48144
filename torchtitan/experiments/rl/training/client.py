"""The controller's side of the trainer: optimizer steps, checkpoints, and the policy at the end."""

import asyncio
import io
import logging
import pickle
from collections.abc import Awaitable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from torchtitan.experiments.rl.batching.batcher import BatchPlan
from torchtitan.experiments.rl.compat.monarch import call_actor, ranks_of
from torchtitan.experiments.rl.process.lifetime import Lifetime, ProcessLost
from torchtitan.experiments.rl.types import DataParallel, TrainingBatch

logger = logging.getLogger(__name__)


class _Pickler(pickle.Pickler):
    """Pickles tensors as arrays.

    torch writes an archive for each, which takes five times as long.
    """

    def reducer_override(self, value: Any) -> Any:  # noqa: ANN401 - pickle's
        if isinstance(value, torch.Tensor):
            return torch.from_numpy, (value.numpy(),)
        return NotImplemented


def pickled(microbatches: Sequence[TrainingBatch]) -> bytes:
    """Return the microbatches for ``PolicyTrainer.forward_backward``, which unpickles them."""
    file = io.BytesIO()
    _Pickler(file, protocol=5).dump(microbatches)
    return file.getvalue()


@dataclass(kw_only=True, slots=True)
class Gradient:
    """Gradient of a step that the ranks compute, or have computed, and the batch it is of."""

    step: int
    """Number of the step, and of the version that it makes."""
    packed: BatchPlan
    metrics: asyncio.Future[list[dict[str, float]]]
    """Metrics of the whole step by rank, once every rank has accumulated its gradient."""


class TrainerClient:
    """Calls all ranks of the trainer together. Call ``connect`` once they are set up, then steps.

        gradient = await trainer.forward_backward(packed, step)     # returns once the rows are sent
        metrics = await trainer.optim_step(gradient)                # returns once the step is taken

    Every call raises ProcessLost as soon as a rank has ended.
    """

    def __init__(
        self,
        mesh: Any,  # noqa: ANN401 - Monarch's
        run_dir: Path,
        life: Lifetime,
        *,
        keep_logprobs: bool = False,
    ):
        """Prepare to call the ranks.

        Args:
            mesh: the ranks, PolicyTrainer actors.
            life: processes of the ranks; it ends with the first of them.
            keep_logprobs: True to set ``trainer_logprobs`` of the samples of each step.
        """
        self._keep_logprobs = keep_logprobs
        self._mesh = mesh
        self._run_dir = run_dir
        self._life = life
        self.failed_batch: Path | None = None
        """File with the batch on which a step failed; None if none has."""
        self._coordinates: list[DataParallel] = []
        """Share of a step's rows of each rank."""
        self._ranks: list[Any] = []
        """Actor of each rank."""

    async def connect(self) -> None:
        """Ask every rank, once it is set up, for its share of a step's rows."""
        coordinates = await self._life.call(self._mesh.data_parallel.call())
        self._coordinates = list(coordinates.values())
        self._ranks = ranks_of(self._mesh)

    @property
    def data_parallel_size(self) -> int:
        """Number of shares that a step's rows are planned in."""
        return self._coordinates[0].size

    async def forward_backward(self, packed: BatchPlan, step: int) -> Gradient:
        """Have the ranks accumulate the gradient of a step, and return once their rows are sent.

        What a rank raises, `optim_step` raises. The rows of a share are sent once, to the first of
        its ranks, which gives them to the others. They are pickled in a thread: on the event loop,
        1.6M tokens held it up for 0.6 s.

        Args:
            packed: rows of each share.
            step: number of the step, which trains the policy version before it.

        Raises:
            ValueError: the rows were planned for another number of data-parallel ranks.
        """
        if len(packed.microbatches) != self.data_parallel_size:
            planned, size = len(packed.microbatches), self.data_parallel_size
            raise ValueError(
                f"rows planned for {planned} data-parallel ranks, and the trainer has {size}"
            )
        unsent = [await asyncio.to_thread(pickled, rows) for rows in packed.microbatches]
        calls = []
        for rank, coordinate in zip(self._ranks, self._coordinates, strict=True):
            calls.append(call_actor(rank.forward_backward, unsent[coordinate.rank], step - 1))
            unsent[coordinate.rank] = b""  # the other ranks of the share are given none
        return Gradient(step=step, packed=packed, metrics=_answers_of(calls))

    async def optim_step(self, gradient: Gradient) -> dict[str, float]:
        """Have the ranks take the optimizer step of a gradient, and return metrics of the step.

        It need not be computed yet: a rank takes the call behind the gradient's, and so does not
        wait for the controller in between. A rank whose gradient has failed takes no step.

        Raises:
            Exception: a rank raised it, from its gradient or from its optimizer. ``failed_batch``
                has the batch, if it could be written.
        """
        updates = _answers_of(call_actor(rank.optim_step) for rank in self._ranks)
        try:
            metrics = await self._life.call(_first_of_both(gradient.metrics, updates))
        except ProcessLost:  # the batch need not be to blame
            raise
        except Exception:
            await self._keep_failed_batch(gradient.packed, gradient.step)
            raise
        if self._keep_logprobs:
            await self._set_logprobs(gradient.packed)
        return metrics

    async def _keep_failed_batch(self, packed: BatchPlan, step: int) -> None:
        """Write the batch of a step that failed. That it can't be written hides no other error."""
        file = self._run_dir / f"failed-batch-{step}.pt"
        try:
            await asyncio.to_thread(torch.save, packed.microbatches, file)
        except (OSError, RuntimeError) as error:  # torch raises the latter if the disk is full
            logger.warning("the batch of step %d can't be written: %s", step, error)
            return
        self.failed_batch = file

    async def _set_logprobs(self, packed: BatchPlan) -> None:
        """Set the samples' log-probabilities, by one rank of each share."""
        rank_of = {
            coordinate.rank: rank
            for rank, coordinate in zip(self._ranks, self._coordinates, strict=True)
        }
        calls = [call_actor(rank_of[share].logprobs) for share in range(self.data_parallel_size)]
        logprobs_of_shares = await self._life.call(asyncio.gather(*calls))
        for sample, logprobs in packed.of_samples(logprobs_of_shares):
            # A replayed sample has its own: its record may be written at this moment.
            if sample.trainer_logprobs is None and sample.loss_mask.any():
                # A copy: a view would keep the log-probabilities of the whole step.
                sample.amend(trainer_logprobs=logprobs.copy())

    async def begin_checkpoint(self, folder: Path, step: int) -> None:
        """Copy the state after a step, and have every rank start to write its part into a folder.

        Raises:
            RunError: the trainer's state is not the one after ``step``.
        """
        await self._life.call(self._mesh.begin_checkpoint.call(folder, step))

    async def finish_checkpoint(self) -> None:
        """Return when every rank has written its part.

        Raises:
            RunError: a rank could not write it, because the disk is full, or failed.
        """
        await self._life.call(self._mesh.finish_checkpoint.call())

    async def save_final(self, step: int) -> Path | None:
        """Write the policy as a hub folder, and return it; None if the config says not to."""
        folders = await self._life.call(self._mesh.save_final.call(step))
        return next(iter(folders.values()))


def _answers_of(calls: Iterable[Awaitable[Any]]) -> asyncio.Future[list[Any]]:
    """Return the answers of calls, in their order, or the first error.

    If nobody waits for an error, because another has ended the run, asyncio does not log it.
    """
    answers = asyncio.gather(*calls)
    answers.add_done_callback(lambda ended: ended.cancelled() or ended.exception())
    return answers


async def _first_of_both(
    gradients: asyncio.Future[list[dict[str, float]]],
    updates: asyncio.Future[list[dict[str, float]]],
) -> dict[str, float]:
    """Return the first rank's metrics of its gradient and of its optimizer step.

    A failed gradient is raised before what its optimizer step says, which only follows from it.
    """
    try:
        return (await gradients)[0] | (await updates)[0]
    finally:
        updates.cancel()
