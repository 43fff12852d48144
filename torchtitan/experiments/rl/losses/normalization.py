"""Advantages normalised over the batch of an optimizer step, as REINFORCE++ wants them."""

from dataclasses import replace

import torch

from torchtitan.experiments.rl.losses.members import rl_members
from torchtitan.experiments.rl.types import TrainingBatch


def advantage_sums(batch: TrainingBatch) -> torch.Tensor:
    """Over the batch's rl member tokens, their number, Σ A and Σ A²: float64 [3], on the batch's device.

    Summed over microbatches and all-reduced once a step, they give the step's mean and standard deviation.
    """
    member = rl_members(batch)
    advantages = torch.where(member, batch.advantages.double(), 0)
    return torch.stack([member.sum().double(), advantages.sum(), (advantages**2).sum()])


def with_normalized_advantages(batch: TrainingBatch, sums: torch.Tensor) -> TrainingBatch:
    """A' = (A - mean) / (std + 1e-6) on rl member tokens, over all of them in the step (REINFORCE++, Hu et al.,
    arXiv:2501.03262). A token counts once, so long answers weigh more in both; std is the population's.

    Args:
        sums: of ``advantage_sums``, over the whole step.
    """
    count, total, squares = (float(value) for value in sums)
    mean = total / max(count, 1.0)
    std = max(squares / max(count, 1.0) - mean**2, 0.0) ** 0.5
    advantages = (batch.advantages.double() - mean) / (std + 1e-6)
    return replace(batch, advantages=torch.where(rl_members(batch), advantages, 0).to(batch.advantages.dtype))
