"""Distance of the policy to a reference model, on the tokens that feed rl: a term of the loss, and a metric."""

import torch

from torchtitan.experiments.rl.losses.members import rl_members
from torchtitan.experiments.rl.losses.metrics import MetricSums
from torchtitan.experiments.rl.types import LossDenominators, TrainingBatch


def reference_kl(
    policy_logprobs: torch.Tensor,
    reference_logprobs: torch.Tensor,
    batch: TrainingBatch,
    denominators: LossDenominators,
    coefficient: float,
) -> tuple[torch.Tensor, MetricSums]:
    """The KL term of GRPO (arXiv:2402.03300, equation 4), for any rl loss:

        d = ref_logp - logp,  ℓ = kl_coef·(exp(d) - d - 1)

    summed over rl member tokens and divided as the rl component is. Sampled from the policy, exp(d) - d - 1 has the expectation
    KL(policy ‖ reference), and no value is below 0. A token counts alike whatever its rl weight is.

    Args:
        policy_logprobs, reference_logprobs: [B, L]; the first is differentiable. Both at the sampling temperature.

    Returns:
        A scalar, part of the step's loss as ``compute_loss``'s is, and metrics: ``loss/reference_kl``, what it adds to
        ``loss/total``, and ``reference/kl`` in nats a token, also ``reference/kl/task/<name>``.
    """
    member = rl_members(batch)
    zero = torch.zeros((), dtype=policy_logprobs.dtype, device=policy_logprobs.device)
    difference = torch.where(member, reference_logprobs.to(policy_logprobs.dtype), zero) - torch.where(
        member, policy_logprobs, zero
    )
    kl = torch.expm1(difference) - difference
    loss = coefficient * kl.sum() / denominators.rl
    metrics = MetricSums()
    metrics.add_sum("loss/reference_kl", loss)
    metrics.add_sum("loss/total", loss)
    metrics.add_mean("reference/kl", kl, member)
    for task_id, name in enumerate(batch.task_names):
        metrics.add_mean(f"reference/kl/task/{name}", kl, member & (batch.task_ids == task_id))
    return loss, metrics
