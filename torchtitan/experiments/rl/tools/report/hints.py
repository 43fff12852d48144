"""What is wrong with a run, the worst first: each hint with the figure behind it and the field to turn.

Limits that the terminal warns by too are in ``observability/limits.py``.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from torchtitan.experiments.rl.observability.limits import IDLE, LAG_S, WAITING

Series = Mapping[str, Sequence[tuple[int, float]]]
"""By metric: (step, value), in the order of steps."""
RECENT = 10
"""Steps that a hint about the present looks at."""
LEAST_STEPS = 20
"""Before it, a reward that does not rise says nothing."""
LEAST_POINTS = 8
TINY = 1e-9
VALIDATION, REWARD, EQUAL = "validation/reward", "rollout/reward_mean", "rollout/groups_all_equal"
TOO_HIGH = {
    "mismatch/share_of_bound_max": (
        0.5,
        "Trainer and generators disagree: {:.0%} of the bound at which the run ends",
        "generator.weight_update = recompute, a lower trainer.optimizer.lr or max_offpolicy_steps",
    ),
    "rollout/status/truncated_length": (
        0.2,
        "{:.0%} of the rollouts were cut off at their token limit",
        "tasks.NAME.sampling.max_tokens, tasks.NAME.env.max_rollout_tokens",
    ),
    "perf/event_loop_lag_max_s": (
        LAG_S,
        "Something blocks the event loop for {:.1f} s a step",
        "rollout_workers (more); envs and rewards that compute: plain functions",
    ),
}
"""By metric: the mean over recent steps that is too high, what is seen, and what to turn."""
WATCHED = (VALIDATION, REWARD, EQUAL, *TOO_HIGH, "mismatch_kl/all", "policy/entropy", "time/*_s", "perf/*/busy", "restarts/*")
"""Patterns of the metrics that hints read."""
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
    found = [*_ended(state), *_ledger(ledger), *_reward(series, state), *_figures(series), *_idle(series)]
    order = {"error": 0, "warning": 1, "note": 2}
    return sorted(found, key=lambda hint: order[hint.severity])


def recent(series: Series, name: str) -> float:
    """Mean over the last steps; nan: it was not measured."""
    values = [value for _, value in series.get(name, ())][-RECENT:]
    return sum(values) / len(values) if values else math.nan


class Curve:
    """A reward over steps, and what can be told from its noise."""

    def __init__(self, points: Sequence[tuple[int, float]]):
        """``points``: at least ``LEAST_POINTS``, over ``LEAST_STEPS`` steps."""
        self.steps, self.values = np.array(points, np.float64).T
        self.count, self.window = len(self.values), max(1, len(self.values) // 8)
        self.means = np.convolve(self.values, np.full(self.window, 1 / self.window), "valid")
        """Of neighbours."""
        self.start, self.end = float(self.means[0]), float(self.means[-1])
        # Standard deviation of one value, from the differences of neighbours. The largest tenth is left out, where the reward
        # itself may have jumped; the squares of the others are 0.62 of all, where they are normal.
        squares = np.sort(np.diff(self.values) ** 2)
        kept = squares[: -max(1, len(squares) // 10)]
        # All of them, where the reward is rarely anything but zero.
        self.noise = math.sqrt((kept.mean() / 0.62 if kept.any() else squares.mean()) / 2)

    def rises(self) -> bool:
        """Whether some part of it is above what was before by more than noise explains. The largest distance of the sum of
        values from a straight line, in units of noise times the root of their number, is above 1.63 for one in 200 of the
        curves that are noise alone (Kolmogorov)."""
        furthest = np.cumsum(self.values.mean() - self.values).max()
        return bool(furthest > 1.63 * self.noise * math.sqrt(self.count) + TINY)

    def falls_from(self) -> float | None:
        """The best mean of neighbours, where the last one has lost more than half of what was gained, or a tenth of what was
        there at first; four standard errors at least."""
        best = float(self.means.max())
        least = max(0.5 * (best - self.start), 0.1 * abs(self.start), 4 * self.noise * math.sqrt(2 / self.window), TINY)
        return best if best - self.end > least else None

    def stays_flat(self, last_step: int | None) -> bool:
        """Whether it does not rise noticeably until the last step (None: for as long as now), even if its slope is 2.5 standard
        errors above the one that is seen. One that falls is not flat, and one of ``SOLVED`` need not rise."""
        centered = self.steps - self.steps.mean()
        spread = centered @ centered
        slope = centered @ (self.values - self.values.mean()) / spread
        seen = self.steps[-1] - self.steps[0]
        horizon = min(max(last_step or 0, self.steps[-1]) - self.steps[0], 10 * seen)
        most = (slope + 2.5 * self.noise / math.sqrt(spread)) * horizon
        return bool(self.values.mean() < SOLVED and -TINY <= most < noticeable(self.start))


def noticeable(reward: float) -> float:
    """How much more than ``reward`` is a rise that a person would call one."""
    return max(0.02, 0.2 * abs(reward))


def _ended(state: Mapping[str, Any]) -> Iterable[Hint]:
    if state.get("state") == "stalled":
        text = f"Stalled: nothing was written for {state['silent_s']:,.0f} s, after step {state['step']}"
        yield Hint("error", text, "logs/controller.jsonl says what it waits for", "step")
    if state.get("state") == "stopped" and state.get("steps") is not None:
        text = f"Stopped after step {state['step'] or 0} of {state['steps']}"
        yield Hint("warning", text, "--resume with this folder goes on, if it has a checkpoint", "step")


def _ledger(ledger: Mapping[str, Mapping[str, int]]) -> Iterable[Hint]:
    for task, columns in ledger.items():
        ended = sum(columns.values())
        for column, what, field in (
            ("failed", "failed", "the Ledger's box opens them, each with its cause"),
            ("oversized", "were longer than a row", "batcher.row_length"),
        ):
            count = sum(number for name, number in columns.items() if name.startswith(column))
            if count > 0.05 * ended:
                text = f"{count / ended:.0%} of the rollouts of {task} {what} ({count:,} of {ended:,})"
                yield Hint("error" if count > 0.5 * ended else "warning", text, field, f"ledger/{task}/{column}")


def _reward(series: Series, state: Mapping[str, Any]) -> Iterable[Hint]:
    curves = {}
    for name in (VALIDATION, REWARD):
        points = series.get(name, ())
        if len(points) >= LEAST_POINTS and points[-1][0] - points[0][0] >= LEAST_STEPS:
            curves[name] = Curve(points)
    for name, curve in curves.items():
        if (best := curve.falls_from()) is not None:
            text = f"The reward falls: {best:.3g} at its best, {curve.end:.3g} now"
            yield Hint("warning", text, "trainer.optimizer.lr (lower it)", name)
            return
    validation = [value for _, value in series.get(VALIDATION, ())]
    gained = bool(validation) and validation[-1] - validation[0] > noticeable(validation[0])
    if gained or any(curve.rises() for curve in curves.values()):
        return
    for name, curve in curves.items():
        if curve.stays_flat(state.get("steps")):
            text = f"The reward is flat: {curve.start:.3g} at first, {curve.end:.3g} now"
            yield Hint("warning", text, "the rollouts: what does the model answer? then trainer.optimizer.lr", name)
            return


def _early_and_late(series: Series, name: str) -> tuple[float, float]:
    """Means over the first steps and over the last ones; nan before there are enough."""
    points = series.get(name, ())
    return (recent({name: points[:RECENT]}, name), recent(series, name)) if len(points) >= LEAST_STEPS else (math.nan, math.nan)


def _figures(series: Series) -> Iterable[Hint]:
    for name, values in series.items():
        if name.startswith("restarts/") and values and (count := values[-1][1]) > 0:
            part = name.partition("/")[2]
            text = f"{part} died and was made again {'once' if count == 1 else f'{count:.0f} times'}"
            yield Hint("warning", text, f"logs/ of {part}; supervision.max_restarts", name)
    for name, (most, text, field) in TOO_HIGH.items():
        if (value := recent(series, name)) > most:
            yield Hint("warning", text.format(value), field, name)
    early, late = _early_and_late(series, "mismatch_kl/all")
    if late > 0.1 and late > 3 * early:
        text = f"The mismatch rises: {early:.2g} nats a token at first, {late:.2g} now"
        yield Hint("warning", text, "trainer.optimizer.lr, max_offpolicy_steps (lower one)", "mismatch_kl/all")
    # Equal rewards and no entropy are what is left of a task that the run has solved.
    reward = recent(series, REWARD)
    if reward >= SOLVED > series[REWARD][0][1]:
        return
    if (equal := recent(series, EQUAL)) > 0.8:
        field = "tasks.NAME.dataset: " + ("harder examples" if reward > 0.5 else "easier examples, or a reward with steps")
        yield Hint("warning", f"{equal:.0%} of the groups have equal rewards: they teach nothing", field, EQUAL)
    early, late = _early_and_late(series, "policy/entropy")
    if late < 0.02 and late < early / 10:
        text = f"The entropy has collapsed: {early:.2g} nats at first, {late:.2g} now"
        yield Hint("warning", text, "trainer.optimizer.lr (lower it), or more rollouts a step", "policy/entropy")


def _idle(series: Series) -> Iterable[Hint]:
    generators = [name for name in series if name.startswith("perf/generator_") and name.endswith("/busy")]
    wait, step = recent(series, "time/wait_s"), recent(series, "time/step_s")
    if not generators or not step > 0:
        return
    idle, waiting = 1 - sum(recent(series, name) for name in generators) / len(generators), wait / step
    if idle > 1 - IDLE and waiting > WAITING:
        text = f"Generators idle {idle:.0%} of the time, and the trainer waits {waiting:.0%} of a step: slow envs"
        field = f"rollout_workers, if perf/event_loop_lag_max_s is above {LAG_S:g}; else the envs wait for something"
        yield Hint("warning", text, field, generators[0])
    elif idle > 1 - IDLE:
        text = f"Generators idle {idle:.0%} of the time: the trainer is the slower side"
        field = "trainer.ranks (more), generator.replicas (fewer), max_offpolicy_steps (1 or 2)"
        yield Hint("note", text, field, generators[0])
    elif waiting > 0.7 and not recent(series, EQUAL) >= 0.5:  # else there is little to train on
        text = f"The trainer waits {waiting:.0%} of a step for rollouts, and the generators are busy"
        yield Hint("note", text, "generator.replicas (more), sampling.max_tokens (fewer)", "time/wait_s")
