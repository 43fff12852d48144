"""What the trainer minimises: three per-token components, rl, ce and ref_kl, summed. Start with ``loss.py``."""

from torchtitan.experiments.rl.losses.loss import LossConfig, compute_loss
from torchtitan.experiments.rl.losses.members import count_members
from torchtitan.experiments.rl.losses.metrics import MetricSums
from torchtitan.experiments.rl.losses.mismatch import mismatch_metrics
from torchtitan.experiments.rl.losses.ref_kl import RefKL
from torchtitan.experiments.rl.losses.variants import CISPO, DPPO, GSPO, CustomRLLoss, PPOClip, RLLoss, RLTokens

__all__ = [
    "CISPO",
    "DPPO",
    "GSPO",
    "CustomRLLoss",
    "LossConfig",
    "MetricSums",
    "PPOClip",
    "RLLoss",
    "RLTokens",
    "RefKL",
    "compute_loss",
    "count_members",
    "mismatch_metrics",
]
