"""The trainer of a simulated run: it learns nothing and takes its time."""

import asyncio
from collections.abc import Awaitable, Callable, Sequence

import numpy as np

from torchtitan.experiments.rl.batching.batcher import BatchPlan
from torchtitan.experiments.rl.simulation.clock import Cores
from torchtitan.experiments.rl.simulation.local_actor import LocalEndpoint
from torchtitan.experiments.rl.simulation.rates import Rates
from torchtitan.experiments.rl.types import TrainingBatch, TrainingSample
from torchtitan.experiments.rl.weights.sync import CANARY_TOKENS

Rows = Sequence[Sequence[TrainingSample]]
"""Samples of each row of a microbatch."""


class SimulatedTrainer:
    """Stands in for a ``TrainerClient``, for the mesh of ranks behind it, and for ``HostCopies``.

    One actor stands for all ranks, which step and publish side by side.
    """

    lost = 0
    """Number of times that a host has lost its copies of a version: none does."""

    def __init__(
        self,
        rates: Rates,
        cores: Cores,
        data_parallel_size: int,
        *,
        take_up_reply: Callable[[], Awaitable[None]],
    ):
        """Start idle.

        Args:
            take_up_reply: returns when the controller takes up a reply of the trainer.
        """
        self.data_parallel_size = data_parallel_size
        self.busy_s = 0.0
        """Seconds that the trainer has stepped or copied weights for."""
        self._rates = rates
        self._cores = cores
        self._take_up_reply = take_up_reply
        self._version = 0
        """Version of the weights that were copied out last."""
        self.copy_weights = LocalEndpoint(self._copy_weights)
        self.proof = LocalEndpoint(self._proof)
        self.score = LocalEndpoint(self._score)

    # For the training loop.

    async def forward_backward(self, packed: BatchPlan, step: int) -> BatchPlan:
        """Return the batch, whose gradient `optim_step` takes the time of."""
        return packed

    async def optim_step(self, gradient: BatchPlan) -> dict[str, float]:
        """Take as long as the slowest rank does for its microbatches and for the optimizer."""
        work_s = max(map(self._rank_s, gradient.microbatches, gradient.samples))
        await self._work(self._rates.trainer.step_s + work_s)
        return {}

    def _rank_s(self, batches: Sequence[TrainingBatch], samples: Sequence[Rows]) -> float:
        """Return the seconds of a rank's microbatches, one after the other."""
        return sum(map(self._microbatch_s, batches, samples))

    def _microbatch_s(self, batch: TrainingBatch, rows: Rows) -> float:
        """Return the seconds of a microbatch: of its tokens, and of their pairs in attention."""
        rates = self._rates.trainer
        tokens = (batch.trees or batch).token_ids.numel()
        pairs = sum(len(sample) ** 2 / 2 for row in rows for sample in row)
        return max(rates.microbatch_s, rates.token_s * tokens + rates.pair_s * pairs)

    async def _work(self, seconds: float) -> None:
        clock = asyncio.get_running_loop().time
        began = clock()
        await self._cores.use(seconds)
        self.busy_s += clock() - began
        await self._take_up_reply()

    # As the mesh that publishes weights.

    def size(self, dimension: str) -> int:
        return 1

    def slice(self, **dimensions: int) -> "SimulatedTrainer":
        return self

    async def _copy_weights(
        self, version: int, canary_token_ids: np.ndarray, remote_readers: bool
    ) -> None:
        await self._work(self._rates.trainer.publish_s)
        self._version = version

    async def _proof(self) -> tuple[str, np.ndarray]:
        """Return the fingerprint of the version that was copied out last, and its canary."""
        return str(self._version), np.zeros(CANARY_TOKENS, np.float32)

    async def _score(self, canary_token_ids: np.ndarray) -> np.ndarray:
        return np.zeros(len(canary_token_ids), np.float32)

    # As the copies on the generators' hosts.

    async def fetch(self, version: int) -> None:
        await asyncio.sleep(self._rates.fetch_s)

    def take_fetched_bytes(self) -> dict[str, int]:
        return {}
