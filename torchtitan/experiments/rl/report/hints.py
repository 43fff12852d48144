"""What is wrong with a run, the worst first: each hint with the figure behind it and the field to turn.

The limits are those of docs/running.md.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

Series = Mapping[str, Sequence[tuple[int, float]]]
"""By metric: (step, value), in the order of steps."""
RECENT = 10
"""Steps that a hint about the present looks at."""
LEAST_STEPS = 20
"""Before it, a reward that does not rise says nothing."""


@dataclass(kw_only=True, slots=True, frozen=True)
class Hint:
    severity: Literal["error", "warning", "note"]
    text: str
    """What is seen, with its figure."""
    field: str
    """What to turn, or where to look."""
    metric: str
    """The figure's name in metrics.jsonl."""


def hints(series: Series, state: Mapping[str, Any], ledger: Mapping[str, Mapping[str, int]]) -> list[Hint]:
    """
    Args:
        state: of ``ReportedRun.state``.
        ledger: rollouts by task and column.
    """
    found = [
        *_stalled(state),
        *_failed(ledger),
        *_restarts(series),
        *_flat_reward(series),
        *_no_signal(series),
        *_mismatch(series),
        *_entropy(series),
        *_cut_off(series),
        *_idle(series),
        *_blocked(series),
    ]
    order = {"error": 0, "warning": 1, "note": 2}
    return sorted(found, key=lambda hint: order[hint.severity])


def recent(series: Series, name: str) -> float | None:
    """Mean over the last steps."""
    values = [value for _, value in series.get(name, ())][-RECENT:]
    return sum(values) / len(values) if values else None


def _stalled(state: Mapping[str, Any]) -> Iterable[Hint]:
    if state.get("state") == "stalled":
        yield Hint(
            severity="error",
            text=f"Stalled: nothing was written for {state['silent_s']:,.0f} s, after step {state['step']}",
            field="logs/controller.jsonl says what it waits for",
            metric="step",
        )
    if state.get("state") == "stopped" and state.get("steps") is not None:
        yield Hint(
            severity="warning",
            text=f"Stopped after step {state['step'] or 0} of {state['steps']}",
            field="--resume with this folder goes on, if it has a checkpoint",
            metric="step",
        )


def _failed(ledger: Mapping[str, Mapping[str, int]]) -> Iterable[Hint]:
    for task, columns in ledger.items():
        ended = sum(columns.values())
        failed = sum(count for column, count in columns.items() if column.startswith("failed"))
        if ended and failed / ended > 0.05:
            yield Hint(
                severity="error" if failed / ended > 0.5 else "warning",
                text=f"{failed / ended:.0%} of the rollouts of {task} failed ({failed:,} of {ended:,})",
                field="the Ledger's box opens them, each with its cause",
                metric=f"ledger/{task}/failed",
            )
        if ended and (oversized := columns.get("oversized", 0)) / ended > 0.05:
            yield Hint(
                severity="warning",
                text=f"{oversized / ended:.0%} of the rollouts of {task} were longer than a row ({oversized:,} of {ended:,})",
                field="batcher.row_length",
                metric=f"ledger/{task}/oversized",
            )


def _restarts(series: Series) -> Iterable[Hint]:
    for name, values in series.items():
        if name.startswith("restarts/") and values and values[-1][1] > 0:
            part = name.partition("/")[2]
            yield Hint(
                severity="warning",
                text=f"{part} died and was made again {'once' if values[-1][1] == 1 else f'{values[-1][1]:.0f} times'}",
                field=f"logs/ of {part}; supervision.max_restarts",
                metric=name,
            )


def _flat_reward(series: Series) -> Iterable[Hint]:
    name = "validation/reward" if len(series.get("validation/reward", ())) >= 8 else "rollout/reward_mean"
    points = series.get(name, ())
    if not points or points[-1][0] - points[0][0] < LEAST_STEPS or len(points) < 8:
        return
    quarter = len(points) // 4
    first, last = points[:quarter], points[-quarter:]
    a, b = _mean_and_error(first), _mean_and_error(last)
    if b[0] - a[0] <= 2 * math.hypot(a[1], b[1]) and a[0] < 0.95:
        falls = a[0] - b[0] > 2 * math.hypot(a[1], b[1])
        yield Hint(
            severity="warning",
            text=f"The reward {'falls' if falls else 'is flat'}: {a[0]:.3g} in the first quarter, {b[0]:.3g} in the last",
            field="trainer.optimizer.lr (lower it)"
            if falls
            else "the rollouts: what does the model answer? then trainer.optimizer.lr",
            metric=name,
        )


def _no_signal(series: Series) -> Iterable[Hint]:
    equal = recent(series, "rollout/groups_all_equal")
    if equal is not None and equal > 0.8:
        reward = recent(series, "rollout/reward_mean") or 0.0
        yield Hint(
            severity="warning",
            text=f"{equal:.0%} of the groups have equal rewards: they teach nothing",
            field="tasks.NAME.dataset: " + ("harder examples" if reward > 0.5 else "easier examples, or a reward with steps"),
            metric="rollout/groups_all_equal",
        )


def _mismatch(series: Series) -> Iterable[Hint]:
    share = recent(series, "mismatch/share_of_bound_max")
    if share is not None and share > 0.5:
        yield Hint(
            severity="warning",
            text=f"Trainer and generators disagree: {share:.0%} of the bound at which the run ends",
            field="generator.weight_update = recompute, a lower trainer.optimizer.lr or max_offpolicy_steps",
            metric="mismatch/share_of_bound_max",
        )
    kl = [value for _, value in series.get("mismatch_kl/all", ())]
    if len(kl) >= LEAST_STEPS:
        early, late = sum(kl[:RECENT]) / RECENT, sum(kl[-RECENT:]) / RECENT
        if late > 0.1 and late > 3 * early:
            yield Hint(
                severity="warning",
                text=f"The mismatch rises: {early:.2g} nats a token at first, {late:.2g} now",
                field="trainer.optimizer.lr, max_offpolicy_steps (lower one)",
                metric="mismatch_kl/all",
            )


def _entropy(series: Series) -> Iterable[Hint]:
    values = [value for _, value in series.get("policy/entropy", ())]
    if len(values) >= LEAST_STEPS:
        early, late = sum(values[:RECENT]) / RECENT, sum(values[-RECENT:]) / RECENT
        if late < 0.02 and late < early / 10:
            yield Hint(
                severity="warning",
                text=f"The entropy has collapsed: {early:.2g} nats at first, {late:.2g} now",
                field="trainer.optimizer.lr (lower it), or more rollouts a step",
                metric="policy/entropy",
            )


def _cut_off(series: Series) -> Iterable[Hint]:
    cut = recent(series, "rollout/status/truncated_length")
    if cut is not None and cut > 0.2:
        yield Hint(
            severity="warning",
            text=f"{cut:.0%} of the rollouts were cut off at their token limit",
            field="tasks.NAME.sampling.max_tokens, tasks.NAME.env.max_rollout_tokens",
            metric="rollout/status/truncated_length",
        )


def _idle(series: Series) -> Iterable[Hint]:
    generators = [name for name in series if name.startswith("perf/generator_") and name.endswith("/busy")]
    busy = [value for name in generators if (value := recent(series, name)) is not None]
    wait, step = recent(series, "time/wait_s"), recent(series, "time/step_s")
    if not busy or wait is None or not step:
        return
    mean, waiting = sum(busy) / len(busy), wait / step
    if mean < 0.6 and waiting > 0.3:
        yield Hint(
            severity="warning",
            text=f"Generators idle {1 - mean:.0%} of the time, and the trainer waits {waiting:.0%} of a step: slow envs",
            field="rollout_workers, if perf/event_loop_lag_max_s is above 0.2; else the envs wait for something",
            metric=generators[0],
        )
    elif mean < 0.6:
        yield Hint(
            severity="note",
            text=f"Generators idle {1 - mean:.0%} of the time: the trainer is the slower side",
            field="trainer.ranks (more), generator.replicas (fewer), max_offpolicy_steps (1 or 2)",
            metric=generators[0],
        )
    elif waiting > 0.5:
        yield Hint(
            severity="note",
            text=f"The trainer waits {waiting:.0%} of a step for rollouts, and the generators are busy",
            field="generator.replicas (more), sampling.max_tokens (fewer)",
            metric="time/wait_s",
        )


def _blocked(series: Series) -> Iterable[Hint]:
    lag = recent(series, "perf/event_loop_lag_max_s")
    if lag is not None and lag > 1:
        yield Hint(
            severity="warning",
            text=f"Something blocks the event loop for {lag:.1f} s a step",
            field="rollout_workers (more); envs and rewards that compute: plain functions",
            metric="perf/event_loop_lag_max_s",
        )


def _mean_and_error(points: Sequence[tuple[int, float]]) -> tuple[float, float]:
    values = [value for _, value in points]
    mean = sum(values) / len(values)
    if len(values) < 2:
        return mean, 0.0
    return mean, math.sqrt(sum((value - mean) ** 2 for value in values) / (len(values) - 1) / len(values))
