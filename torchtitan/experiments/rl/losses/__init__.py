"""What the trainer minimises: three per-token components, rl, ce and ref_kl, summed. Start with ``loss.py``."""

from torchtitan.experiments.rl.losses.loss import CrossEntropy, LossConfig, RefKL, compute_loss, reference_kl
from torchtitan.experiments.rl.losses.members import (
    advantage_sums,
    count_denominators,
    step_denominators,
    with_normalized_advantages,
)
from torchtitan.experiments.rl.losses.metrics import MetricSums, mismatch_metrics
from torchtitan.experiments.rl.losses.variants import (
    CISPO,
    DPPO,
    GSPO,
    Correction,
    CustomRLLoss,
    GeometricMask,
    IcePop,
    PPOClip,
    ProbabilityMask,
    RLLoss,
    RLTokens,
    SequenceMask,
    TruncatedImportance,
    check_corrections,
)

__all__ = [
    "CISPO",
    "DPPO",
    "GSPO",
    "Correction",
    "CrossEntropy",
    "CustomRLLoss",
    "GeometricMask",
    "IcePop",
    "LossConfig",
    "MetricSums",
    "PPOClip",
    "ProbabilityMask",
    "RLLoss",
    "RLTokens",
    "RefKL",
    "SequenceMask",
    "TruncatedImportance",
    "advantage_sums",
    "check_corrections",
    "compute_loss",
    "count_denominators",
    "mismatch_metrics",
    "reference_kl",
    "step_denominators",
    "with_normalized_advantages",
]
