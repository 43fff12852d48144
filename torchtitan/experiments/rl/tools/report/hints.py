"""What is wrong with a run, the worst first: each hint with the figure behind it and the field to turn.

Limits that the terminal warns by too are in ``observability/limits.py``.
"""

import itertools
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from torchtitan.experiments.rl.observability.limits import IDLE, LAG_S, WAITING

Series = Mapping[str, Sequence[tuple[int, float]]]
"""By metric: (step, value), in the order of steps."""
RECENT = 10
"""Steps that a hint about the present looks at."""
LEAST_STEPS = 20
"""Before it, a reward that does not rise says nothing."""
LEAST_POINTS = 8
TINY = 1e-9
REWARDS = ("validation/reward", "rollout/reward_mean")
SOLVED = 0.95
"""Mean reward from which on a task has no more to teach."""


@dataclass(slots=True, frozen=True)
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
        *_reward(series, state),
        *_no_signal(series),
        *_mismatch(series),
        *_entropy(series),
        *_cut_off(series),
        *_idle(series),
        *_blocked(series),
    ]
    order = {"error": 0, "warning": 1, "note": 2}
    return sorted(found, key=lambda hint: order[hint.severity])


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)


def recent(series: Series, name: str) -> float | None:
    """Mean over the last steps."""
    values = [value for _, value in series.get(name, ())][-RECENT:]
    return _mean(values) if values else None


@dataclass(kw_only=True, slots=True, frozen=True)
class Curve:
    """A reward over steps, and what can be told from its noise."""

    steps: Sequence[int]
    values: Sequence[float]
    noise: float
    """Standard deviation of one value, estimated from the differences of neighbours. The largest tenth is left out, where the
    reward itself may have jumped; the squares of the others are 0.62 of all, where they are normal."""

    @staticmethod
    def of(points: Sequence[tuple[int, float]]) -> "Curve | None":
        """None: there are too few points, or steps, to say anything of it."""
        if len(points) < LEAST_POINTS or points[-1][0] - points[0][0] < LEAST_STEPS:
            return None
        steps, values = zip(*points, strict=True)
        squares = sorted((b - a) ** 2 for a, b in itertools.pairwise(values))
        kept = squares[: -max(1, len(squares) // 10)]
        # All of them, where the reward is rarely anything but zero.
        variance = _mean(kept) / 0.62 if any(kept) else _mean(squares)
        return Curve(steps=steps, values=values, noise=math.sqrt(variance / 2))

    @property
    def window(self) -> int:
        return max(1, len(self.values) // 8)

    @property
    def start(self) -> float:
        return _mean(self.values[: self.window])

    @property
    def end(self) -> float:
        return _mean(self.values[-self.window :])

    def rises(self) -> bool:
        """Whether some part of it is above what was before by more than noise explains. The largest distance of the sum of
        values from a straight line, in units of noise times the root of their number, is above 1.63 for one in 200 of the
        curves that are noise alone (Kolmogorov)."""
        mean, sum_, furthest = _mean(self.values), 0.0, 0.0
        for value in self.values:
            sum_ += mean - value
            furthest = max(furthest, sum_)
        return furthest > 1.63 * self.noise * math.sqrt(len(self.values)) + TINY

    def fall(self) -> tuple[float, float] | None:
        """The best mean of neighbours and the last one, where more than half of what was gained is lost, or a tenth of what was
        there at first; four standard errors at least."""
        means = [_mean(self.values[i : i + self.window]) for i in range(len(self.values) - self.window + 1)]
        best = max(means)
        least = max(0.5 * (best - self.start), 0.1 * abs(self.start), 4 * self.noise * math.sqrt(2 / self.window), TINY)
        return (best, self.end) if best - self.end > least else None

    def stays_flat(self, last_step: int | None) -> bool:
        """Whether it does not rise noticeably until the last step (None: for as long as now), even if its slope is 2.5 standard
        errors above the one that is seen. One that falls is not flat, and one of ``SOLVED`` need not rise."""
        center, mean = _mean(self.steps), _mean(self.values)
        spread = sum((step - center) ** 2 for step in self.steps)
        slope = sum((step - center) * (value - mean) for step, value in zip(self.steps, self.values, strict=True)) / spread
        seen = self.steps[-1] - self.steps[0]
        horizon = min(max(last_step or 0, self.steps[-1]) - self.steps[0], 10 * seen)
        most = (slope + 2.5 * self.noise / math.sqrt(spread)) * horizon
        return mean < SOLVED and 0 <= most < noticeable(self.start)


def noticeable(reward: float) -> float:
    """How much more than ``reward`` is a rise that a person would call one."""
    return max(0.02, 0.2 * abs(reward))


def _stalled(state: Mapping[str, Any]) -> Iterable[Hint]:
    if state.get("state") == "stalled":
        yield Hint(
            "error",
            f"Stalled: nothing was written for {state['silent_s']:,.0f} s, after step {state['step']}",
            "logs/controller.jsonl says what it waits for",
            "step",
        )
    if state.get("state") == "stopped" and state.get("steps") is not None:
        yield Hint(
            "warning",
            f"Stopped after step {state['step'] or 0} of {state['steps']}",
            "--resume with this folder goes on, if it has a checkpoint",
            "step",
        )


def _failed(ledger: Mapping[str, Mapping[str, int]]) -> Iterable[Hint]:
    for task, columns in ledger.items():
        ended = sum(columns.values())
        failed = sum(count for column, count in columns.items() if column.startswith("failed"))
        if ended and failed / ended > 0.05:
            yield Hint(
                "error" if failed / ended > 0.5 else "warning",
                f"{failed / ended:.0%} of the rollouts of {task} failed ({failed:,} of {ended:,})",
                "the Ledger's box opens them, each with its cause",
                f"ledger/{task}/failed",
            )
        if ended and (oversized := columns.get("oversized", 0)) / ended > 0.05:
            yield Hint(
                "warning",
                f"{oversized / ended:.0%} of the rollouts of {task} were longer than a row ({oversized:,} of {ended:,})",
                "batcher.row_length",
                f"ledger/{task}/oversized",
            )


def _restarts(series: Series) -> Iterable[Hint]:
    for name, values in series.items():
        if name.startswith("restarts/") and values and values[-1][1] > 0:
            part = name.partition("/")[2]
            yield Hint(
                "warning",
                f"{part} died and was made again {'once' if values[-1][1] == 1 else f'{values[-1][1]:.0f} times'}",
                f"logs/ of {part}; supervision.max_restarts",
                name,
            )


def _reward(series: Series, state: Mapping[str, Any]) -> Iterable[Hint]:
    curves = {name: curve for name in REWARDS if (curve := Curve.of(series.get(name, ()))) is not None}
    for name, curve in curves.items():
        if (loss := curve.fall()) is not None:
            yield Hint(
                "warning",
                f"The reward falls: {loss[0]:.3g} at its best, {loss[1]:.3g} now",
                "trainer.optimizer.lr (lower it)",
                name,
            )
            return
    validation = [value for _, value in series.get(REWARDS[0], ())]
    if any(curve.rises() for curve in curves.values()) or (
        validation and validation[-1] - validation[0] > noticeable(validation[0])
    ):
        return
    for name, curve in curves.items():
        if curve.stays_flat(state.get("steps")):
            yield Hint(
                "warning",
                f"The reward is flat: {curve.start:.3g} at first, {curve.end:.3g} now",
                "the rollouts: what does the model answer? then trainer.optimizer.lr",
                name,
            )
            return


def _no_signal(series: Series) -> Iterable[Hint]:
    equal = recent(series, "rollout/groups_all_equal")
    if equal is not None and equal > 0.8 and not _was_learned(series):
        reward = recent(series, "rollout/reward_mean") or 0.0
        yield Hint(
            "warning",
            f"{equal:.0%} of the groups have equal rewards: they teach nothing",
            "tasks.NAME.dataset: " + ("harder examples" if reward > 0.5 else "easier examples, or a reward with steps"),
            "rollout/groups_all_equal",
        )


def _was_learned(series: Series) -> bool:
    """Whether the run solved its task: equal rewards and no entropy are what is left of it."""
    rewards = [value for _, value in series.get("rollout/reward_mean", ())]
    return bool(rewards) and _mean(rewards[-RECENT:]) >= SOLVED > rewards[0]


def _early_and_late(series: Series, name: str) -> tuple[float, float]:
    """Means over the first steps and over the last ones; nan before there are enough."""
    values = [value for _, value in series.get(name, ())]
    return (_mean(values[:RECENT]), _mean(values[-RECENT:])) if len(values) >= LEAST_STEPS else (math.nan, math.nan)


def _mismatch(series: Series) -> Iterable[Hint]:
    share = recent(series, "mismatch/share_of_bound_max")
    if share is not None and share > 0.5:
        yield Hint(
            "warning",
            f"Trainer and generators disagree: {share:.0%} of the bound at which the run ends",
            "generator.weight_update = recompute, a lower trainer.optimizer.lr or max_offpolicy_steps",
            "mismatch/share_of_bound_max",
        )
    early, late = _early_and_late(series, "mismatch_kl/all")
    if late > 0.1 and late > 3 * early:
        yield Hint(
            "warning",
            f"The mismatch rises: {early:.2g} nats a token at first, {late:.2g} now",
            "trainer.optimizer.lr, max_offpolicy_steps (lower one)",
            "mismatch_kl/all",
        )


def _entropy(series: Series) -> Iterable[Hint]:
    early, late = _early_and_late(series, "policy/entropy")
    if late < 0.02 and late < early / 10 and not _was_learned(series):
        yield Hint(
            "warning",
            f"The entropy has collapsed: {early:.2g} nats at first, {late:.2g} now",
            "trainer.optimizer.lr (lower it), or more rollouts a step",
            "policy/entropy",
        )


def _cut_off(series: Series) -> Iterable[Hint]:
    cut = recent(series, "rollout/status/truncated_length")
    if cut is not None and cut > 0.2:
        yield Hint(
            "warning",
            f"{cut:.0%} of the rollouts were cut off at their token limit",
            "tasks.NAME.sampling.max_tokens, tasks.NAME.env.max_rollout_tokens",
            "rollout/status/truncated_length",
        )


def _idle(series: Series) -> Iterable[Hint]:
    generators = [name for name in series if name.startswith("perf/generator_") and name.endswith("/busy")]
    busy = [value for name in generators if (value := recent(series, name)) is not None]
    wait, step = recent(series, "time/wait_s"), recent(series, "time/step_s")
    if not busy or wait is None or not step:
        return
    mean, waiting = sum(busy) / len(busy), wait / step
    if mean < IDLE and waiting > WAITING:
        yield Hint(
            "warning",
            f"Generators idle {1 - mean:.0%} of the time, and the trainer waits {waiting:.0%} of a step: slow envs",
            f"rollout_workers, if perf/event_loop_lag_max_s is above {LAG_S:g}; else the envs wait for something",
            generators[0],
        )
    elif mean < IDLE:
        yield Hint(
            "note",
            f"Generators idle {1 - mean:.0%} of the time: the trainer is the slower side",
            "trainer.ranks (more), generator.replicas (fewer), max_offpolicy_steps (1 or 2)",
            generators[0],
        )
    elif waiting > 0.7 and (recent(series, "rollout/groups_all_equal") or 0.0) < 0.5:  # else there is little to train on
        yield Hint(
            "note",
            f"The trainer waits {waiting:.0%} of a step for rollouts, and the generators are busy",
            "generator.replicas (more), sampling.max_tokens (fewer)",
            "time/wait_s",
        )


def _blocked(series: Series) -> Iterable[Hint]:
    lag = recent(series, "perf/event_loop_lag_max_s")
    if lag is not None and lag > LAG_S:
        yield Hint(
            "warning",
            f"Something blocks the event loop for {lag:.1f} s a step",
            "rollout_workers (more); envs and rewards that compute: plain functions",
            "perf/event_loop_lag_max_s",
        )
