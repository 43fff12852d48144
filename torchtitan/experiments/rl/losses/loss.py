"""The loss of one microbatch: Σ over components (Σ over member tokens w·ℓ) / N_component."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from torchtitan.config import Configurable
from torchtitan.experiments.rl.losses.components import CrossEntropy, RefKL
from torchtitan.experiments.rl.losses.corrections import Correction, correct
from torchtitan.experiments.rl.losses.members import Denominator, ce_members, ref_kl_members, rl_members, sequence_ids
from torchtitan.experiments.rl.losses.metrics import MetricSums, add_own_metrics, mismatch_kl
from torchtitan.experiments.rl.losses.variants import DPPO, RLLoss, RLTokens
from torchtitan.experiments.rl.types import ROLES, LossDenominators, TrainingBatch


@dataclass(kw_only=True, slots=True)
class LossConfig(Configurable.Config):
    rl: RLLoss.Config = field(default_factory=DPPO.Config)
    """Which rl variant, with its settings."""
    corrections: list[Correction.Config] = field(default_factory=list)
    """Of the rl component, where trainer and generators differ: ``losses/corrections.py``."""
    ce: CrossEntropy.Config = field(default_factory=CrossEntropy.Config)
    ref_kl: RefKL.Config = field(default_factory=RefKL.Config)
    rl_denominator: Denominator = "members"
    """What the component's sum over a step is divided by: its member tokens, the sum of their weights' absolute values, or this
    number."""
    ce_denominator: Denominator = "members"
    ref_kl_denominator: Denominator = "members"
    normalize_advantages: bool = False
    """Before the loss, make the advantages of the step's rl tokens, of all tasks together, (A - mean) / std (REINFORCE++)."""

    @property
    def denominators(self) -> tuple[Denominator, Denominator, Denominator]:
        """Of rl, ce and ref_kl."""
        return self.rl_denominator, self.ce_denominator, self.ref_kl_denominator


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

    def total(name: str, member: torch.Tensor, weights: torch.Tensor, losses: torch.Tensor, count: float) -> torch.Tensor:
        weighted = torch.where(member, weights.to(dtype) * losses, 0)
        metrics.add_mean(f"{name}/loss", weighted, member)
        return weighted.sum() / count

    def own_metrics(name: str, own: Sequence[Any], member: torch.Tensor) -> None:
        for entry in own:
            add_own_metrics(metrics, name, entry, member)

    member = rl_members(batch)
    tokens = RLTokens(
        logprobs=at(member, policy_logprobs),
        generator_logprobs=at(member, batch.generator_logprobs),
        advantages=at(member, batch.advantages),
        member=member,
        sequence_ids=sequence_ids(batch.positions),
    )
    given, factors, left_out = correct(tokens, [entry.build() for entry in config.corrections])
    losses, masked, *own = config.rl.build().per_token(given)
    own_metrics("rl", own, given.member)
    if config.corrections:
        losses, masked = torch.where(given.member, factors * losses, 0), masked & given.member
    for name, where in left_out.items():
        metrics.add_mean(f"rl/left_out/{name}", where, member)
    rl = total("rl", member, batch.rl_weights, losses, denominators.rl)
    _add_ratio_metrics(metrics, "rl", tokens.logprobs, tokens.generator_logprobs, member, masked)

    member = ce_members(batch)
    nll = -at(member, policy_logprobs)
    returned = config.ce.build().per_token(at(member, policy_logprobs))
    losses, *own = returned if isinstance(returned, tuple) else (returned,)
    own_metrics("ce", own, member)
    ce = total("ce", member, batch.ce_weights, losses, denominators.ce)
    metrics.add_mean("ce/nll", nll, member)
    for index, role in enumerate(ROLES):
        metrics.add_mean(f"ce/{role}/nll", nll, member & (batch.role_ids == index))

    member = ref_kl_members(batch)
    logprobs, generator = at(member, policy_logprobs), at(member, batch.generator_logprobs)
    reference = at(member, batch.ref_logprobs)
    losses, masked, *own = config.ref_kl.build().per_token(logprobs, generator, reference)
    own_metrics("ref_kl", own, member)
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
