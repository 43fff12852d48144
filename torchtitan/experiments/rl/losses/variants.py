"""The rl component's variants. Each is a class with one formula; a user's own is a subclass of RLLoss, or CustomRLLoss.

In every formula: lr = logp - generator_logp, ρ = exp(lr), A the advantage, sg(·) a constant in the backward pass.
The sum over tokens is divided by the step's member tokens, whatever normalisation the paper uses.
"""

import abc
import math
from collections.abc import Callable
from dataclasses import dataclass, fields

import torch

from torchtitan.config import Configurable
from torchtitan.experiments.rl.bounds import NonNegativeFloat
from torchtitan.experiments.rl.compat.torchtitan import built_class
from torchtitan.experiments.rl.configurable import UserConfigurable
from torchtitan.experiments.rl.errors import RunError
from torchtitan.experiments.rl.losses.metrics import OwnMetrics
from torchtitan.experiments.rl.user_code.calls import cause_of


@dataclass(kw_only=True, slots=True, frozen=True)
class RLTokens:
    """What an rl loss sees of a batch. All [B, L]; a token that is no member reads 0 in the three float streams.

    Shapes never depend on the data, so no loss makes the host wait for the device.
    """

    logprobs: torch.Tensor
    """The policy's, attached to the graph."""
    generator_logprobs: torch.Tensor
    advantages: torch.Tensor
    member: torch.Tensor
    """bool. What a loss returns elsewhere is discarded, and no gradient flows there."""
    sequence_ids: torch.Tensor
    """int64, in [0, B * L). The same for all tokens of one packed training sample."""


PerToken = tuple[torch.Tensor, torch.Tensor] | tuple[torch.Tensor, torch.Tensor, OwnMetrics]
"""What a loss with a mask returns: losses, masked tokens, and metrics of its own if it has any."""


def sequence_log_ratios(tokens: RLTokens) -> tuple[torch.Tensor, torch.Tensor]:
    """For each token the sum of lr over its sequence, and the sequence's number of member tokens: float64 [B, L], constants."""
    ids = tokens.sequence_ids.flatten()
    lr = (tokens.logprobs - tokens.generator_logprobs).detach().double()  # 0 on tokens that are no member
    lr_sum = lr.new_zeros(ids.numel()).index_add(0, ids, lr.flatten())
    count = lr.new_zeros(ids.numel()).index_add(0, ids, tokens.member.flatten().double())
    return lr_sum[ids].view_as(lr), count[ids].view_as(lr)


class RLLoss(UserConfigurable, abc.ABC):
    """Base of the rl variants."""

    @dataclass(kw_only=True, slots=True)
    class Config(Configurable.Config):
        pass

    def __init__(self, config: Config):
        self.config = config

    @abc.abstractmethod
    def per_token(self, tokens: RLTokens) -> PerToken:
        """Losses [B, L], before the token's weight, and bool [B, L]: where a mask or clip took or capped the gradient.

        A third entry, a dict of values [B, L] by name, gives the metrics ``rl/own/<name>``.
        """


class DPPO(RLLoss):
    """Divergence PPO, binary total variation (Qi et al., arXiv:2602.04879), with a squared log-ratio penalty (Kimi k1.5,
    arXiv:2501.12599). The trust region bounds how far a token's probability moved, not by what factor.

        d = exp(logp) - exp(generator_logp)
        drop = d > mask_high where A > 0, else d < -mask_low
        ℓ = -keep·adv_tau·A·ρ + kl_tau·lr²
    """

    @dataclass(kw_only=True, slots=True)
    class Config(RLLoss.Config):
        mask_high: NonNegativeFloat = 0.2
        """A token of positive advantage already this much more probable than when sampled has no policy gradient."""
        mask_low: NonNegativeFloat = 0.2
        """The same for one of negative advantage already this much less probable."""
        adv_tau: NonNegativeFloat = 1.0
        """Weight of the policy gradient."""
        kl_tau: NonNegativeFloat = 1e-3
        """Weight of the squared log ratio."""

    config: Config

    def per_token(self, tokens: RLTokens) -> tuple[torch.Tensor, torch.Tensor]:
        c, A = self.config, tokens.advantages
        lr = tokens.logprobs - tokens.generator_logprobs
        d = tokens.logprobs.detach().exp() - tokens.generator_logprobs.exp()
        drop = torch.where(A > 0, d > c.mask_high, d < -c.mask_low)
        gain = torch.where(drop, 0, A)
        ratio = torch.where(gain == 0, 0, lr).exp()  # masked before exp: the ratio may overflow, and 0 * inf is nan
        return -c.adv_tau * gain * ratio + c.kl_tau * lr**2, drop


def clipped_surrogate(
    lr: torch.Tensor, A: torch.Tensor, clip_low: float, clip_high: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """-min(ρ·A, clip(ρ, 1 - clip_low, 1 + clip_high)·A) and where the clip bites, for log ratios ``lr`` of any shape.

    The minimum bounds ρ from above where A > 0 and from below where A < 0, so ρ is bounded before it is exponentiated and an
    extreme log ratio can't overflow.
    """
    high = math.log1p(clip_high)
    low = math.log1p(-clip_low) if clip_low < 1 else -math.inf
    positive = A > 0
    bounded = torch.where(positive, lr.clamp(max=high), lr.clamp(min=low))
    ratio = torch.where(A == 0, 0, bounded).exp()  # masked before exp: without a bound it may overflow, and 0 * inf is nan
    return -A * ratio, torch.where(positive, lr > high, lr < low) & (A != 0)


class PPOClip(RLLoss):
    """Clipped surrogate of PPO (Schulman et al., arXiv:1707.06347, eq. 7), per token; unequal bounds are DAPO's clip-higher
    (Yu et al., arXiv:2503.14476).

        ℓ = -min(ρ·A, clip(ρ, 1 - clip_low, 1 + clip_high)·A)
    """

    @dataclass(kw_only=True, slots=True)
    class Config(RLLoss.Config):
        clip_low: NonNegativeFloat = 0.2
        clip_high: NonNegativeFloat = 0.2
        """DAPO: 0.28."""

    config: Config

    def per_token(self, tokens: RLTokens) -> tuple[torch.Tensor, torch.Tensor]:
        lr = tokens.logprobs - tokens.generator_logprobs
        return clipped_surrogate(lr, tokens.advantages, self.config.clip_low, self.config.clip_high)


class CISPO(RLLoss):
    """Clipped importance weights (MiniMax-M1, arXiv:2506.13585, eq. 4).

        ℓ = -sg(clip(ρ, 1 - clip_low, 1 + clip_high))·A·logp

    Every token keeps a gradient, of bounded weight.
    """

    @dataclass(kw_only=True, slots=True)
    class Config(RLLoss.Config):
        clip_low: NonNegativeFloat = 1.0
        """1 is no lower bound, as in the paper."""
        clip_high: NonNegativeFloat = 4.0
        """The paper tunes this bound and gives no number. 4 caps the weight at 5."""

    config: Config

    def per_token(self, tokens: RLTokens) -> tuple[torch.Tensor, torch.Tensor]:
        low, high = 1 - self.config.clip_low, 1 + self.config.clip_high
        ratio = (tokens.logprobs.detach() - tokens.generator_logprobs).exp()
        return -ratio.clamp(low, high) * tokens.advantages * tokens.logprobs, (ratio < low) | (ratio > high)


class GSPO(RLLoss):
    """Sequence-level ratios (Zheng et al., arXiv:2507.18071), in the paper's GSPO-token form (eq. 13 and 14), which lets
    advantages differ within a sequence; where they don't, its gradient is GSPO's.

        s = exp(mean of lr over the sequence's member tokens)        (geometric mean of their ratios)
        s_t = sg(s)·exp(logp - sg(logp))
        ℓ = -min(s_t·A, clip(s_t, 1 - clip_low, 1 + clip_high)·A)

    A sequence is one packed training sample. The paper averages tokens within a sequence, then sequences; here every token
    counts the same, so long sequences weigh more.
    """

    @dataclass(kw_only=True, slots=True)
    class Config(RLLoss.Config):
        clip_low: NonNegativeFloat = 3e-4
        clip_high: NonNegativeFloat = 4e-4
        """Both bounds are the paper's; sequence ratios vary far less than token ratios."""

    config: Config

    def per_token(self, tokens: RLTokens) -> tuple[torch.Tensor, torch.Tensor]:
        logprobs = tokens.logprobs
        lr_sum, count = sequence_log_ratios(tokens)
        log_s = (lr_sum / count.clamp(min=1)).to(logprobs.dtype)
        log_s_t = log_s + (logprobs - logprobs.detach())
        return clipped_surrogate(log_s_t, tokens.advantages, self.config.clip_low, self.config.clip_high)


class CustomRLLoss(RLLoss):
    """A function of yours: RLTokens in, losses [B, L] out, one per token and before its weight; or these and a dict of values
    [B, L], for the metrics ``rl/own/<name>``. It is given copies.

    Raises:
        ValueError: the function returned something else. Names the function.
        RunError: the function raised anything. Names the function.
    """

    @dataclass(kw_only=True, slots=True)
    class Config(RLLoss.Config):
        function: Callable[[RLTokens], torch.Tensor | tuple[torch.Tensor, OwnMetrics]]
        """Importable by the trainer's processes: defined at the top level of a module."""

    config: Config

    def per_token(self, tokens: RLTokens) -> PerToken:
        owner = loss_name(self.config)
        copies = {entry.name: getattr(tokens, entry.name).clone() for entry in fields(tokens)}
        try:
            returned = self.config.function(RLTokens(**copies))
        except BaseException as error:  # an exit would end the trainer's thread without a cause
            raise RunError(f"{owner}: {cause_of(error)}") from error
        with_metrics = isinstance(returned, tuple) and len(returned) == 2 and isinstance(returned[1], dict)
        losses, own = returned if with_metrics else (returned, {})
        if not isinstance(losses, torch.Tensor) or not losses.is_floating_point():
            kind = losses.dtype if isinstance(losses, torch.Tensor) else type(losses).__name__
            raise ValueError(f"{owner} returned {kind}, want a floating-point tensor of losses")
        if losses.shape != tokens.logprobs.shape:
            raise ValueError(
                f"{owner} returned shape {tuple(losses.shape)} for tokens of shape {tuple(tokens.logprobs.shape)}: return one "
                "loss per token, not their sum or mean"
            )
        if tokens.logprobs.requires_grad and not losses.requires_grad:
            raise ValueError(f"{owner} returned losses without a gradient: compute them from tokens.logprobs")
        return losses, torch.zeros_like(tokens.member), own


def loss_name(config: RLLoss.Config) -> str:
    """The rl variant as errors name it: its class, or the function."""
    if isinstance(config, CustomRLLoss.Config):
        function = config.function
        return f"rl loss {getattr(function, '__name__', type(function).__name__)!r}"
    return f"rl loss {built_class(config).__name__}"
