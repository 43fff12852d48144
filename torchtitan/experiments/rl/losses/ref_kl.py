"""The ref_kl component: on-policy distillation towards a reference model's log-probabilities."""

from dataclasses import dataclass

import torch

from torchtitan.config import Configurable
from torchtitan.experiments.rl.bounds import NonNegativeFloat
from torchtitan.experiments.rl.configurable import UserConfigurable
from torchtitan.experiments.rl.losses.variants import PerToken


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
