"""The loss of one microbatch: Σ over components (Σ over member tokens w·ℓ) / N_component.

The rl component's losses are in `variants.py`. Here are: metrics that are right over a whole optimizer step; which tokens are
members and what each component is divided by; ce, ref_kl and the distance to a reference, a term beside rl; the sum; and how
far the trainer's log-probabilities are from the generator's.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

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
    """Named metrics of some tokens, to be merged over microbatches, reduced over ranks and turned into floats.

    A mean is kept as (sum, weight), so a merged mean is over tokens, never an average of averages. Values are float64 and stay
    on the device they came from until ``all_reduce`` or ``compute``.
    """

    def __init__(self) -> None:
        self._entries: dict[str, tuple[Kind, torch.Tensor]] = {}

    def add_sum(self, name: str, value: torch.Tensor | float) -> None:
        """A part of a sum, such as a microbatch's loss already divided by the step's denominator."""
        self._add(name, "sum", torch.as_tensor(value).detach().double().reshape(1))

    @torch.no_grad()
    def add_mean(self, name: str, values: torch.Tensor, mask: torch.Tensor) -> None:
        """Values of the tokens where ``mask`` is True, each with weight 1. What lies elsewhere may be anything.

        Args:
            values: any shape and dtype.
            mask: bool, of the same shape.
        """
        self._add(
            name,
            "mean",
            torch.stack([torch.where(mask, values.double(), 0).sum(), mask.sum().double()]),
        )

    @torch.no_grad()
    def add_max(self, name: str, values: torch.Tensor, mask: torch.Tensor) -> None:
        """As add_mean, but the largest is kept. A nan is kept too: it is what one looks for."""
        nothing = values.new_full((1,), -math.inf, dtype=torch.float64)
        self._add(
            name,
            "max",
            torch.cat([torch.where(mask, values.double(), -math.inf).flatten(), nothing])
            .max()
            .reshape(1),
        )

    def merge(self, other: "MetricSums") -> None:
        """Take in the metrics of another microbatch or rank. Names may differ.

        Raises:
            ValueError: a name is a metric of another kind there.
        """
        for name, (kind, value) in other._entries.items():
            self._add(name, kind, value)

    def all_reduce(self, group: dist.ProcessGroup | None = None) -> None:
        """Merge over the ranks of ``group``: afterwards each holds the same, on the CPU. Nothing to do in a single process.

        A rank that saw no token of a task lacks its name, so names travel with the values: one gather of a few kilobytes a
        rank, merged in rank order, which gives every rank the same bits.
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
        """Floats by name, sorted. A mean or maximum of no token is left out: there is no number to report."""
        floats = {}
        for name, (kind, (value, *weight)) in sorted(self._numbers().items()):
            if any(weight) or kind == "sum" or (kind == "max" and value != -math.inf):
                floats[name] = value / weight[0] if weight else value
        return floats

    def _numbers(self) -> dict[str, tuple[Kind, list[float]]]:
        """By name. One transfer from a device for all of them: each would wait for it."""
        found: dict[str, tuple[Kind, list[float]]] = {}
        for device in {value.device for _, value in self._entries.values()}:
            own = [
                (name, kind, value)
                for name, (kind, value) in self._entries.items()
                if value.device == device
            ]
            numbers = iter(torch.cat([value for *_, value in own]).tolist())
            found |= {name: (kind, [next(numbers) for _ in value]) for name, kind, value in own}
        return found

    def _add(self, name: str, kind: Kind, value: torch.Tensor) -> None:
        if name not in self._entries:
            self._entries[name] = (kind, value)
            return
        held_kind, held = self._entries[name]
        if held_kind != kind:
            raise ValueError(
                f"metric {name!r} is a {held_kind} and can't also be a {kind}: give one of them another name"
            )
        value = value.to(held.device)
        self._entries[name] = (kind, torch.maximum(held, value) if kind == "max" else held + value)


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
        counts.append(
            torch.where(member, weights.double().abs(), 0).sum()
            if wanted == "weights"
            else member.sum().double()
        )
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
    return replace(
        batch, advantages=torch.where(rl_members(batch), advantages, 0).to(batch.advantages.dtype)
    )


class CrossEntropy(UserConfigurable):
    """ℓ = -logp, per token, in nats. A loss of your own is a subclass with a ``per_token``."""

    def per_token(self, logprobs: torch.Tensor) -> torch.Tensor | tuple[torch.Tensor, OwnMetrics]:
        """Losses [B, L], before the token's weight, of log-probabilities [B, L]; with metrics of its own, if it has any."""
        return -logprobs


class RefKL(UserConfigurable):
    """Policy gradient of the reverse KL to a reference model, one sampled token at a time.

    The gain of token t is ``g = stopgrad(ref_logp - logp)``: sampled from the policy, -g has the expectation KL(policy ‖ ref),
    so g takes the advantage's place (on-policy distillation, Agarwal et al., arXiv:2306.13649; per-token form as in
    Thinking Machines, "On-Policy Distillation", 2025).

        lr = logp - generator_logp,  ρ = exp(lr),  d = exp(logp) - exp(generator_logp)
        drop = d < -mask_low
        ℓ = -keep·g·min(ρ, ratio_max) + kl_tau·lr²
    """

    @dataclass(kw_only=True, slots=True)
    class Config(Configurable.Config):
        mask_low: NonNegativeFloat = 0.2
        """A token whose probability fell by more than this since it was sampled has no gain."""
        kl_tau: NonNegativeFloat = 1e-3
        """Weight of the squared log ratio, which holds the policy near the generator's."""
        ratio_max: RatioMax = RATIO_MAX
        """Largest importance ratio that the loss computes with; None: no cap. A token above it has no
        gain."""

    config: Config

    def per_token(
        self, logprobs: torch.Tensor, generator_logprobs: torch.Tensor, ref_logprobs: torch.Tensor
    ) -> PerToken:
        """Losses [B, L], before the token's weight, and bool [B, L]: the dropped tokens. The inputs are [B, L]. A subclass may
        return metrics of its own too, as for ``RLLoss``."""
        c = self.config
        lr = logprobs - generator_logprobs
        gain, drop = self._gain(logprobs, generator_logprobs, ref_logprobs)
        ratio, capped = capped_ratio(lr, gain, c.ratio_max)
        return -gain * ratio + c.kl_tau * lr**2, drop | capped

    def ratio_capped(
        self, logprobs: torch.Tensor, generator_logprobs: torch.Tensor, ref_logprobs: torch.Tensor
    ) -> torch.Tensor | None:
        """Return bool [B, L]: where ``ratio_max`` takes the gain. None: the loss has no cap.

        The metric ``ref_kl/ratio_capped_fraction`` is the share of these tokens. Return None in a
        subclass whose ``per_token`` has no cap.
        """
        gain, _ = self._gain(logprobs, generator_logprobs, ref_logprobs)
        return capped_ratio(logprobs - generator_logprobs, gain, self.config.ratio_max)[1]

    def _gain(
        self, logprobs: torch.Tensor, generator_logprobs: torch.Tensor, ref_logprobs: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the gain g, which is 0 for dropped tokens, and bool: the dropped tokens."""
        d = logprobs.detach().exp() - generator_logprobs.exp()
        drop = d < -self.config.mask_low
        return torch.where(drop, 0, (ref_logprobs - logprobs).detach()), drop


LARGEST_KL = 10.0
"""Of a token, in nats."""


def reference_kl(
    policy_logprobs: torch.Tensor,
    reference_logprobs: torch.Tensor,
    batch: TrainingBatch,
    denominators: LossDenominators,
    coefficient: float,
) -> tuple[torch.Tensor, MetricSums]:
    """The KL term of GRPO (arXiv:2402.03300, equation 4), for any rl loss:

        d = ref_logp - logp,  ℓ = kl_coef·min(exp(d) - d - 1, 10)

    summed over rl member tokens and divided as the rl component is. Sampled from the policy, exp(d) - d - 1 has the expectation
    KL(policy ‖ reference), and no value is below 0. A token counts alike whatever its rl weight is. The bound, which d = 2.61
    and d = -11 meet, is verl's: without it one token with d = 15 adds 3 million. A token above it has no gradient.

    Args:
        policy_logprobs, reference_logprobs: [B, L]; the first is differentiable. Both at the sampling temperature.

    Returns:
        A scalar, part of the step's loss as ``compute_loss``'s is, and metrics: ``loss/reference_kl``, what it adds to
        ``loss/total``; ``reference/kl`` in nats a token, also ``reference/kl/task/<name>``; ``reference/bounded``, the share of
        tokens that the bound touched.
    """
    member = rl_members(batch)
    zero = torch.zeros((), dtype=policy_logprobs.dtype, device=policy_logprobs.device)
    difference = torch.where(
        member, reference_logprobs.to(policy_logprobs.dtype), zero
    ) - torch.where(member, policy_logprobs, zero)
    kl = (
        torch.expm1(difference.clamp(max=20)) - difference
    )  # an infinite gradient, masked, would be nan
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
    """Which rl variant, with its settings."""
    corrections: list[Correction.Config] = field(default_factory=list)
    """Of the rl component, where trainer and generators differ: ``losses/variants.py``."""
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
    policy_logprobs: torch.Tensor,
    batch: TrainingBatch,
    denominators: LossDenominators,
    config: LossConfig,
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

    def total(
        name: str, member: torch.Tensor, weights: torch.Tensor, losses: torch.Tensor, count: float
    ) -> torch.Tensor:
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
    given, factors, left_out = correct(tokens, [entry.build() for entry in config.corrections])
    variant = config.rl.build()
    losses, masked, *own = variant.per_token(given)
    add_own_metrics(metrics, "rl", own, given.member)
    if config.corrections:
        losses, masked = torch.where(given.member, factors * losses, 0), masked & given.member
    for name, where in left_out.items():
        metrics.add_mean(f"rl/left_out/{name}", where, member)
    rl = total("rl", member, batch.rl_weights, losses, denominators.rl)
    with torch.no_grad():
        capped = variant.ratio_capped(given)
    _add_ratio_metrics(
        metrics, "rl", tokens.logprobs, tokens.generator_logprobs, member, masked, capped
    )

    member = ce_members(batch)
    nll = -at(member, policy_logprobs)
    returned = config.ce.build().per_token(at(member, policy_logprobs))
    losses, *own = returned if isinstance(returned, tuple) else (returned,)
    add_own_metrics(metrics, "ce", own, member)
    ce = total("ce", member, batch.ce_weights, losses, denominators.ce)
    metrics.add_mean("ce/nll", nll, member)
    for index, role in enumerate(ROLES):
        metrics.add_mean(f"ce/{role}/nll", nll, member & (batch.role_ids == index))

    member = ref_kl_members(batch)
    logprobs, generator = at(member, policy_logprobs), at(member, batch.generator_logprobs)
    reference = at(member, batch.ref_logprobs)
    distillation = config.ref_kl.build()
    losses, masked, *own = distillation.per_token(logprobs, generator, reference)
    add_own_metrics(metrics, "ref_kl", own, member)
    ref_kl = total("ref_kl", member, batch.ref_kl_weights, losses, denominators.ref_kl)
    with torch.no_grad():
        capped = distillation.ratio_capped(logprobs, generator, reference)
    _add_ratio_metrics(metrics, "ref_kl", logprobs, generator, member, masked, capped)
    # The plain estimator, E[logp - ref_logp]: what the component's gain g sums up to.
    metrics.add_mean("ref_kl/kl", logprobs - reference, member)

    loss = rl + ce + ref_kl
    for name, part in (("total", loss), ("rl", rl), ("ce", ce), ("ref_kl", ref_kl)):
        metrics.add_sum(f"loss/{name}", part)
    return loss, metrics


def add_own_metrics(
    sums: MetricSums, component: str, own: Sequence[Any], member: torch.Tensor
) -> None:
    """
    Args:
        own: OwnMetrics of a loss, if it has any.

    Raises:
        ValueError: a metric that is no value for each token; names it.
    """
    for name, values in (own[0] if own else {}).items():
        if not isinstance(values, torch.Tensor) or values.shape != member.shape:
            kind = (
                f"shape {tuple(values.shape)}"
                if isinstance(values, torch.Tensor)
                else f"a {type(values).__name__}"
            )
            raise ValueError(
                f"metric {component}/own/{name} has {kind}: want a tensor of shape {tuple(member.shape)}"
            )
        sums.add_mean(f"{component}/own/{name}", values.detach(), member)


@torch.no_grad()
def _add_ratio_metrics(
    metrics: MetricSums,
    prefix: str,
    logprobs: torch.Tensor,
    generator_logprobs: torch.Tensor,
    member: torch.Tensor,
    masked: torch.Tensor,
    capped: torch.Tensor | None,
) -> None:
    lr = logprobs - generator_logprobs
    metrics.add_mean(f"{prefix}/ratio_mean", lr.exp(), member)
    metrics.add_max(f"{prefix}/ratio_max", lr.exp(), member)
    metrics.add_mean(f"{prefix}/logprob_diff_mean", lr.abs(), member)
    metrics.add_max(f"{prefix}/logprob_diff_max", lr.abs(), member)
    metrics.add_mean(f"{prefix}/mismatch_kl", mismatch_kl(lr), member)
    metrics.add_mean(f"{prefix}/masked_fraction", masked, member)
    if capped is not None:
        metrics.add_mean(f"{prefix}/ratio_capped_fraction", capped, member)


def mismatch_kl(lr: torch.Tensor) -> torch.Tensor:
    """Per-token estimate of KL(generator ‖ trainer), in nats, from lr = logp - generator_logp: k3 = exp(lr) - 1 - lr.

    On tokens sampled by the generator its mean is unbiased and every value is at least 0 (Schulman, "Approximating KL
    Divergence", 2020).
    """
    return torch.expm1(lr) - lr


def mismatch_of(
    policy_logprobs: torch.Tensor, batch: TrainingBatch
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """[B, L] each: logp - generator_logp, its ``mismatch_kl``, and which tokens the policy sampled; both are 0 elsewhere."""
    sampled = batch.loss_mask & (batch.policy_versions >= 0)
    lr = torch.where(sampled, policy_logprobs.double() - batch.generator_logprobs.double(), 0)
    return lr, mismatch_kl(lr), sampled


@torch.no_grad()
def mismatch_metrics(
    policy_logprobs: torch.Tensor, batch: TrainingBatch, policy_version: int
) -> MetricSums:
    """Mismatch KL of a microbatch: ``mismatch_kl/all``, ``mismatch_kl/task/<name>`` and ``mismatch_kl/age/<n>``; and where the
    replicas are known, ``mismatch/replica/<r>/age/<n>``: the mean distance of the two log-probabilities, in nats.

    Also ``ref_kl/kl/task/<name>``, the distance to each task's reference model, E[logp - ref_logp] over its ref_kl tokens.

    Counts every token the policy sampled, whatever component it feeds. Which ages and replicas occur is read from the batch: on
    a GPU each would wait for it, so a step calls this on the CPU, at its end.

    Args:
        policy_logprobs: [B, L], where the batch is.
        policy_version: the trainer's, before this step's update. A token's age is this less the version it was sampled with.
    """
    metrics = MetricSums()
    lr, kl, sampled = mismatch_of(policy_logprobs, batch)
    metrics.add_mean("mismatch_kl/all", kl, sampled)
    for task_id, name in enumerate(batch.task_names):
        own = batch.task_ids == task_id
        metrics.add_mean(f"mismatch_kl/task/{name}", kl, sampled & own)
        compared = ref_kl_members(batch) & own
        metrics.add_mean(
            f"ref_kl/kl/task/{name}",
            policy_logprobs.double() - batch.ref_logprobs.double(),
            compared,
        )
    for version in batch.policy_versions[sampled].unique().tolist():
        metrics.add_mean(
            f"mismatch_kl/age/{policy_version - version}",
            kl,
            sampled & (batch.policy_versions == version),
        )
    known = sampled & (batch.replicas >= 0)
    pairs = torch.stack([batch.replicas[known].int(), batch.policy_versions[known]], dim=1).unique(
        dim=0
    )
    for replica, version in pairs.tolist():
        own = known & (batch.replicas == replica) & (batch.policy_versions == version)
        metrics.add_mean(
            f"mismatch/replica/{replica}/age/{policy_version - version}", lr.abs(), own
        )
    return metrics
