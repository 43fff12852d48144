"""The ce component: cross-entropy of given tokens."""

from dataclasses import dataclass

import torch

from torchtitan.config import Configurable
from torchtitan.experiments.rl.configurable import UserConfigurable
from torchtitan.experiments.rl.losses.own_metrics import OwnMetrics


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
