"""Which tokens of a batch each loss component is about, and which packed sample each token lies in."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Literal

import torch

from torchtitan.experiments.rl.bounds import PositiveFloat
from torchtitan.experiments.rl.types import LossDenominators, TrainingBatch


def rl_members(batch: TrainingBatch) -> torch.Tensor:
    """bool [B, L]. Sampled tokens with an rl weight."""
    return batch.loss_mask & (batch.rl_weights != 0)


def ce_members(batch: TrainingBatch) -> torch.Tensor:
    """bool [B, L]. Tokens with a ce weight, sampled or not."""
    return batch.ce_weights != 0


def ref_kl_members(batch: TrainingBatch) -> torch.Tensor:
    """bool [B, L]. Tokens with a ref_kl weight."""
    return batch.ref_kl_weights != 0


Denominator = Literal["members", "weights"] | PositiveFloat
"""What a component's sum over the step is divided by: its member tokens, the sum of their absolute weights, or a number."""


def count_denominators(batch: TrainingBatch, denominators: Sequence[Denominator]) -> torch.Tensor:
    """This batch's part of the denominators of rl, ce and ref_kl: float64 [3], on the batch's device.

    Summed over microbatches and all-reduced once a step; ``step_denominators`` makes the step's of the sums.
    """
    counts = []
    for wanted, members, weights in zip(
        denominators,
        (rl_members, ce_members, ref_kl_members),
        (batch.rl_weights, batch.ce_weights, batch.ref_kl_weights),
        strict=True,
    ):
        member = members(batch)
        counts.append(torch.where(member, weights.double().abs(), 0).sum() if wanted == "weights" else member.sum().double())
    return torch.stack(counts)


def step_denominators(sums: torch.Tensor, denominators: Sequence[Denominator]) -> LossDenominators:
    """The step's denominators. An empty component divides 0 by 1."""
    rl, ce, ref_kl = (
        wanted if not isinstance(wanted, str) else float(value) or 1.0
        for wanted, value in zip(denominators, sums.tolist(), strict=True)
    )
    return LossDenominators(rl=rl, ce=ce, ref_kl=ref_kl)


def sequence_ids(positions: torch.Tensor) -> torch.Tensor:
    """Number the packed samples of a batch, padding included: int64 [B, L], each id in [0, B * L).

    Args:
        positions: int [B, L], 0 at the first token of each sample.
    """
    starts = positions == 0
    starts[:, 0] = True
    return (starts.flatten().cumsum(0) - 1).view_as(positions)


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
