"""What is known about a step that was taken: of its rollouts and their credit, its batch, and what each part of it took."""

from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from torchtitan.experiments.rl.batching.batcher import BatchPlan
from torchtitan.experiments.rl.controller.groups import StepGroups
from torchtitan.experiments.rl.controller.saved_state import ValidationReport
from torchtitan.experiments.rl.rollouts.types import Rollout, RolloutGroup
from torchtitan.experiments.rl.types import TrainingSample
from torchtitan.experiments.rl.weights.sync import SyncReport


@dataclass(kw_only=True, slots=True)
class StepRecord:
    """What is known about a step that was taken."""

    step: int
    metrics: dict[str, float]
    groups: Sequence[RolloutGroup]
    """That the step took."""
    validation: ValidationReport | None
    """The newest that ended since the last step and has a reward."""


def step_record(
    *,
    step: int,
    taken: StepGroups,
    packed: BatchPlan,
    trained: dict[str, float],
    validations: Sequence[ValidationReport],
    seconds: float,
    spans: dict[str, float],
    last_sync: SyncReport | None,
    generated_tokens: int,
    event_loop_lag_s: float,
    blocking_calls: int,
    ledger: dict[str, int],
) -> StepRecord:
    """
    Args:
        trained: what the trainer reported.
        validations: evaluations that ended since the last step, oldest first.
        seconds: of the whole step.
        spans: seconds by what the controller waited for.
        last_sync: of the newest version every generator holds.
        generated_tokens: sampled in the step, training and validation.
        event_loop_lag_s: longest time since the last step that an event loop with rollouts was held up.
        blocking_calls: calls of user code since the last step that held up an event loop beyond their limit.
        ledger: rollouts so far by task and column.
    """
    ages = _ages(taken.groups, step - 1)
    sampled = len(ages)
    metrics: dict[str, float] = {
        **trained,
        **_rollout_metrics(taken),
        **_demonstration_metrics(taken),
        **_replay_metrics(taken, step - 1),
        "batch/groups": len(taken.groups),
        "batch/rows": packed.rows,
        "batch/tokens": packed.tokens,
        "batch/sampled_tokens": sampled,
        "batch/packing_efficiency": packed.efficiency,
        "batch/shared_fraction": packed.shared_fraction,
        "batch/dropped_groups": taken.dropped_groups,
        "policy/version": step,
        "policy/age_mean": mean(ages) if sampled else 0.0,
        "policy/age_max": int(ages.max()) if sampled else 0,
        **{f"policy/age/{age}": mean(ages == age) for age in np.unique(ages).tolist()},
        "policy/mixed_version_completions": _mixed_version_share(taken),
        **{f"filter/{name}": count for name, count in taken.filter_matches.items()},
        **{f"filter/{name}/tokens": count for name, count in taken.filter_tokens.items()},
        **{f"time/{name}_s": seconds for name, seconds in spans.items()},
        **credit_seconds(taken.sampled),
        **costs(taken.sampled),
        "time/step_s": seconds,
        "perf/trained_tokens_per_s": packed.tokens / seconds,
        "perf/generated_tokens_per_s": generated_tokens / seconds,
        "perf/event_loop_lag_max_s": event_loop_lag_s,
        "perf/blocking_calls": blocking_calls,
        **{f"ledger/{column}": count for column, count in ledger.items()},
    }
    for report in validations:
        metrics |= report.metrics
    if last_sync is not None:
        # Which version's sync has answered by now depends on the clock.
        metrics |= {
            "perf/sync_version": last_sync.version,
            "perf/sync_canary_max_diff": last_sync.canary_max_diff,
            **{
                f"time/sync_{part}": getattr(last_sync, part)
                for part in ("copy_out_s", "load_s", "verify_s", "reload_s")
            },
            **{
                f"weights/bytes_fetched/{host}": count
                for host, count in last_sync.fetched_bytes.items()
            },
            **({"time/sync_fetch_s": last_sync.fetch_s} if last_sync.fetched_bytes else {}),
        }
    validation = next(
        (report for report in reversed(validations) if report.reward is not None), None
    )
    return StepRecord(step=step, metrics=metrics, groups=taken.groups, validation=validation)


def mean(values: Any) -> float:
    return float(np.mean(values))


def _ages(groups: Sequence[RolloutGroup], version: int) -> np.ndarray:
    """Policy age of every sampled token."""
    samples = [
        sample for group in groups for rollout in group.rollouts for sample in rollout.samples
    ]
    sampled = [version - sample.policy_versions[sample.loss_mask] for sample in samples]
    return np.concatenate(sampled) if sampled else np.zeros(0, np.int32)


def _mixed_version_share(taken: StepGroups) -> float:
    """Share of the completions with tokens that weights changed under."""
    rollouts = [rollout for group in taken.groups for rollout in group.rollouts]
    versions = [turn.completion.policy_versions for rollout in rollouts for turn in rollout.turns]
    return mean([v[0] != v[-1] for v in versions if len(v)] or [False])


def _replay_metrics(taken: StepGroups, version: int) -> dict[str, float]:
    """Of groups that are trained on again."""
    if not taken.replayed:
        return {}
    ages = _ages(taken.replayed, version)
    return {
        "replay/groups": len(taken.replayed),
        "replay/rollouts": sum(len(group.rollouts) for group in taken.replayed),
        "replay/age_mean": mean(ages),
        "replay/age_max": int(ages.max()),
    }


def _demonstration_metrics(taken: StepGroups) -> dict[str, float]:
    """Of rollouts that are a dataset's conversations."""
    metrics: Counter[str] = Counter()
    for rollout in (
        rollout for group in taken.groups for rollout in group.rollouts if rollout.static
    ):
        metrics[f"demonstrations/{rollout.task_name}/count"] += 1
        weights = [sample.ce_weights for sample in rollout.samples if sample.ce_weights is not None]
        metrics[f"demonstrations/{rollout.task_name}/trained_tokens"] += sum(
            int(np.count_nonzero(w)) for w in weights
        )
    return dict(metrics)


def _rollout_metrics(taken: StepGroups) -> dict[str, float]:
    """Of what the step took, with what post-batch filters dropped: without it a filter of ties would hide the reward."""
    rollouts = [
        rollout for group in taken.sampled for rollout in group.rollouts if not rollout.static
    ]
    if not rollouts:
        return {}
    rewards = np.array([rollout.reward for rollout in rollouts])
    # A rollout that was compared with no other has no spread.
    spreads = [np.std(group.rewards) for group in taken.sampled if len(group.rollouts) > 1] or [
        np.float64(0)
    ]
    lengths = np.array([rollout.completion_tokens for rollout in rollouts])
    metrics = {
        "rollout/count": len(rollouts),
        "rollout/reward_mean": mean(rewards),
        "rollout/reward_std": float(rewards.std()),
        "rollout/reward_std_in_group": mean(spreads),
        "rollout/groups_all_equal": mean([spread == 0 for spread in spreads]),
        "rollout/completion_tokens_mean": mean(lengths),
        "rollout/completion_tokens_max": int(lengths.max()),
        "rollout/turns_mean": mean([len(rollout.turns) for rollout in rollouts]),
    }
    statuses = Counter(rollout.status.value for rollout in rollouts)
    metrics |= {
        f"rollout/status/{status}": count / len(rollouts) for status, count in statuses.items()
    }
    for task in sorted({rollout.task_name for rollout in rollouts}):
        own = [rollout for rollout in rollouts if rollout.task_name == task]
        metrics[f"rollout/{task}/reward_mean"] = mean([rollout.reward for rollout in own])
        metrics |= advantage_metrics(own, task)
        for name in sorted({name for rollout in own for name in rollout.reward_components}):
            values = [
                rollout.reward_components[name]
                for rollout in own
                if name in rollout.reward_components
            ]
            metrics[f"rollout/{task}/component/{name}"] = mean(values)
    return metrics


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
        f"advantage/{task}/mean": float(
            (np.add.reduceat(advantages, starts, dtype=np.float64) / counts).mean()
        ),
        f"advantage/{task}/zero": float(
            (np.add.reduceat(advantages != 0, starts, dtype=np.int64) == 0).mean()
        ),
        f"advantage/{task}/min": float(advantages.min()),
        f"advantage/{task}/max": float(advantages.max()),
    }


def credit_seconds(groups: Sequence[RolloutGroup]) -> dict[str, float]:
    """``time/credit_s/<task>``: seconds that the task's algorithm took for a rollout, mean."""
    seconds: defaultdict[str, float] = defaultdict(float)
    rollouts: Counter[str] = Counter()
    for group in groups:
        seconds[group.task_name] += group.credit_s
        rollouts[group.task_name] += len(group.rollouts)
    return {f"time/credit_s/{task}": seconds[task] / count for task, count in rollouts.items()}


def costs(groups: Sequence[RolloutGroup]) -> dict[str, float]:
    """What the groups cost beside the policy's sampling, by name; seconds as ``time/<name>_s``."""
    sums: Counter[str] = Counter()
    for group in groups:
        sums.update(group.costs)
    return {
        f"time/{name.removesuffix('/seconds')}_s" if name.endswith("/seconds") else name: n
        for name, n in sums.items()
    }


def _advantages(sample: TrainingSample) -> np.ndarray:
    """Of the tokens that feed rl."""
    if sample.advantages is None:
        return np.zeros(0, np.float32)
    return sample.advantages[
        sample.loss_mask
        if sample.rl_weights is None
        else sample.loss_mask & (sample.rl_weights != 0)
    ]
