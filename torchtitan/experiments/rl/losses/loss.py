"""The loss of one microbatch: Σ over components (Σ over member tokens w·ℓ) / N_component."""

from dataclasses import dataclass, field

import torch

from torchtitan.config import Configurable
from torchtitan.experiments.rl.losses.ce import cross_entropy
from torchtitan.experiments.rl.losses.members import ce_members, ref_kl_members, rl_members, sequence_ids
from torchtitan.experiments.rl.losses.metrics import MetricSums
from torchtitan.experiments.rl.losses.mismatch import mismatch_kl
from torchtitan.experiments.rl.losses.ref_kl import RefKL
from torchtitan.experiments.rl.losses.variants import DPPO, RLLoss, RLTokens
from torchtitan.experiments.rl.types import ROLES, LossDenominators, TrainingBatch


@dataclass(kw_only=True, slots=True)
class LossConfig(Configurable.Config):
    rl: RLLoss.Config = field(default_factory=DPPO.Config)
    """Which rl variant, with its settings."""
    ref_kl: RefKL.Config = field(default_factory=RefKL.Config)


def compute_loss(
    policy_logprobs: torch.Tensor, batch: TrainingBatch, denominators: LossDenominators, config: LossConfig
) -> tuple[torch.Tensor, MetricSums]:
    """Loss of one microbatch, and what there is to know about it.

    The denominators are of the whole optimizer step, so the losses of all microbatches and data-parallel ranks add up to the
    step's loss, and so do their gradients. The loss is attached to the graph whatever the batch holds: with no member token it
    is 0 with a gradient of 0, also where ``policy_logprobs`` is not finite.

    Args:
        policy_logprobs: [B, L], differentiable. Entry t is the log-probability of token t at its sampling temperature. The
            loss is computed in its dtype.

    Returns:
        A scalar, and metrics: ``loss/total``, ``loss/rl``, ``loss/ce`` and ``loss/ref_kl`` are parts of the step's loss, to be
        summed; everything under ``rl/``, ``ce/`` and ``ref_kl/`` is of that component's member tokens.
    """
    dtype = policy_logprobs.dtype
    metrics = MetricSums()

    def at(member: torch.Tensor, stream: torch.Tensor) -> torch.Tensor:
        # Selected, never multiplied by a mask: 0 · inf and 0 · nan are nan, in the backward pass too.
        return torch.where(member, stream.to(dtype), 0)

    def total(name: str, member: torch.Tensor, weights: torch.Tensor, losses: torch.Tensor, count: int) -> torch.Tensor:
        weighted = torch.where(member, weights.to(dtype) * losses, 0)
        metrics.add_mean(f"{name}/loss", weighted, member)
        return weighted.sum() / count

    member = rl_members(batch)
    tokens = RLTokens(
        logprobs=at(member, policy_logprobs),
        generator_logprobs=at(member, batch.generator_logprobs),
        advantages=at(member, batch.advantages),
        member=member,
        sequence_ids=sequence_ids(batch.positions),
    )
    losses, masked = config.rl.build().per_token(tokens)
    rl = total("rl", member, batch.rl_weights, losses, denominators.rl)
    _add_ratio_metrics(metrics, "rl", tokens.logprobs, tokens.generator_logprobs, member, masked)

    member = ce_members(batch)
    losses = cross_entropy(at(member, policy_logprobs))
    ce = total("ce", member, batch.ce_weights, losses, denominators.ce)
    metrics.add_mean("ce/nll", losses, member)
    for index, role in enumerate(ROLES):
        metrics.add_mean(f"ce/{role}/nll", losses, member & (batch.role_ids == index))

    member = ref_kl_members(batch)
    logprobs, generator = at(member, policy_logprobs), at(member, batch.generator_logprobs)
    reference = at(member, batch.ref_logprobs)
    losses, masked = config.ref_kl.build().per_token(logprobs, generator, reference)
    ref_kl = total("ref_kl", member, batch.ref_kl_weights, losses, denominators.ref_kl)
    _add_ratio_metrics(metrics, "ref_kl", logprobs, generator, member, masked)
    # The plain estimator, E[logp - ref_logp]: what the component's gain g sums up to.
    metrics.add_mean("ref_kl/kl", logprobs - reference, member)

    loss = rl + ce + ref_kl
    for name, part in (("total", loss), ("rl", rl), ("ce", ce), ("ref_kl", ref_kl)):
        metrics.add_sum(f"loss/{name}", part)
    return loss, metrics


@torch.no_grad()
def _add_ratio_metrics(
    metrics: MetricSums,
    prefix: str,
    logprobs: torch.Tensor,
    generator_logprobs: torch.Tensor,
    member: torch.Tensor,
    masked: torch.Tensor,
) -> None:
    lr = logprobs - generator_logprobs
    metrics.add_mean(f"{prefix}/ratio_mean", lr.exp(), member)
    metrics.add_max(f"{prefix}/ratio_max", lr.exp(), member)
    metrics.add_mean(f"{prefix}/logprob_diff_mean", lr.abs(), member)
    metrics.add_max(f"{prefix}/logprob_diff_max", lr.abs(), member)
    metrics.add_mean(f"{prefix}/mismatch_kl", mismatch_kl(lr), member)
    metrics.add_mean(f"{prefix}/masked_fraction", masked, member)
