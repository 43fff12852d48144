"""The ce component: cross-entropy of given tokens."""

import torch


def cross_entropy(logprobs: torch.Tensor) -> torch.Tensor:
    """ℓ = -logp, per token, in nats."""
    return -logprobs
