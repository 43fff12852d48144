"""The loss of one microbatch, and the metrics of a step's losses.

The loss is a sum over three components, rl, ce and ref_kl: each is the sum over its member tokens
of weight times loss, divided by a denominator that belongs to the whole optimizer step.

This file has, in order: `MetricSums`, which merges metrics over microbatches and ranks; which
tokens are members and what a component is divided by; the losses ce, ref_kl and the KL term to a
reference; `compute_loss`; and the mismatch between trainer and generator. The rl losses are in
`variants.py`.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

import torch
import torch.distributed as dist

from torchtitan.config import Configurable
from torchtitan.experiments.rl.bounds import NonNegativeFloat, PositiveFloat
from torchtitan.experiments.rl.configurable import UserConfigurable
from torchtitan.experiments.rl.losses.variants import (
    DPPO,
    RATIO_MAX,
    Correction,
    OwnMetrics,
    PerToken,
    RatioMax,
    RLLoss,
    RLTokens,
    capped_ratio,
    correct,
)
from torchtitan.experiments.rl.types import ROLES, LossDenominators, TrainingBatch

Kind = Literal["sum", "mean", "max"]


class MetricSums:
    """Named metrics over tokens, merged over microbatches and ranks before they become floats.

    A mean is kept as a sum and a count, so a merged mean is over tokens and never an average of
    averages. Values are float64, and stay on their device until `all_reduce` or `compute`.
    """

    def __init__(self) -> None:
        self._entries: dict[str, tuple[Kind, torch.Tensor]] = {}

    def add_sum(self, name: str, value: torch.Tensor | float) -> None:
        """Add to a sum, such as a microbatch's loss divided by the step's denominator."""
        self._add(name, "sum", torch.as_tensor(value).detach().double().reshape(1))

    @torch.no_grad()
    def add_mean(self, name: str, values: torch.Tensor, mask: torch.Tensor) -> None:
        """Add the masked values to a mean, each with weight 1. Other values may be anything.

        Args:
            values: any shape and dtype.
            mask: bool, of the same shape.
        """
        total = torch.where(mask, values.double(), 0).sum()
        self._add(name, "mean", torch.stack([total, mask.sum().double()]))

    @torch.no_grad()
    def add_max(self, name: str, values: torch.Tensor, mask: torch.Tensor) -> None:
        """Add the masked values to a maximum, which is nan if one of them is."""
        masked = torch.where(mask, values.double(), -math.inf).flatten()
        # With an entry of -inf, the maximum exists for an empty tensor too.
        nothing = values.new_full((1,), -math.inf, dtype=torch.float64)
        self._add(name, "max", torch.cat([masked, nothing]).max().reshape(1))

    def merge(self, other: "MetricSums") -> None:
        """Add the metrics of another microbatch or rank, whose names may differ.

        Raises:
            ValueError: a name is a metric of another kind there.
        """
        for name, (kind, value) in other._entries.items():
            self._add(name, kind, value)

    def all_reduce(self, group: dist.ProcessGroup | None = None) -> None:
        """Merge over the ranks of ``group``. Afterwards every rank holds the same, on the CPU.

        A rank that saw no token of a task lacks its metric, so names travel with the values: one
        gather of a few kilobytes a rank. Merging in rank order gives every rank the same bits. Does
        nothing in a single process.
        """
        if not dist.is_initialized():
            return
        ranks: list[dict[str, tuple[Kind, list[float]]]] = [{}] * dist.get_world_size(group)
        dist.all_gather_object(ranks, self._numbers(), group=group)
        self._entries = {}
        for entries in ranks:
            for name, (kind, value) in entries.items():
                self._add(name, kind, torch.tensor(value, dtype=torch.float64))

    def compute(self) -> dict[str, float]:
        """Return the metrics as floats, sorted by name, without means and maxima over no token."""
        floats = {}
        for name, (kind, (value, *weight)) in sorted(self._numbers().items()):
            if any(weight) or kind == "sum" or (kind == "max" and value != -math.inf):
                floats[name] = value / weight[0] if weight else value
        return floats

    def _numbers(self) -> dict[str, tuple[Kind, list[float]]]:
        """Return the kind and the numbers of each metric, in one transfer from each device."""
        numbers_by_name: dict[str, tuple[Kind, list[float]]] = {}
        for device in {value.device for _, value in self._entries.values()}:
            on_device = [
                (name, kind, value)
                for name, (kind, value) in self._entries.items()
                if value.device == device
            ]
            numbers = iter(torch.cat([value for *_, value in on_device]).tolist())
            for name, kind, value in on_device:
                numbers_by_name[name] = (kind, [next(numbers) for _ in value])
        return numbers_by_name

    def _add(self, name: str, kind: Kind, value: torch.Tensor) -> None:
        if name not in self._entries:
            self._entries[name] = (kind, value)
            return
        held_kind, held = self._entries[name]
        if held_kind != kind:
            raise ValueError(
                f"metric {name!r} is a {held_kind} and can't also be a {kind}: "
                "give one of them another name"
            )
        value = value.to(held.device)
        self._entries[name] = (kind, torch.maximum(held, value) if kind == "max" else held + value)


def rl_members(batch: TrainingBatch) -> torch.Tensor:
    """Return which tokens feed rl, bool [B, L]: sampled ones with an rl weight."""
    return batch.loss_mask & (batch.rl_weights != 0)


def ce_members(batch: TrainingBatch) -> torch.Tensor:
    """Return which tokens feed ce, bool [B, L]: those with a ce weight, sampled or not."""
    return batch.ce_weights != 0


def ref_kl_members(batch: TrainingBatch) -> torch.Tensor:
    """Return which tokens feed ref_kl, bool [B, L]: those with a ref_kl weight."""
    return batch.ref_kl_weights != 0


Denominator = Literal["members", "weights"] | PositiveFloat
"""Divisor of a component's sum over the step: the number of its member tokens, the sum of their
absolute weights, or a fixed number."""


def count_denominators(batch: TrainingBatch, denominators: Sequence[Denominator]) -> torch.Tensor:
    """Return what this batch adds to the denominators of rl, ce and ref_kl.

    The sum over microbatches and data-parallel ranks goes into `step_denominators`.

    Returns:
        float64 [3], on the batch's device.
    """
    members = (rl_members(batch), ce_members(batch), ref_kl_members(batch))
    weights = (batch.rl_weights, batch.ce_weights, batch.ref_kl_weights)
    counts = []
    for denominator, member, weight in zip(denominators, members, weights, strict=True):
        if denominator == "weights":
            counts.append(torch.where(member, weight.double().abs(), 0).sum())
        else:
            counts.append(member.sum().double())
    return torch.stack(counts)


def step_denominators(sums: torch.Tensor, denominators: Sequence[Denominator]) -> LossDenominators:
    """Return the denominators of a step. A component without members gets 1, and divides 0 by it.

    Args:
        sums: float64 [3]: sum of `count_denominators` over the step.
    """
    rl, ce, ref_kl = (
        denominator if not isinstance(denominator, str) else float(count) or 1.0
        for denominator, count in zip(denominators, sums.tolist(), strict=True)
    )
    return LossDenominators(rl=rl, ce=ce, ref_kl=ref_kl)


def sequence_ids(positions: torch.Tensor) -> torch.Tensor:
    """Return a number for each packed sample of a batch, padding included.

    Args:
        positions: int [B, L], 0 at the first token of each sample.

    Returns:
        int64 [B, L]. Each number is in [0, B * L).
    """
    starts = positions == 0
    starts[:, 0] = True
    return (starts.flatten().cumsum(0) - 1).view_as(positions)


def advantage_sums(batch: TrainingBatch) -> torch.Tensor:
    """Return the number of tokens that feed rl, and the sums of A and of A² over them.

    Their sums over microbatches and ranks give the mean and the standard deviation of the step's
    advantages.

    Returns:
        float64 [3], on the batch's device.
    """
    member = rl_members(batch)
    advantages = torch.where(member, batch.advantages.double(), 0)
    return torch.stack([member.sum().double(), advantages.sum(), (advantages**2).sum()])


def with_normalized_advantages(batch: TrainingBatch, sums: torch.Tensor) -> TrainingBatch:
    """Replace the advantages of the tokens that feed rl by (A - mean) / (std + 1e-6).

    Mean and standard deviation (of the population) are over all these tokens of the step, as in
    REINFORCE++ (Hu et al., arXiv:2501.03262). Each token counts once, so long answers weigh more.

    Args:
        sums: float64 [3]: sum of `advantage_sums` over the step.
    """
    count, total, squares = (float(value) for value in sums)
    mean = total / max(count, 1.0)
    std = max(squares / max(count, 1.0) - mean**2, 0.0) ** 0.5
    advantages = (batch.advantages.double() - mean) / (std + 1e-6)
    return replace(
        batch, advantages=torch.where(rl_members(batch), advantages, 0).to(batch.advantages.dtype)
    )


class CrossEntropy(UserConfigurable):
    """Negative log-likelihood of each token, in nats. Subclass it for a loss of your own.

    ℓ = -logp
    """

    def per_token(self, logprobs: torch.Tensor) -> torch.Tensor | tuple[torch.Tensor, OwnMetrics]:
        """Return the losses, before they are weighted, and metrics of its own if it has any.

        Args:
            logprobs: [B, L].

        Returns:
            [B, L], or a tuple of that and a dict of metrics.
        """
        return -logprobs


class RefKL(UserConfigurable):
    """Policy gradient of the reverse KL to a reference model, one sampled token at a time.

    The gain of token t is ``g = stopgrad(ref_logp - logp)``. Over tokens that the policy sampled,
    -g has the expectation KL(policy ‖ ref), so g takes the place of an advantage. This is on-policy
    distillation (Agarwal et al., arXiv:2306.13649) in the per-token form of Thinking Machines,
    "On-Policy Distillation", 2025.

        lr = logp - generator_logp,  ρ = exp(lr),  d = exp(logp) - exp(generator_logp)
        drop = d < -mask_low
        ℓ = -keep·g·min(ρ, ratio_max) + kl_tau·lr²
    """

    @dataclass(kw_only=True, slots=True)
    class Config(Configurable.Config):
        mask_low: NonNegativeFloat = 0.2
        """Largest fall of a token's probability since it was sampled, beyond which it has no
        gain."""
        kl_tau: NonNegativeFloat = 1e-3
        """Weight of the squared log ratio, which holds the policy near the generator's."""
        ratio_max: RatioMax = RATIO_MAX
        """Largest importance ratio that the loss computes with; None sets no cap. A token above it
        has no gain."""

    config: Config

    def per_token(
        self, logprobs: torch.Tensor, generator_logprobs: torch.Tensor, ref_logprobs: torch.Tensor
    ) -> PerToken:
        """Return the losses, before they are weighted, and which tokens have no gain.

        A subclass may also return metrics of its own, as an ``RLLoss`` may.

        Args:
            logprobs: [B, L], as the other arguments.

        Returns:
            [B, L], and bool [B, L].
        """
        c = self.config
        lr = logprobs - generator_logprobs
        gain, drop = self._gain(logprobs, generator_logprobs, ref_logprobs)
        ratio, capped = capped_ratio(lr, gain, c.ratio_max)
        return -gain * ratio + c.kl_tau * lr**2, drop | capped

    def ratio_capped(
        self, logprobs: torch.Tensor, generator_logprobs: torch.Tensor, ref_logprobs: torch.Tensor
    ) -> torch.Tensor | None:
        """Return where ``ratio_max`` takes the gain, bool [B, L]; None if the loss has no cap.

        The metric ``ref_kl/ratio_capped_fraction`` is the share of these tokens. A subclass whose
        ``per_token`` has no cap returns None.
        """
        gain, _ = self._gain(logprobs, generator_logprobs, ref_logprobs)
        return capped_ratio(logprobs - generator_logprobs, gain, self.config.ratio_max)[1]

    def _gain(
        self, logprobs: torch.Tensor, generator_logprobs: torch.Tensor, ref_logprobs: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the gain g, which is 0 for dropped tokens, and which tokens are dropped."""
        d = logprobs.detach().exp() - generator_logprobs.exp()
        drop = d < -self.config.mask_low
        return torch.where(drop, 0, (ref_logprobs - logprobs).detach()), drop


LARGEST_KL = 10.0
"""Upper bound of one token's KL term, in nats."""


def reference_kl(
    policy_logprobs: torch.Tensor,
    reference_logprobs: torch.Tensor,
    batch: TrainingBatch,
    denominators: LossDenominators,
    coefficient: float,
) -> tuple[torch.Tensor, MetricSums]:
    """Return GRPO's KL term to a reference (arXiv:2402.03300, equation 4), for any rl loss.

        d = ref_logp - logp,  ℓ = kl_coef·min(exp(d) - d - 1, 10)

    It is summed over the tokens that feed rl and divided as the rl component is. A token counts
    alike whatever its rl weight is. Over tokens that the policy sampled, exp(d) - d - 1 has the
    expectation KL(policy ‖ reference), and no value is below 0. The bound is verl's, and is met at
    d = 2.61 and d = -11: without it one token with d = 15 adds 3 million. A token above it has no
    gradient.

    Args:
        policy_logprobs: [B, L], differentiable, at the sampling temperature.
        reference_logprobs: [B, L], at the sampling temperature.

    Returns:
        A scalar, to be added to the loss of `compute_loss`, and metrics: ``loss/reference_kl``,
        what it adds to ``loss/total``; ``reference/kl`` in nats a token, also by task as
        ``reference/kl/task/<name>``; ``reference/bounded``, the share of tokens above the bound.
    """
    member = rl_members(batch)
    zero = torch.zeros((), dtype=policy_logprobs.dtype, device=policy_logprobs.device)
    reference = torch.where(member, reference_logprobs.to(policy_logprobs.dtype), zero)
    difference = reference - torch.where(member, policy_logprobs, zero)
    # Clamped, because the infinite gradient of an overflow would be nan once it is masked.
    kl = torch.expm1(difference.clamp(max=20)) - difference
    bounded = kl > LARGEST_KL
    kl = torch.where(bounded, LARGEST_KL, kl)
    loss = coefficient * kl.sum() / denominators.rl
    metrics = MetricSums()
    metrics.add_sum("loss/reference_kl", loss)
    metrics.add_sum("loss/total", loss)
    metrics.add_mean("reference/kl", kl, member)
    metrics.add_mean("reference/bounded", bounded, member)
    for task_id, name in enumerate(batch.task_names):
        metrics.add_mean(f"reference/kl/task/{name}", kl, member & (batch.task_ids == task_id))
    return loss, metrics


@dataclass(kw_only=True, slots=True)
class LossConfig(Configurable.Config):
    rl: RLLoss.Config = field(default_factory=DPPO.Config)
    """Variant of the rl loss, with its settings."""
    corrections: list[Correction.Config] = field(default_factory=list)
    """Corrections of the rl loss where trainer and generators differ (``losses/variants.py``)."""
    ce: CrossEntropy.Config = field(default_factory=CrossEntropy.Config)
    ref_kl: RefKL.Config = field(default_factory=RefKL.Config)
    rl_denominator: Denominator = "members"
    """Divisor of the component's sum over a step: the number of its member tokens ("members"), the
    sum of their absolute weights ("weights"), or this number."""
    ce_denominator: Denominator = "members"
    ref_kl_denominator: Denominator = "members"
    normalize_advantages: bool = False
    """True to make the advantages of all rl tokens of a step (A - mean) / std, over all tasks
    together (REINFORCE++)."""

    @property
    def denominators(self) -> tuple[Denominator, Denominator, Denominator]:
        """Denominators of rl, ce and ref_kl."""
        return self.rl_denominator, self.ce_denominator, self.ref_kl_denominator


def compute_loss(
    policy_logprobs: torch.Tensor,
    batch: TrainingBatch,
    denominators: LossDenominators,
    config: LossConfig,
) -> tuple[torch.Tensor, MetricSums]:
    """Return the loss of one microbatch, and its metrics.

    The denominators belong to the whole optimizer step, so the losses of all microbatches and
    data-parallel ranks add up to the step's loss, and their gradients to its gradient. The loss is
    attached to the graph whatever the batch holds: without member tokens it is 0 with a gradient of
    0, even if ``policy_logprobs`` is not finite.

    Args:
        policy_logprobs: [B, L], differentiable. Entry t is the log-probability of token t at its
            sampling temperature. The loss is computed in its dtype.

    Returns:
        A scalar, and metrics: ``loss/total``, ``loss/rl``, ``loss/ce`` and ``loss/ref_kl`` are to
        be summed over microbatches; those under ``rl/``, ``ce/`` and ``ref_kl/`` are over the
        member tokens of that component.
    """
    metrics = MetricSums()
    rl = _rl_component(policy_logprobs, batch, denominators.rl, config, metrics)
    ce = _ce_component(policy_logprobs, batch, denominators.ce, config, metrics)
    ref_kl = _ref_kl_component(policy_logprobs, batch, denominators.ref_kl, config, metrics)
    loss = rl + ce + ref_kl
    for name, value in (("total", loss), ("rl", rl), ("ce", ce), ("ref_kl", ref_kl)):
        metrics.add_sum(f"loss/{name}", value)
    return loss, metrics


def _rl_component(
    policy_logprobs: torch.Tensor,
    batch: TrainingBatch,
    denominator: float,
    config: LossConfig,
    metrics: MetricSums,
) -> torch.Tensor:
    member = rl_members(batch)
    dtype = policy_logprobs.dtype
    tokens = RLTokens(
        logprobs=_select(member, policy_logprobs, dtype),
        generator_logprobs=_select(member, batch.generator_logprobs, dtype),
        advantages=_select(member, batch.advantages, dtype),
        member=member,
        sequence_ids=sequence_ids(batch.positions),
    )
    corrected, factors, left_out = correct(tokens, [entry.build() for entry in config.corrections])
    variant = config.rl.build()
    losses, masked, *own = variant.per_token(corrected)
    add_own_metrics(metrics, "rl", own, corrected.member)
    if config.corrections:
        losses = torch.where(corrected.member, factors * losses, 0)
        masked = masked & corrected.member
    for name, where in left_out.items():
        metrics.add_mean(f"rl/left_out/{name}", where, member)
    with torch.no_grad():
        capped = variant.ratio_capped(corrected)
    lr = tokens.logprobs - tokens.generator_logprobs
    _add_ratio_metrics(metrics, "rl", lr, member, masked, capped)
    weighted = torch.where(member, batch.rl_weights.to(dtype) * losses, 0)
    metrics.add_mean("rl/loss", weighted, member)
    return weighted.sum() / denominator


def _ce_component(
    policy_logprobs: torch.Tensor,
    batch: TrainingBatch,
    denominator: float,
    config: LossConfig,
    metrics: MetricSums,
) -> torch.Tensor:
    member = ce_members(batch)
    dtype = policy_logprobs.dtype
    logprobs = _select(member, policy_logprobs, dtype)
    returned = config.ce.build().per_token(logprobs)
    losses, *own = returned if isinstance(returned, tuple) else (returned,)
    add_own_metrics(metrics, "ce", own, member)
    metrics.add_mean("ce/nll", -logprobs, member)
    for index, role in enumerate(ROLES):
        metrics.add_mean(f"ce/{role}/nll", -logprobs, member & (batch.role_ids == index))
    weighted = torch.where(member, batch.ce_weights.to(dtype) * losses, 0)
    metrics.add_mean("ce/loss", weighted, member)
    return weighted.sum() / denominator


def _ref_kl_component(
    policy_logprobs: torch.Tensor,
    batch: TrainingBatch,
    denominator: float,
    config: LossConfig,
    metrics: MetricSums,
) -> torch.Tensor:
    member = ref_kl_members(batch)
    dtype = policy_logprobs.dtype
    logprobs = _select(member, policy_logprobs, dtype)
    generator_logprobs = _select(member, batch.generator_logprobs, dtype)
    reference_logprobs = _select(member, batch.ref_logprobs, dtype)
    ref_kl = config.ref_kl.build()
    losses, masked, *own = ref_kl.per_token(logprobs, generator_logprobs, reference_logprobs)
    add_own_metrics(metrics, "ref_kl", own, member)
    with torch.no_grad():
        capped = ref_kl.ratio_capped(logprobs, generator_logprobs, reference_logprobs)
    lr = logprobs - generator_logprobs
    _add_ratio_metrics(metrics, "ref_kl", lr, member, masked, capped)
    # The plain estimator, E[logp - ref_logp]: what the gains of the component sum up to.
    metrics.add_mean("ref_kl/kl", logprobs - reference_logprobs, member)
    weighted = torch.where(member, batch.ref_kl_weights.to(dtype) * losses, 0)
    metrics.add_mean("ref_kl/loss", weighted, member)
    return weighted.sum() / denominator


def _select(member: torch.Tensor, values: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Return the values of member tokens, and 0 elsewhere.

    A product with a mask would not do: 0 · inf and 0 · nan are nan, in the backward pass too.
    """
    return torch.where(member, values.to(dtype), 0)


def add_own_metrics(
    sums: MetricSums, component: str, own: Sequence[OwnMetrics], member: torch.Tensor
) -> None:
    """Add the metrics that a loss returned beside its losses.

    Args:
        own: the loss's metrics as its only entry; empty if it has none.

    Raises:
        ValueError: a metric is not one value for each token.
    """
    for name, values in (own[0] if own else {}).items():
        if isinstance(values, torch.Tensor) and values.shape == member.shape:
            sums.add_mean(f"{component}/own/{name}", values.detach(), member)
            continue
        is_tensor = isinstance(values, torch.Tensor)
        kind = f"shape {tuple(values.shape)}" if is_tensor else f"a {type(values).__name__}"
        raise ValueError(
            f"metric {component}/own/{name} has {kind}: "
            f"want a tensor of shape {tuple(member.shape)}"
        )


@torch.no_grad()
def _add_ratio_metrics(
    metrics: MetricSums,
    prefix: str,
    lr: torch.Tensor,
    member: torch.Tensor,
    masked: torch.Tensor,
    capped: torch.Tensor | None,
) -> None:
    """Add metrics of the importance ratios, whose logarithms are ``lr``."""
    metrics.add_mean(f"{prefix}/ratio_mean", lr.exp(), member)
    metrics.add_max(f"{prefix}/ratio_max", lr.exp(), member)
    metrics.add_mean(f"{prefix}/logprob_diff_mean", lr.abs(), member)
    metrics.add_max(f"{prefix}/logprob_diff_max", lr.abs(), member)
    metrics.add_mean(f"{prefix}/mismatch_kl", mismatch_kl(lr), member)
    metrics.add_mean(f"{prefix}/masked_fraction", masked, member)
    if capped is not None:
        metrics.add_mean(f"{prefix}/ratio_capped_fraction", capped, member)


def mismatch_kl(lr: torch.Tensor) -> torch.Tensor:
    """Return the per-token estimate k3 of KL(generator ‖ trainer), in nats: exp(lr) - 1 - lr.

    Over tokens that the generator sampled its mean is unbiased, and every value is at least 0
    (Schulman, "Approximating KL Divergence", 2020).

    Args:
        lr: logp - generator_logp, of any shape.
    """
    return torch.expm1(lr) - lr


def mismatch_of(
    policy_logprobs: torch.Tensor, batch: TrainingBatch
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return how far the trainer's log-probabilities are from the generator's, token by token.

    Returns:
        lr = logp - generator_logp; its `mismatch_kl`; and bool: which tokens the policy sampled.
        Each is [B, L]. The first two are 0 on the other tokens.
    """
    sampled = batch.loss_mask & (batch.policy_versions >= 0)
    lr = torch.where(sampled, policy_logprobs.double() - batch.generator_logprobs.double(), 0)
    return lr, mismatch_kl(lr), sampled


@torch.no_grad()
def mismatch_metrics(
    policy_logprobs: torch.Tensor, batch: TrainingBatch, policy_version: int
) -> MetricSums:
    """Return the mismatch of a microbatch, over every token that the policy sampled.

    - ``mismatch_kl/all``, ``mismatch_kl/task/<name>`` and ``mismatch_kl/age/<n>``: `mismatch_kl`.
    - ``mismatch/replica/<r>/age/<n>``, if the replicas are known: mean distance of the two
      log-probabilities, in nats.
    - ``ref_kl/kl/task/<name>``: distance to each task's reference model, E[logp - ref_logp], over
      the tokens that feed ref_kl.

    Which ages and replicas occur is read from the batch. On a GPU each read would wait for the
    device, so a step calls this on the CPU, at its end.

    Args:
        policy_logprobs: [B, L], on the batch's device.
        policy_version: version of the trainer before the step's update. A token's age is this less
            the version that sampled it.
    """
    metrics = MetricSums()
    lr, kl, sampled = mismatch_of(policy_logprobs, batch)
    metrics.add_mean("mismatch_kl/all", kl, sampled)
    for task_id, name in enumerate(batch.task_names):
        of_task = batch.task_ids == task_id
        metrics.add_mean(f"mismatch_kl/task/{name}", kl, sampled & of_task)
        distance = policy_logprobs.double() - batch.ref_logprobs.double()
        metrics.add_mean(f"ref_kl/kl/task/{name}", distance, ref_kl_members(batch) & of_task)
    for version in batch.policy_versions[sampled].unique().tolist():
        of_age = sampled & (batch.policy_versions == version)
        metrics.add_mean(f"mismatch_kl/age/{policy_version - version}", kl, of_age)
    known = sampled & (batch.replicas >= 0)
    pairs = torch.stack([batch.replicas[known].int(), batch.policy_versions[known]], dim=1)
    for replica, version in pairs.unique(dim=0).tolist():
        of_pair = known & (batch.replicas == replica) & (batch.policy_versions == version)
        age = policy_version - version
        metrics.add_mean(f"mismatch/replica/{replica}/age/{age}", lr.abs(), of_pair)
    return metrics
