"""Makes the record of a step: metrics of its rollouts, credit and batch, and of where time went."""

from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from torchtitan.experiments.rl.batching.batcher import BatchPlan
from torchtitan.experiments.rl.loops.groups import StepGroups
from torchtitan.experiments.rl.loops.saved_state import ValidationReport
from torchtitan.experiments.rl.rollouts.rounding import are_equal
from torchtitan.experiments.rl.rollouts.types import Rollout, RolloutGroup
from torchtitan.experiments.rl.rubrics.rubric import ENV_PREFIX
from torchtitan.experiments.rl.types import TrainingSample
from torchtitan.experiments.rl.weights.sync import SyncReport


@dataclass(kw_only=True, slots=True)
class StepRecord:
    """Record of an optimizer step that was taken."""

    step: int
    metrics: dict[str, float]
    groups: Sequence[RolloutGroup]
    """Groups that the step trained on."""
    validations: Sequence[ValidationReport]
    """Evaluations that ended since the last step, oldest first."""


def step_record(  # noqa: PLR0913 - one argument for each source of metrics
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
    """Make the record of a step.

    Args:
        trained: metrics that the trainer reported.
        validations: evaluations that ended since the last step, oldest first.
        seconds: time from the wait for groups until now, without the checkpoint.
        spans: seconds that the controller waited, by what it waited for.
        last_sync: newest update of weights that the controller has awaited.
        generated_tokens: number of tokens sampled during the step, for training and validation.
        event_loop_lag_s: longest time since the last step for which an event loop with rollouts
            was held up.
        blocking_calls: number of calls of user code since the last step that held up an event loop
            beyond their limit.
        ledger: number of rollouts so far, by task and column.
    """
    metrics: dict[str, float] = {
        **trained,
        **_rollout_metrics(taken),
        **_demonstration_metrics(taken),
        **_replay_metrics(taken, base_version=step - 1),
        **_batch_metrics(taken, packed),
        "policy/version": step,
        **_age_metrics(taken, base_version=step - 1),
        **{f"filter/{name}": count for name, count in taken.filter_matches.items()},
        **{f"filter/{name}/tokens": count for name, count in taken.filter_tokens.items()},
        **{f"time/{name}_s": waited for name, waited in spans.items()},
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
        metrics |= _sync_metrics(last_sync)
    return StepRecord(step=step, metrics=metrics, groups=taken.groups, validations=validations)


def mean(values: Any) -> float:  # noqa: ANN401 - anything that numpy takes the mean of
    return float(np.mean(values))


def _batch_metrics(taken: StepGroups, packed: BatchPlan) -> dict[str, float]:
    return {
        "batch/groups": len(taken.groups),
        "batch/rows": packed.rows,
        "batch/tokens": packed.tokens,
        "batch/packing_efficiency": packed.efficiency,
        "batch/shared_fraction": packed.shared_fraction,
        "batch/dropped_groups": taken.dropped_groups,
    }


def _age_metrics(taken: StepGroups, base_version: int) -> dict[str, float]:
    """Return the ages of the step's sampled tokens, replayed ones left out (see `_ages`)."""
    ages = _ages(taken.groups, base_version)
    sampled = len(ages)
    return {
        "batch/sampled_tokens": sampled,
        "policy/age_mean": mean(ages) if sampled else 0.0,
        "policy/age_max": int(ages.max()) if sampled else 0,
        **{f"policy/age/{age}": mean(ages == age) for age in np.unique(ages).tolist()},
        "policy/mixed_version_completions": _mixed_version_share(taken),
    }


def _ages(groups: Sequence[RolloutGroup], base_version: int) -> np.ndarray:
    """Return the age of every sampled token.

    Its age is the number of versions from the one that sampled it to the one that the step starts
    from. On-policy tokens have age 0.
    """
    samples = [
        sample for group in groups for rollout in group.rollouts for sample in rollout.samples
    ]
    ages = [base_version - sample.policy_versions[sample.loss_mask] for sample in samples]
    return np.concatenate(ages) if ages else np.zeros(0, np.int32)


def _mixed_version_share(taken: StepGroups) -> float:
    """Return the share of completions during which the generator's weights changed."""
    rollouts = [rollout for group in taken.groups for rollout in group.rollouts]
    versions = [turn.completion.policy_versions for rollout in rollouts for turn in rollout.turns]
    return mean([v[0] != v[-1] for v in versions if len(v)] or [False])


def _sync_metrics(sync: SyncReport) -> dict[str, float]:
    """Return the metrics of an update of the generators' weights, with its version.

    An asynchronous run records a step while the update to the step's own version is under way. The
    newest update that has ended is then that of the step before.
    """
    metrics: dict[str, float] = {
        "perf/sync_version": sync.version,
        "perf/sync_canary_max_diff": sync.canary_max_diff,
    }
    for name in ("copy_out_s", "load_s", "verify_s", "reload_s"):
        metrics[f"time/sync_{name}"] = getattr(sync, name)
    for host, count in sync.fetched_bytes.items():
        metrics[f"weights/bytes_fetched/{host}"] = count
    if sync.fetched_bytes:
        metrics["time/sync_fetch_s"] = sync.fetch_s
    return metrics


def _replay_metrics(taken: StepGroups, base_version: int) -> dict[str, float]:
    """Return the metrics of the groups that the step trains on again."""
    if not taken.replayed:
        return {}
    metrics: dict[str, float] = {
        "replay/groups": len(taken.replayed),
        "replay/rollouts": sum(len(group.rollouts) for group in taken.replayed),
    }
    ages = _ages(taken.replayed, base_version)
    if len(ages):
        metrics |= {"replay/age_mean": mean(ages), "replay/age_max": int(ages.max())}
    return metrics


def _demonstration_metrics(taken: StepGroups) -> dict[str, float]:
    """Return the number of conversations of datasets by task, and of their tokens with weight."""
    metrics: Counter[str] = Counter()
    rollouts = [rollout for group in taken.groups for rollout in group.rollouts if rollout.static]
    for rollout in rollouts:
        prefix = f"demonstrations/{rollout.task_name}"
        metrics[f"{prefix}/count"] += 1
        weights = [sample.ce_weights for sample in rollout.samples]
        metrics[f"{prefix}/trained_tokens"] += sum(
            int(np.count_nonzero(of_sample)) for of_sample in weights if of_sample is not None
        )
    return dict(metrics)


def _rollout_metrics(taken: StepGroups) -> dict[str, float]:
    """Return the metrics of the rollouts that the step took.

    Rollouts that post-batch filters dropped are among them: without these, a filter of ties would
    hide the rewards.
    """
    rollouts = [
        rollout for group in taken.sampled for rollout in group.rollouts if not rollout.static
    ]
    if not rollouts:
        return {}
    rewards = np.array([rollout.reward for rollout in rollouts])
    lengths = np.array([rollout.completion_tokens for rollout in rollouts])
    metrics = {
        "rollout/count": len(rollouts),
        "rollout/reward_mean": mean(rewards),
        "rollout/reward_std": float(rewards.std()),
        "rollout/completion_tokens_mean": mean(lengths),
        "rollout/completion_tokens_max": int(lengths.max()),
        "rollout/turns_mean": mean([len(rollout.turns) for rollout in rollouts]),
    }
    # A rollout that is compared with no other is in no spread.
    compared = [group.rewards for group in taken.sampled if len(group.rollouts) > 1]
    if compared:
        metrics["rollout/reward_std_in_group"] = mean([np.std(rewards) for rewards in compared])
        metrics["rollout/groups_all_equal"] = mean([are_equal(rewards) for rewards in compared])
    statuses = Counter(rollout.status.value for rollout in rollouts)
    for status, count in statuses.items():
        metrics[f"rollout/status/{status}"] = count / len(rollouts)
    for task in sorted({rollout.task_name for rollout in rollouts}):
        of_task = [rollout for rollout in rollouts if rollout.task_name == task]
        metrics |= _task_metrics(of_task, task)
    return metrics


def _task_metrics(rollouts: Sequence[Rollout], task: str) -> dict[str, float]:
    """Return the mean rewards and the advantages of one task's rollouts.

    What an env rewards is earned: a rollout without such a component has earned 0 of it, and counts
    in the mean. A function's mean is over the rollouts that it scored; if it did not score all of
    them, ``component_share`` is their share.
    """
    metrics = {f"rollout/{task}/reward_mean": mean([rollout.reward for rollout in rollouts])}
    metrics |= advantage_metrics(rollouts, task)
    components = [rollout.reward_components for rollout in rollouts]
    for name in sorted({name for component in components for name in component}):
        values = [component[name] for component in components if name in component]
        share = len(values) / len(rollouts)
        if name.startswith(ENV_PREFIX):
            metrics[f"rollout/{task}/component/{name}"] = sum(values) / len(rollouts)
            continue
        metrics[f"rollout/{task}/component/{name}"] = mean(values)
        if share < 1:
            metrics[f"rollout/{task}/component_share/{name}"] = share
    return metrics


def advantage_metrics(rollouts: Sequence[Rollout], task: str) -> dict[str, float]:
    """Return ``advantage/<task>/...`` of one task's rollouts; empty if no token feeds rl.

    ``mean`` is the mean over rollouts of each rollout's mean over its tokens that feed rl. ``zero``
    is the share of rollouts whose tokens all have advantage 0. ``min`` and ``max`` are over tokens.
    All are as the algorithm gave them, before the trainer normalises any.
    """
    of_rollouts = [[_advantages(sample) for sample in rollout.samples] for rollout in rollouts]
    counts = np.array([sum(map(len, arrays)) for arrays in of_rollouts])
    if not counts.any():
        return {}
    counts = counts[counts > 0]
    starts = np.cumsum(counts) - counts
    advantages = np.concatenate([array for arrays in of_rollouts for array in arrays])
    sums = np.add.reduceat(advantages, starts, dtype=np.float64)
    non_zero = np.add.reduceat(advantages != 0, starts, dtype=np.int64)
    return {
        f"advantage/{task}/mean": float((sums / counts).mean()),
        f"advantage/{task}/zero": float((non_zero == 0).mean()),
        f"advantage/{task}/min": float(advantages.min()),
        f"advantage/{task}/max": float(advantages.max()),
    }


def _advantages(sample: TrainingSample) -> np.ndarray:
    """Return the advantages of the sample's tokens that feed rl."""
    if sample.advantages is None:
        return np.zeros(0, np.float32)
    feeds_rl = sample.loss_mask
    if sample.rl_weights is not None:
        feeds_rl = feeds_rl & (sample.rl_weights != 0)
    return sample.advantages[feeds_rl]


def credit_seconds(groups: Sequence[RolloutGroup]) -> dict[str, float]:
    """Return ``time/credit_s/<task>``: mean seconds per rollout that the algorithm took."""
    seconds: defaultdict[str, float] = defaultdict(float)
    rollouts: Counter[str] = Counter()
    for group in groups:
        seconds[group.task_name] += group.credit_s
        rollouts[group.task_name] += len(group.rollouts)
    return {f"time/credit_s/{task}": seconds[task] / count for task, count in rollouts.items()}


def costs(groups: Sequence[RolloutGroup]) -> dict[str, float]:
    """Return the sums of the groups' costs by name, with seconds as ``time/<name>_s``."""
    sums: Counter[str] = Counter()
    for group in groups:
        sums.update(group.costs)
    metrics: dict[str, float] = {}
    for name, amount in sums.items():
        is_time = name.endswith("/seconds")
        metrics[f"time/{name.removesuffix('/seconds')}_s" if is_time else name] = amount
    return metrics
