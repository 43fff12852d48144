"""Corrections of the rl loss where the policy that sampled is not quite the policy that learns: older weights, other kernels.

Each is a factor of a token's rl loss, constant in the backward pass, and works with every rl variant. In every formula
ρ = exp(logp - generator_logp) of a member token; a sequence is one packed training sample.

    ℓ = w·ℓ_rl        w: the product over ``LossConfig.corrections``; a token with w = 0 is left out

A token that is left out is no member for the variant (GSPO's mean goes over the others), and its loss and gradient are 0. It
still counts in the denominator, as in IcePop's own objective: which tokens are left out is known after the forward pass
only, and the denominator has to be known before the first backward pass of the step.
"""

import abc
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Annotated, ClassVar

import torch
from annotated_types import Ge, Lt

from torchtitan.config import Configurable
from torchtitan.experiments.rl.bounds import NonNegativeFloat, PositiveFloat
from torchtitan.experiments.rl.compat.torchtitan import built_class
from torchtitan.experiments.rl.configurable import UserConfigurable
from torchtitan.experiments.rl.errors import ConfigError
from torchtitan.experiments.rl.losses.variants import RLTokens, sequence_log_ratios


class Correction(UserConfigurable, abc.ABC):
    """Base of the corrections."""

    has_ratio: ClassVar[bool] = False
    """Whether the weights have ρ in them. The variant then sees sg(logp) for generator_logp, so its own ratio is 1 with the
    gradient of logp: a batch is trained on in one update, so the policy before the update is the trainer's as it is. What a
    variant does about large ratios (a clip, DPPO's mask, kl_tau) then has no effect."""

    @dataclass(kw_only=True, slots=True)
    class Config(Configurable.Config):
        def validate(self, *, field: str) -> None:
            """Refuse fields that don't fit together.

            Raises:
                ConfigError: by field, value and cure.
            """

    def __init__(self, config: Config):
        self.config = config

    @property
    def name(self) -> str:
        """The class's name in snake case, as metrics have it."""
        return re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", type(self).__name__).lower()

    @abc.abstractmethod
    def weights(self, tokens: RLTokens) -> torch.Tensor:
        """w [B, L], at least 0 and without a gradient. What it is on tokens that are no member does not matter."""


class TruncatedImportance(Correction):
    """Truncated importance sampling (Yao et al., "Your Efficient RL Framework Secretly Brings You Off-Policy RL Training",
    2025; Ionides, "Truncated Importance Sampling", 2008).

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
    """Of a correction that keeps what lies between two bounds."""

    low: NonNegativeFloat = 0.5
    high: PositiveFloat = 2.0

    def validate(self, *, field: str) -> None:
        if self.low > self.high:
            raise ConfigError(f"{field}.low", self.low, f"must be at most high = {self.high}: nothing would be left")


class IcePop(Correction):
    """IcePop's masked importance weights (Ling team, "Every Step Evolves", arXiv:2510.18855).

    w = ρ where low ≤ ρ ≤ high, else 0
    """

    has_ratio = True

    @dataclass(kw_only=True, slots=True)
    class Config(BoundedConfig):
        high: PositiveFloat = 5.0

    config: Config

    def weights(self, tokens: RLTokens) -> torch.Tensor:
        ratio = _ratio(tokens)
        return torch.where((ratio >= self.config.low) & (ratio <= self.config.high), ratio, 0)


class SequenceMask(Correction):
    """Leaves out whole sequences by the ratio of their probabilities (Liu et al., "When Speed Kills Stability: Demystifying RL
    Collapse from the Training-Inference Mismatch", 2025). The ratio's spread grows with length: for short answers.

        w = 1 where low ≤ product of ρ over the sequence ≤ high, else 0
    """

    @dataclass(kw_only=True, slots=True)
    class Config(BoundedConfig):
        pass

    config: Config

    def weights(self, tokens: RLTokens) -> torch.Tensor:
        ratio = sequence_log_ratios(tokens)[0].exp()
        return ((ratio >= self.config.low) & (ratio <= self.config.high)).to(tokens.logprobs.dtype)


class GeometricMask(Correction):
    """As SequenceMask, by the geometric mean of ρ, which does not depend on length (same source, part 3; DeepSeek-V3.2,
    arXiv:2512.02556, masks off-policy sequences by their mean log ratio too).

        w = 1 where low ≤ (product of ρ over the sequence)^(1/n) ≤ high, else 0        n: the sequence's member tokens
    """

    @dataclass(kw_only=True, slots=True)
    class Config(BoundedConfig):
        low: NonNegativeFloat = 0.99
        high: PositiveFloat = 1.01

    config: Config

    def weights(self, tokens: RLTokens) -> torch.Tensor:
        lr_sum, count = sequence_log_ratios(tokens)
        mean = (lr_sum / count.clamp(min=1)).exp()
        return ((mean >= self.config.low) & (mean <= self.config.high)).to(tokens.logprobs.dtype)


class ProbabilityMask(Correction):
    """Leaves out tokens that the policy itself finds improbable now: their gradients are the largest (Yang et al.,
    arXiv:2505.12929; STAPO, arXiv:2602.15620, masks such tokens where entropy is low too, and divides by the tokens left).

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
        ConfigError: by field, value and cure.
    """
    with_ratio = []
    for index, entry in enumerate(corrections):
        entry.validate(field=f"{field}[{index}]")
        correction: type[Correction] = built_class(entry)
        if correction.has_ratio:
            with_ratio.append(correction.__name__)
    if len(with_ratio) > 1:
        raise ConfigError(
            field, ", ".join(with_ratio), "each has the importance ratio in it, which would count twice: name one"
        )


def correct(tokens: RLTokens, corrections: Sequence[Correction]) -> tuple[RLTokens, torch.Tensor, dict[str, torch.Tensor]]:
    """What the variant is given, each token's factor [B, L], and bool [B, L] by name: what a correction leaves out."""
    if not corrections:
        return tokens, torch.ones_like(tokens.logprobs), {}
    factors = torch.ones_like(tokens.logprobs.detach())
    left_out = {}
    for entry in corrections:
        weights = entry.weights(tokens)
        left_out[entry.name] = tokens.member & (weights == 0)
        factors = factors * weights
    member = tokens.member & (factors != 0)
    generator = tokens.logprobs.detach() if any(entry.has_ratio for entry in corrections) else tokens.generator_logprobs
    # Selected, never multiplied by 0: an extreme ratio of a token that is left out must not reach the backward pass.
    given = replace(
        tokens,
        logprobs=torch.where(member, tokens.logprobs, 0),
        generator_logprobs=torch.where(member, generator, 0),
        advantages=torch.where(member, tokens.advantages, 0),
        member=member,
    )
    return given, torch.where(member, factors, 0), left_out


def _ratio(tokens: RLTokens) -> torch.Tensor:
    return (tokens.logprobs.detach() - tokens.generator_logprobs).exp()
