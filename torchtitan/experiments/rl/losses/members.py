"""Which tokens of a batch each loss component is about, and which packed sample each token lies in."""

import torch

from torchtitan.experiments.rl.types import TrainingBatch


def rl_members(batch: TrainingBatch) -> torch.Tensor:
    """bool [B, L]. Sampled tokens with an rl weight."""
    return batch.loss_mask & (batch.rl_weights != 0)


def ce_members(batch: TrainingBatch) -> torch.Tensor:
    """bool [B, L]. Tokens with a ce weight, sampled or not."""
    return batch.ce_weights != 0


def ref_kl_members(batch: TrainingBatch) -> torch.Tensor:
    """bool [B, L]. Tokens with a ref_kl weight."""
    return batch.ref_kl_weights != 0


def count_members(batch: TrainingBatch) -> torch.Tensor:
    """Member tokens of rl, ce and ref_kl in this batch: int64 [3], on the batch's device.

    Summed over microbatches and all-reduced once a step, then clamped to at least 1, they are the step's LossDenominators.
    """
    return torch.stack([members(batch).sum() for members in (rl_members, ce_members, ref_kl_members)])


def sequence_ids(positions: torch.Tensor) -> torch.Tensor:
    """Number the packed samples of a batch, padding included: int64 [B, L], each id in [0, B * L).

    Args:
        positions: int [B, L], 0 at the first token of each sample.
    """
    starts = positions == 0
    starts[:, 0] = True
    return (starts.flatten().cumsum(0) - 1).view_as(positions)
