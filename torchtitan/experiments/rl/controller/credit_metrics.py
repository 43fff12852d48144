"""What algorithms gave the rollouts of a step: how advantages are distributed, and what that took."""

from collections import Counter
from collections.abc import Sequence

import numpy as np

from torchtitan.experiments.rl.rollouts.types import Rollout, RolloutGroup
from torchtitan.experiments.rl.types import TrainingSample


def advantage_metrics(rollouts: Sequence[Rollout], task: str) -> dict[str, float]:
    """``advantage/<task>/...`` of one task's rollouts; empty where none of their tokens feed rl.

    ``mean`` is the mean over rollouts of each one's mean over its tokens that feed rl, ``zero`` the share of rollouts whose
    tokens all have advantage 0, ``min`` and ``max`` are over tokens. All are as the algorithm gave them, before the trainer
    normalises any.
    """
    of_rollouts = [[_advantages(sample) for sample in rollout.samples] for rollout in rollouts]
    counts = np.array([sum(map(len, own)) for own in of_rollouts])
    if not counts.any():
        return {}
    counts = counts[counts > 0]
    starts = np.cumsum(counts) - counts
    advantages = np.concatenate([array for own in of_rollouts for array in own])
    return {
        f"advantage/{task}/mean": float((np.add.reduceat(advantages, starts, dtype=np.float64) / counts).mean()),
        f"advantage/{task}/zero": float((np.add.reduceat(advantages != 0, starts, dtype=np.int64) == 0).mean()),
        f"advantage/{task}/min": float(advantages.min()),
        f"advantage/{task}/max": float(advantages.max()),
    }


def credit_seconds(groups: Sequence[RolloutGroup]) -> dict[str, float]:
    """``time/credit_s/<task>``: seconds that the task's algorithm took for a rollout, mean."""
    by_task: dict[str, list[RolloutGroup]] = {}
    for group in groups:
        by_task.setdefault(group.task_name, []).append(group)
    return {
        f"time/credit_s/{task}": sum(group.credit_s for group in own) / sum(len(group.rollouts) for group in own)
        for task, own in by_task.items()
    }


def costs(groups: Sequence[RolloutGroup]) -> dict[str, float]:
    """What the groups cost beside the policy's sampling, by name; seconds as ``time/<name>_s``."""
    sums: Counter[str] = Counter()
    for group in groups:
        sums.update(group.costs)
    return {f"time/{name.removesuffix('/seconds')}_s" if name.endswith("/seconds") else name: n for name, n in sums.items()}


def _advantages(sample: TrainingSample) -> np.ndarray:
    """Of the tokens that feed rl."""
    if sample.advantages is None:
        return np.zeros(0, np.float32)
    return sample.advantages[sample.loss_mask if sample.rl_weights is None else sample.loss_mask & (sample.rl_weights != 0)]
