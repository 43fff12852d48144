"""Variants of the rl loss, and corrections of it.

Each variant is a class with one formula. One of your own is a subclass of RLLoss, or a function in
CustomRLLoss. In every formula lr = logp - generator_logp, ρ = exp(lr), A is the advantage, and
sg(·) a constant in the backward pass. The sum over tokens is divided by the step's member tokens,
whichever normalisation the paper uses.

DPPO, PPOClip and GSPO replace ρ by min(ρ, ratio_max), because none of them bounds it from above by
itself: DPPO tests the difference of probabilities, and the clip of the other two lets a ratio of
negative advantage grow. A capped ratio is constant, so its token has no policy gradient. CISPO has
no such field: its ratio is at most 1 + clip_high.

A correction makes up for the differences between the policy that sampled and the one that learns:
older weights, other kernels. It is a factor of a token's rl loss, constant in the backward pass,
and works with every variant. A sequence is one packed training sample.

    ℓ = w·ℓ_rl        w: the product over ``LossConfig.corrections``; a token with w = 0 is left out

A token that is left out is no member for the variant (GSPO's mean goes over the others), and its
loss and gradient are 0. It still counts in the denominator, as in IcePop's own objective: which
tokens are left out is known only after the forward pass, and the denominator must be known before
the step's first backward pass.
"""

import abc
import math
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, replace
from typing import Annotated, ClassVar

import torch
from annotated_types import Ge, Gt, Lt

from torchtitan.experiments.rl.bounds import AtMost, Cure, NonNegativeFloat, PositiveFloat
from torchtitan.experiments.rl.compat.torchtitan import built_class
from torchtitan.experiments.rl.configurable import UserConfigurable
from torchtitan.experiments.rl.errors import ConfigError, RunError, cause_of


@dataclass(kw_only=True, slots=True, frozen=True)
class RLTokens:
    """Tokens of a batch as an rl loss is given them. Every field is [B, L].

    The float streams are 0 on tokens that are no members. Shapes never depend on the data, so no
    loss makes the host wait for the device.
    """

    logprobs: torch.Tensor
    """The policy's log-probabilities, attached to the graph."""
    generator_logprobs: torch.Tensor
    advantages: torch.Tensor
    member: torch.Tensor
    """bool. Losses of other tokens are discarded, and no gradient flows there."""
    sequence_ids: torch.Tensor
    """int64, in [0, B * L). Equal for all tokens of one packed training sample."""


OwnMetrics = dict[str, torch.Tensor]
"""Metrics of a loss by name: one value for each token, [B, L]. Values of tokens that are no members
are ignored."""

PerToken = tuple[torch.Tensor, torch.Tensor] | tuple[torch.Tensor, torch.Tensor, OwnMetrics]
"""Result of a loss with a mask: losses, masked tokens, and metrics of its own if it has any."""

RatioMax = (
    Annotated[float, Gt(1), Cure("a ratio of 1 is an on-policy token; None sets no cap")] | None
)
"""Type of the fields ``ratio_max``."""

RATIO_MAX = 100.0
"""Default of the fields ``ratio_max``. Healthy runs stay below it: the largest ratio of the demo is
3, that of a pretrained model's first steps 8 (docs/measured.md)."""


def cap_log_ratio(lr: torch.Tensor, ratio_max: float | None) -> tuple[torch.Tensor, torch.Tensor]:
    """Return log(min(ρ, ratio_max)), and where the cap acts.

    The log is capped and not ρ, because ρ may overflow, and the backward pass of a cap on ρ would
    multiply that infinity by 0. A loss of your own calls this for a cap like that of the variants.

    Args:
        lr: log ratios, of any shape.
        ratio_max: the cap; None returns ``lr`` as it is.
    """
    if ratio_max is None:
        return lr, torch.zeros_like(lr, dtype=torch.bool)
    log_max = math.log(ratio_max)
    return lr.clamp(max=log_max), lr > log_max


def capped_ratio(
    lr: torch.Tensor,
    gain: torch.Tensor,
    ratio_max: float | None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return min(ρ, ratio_max), or 1 where ``gain`` is 0, and where the cap takes a gradient.

    Args:
        lr: log ratios, of any shape.
        gain: the factor of the ratio in the loss, of the same shape. 0 means that the token has no
            policy gradient, so the cap takes none.
    """
    # Masked before exp: the ratio may overflow, and 0 * inf is nan.
    used = torch.where(gain == 0, 0, lr)
    log_ratio, capped = cap_log_ratio(used, ratio_max)
    return log_ratio.exp(), capped


def sequence_log_ratios(tokens: RLTokens) -> tuple[torch.Tensor, torch.Tensor]:
    """Return for each token the sum of lr over its sequence, and the sequence's number of members.

    Returns:
        float64 [B, L] each, without a gradient.
    """
    ids = tokens.sequence_ids.flatten()
    # Both log-probabilities are 0 on tokens that are no members.
    lr = (tokens.logprobs - tokens.generator_logprobs).detach().double()
    lr_sum = lr.new_zeros(ids.numel()).index_add(0, ids, lr.flatten())
    count = lr.new_zeros(ids.numel()).index_add(0, ids, tokens.member.flatten().double())
    return lr_sum[ids].view_as(lr), count[ids].view_as(lr)


class RLLoss(UserConfigurable, abc.ABC):
    """Base of the rl variants.

    Example::

        from torchtitan.experiments.rl.losses import RLLoss, cap_log_ratio

        class PolicyGradient(RLLoss):  # ℓ = -A·min(ρ, 100)
            def per_token(self, tokens):
                lr = tokens.logprobs - tokens.generator_logprobs
                log_ratio, capped = cap_log_ratio(lr, 100.0)
                return -tokens.advantages * log_ratio.exp(), capped
    """

    @abc.abstractmethod
    def per_token(self, tokens: RLTokens) -> PerToken:
        """Return the losses, before they are weighted, and which tokens a mask or a clip took.

        Returns:
            Losses [B, L]; bool [B, L]: where a mask, a clip or a cap took the gradient or bounded
            it; and optionally a dict of values [B, L], for the metrics ``rl/own/<name>``.
        """

    def ratio_capped(self, tokens: RLTokens) -> torch.Tensor | None:
        """Return where a cap on the ratio takes the gradient, bool [B, L]; None if there is no cap.

        The metric ``rl/ratio_capped_fraction`` is the share of these tokens. Override this if your
        loss has a cap.
        """
        return None


class DPPO(RLLoss):
    """Divergence PPO, binary total variation (Qi et al., arXiv:2602.04879).

    The trust region bounds how far a token's probability moved, not by which factor. A squared
    log ratio is added (Kimi k1.5, arXiv:2501.12599).

        d = exp(logp) - exp(generator_logp)
        drop = d > mask_high where A > 0, else d < -mask_low
        ℓ = -keep·adv_tau·A·min(ρ, ratio_max) + kl_tau·lr²

    A small d does not bound ρ: a token that was sampled with probability 1e-6 and now has 0.1
    passes the test with a ratio of 1e5.
    """

    @dataclass(kw_only=True, slots=True)
    class Config(RLLoss.Config):
        mask_high: NonNegativeFloat = 0.2
        """Largest rise of a token's probability since it was sampled, beyond which a token of
        positive advantage has no policy gradient."""
        mask_low: NonNegativeFloat = 0.2
        """Largest fall, beyond which a token of negative advantage has no policy gradient."""
        adv_tau: NonNegativeFloat = 1.0
        """Weight of the policy gradient."""
        kl_tau: NonNegativeFloat = 1e-3
        """Weight of the squared log ratio."""
        ratio_max: RatioMax = RATIO_MAX
        """Largest importance ratio that the loss computes with; None sets no cap. A token above it
        has no policy gradient."""

    config: Config

    def per_token(self, tokens: RLTokens) -> tuple[torch.Tensor, torch.Tensor]:
        c = self.config
        lr = tokens.logprobs - tokens.generator_logprobs
        gain, drop = self._gain(tokens)
        ratio, capped = capped_ratio(lr, gain, c.ratio_max)
        return -c.adv_tau * gain * ratio + c.kl_tau * lr**2, drop | capped

    def ratio_capped(self, tokens: RLTokens) -> torch.Tensor:
        lr = tokens.logprobs - tokens.generator_logprobs
        return capped_ratio(lr, self._gain(tokens)[0], self.config.ratio_max)[1]

    def _gain(self, tokens: RLTokens) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the advantages, 0 for dropped tokens, and which tokens are dropped."""
        A = tokens.advantages
        d = tokens.logprobs.detach().exp() - tokens.generator_logprobs.exp()
        drop = torch.where(A > 0, d > self.config.mask_high, d < -self.config.mask_low)
        return torch.where(drop, 0, A), drop


def clipped_surrogate(
    lr: torch.Tensor,
    A: torch.Tensor,
    clip_low: float,
    clip_high: float,
    ratio_max: float | None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return the losses of ``PPOClip``, where its clip takes the gradient, and where its cap does.

    The minimum of the formula bounds ρ from above where A > 0 and from below where A < 0, so ρ is
    bounded before it is exponentiated and an extreme log ratio can't overflow. Where A < 0, only
    ``ratio_max`` bounds it from above. A token that the clip takes is not counted as capped.

    Args:
        lr: log ratios, of any shape.
    """
    high = math.log1p(clip_high)
    low = math.log1p(-clip_low) if clip_low < 1 else -math.inf
    positive, negative = A > 0, A < 0
    clipped = (positive & (lr > high)) | (negative & (lr < low))
    capped_lr, above = cap_log_ratio(lr, ratio_max)
    bounded = torch.where(positive, capped_lr.clamp(max=high), capped_lr.clamp(min=low))
    # Masked before exp: without a bound it may overflow, and 0 * inf is nan.
    ratio = torch.where(A == 0, 0, bounded).exp()
    return -A * ratio, clipped, above & (A != 0) & ~clipped


class PPOClip(RLLoss):
    """Clipped surrogate of PPO (Schulman et al., arXiv:1707.06347, eq. 7), per token.

    Unequal bounds are DAPO's clip-higher (Yu et al., arXiv:2503.14476).

        ℓ = -min(ρ·A, clip(ρ, 1 - clip_low, 1 + clip_high)·A)        with min(ρ, ratio_max) for ρ

    The clip bounds ρ from above only where A > 0. Where A < 0, ``ratio_max`` does: the dual clip of
    Ye et al., arXiv:1912.09729.
    """

    @dataclass(kw_only=True, slots=True)
    class Config(RLLoss.Config):
        clip_low: NonNegativeFloat = 0.2
        clip_high: NonNegativeFloat = 0.2
        """Distance of the clip's upper bound above 1. DAPO uses 0.28."""
        ratio_max: RatioMax = RATIO_MAX
        """Largest importance ratio that the loss computes with; None sets no cap. A token above it
        has no gradient."""

    config: Config

    def per_token(self, tokens: RLTokens) -> tuple[torch.Tensor, torch.Tensor]:
        losses, clipped, capped = self._surrogate(tokens)
        return losses, clipped | capped

    def ratio_capped(self, tokens: RLTokens) -> torch.Tensor:
        return self._surrogate(tokens)[2]

    def _surrogate(self, tokens: RLTokens) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        c = self.config
        lr = tokens.logprobs - tokens.generator_logprobs
        return clipped_surrogate(lr, tokens.advantages, c.clip_low, c.clip_high, c.ratio_max)


class CISPO(RLLoss):
    """Clipped importance weights (MiniMax-M1, arXiv:2506.13585, eq. 4).

        ℓ = -sg(clip(ρ, 1 - clip_low, 1 + clip_high))·A·logp

    Every token keeps a gradient, of bounded weight.
    """

    @dataclass(kw_only=True, slots=True)
    class Config(RLLoss.Config):
        clip_low: NonNegativeFloat = 1.0
        """Distance of the clip's lower bound below 1. The default of 1 sets no bound, as in the
        paper."""
        clip_high: NonNegativeFloat = 4.0
        """Distance of the clip's upper bound above 1. The paper tunes it and gives no number."""

    config: Config

    def per_token(self, tokens: RLTokens) -> tuple[torch.Tensor, torch.Tensor]:
        low, high = 1 - self.config.clip_low, 1 + self.config.clip_high
        ratio = (tokens.logprobs.detach() - tokens.generator_logprobs).exp()
        losses = -ratio.clamp(low, high) * tokens.advantages * tokens.logprobs
        return losses, (ratio < low) | (ratio > high)


class GSPO(RLLoss):
    """Sequence-level ratios (Zheng et al., arXiv:2507.18071), in the form of GSPO-token.

    That form (eq. 13 and 14) lets advantages differ within a sequence. If they don't, its gradient
    is that of GSPO.

        s = exp(mean of lr over the sequence's member tokens)
        s_t = sg(s)·exp(logp - sg(logp))
        ℓ = -min(s_t·A, clip(s_t, 1 - clip_low, 1 + clip_high)·A)

    with min(s_t, ratio_max) for s_t. s is the geometric mean of the tokens' ratios.

    The paper averages over the tokens of a sequence, then over sequences. Here every token counts
    the same, so long sequences weigh more.
    """

    @dataclass(kw_only=True, slots=True)
    class Config(RLLoss.Config):
        clip_low: NonNegativeFloat = 3e-4
        clip_high: NonNegativeFloat = 4e-4
        """Distance of the clip's upper bound above 1. Both bounds are the paper's: ratios of
        sequences vary far less than those of tokens."""
        ratio_max: RatioMax = RATIO_MAX
        """Largest sequence ratio that the loss computes with; None sets no cap. The tokens of a
        sequence above it have no gradient."""

    config: Config

    def per_token(self, tokens: RLTokens) -> tuple[torch.Tensor, torch.Tensor]:
        losses, clipped, capped = self._surrogate(tokens)
        return losses, clipped | capped

    def ratio_capped(self, tokens: RLTokens) -> torch.Tensor:
        return self._surrogate(tokens)[2]

    def _surrogate(self, tokens: RLTokens) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        c = self.config
        logprobs = tokens.logprobs
        lr_sum, count = sequence_log_ratios(tokens)
        log_s = (lr_sum / count.clamp(min=1)).to(logprobs.dtype)
        log_s_t = log_s + (logprobs - logprobs.detach())
        return clipped_surrogate(log_s_t, tokens.advantages, c.clip_low, c.clip_high, c.ratio_max)


class CustomRLLoss(RLLoss):
    """Loss computed by a function of yours.

    The function is given copies. It returns losses [B, L], one for each token and before they are
    weighted, or a tuple of these and a dict of values [B, L], for the metrics ``rl/own/<name>``.

    Raises:
        ValueError: the function returned something else. Names the function.
        RunError: the function raised an error. Names the function.
    """

    @dataclass(kw_only=True, slots=True)
    class Config(RLLoss.Config):
        function: Callable[[RLTokens], torch.Tensor | tuple[torch.Tensor, OwnMetrics]]
        """Function at the top level of a module, so that the trainer's processes can import it."""

    config: Config

    def per_token(self, tokens: RLTokens) -> PerToken:
        owner = loss_name(self.config)
        copies = {entry.name: getattr(tokens, entry.name).clone() for entry in fields(tokens)}
        try:
            returned = self.config.function(RLTokens(**copies))
        except BaseException as error:  # noqa: BLE001 - an exit would end the trainer silently
            raise RunError(f"{owner}: {cause_of(error)}") from error
        with_metrics = (
            isinstance(returned, tuple) and len(returned) == 2 and isinstance(returned[1], dict)
        )
        losses, own = returned if with_metrics else (returned, {})
        if not isinstance(losses, torch.Tensor) or not losses.is_floating_point():
            kind = losses.dtype if isinstance(losses, torch.Tensor) else type(losses).__name__
            raise ValueError(f"{owner} returned {kind}, want a floating-point tensor of losses")
        if losses.shape != tokens.logprobs.shape:
            raise ValueError(
                f"{owner} returned shape {tuple(losses.shape)} for tokens of shape "
                f"{tuple(tokens.logprobs.shape)}: return one loss per token, not their sum or mean"
            )
        if tokens.logprobs.requires_grad and not losses.requires_grad:
            raise ValueError(
                f"{owner} returned losses without a gradient: compute them from tokens.logprobs"
            )
        return losses, torch.zeros_like(tokens.member), own


def loss_name(config: RLLoss.Config) -> str:
    """Return how errors name the rl variant: by its class, or by the user's function."""
    if isinstance(config, CustomRLLoss.Config):
        function = config.function
        return f"rl loss {getattr(function, '__name__', type(function).__name__)!r}"
    return f"rl loss {built_class(config).__name__}"


class Correction(UserConfigurable, abc.ABC):
    """Base of the corrections.

    Example::

        from torchtitan.experiments.rl.losses import Correction

        class Unmoved(Correction):  # w = 1 where |lr| ≤ 1, else 0
            def weights(self, tokens):
                lr = (tokens.logprobs - tokens.generator_logprobs).detach()
                return (lr.abs() <= 1).to(lr.dtype)
    """

    has_ratio: ClassVar[bool] = False
    """True if the weights contain ρ.

    The variant is then given sg(logp) as generator_logp, so its own ratio is 1 with the gradient of
    logp. A batch is trained on in one update, so the policy before the update is the trainer's as
    it is. What a variant does about large ratios (a clip, DPPO's mask, kl_tau) then has no effect.
    """

    @property
    def name(self) -> str:
        """Name of the class in snake case, for metrics."""
        return re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", type(self).__name__).lower()

    @abc.abstractmethod
    def weights(self, tokens: RLTokens) -> torch.Tensor:
        """Return the factors w [B, L], at least 0 and without a gradient.

        Factors of tokens that are no members are ignored.
        """


class TruncatedImportance(Correction):
    """Truncated importance sampling.

    Yao et al., "Your Efficient RL Framework Secretly Brings You Off-Policy RL Training", 2025;
    Ionides, "Truncated Importance Sampling", 2008.

        w = min(ρ, cap)
    """

    has_ratio = True

    @dataclass(kw_only=True, slots=True)
    class Config(Correction.Config):
        cap: PositiveFloat = 2.0

    config: Config

    def weights(self, tokens: RLTokens) -> torch.Tensor:
        return _ratio(tokens).clamp(max=self.config.cap)


@dataclass(kw_only=True, slots=True)
class BoundedConfig(Correction.Config):
    """Settings of a correction that keeps values between two bounds."""

    low: Annotated[NonNegativeFloat, AtMost("high")] = 0.5
    high: PositiveFloat = 2.0

    def holds(self, values: torch.Tensor) -> torch.Tensor:
        """Return which values lie between the bounds, bool."""
        return (values >= self.low) & (values <= self.high)


class IcePop(Correction):
    """IcePop's masked importance weights (Ling team, "Every Step Evolves", arXiv:2510.18855).

        w = ρ where low ≤ ρ ≤ high, else 0

    A token outside the bounds is left out.
    """

    has_ratio = True

    @dataclass(kw_only=True, slots=True)
    class Config(BoundedConfig):
        high: float = 5.0

    config: Config

    def weights(self, tokens: RLTokens) -> torch.Tensor:
        ratio = _ratio(tokens)
        return torch.where(self.config.holds(ratio), ratio, 0)


class SequenceMask(Correction):
    """Mask of whole sequences by the ratio of their probabilities, for short answers.

    The ratio's spread grows with length. Liu et al., "When Speed Kills Stability: Demystifying RL
    Collapse from the Training-Inference Mismatch", 2025.

        w = 1 where low ≤ product of ρ over the sequence ≤ high, else 0
    """

    @dataclass(kw_only=True, slots=True)
    class Config(BoundedConfig):
        pass

    config: Config

    def weights(self, tokens: RLTokens) -> torch.Tensor:
        return self.config.holds(sequence_log_ratios(tokens)[0].exp()).to(tokens.logprobs.dtype)


class GeometricMask(Correction):
    """Mask of whole sequences by the geometric mean of ρ, which does not depend on length.

    Part 3 of SequenceMask's source. DeepSeek-V3.2, arXiv:2512.02556, masks off-policy sequences by
    their mean log ratio too.

        w = 1 where low ≤ (product of ρ over the sequence)^(1/n) ≤ high, else 0
        n: number of the sequence's member tokens
    """

    @dataclass(kw_only=True, slots=True)
    class Config(BoundedConfig):
        low: float = 0.99
        high: float = 1.01

    config: Config

    def weights(self, tokens: RLTokens) -> torch.Tensor:
        lr_sum, count = sequence_log_ratios(tokens)
        return self.config.holds((lr_sum / count.clamp(min=1)).exp()).to(tokens.logprobs.dtype)


class ProbabilityMask(Correction):
    """Mask of tokens that the policy finds improbable by now, whose gradients are the largest.

    Yang et al., arXiv:2505.12929. STAPO, arXiv:2602.15620, masks such tokens only if the entropy is
    low too, and divides by the tokens that are left.

        w = 1 where exp(logp) ≥ least, else 0        at the sampling temperature
    """

    @dataclass(kw_only=True, slots=True)
    class Config(Correction.Config):
        least: Annotated[float, Ge(0), Lt(1)] = 1e-3

    config: Config

    def weights(self, tokens: RLTokens) -> torch.Tensor:
        return (tokens.logprobs.detach().exp() >= self.config.least).to(tokens.logprobs.dtype)


def check_corrections(corrections: Sequence[Correction.Config], *, field: str) -> None:
    """Refuse corrections that don't fit together.

    Raises:
        ConfigError: several of them contain the importance ratio.
    """
    classes: list[type[Correction]] = [built_class(entry) for entry in corrections]
    with_ratio = [correction.__name__ for correction in classes if correction.has_ratio]
    if len(with_ratio) > 1:
        raise ConfigError(
            field,
            ", ".join(with_ratio),
            "each has the importance ratio in it, which would count twice: name one",
        )


def correct(
    tokens: RLTokens, corrections: Sequence[Correction]
) -> tuple[RLTokens, torch.Tensor, dict[str, torch.Tensor]]:
    """Apply the corrections to the tokens that an rl loss is given.

    Returns:
        The tokens for the variant; each token's factor [B, L]; and by the name of a correction,
        which tokens it leaves out, bool [B, L].
    """
    if not corrections:
        return tokens, torch.ones_like(tokens.logprobs), {}
    factors = torch.ones_like(tokens.logprobs.detach())
    left_out = {}
    for entry in corrections:
        weights = entry.weights(tokens)
        left_out[entry.name] = tokens.member & (weights == 0)
        factors = factors * weights
    member = tokens.member & (factors != 0)
    has_ratio = any(entry.has_ratio for entry in corrections)
    generator = tokens.logprobs.detach() if has_ratio else tokens.generator_logprobs
    # Selected and not multiplied by 0: an extreme ratio of a token that is left out must not reach
    # the backward pass.
    given = replace(
        tokens,
        logprobs=torch.where(member, tokens.logprobs, 0),
        generator_logprobs=torch.where(member, generator, 0),
        advantages=torch.where(member, tokens.advantages, 0),
        member=member,
    )
    return given, torch.where(member, factors, 0), left_out


def _ratio(tokens: RLTokens) -> torch.Tensor:
    """Return ρ without a gradient."""
    return (tokens.logprobs.detach() - tokens.generator_logprobs).exp()
