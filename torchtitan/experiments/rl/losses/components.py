"""The ce component, the ref_kl component, and the distance to a reference, which is a term beside the rl component."""

from dataclasses import dataclass

import torch

from torchtitan.config import Configurable
from torchtitan.experiments.rl.bounds import NonNegativeFloat
from torchtitan.experiments.rl.configurable import UserConfigurable
from torchtitan.experiments.rl.losses.members import rl_members
from torchtitan.experiments.rl.losses.metrics import MetricSums, OwnMetrics
from torchtitan.experiments.rl.losses.variants import PerToken
from torchtitan.experiments.rl.types import LossDenominators, TrainingBatch


class CrossEntropy(UserConfigurable):
    """ℓ = -logp, per token, in nats. A loss of your own is a subclass with a ``per_token``."""

    @dataclass(kw_only=True, slots=True)
    class Config(Configurable.Config):
        pass

    def __init__(self, config: Config):
        self.config = config

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
        ℓ = -keep·g·ρ + kl_tau·lr²
    """

    @dataclass(kw_only=True, slots=True)
    class Config(Configurable.Config):
        mask_low: NonNegativeFloat = 0.2
        """A token whose probability fell by more than this since it was sampled has no gain."""
        kl_tau: NonNegativeFloat = 1e-3
        """Weight of the squared log ratio, which holds the policy near the generator's."""

    def __init__(self, config: Config):
        self.config = config

    def per_token(self, logprobs: torch.Tensor, generator_logprobs: torch.Tensor, ref_logprobs: torch.Tensor) -> PerToken:
        """Losses [B, L], before the token's weight, and bool [B, L]: the dropped tokens. The inputs are [B, L]. A subclass may
        return metrics of its own too, as for ``RLLoss``."""
        c = self.config
        lr = logprobs - generator_logprobs
        d = logprobs.detach().exp() - generator_logprobs.exp()
        drop = d < -c.mask_low
        g = torch.where(drop, 0, (ref_logprobs - logprobs).detach())
        ratio = torch.where(g == 0, 0, lr).exp()  # masked before exp: the ratio may overflow, and 0 * inf is nan
        return -g * ratio + c.kl_tau * lr**2, drop


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
    difference = torch.where(member, reference_logprobs.to(policy_logprobs.dtype), zero) - torch.where(
        member, policy_logprobs, zero
    )
    kl = torch.expm1(difference.clamp(max=20)) - difference  # an infinite gradient, masked, would be nan
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
