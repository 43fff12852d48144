"""Trainer, generators and weights in the Controller's own process: nothing is spawned, the loss is the real one."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from tests.zoo.world import HonestPolicy
from torchtitan.experiments.rl.batching.batcher import BatchPlan
from torchtitan.experiments.rl.errors import RunError
from torchtitan.experiments.rl.fleet.context import RunContext
from torchtitan.experiments.rl.fleet.fleet import Fleet
from torchtitan.experiments.rl.losses import LossConfig, compute_loss, count_denominators
from torchtitan.experiments.rl.training.learner import check_finite
from torchtitan.experiments.rl.types import LossDenominators, TrainingSample
from torchtitan.experiments.rl.weights.sync import CopiedOut, SyncReport


class StandInTrainer:
    """Implements what the Controller asks of training.client.TrainerClient. A step computes the loss and its gradient."""

    data_parallel_size = 1

    def __init__(self, loss: LossConfig):
        self.failed_batch: Path | None = None
        self.planned: list[TrainingSample] = []
        """Samples that were packed for a step; `scene.py` notes them."""
        self.stepped: list[TrainingSample] = []
        """Those of the optimizer steps that were taken."""
        self.losses: list[float] = []
        """Of each step, its loss plus the sum of its gradient's absolute values: advantages alone add up to 0."""
        self._loss = loss

    async def forward_backward(self, packed: BatchPlan, step: int) -> float:
        (microbatches,) = packed.microbatches
        counts = torch.stack(
            [count_denominators(batch, ["members"] * 3) for batch in microbatches]
        ).sum(0)
        rl, ce, ref_kl = (max(1, int(count)) for count in counts)
        total = 0.0
        for batch in microbatches:
            logprobs = (batch.generator_logprobs * 1.01).requires_grad_()
            loss, _ = compute_loss(
                logprobs, batch, LossDenominators(rl=rl, ce=ce, ref_kl=ref_kl), self._loss
            )
            loss.backward()
            assert logprobs.grad is not None
            check_finite("loss", loss.item(), self._loss)
            check_finite("gradient norm", logprobs.grad.norm().item(), self._loss)
            total += loss.item() + logprobs.grad.abs().sum().item()
        return total

    async def optim_step(self, gradient: float) -> dict[str, float]:
        self.losses.append(gradient)
        self.stepped += self.planned
        self.planned.clear()
        return {"loss/total": gradient}

    async def save_final(self, step: int) -> Path | None:
        return None


class StandInWeights:
    def __init__(self, policy: HonestPolicy):
        self._policy = policy

    async def copy_out(self, version: int) -> CopiedOut:
        return CopiedOut(version=version, seconds=0.0)

    async def update(self, copied: CopiedOut) -> SyncReport:
        self._policy.version = copied.version
        zeros = dict.fromkeys(
            ("canary_max_diff", "copy_out_s", "load_s", "verify_s", "reload_s"), 0.0
        )
        return SyncReport(version=copied.version, **zeros)


class StandInFleet(Fleet):
    """Fleet without processes. ``start_runner``, which sets the tasks up, is the real one."""

    policy_of: Callable[[], HonestPolicy]
    """Makes the policy; `scene.py` sets it."""
    made: "StandInFleet"

    def __init__(
        self,
        context: RunContext,
        *,
        on_failure: Callable[[Exception], None],
    ):
        super().__init__(context, on_failure=on_failure)
        policy: Any = type(self).policy_of()
        trainer: Any = StandInTrainer(context.config.trainer.loss)
        weights: Any = StandInWeights(policy)
        self.policy, self.trainer, self.weights = policy, trainer, weights
        self.closed = 0
        StandInFleet.made = self

    async def start(self, text: Any, trainer_start: Any = None) -> None:
        """Nothing is spawned."""

    def fail(self, failure: RunError) -> None:
        raise AssertionError(f"no process can die here: {failure}")

    async def close(self) -> Any:
        self.closed += 1
        return []
