"""Metrics that are right over a whole optimizer step: sums and weights travel, and are divided once, at the end.

Among them: how far the trainer's log-probabilities are from the generator's, on the tokens the generator sampled.
"""

import math
from typing import Literal

import torch
import torch.distributed as dist

from torchtitan.experiments.rl.losses.members import ref_kl_members
from torchtitan.experiments.rl.types import TrainingBatch

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
        self._add(name, "mean", torch.stack([torch.where(mask, values.double(), 0).sum(), mask.sum().double()]))

    @torch.no_grad()
    def add_max(self, name: str, values: torch.Tensor, mask: torch.Tensor) -> None:
        """As add_mean, but the largest is kept. A nan is kept too: it is what one looks for."""
        nothing = values.new_full((1,), -math.inf, dtype=torch.float64)
        self._add(name, "max", torch.cat([torch.where(mask, values.double(), -math.inf).flatten(), nothing]).max().reshape(1))

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
            own = [(name, kind, value) for name, (kind, value) in self._entries.items() if value.device == device]
            numbers = iter(torch.cat([value for *_, value in own]).tolist())
            found |= {name: (kind, [next(numbers) for _ in value]) for name, kind, value in own}
        return found

    def _add(self, name: str, kind: Kind, value: torch.Tensor) -> None:
        if name not in self._entries:
            self._entries[name] = (kind, value)
            return
        held_kind, held = self._entries[name]
        if held_kind != kind:
            raise ValueError(f"metric {name!r} is a {held_kind} and can't also be a {kind}: give one of them another name")
        value = value.to(held.device)
        self._entries[name] = (kind, torch.maximum(held, value) if kind == "max" else held + value)


OwnMetrics = dict[str, torch.Tensor]
"""A value [B, L] for each token, by the metric's name. What it is on tokens that are no member does not matter."""


def add_own_metrics(sums: MetricSums, component: str, own: OwnMetrics, member: torch.Tensor) -> None:
    """
    Raises:
        ValueError: a metric that is no value for each token; names it.
    """
    for name, values in own.items():
        if not isinstance(values, torch.Tensor) or values.shape != member.shape:
            kind = f"shape {tuple(values.shape)}" if isinstance(values, torch.Tensor) else f"a {type(values).__name__}"
            raise ValueError(f"metric {component}/own/{name} has {kind}: want a tensor of shape {tuple(member.shape)}")
        sums.add_mean(f"{component}/own/{name}", values.detach(), member)


def mismatch_kl(lr: torch.Tensor) -> torch.Tensor:
    """Per-token estimate of KL(generator ‖ trainer), in nats, from lr = logp - generator_logp: k3 = exp(lr) - 1 - lr.

    On tokens sampled by the generator its mean is unbiased and every value is at least 0 (Schulman, "Approximating KL
    Divergence", 2020).
    """
    return torch.expm1(lr) - lr


def mismatch_of(policy_logprobs: torch.Tensor, batch: TrainingBatch) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """[B, L] each: logp - generator_logp, its ``mismatch_kl``, and which tokens the policy sampled; both are 0 elsewhere."""
    sampled = batch.loss_mask & (batch.policy_versions >= 0)
    lr = torch.where(sampled, policy_logprobs.double() - batch.generator_logprobs.double(), 0)
    return lr, mismatch_kl(lr), sampled


@torch.no_grad()
def mismatch_metrics(policy_logprobs: torch.Tensor, batch: TrainingBatch, policy_version: int) -> MetricSums:
    """Mismatch KL of a microbatch: ``mismatch_kl/all``, ``mismatch_kl/task/<name>`` and ``mismatch_kl/age/<n>``; and where the
    replicas are known, the mean distance by replica and age.

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
        metrics.add_mean(f"ref_kl/kl/task/{name}", policy_logprobs.double() - batch.ref_logprobs.double(), compared)
    for version in batch.policy_versions[sampled].unique().tolist():
        metrics.add_mean(f"mismatch_kl/age/{policy_version - version}", kl, sampled & (batch.policy_versions == version))
    if bool((batch.replicas[sampled] >= 0).any()):
        metrics.merge(_by_replica(lr.abs(), sampled, batch, policy_version))
    return metrics


def _by_replica(distances: torch.Tensor, sampled: torch.Tensor, batch: TrainingBatch, policy_version: int) -> MetricSums:
    """``mismatch/replica/<r>/age/<n>``: mean distance of the two log-probabilities, in nats."""
    metrics = MetricSums()
    known = sampled & (batch.replicas >= 0)
    pairs = torch.stack([batch.replicas[known].int(), batch.policy_versions[known]], dim=1).unique(dim=0)
    for replica, version in pairs.tolist():
        own = known & (batch.replicas == replica) & (batch.policy_versions == version)
        metrics.add_mean(f"mismatch/replica/{replica}/age/{policy_version - version}", distances, own)
    return metrics
