"""The trainer's loss: a sum of three per-token components, rl, ce and ref_kl.

Begin with ``loss.py``.
"""

from torchtitan.experiments.rl.losses.loss import (
    CrossEntropy,
    LossConfig,
    MetricSums,
    RefKL,
    advantage_sums,
    compute_loss,
    count_denominators,
    mismatch_metrics,
    reference_kl,
    step_denominators,
    with_normalized_advantages,
)
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
    cap_log_ratio,
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
    "cap_log_ratio",
    "check_corrections",
    "compute_loss",
    "count_denominators",
    "mismatch_metrics",
    "reference_kl",
    "step_denominators",
    "with_normalized_advantages",
]
