"""How far the trainer's log-probabilities are from the generator's, on the tokens the generator sampled."""

import torch

from torchtitan.experiments.rl.losses.members import ref_kl_members
from torchtitan.experiments.rl.losses.metrics import MetricSums
from torchtitan.experiments.rl.types import TrainingBatch


def mismatch_kl(lr: torch.Tensor) -> torch.Tensor:
    """Per-token estimate of KL(generator ‖ trainer), in nats, from lr = logp - generator_logp: k3 = exp(lr) - 1 - lr.

    On tokens sampled by the generator its mean is unbiased and every value is at least 0 (Schulman, "Approximating KL
    Divergence", 2020).
    """
    return torch.expm1(lr) - lr


@torch.no_grad()
def mismatch_metrics(policy_logprobs: torch.Tensor, batch: TrainingBatch, policy_version: int) -> MetricSums:
    """Mismatch KL of a microbatch: ``mismatch_kl/all``, ``mismatch_kl/task/<name>`` and ``mismatch_kl/age/<n>``; and where the
    replicas are known, the mean distance by replica and age.

    Also ``ref_kl/kl/task/<name>``, the distance to each task's reference model, E[logp - ref_logp] over its ref_kl tokens.

    Counts every token the policy sampled, whatever component it feeds. Waits for the device once, to learn which ages occur.

    Args:
        policy_logprobs: [B, L].
        policy_version: the trainer's, before this step's update. A token's age is this less the version it was sampled with.
    """
    metrics = MetricSums()
    sampled = batch.loss_mask & (batch.policy_versions >= 0)
    lr = torch.where(sampled, policy_logprobs.double() - batch.generator_logprobs.double(), 0)
    kl = mismatch_kl(lr)
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
