"""The controller's side of the PolicyTrainer mesh: one optimizer step, and the policy at the end."""

import asyncio
from pathlib import Path
from typing import Any

import torch

from torchtitan.experiments.rl.batching.batcher import BatchPlan


class TrainerClient:
    def __init__(self, mesh: Any, *, run_dir: Path):
        self._mesh, self._run_dir = mesh, run_dir
        self.failed_batch: Path | None = None
        """Where a batch was written on which a step failed."""

    async def step(self, packed: BatchPlan, step: int) -> dict[str, float]:
        """Take optimizer step ``step`` on the policy version before it; each rank is sent its own rows only. Returns metrics.

        Raises:
            Exception: what a rank raised; the batch is on disk then.
        """
        calls = [
            self._mesh.slice(procs=rank).forward_backward.call_one(microbatches, step - 1)
            for rank, microbatches in enumerate(packed.microbatches)
        ]
        try:
            metrics = (await asyncio.gather(*calls))[0]
            return metrics | next(iter((await self._mesh.optim_step.call(step)).values()))
        except Exception:
            self.failed_batch = self._run_dir / f"failed-batch-{step}.pt"
            torch.save(packed.microbatches, self.failed_batch)
            raise

    async def save_final(self, step: int) -> Path | None:
        """Write the policy as a hub folder; None where the config says not to."""
        return next(iter((await self._mesh.save_final.call(step)).values()))
