"""Says what is wrong with a run, from its metrics, its state and its ledger.

Each hint has the figure behind it and the field to turn, and the worst come first. The limits that
the terminal warns by too are in ``observability/__init__.py``.
"""

import math
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean
from types import MappingProxyType
from typing import Any, Literal

import numpy as np

from torchtitan.experiments.rl.command.history import HISTORY_FILE
from torchtitan.experiments.rl.observability import IDLE, LAG_S, WAITING

Series = Mapping[str, Sequence[tuple[int, float]]]
"""Step and value of each metric, by its name, in the order of the steps."""

RECENT_STEPS = 10
"""Number of steps that a hint about the present looks at."""
EARLY_STEPS = 20
"""Number of steps that a metric has before a hint compares its last values with its first. Before
it a reward that does not rise says nothing either."""
MIN_POINTS = 8
"""Minimum number of values of a reward that is judged."""
TINY = 1e-9
"""Difference that counts as none."""
SOLVED = 0.95
"""Mean reward from which on a task has no more to teach."""

VALIDATION = "validation/reward"
REWARD = "rollout/reward_mean"
EQUAL = "rollout/groups_all_equal"
MISMATCH = "mismatch_kl/all"
ENTROPY = "policy/entropy"
FASTER_THAN_RIGHT = "trainer.optimizer.lr, max_offpolicy_steps (lower one)"
"""Fields of a policy that moves too far between sampling and training."""


@dataclass(slots=True, frozen=True)
class Limit:
    """Mean of a metric over recent steps that is too high."""

    metric: str
    most: float
    text: str
    """What is seen, with a place for the figure."""
    field: str


CAPPED_TEXT = "{:.1%} of the tokens have an importance ratio above ratio_max, and teach nothing"
LIMITS = (
    Limit(
        metric="mismatch/share_of_bound_max",
        most=0.5,
        text="Trainer and generators disagree: {:.0%} of the bound at which the run ends",
        field="generator.weight_update = recompute, a lower trainer.optimizer.lr or "
        "max_offpolicy_steps",
    ),
    Limit(
        metric="rl/ratio_capped_fraction",
        most=0.001,
        text=CAPPED_TEXT,
        field=FASTER_THAN_RIGHT,
    ),
    Limit(
        metric="ref_kl/ratio_capped_fraction",
        most=0.001,
        text=CAPPED_TEXT,
        field=FASTER_THAN_RIGHT,
    ),
    Limit(
        metric="rollout/status/truncated_length",
        most=0.2,
        text="{:.0%} of the rollouts were cut off at their token limit",
        field="tasks.NAME.sampling.max_tokens, tasks.NAME.env.max_rollout_tokens",
    ),
    Limit(
        metric="perf/event_loop_lag_max_s",
        most=LAG_S,
        text="Something blocks the event loop for {:.1f} s a step",
        field="rollout_workers (more); envs and rewards that compute: plain functions",
    ),
)
WATCHED = (
    VALIDATION,
    REWARD,
    EQUAL,
    *(limit.metric for limit in LIMITS),
    MISMATCH,
    ENTROPY,
    "validation/*/failed",
    "validation/*/attempts",
    "time/*_s",
    "perf/*/busy",
    "restarts/*",
)
"""Patterns of the metrics that hints read."""


@dataclass(slots=True, frozen=True)
class Hint:
    """One thing that is wrong with a run."""

    severity: Literal["error", "warning", "note"]
    text: str
    """What is seen, with its figure."""
    field: str
    """Field to turn, or place to look at."""
    metric: str
    """Name of the figure in metrics.jsonl, or in the ledger; or the file that says so."""
    page: Literal["timeline", "ledger", "evaluations"] | None = None
    """Page of the report that shows more of it."""


def hints(
    series: Series,
    state: Mapping[str, Any],
    ledger: Mapping[str, Mapping[str, int]],
    causes: Mapping[str, str] = MappingProxyType({}),
) -> list[Hint]:
    """Return what is wrong with a run, the worst first.

    Args:
        series: metrics that `WATCHED` names.
        state: state of the run, as ``ReportedRun.state`` returns it.
        ledger: number of rollouts by task and column.
        causes: most frequent cause of each task's failed rollouts.
    """
    found = [
        *_end_hints(state),
        *_evaluation_hints(series),
        *_ledger_hints(ledger, causes),
        *_reward_hints(series, state),
        *_metric_hints(series),
    ]
    severities = ("error", "warning", "note")
    return sorted(found, key=lambda hint: severities.index(hint.severity))


def _end_hints(state: Mapping[str, Any]) -> Iterable[Hint]:
    """Yield what is wrong with a run that hangs, or ended otherwise than by its last step."""
    name = state["state"]
    why = state.get("why")
    after = f"after step {state['step'] or 0}"
    if state["steps"] is not None:
        after += f" of {state['steps']}"
    saved = state.get("checkpoint")
    resume = "start a new run: this one has no checkpoint to go on from"
    if saved is not None:
        resume = f"--resume with this folder goes on from step {saved}"
    elif state.get("begins_again"):
        resume = "--resume with this folder begins again: there is no checkpoint yet"
    if name == "stalled":
        yield Hint(
            "error",
            f"Stalled: nothing was written for {state['silent_s']:,.0f} s, {after}",
            "logs/controller.jsonl says what it waits for",
            "step",
            page="timeline",
        )
    elif name == "failed":
        text = why or f"Failed {after}"
        yield Hint("error", text, f"mend the cause, then {resume}", HISTORY_FILE, page="timeline")
    elif name == "killed":
        yield Hint(
            "error",
            f"Killed {after}: the command ended without a word, as after SIGKILL (often for "
            "memory) or when its host goes down",
            resume,
            HISTORY_FILE,
            page="timeline",
        )
    elif name == "stopped" and state["steps"] is not None:
        by = f" by {why.replace('SIGINT', 'Ctrl-C (SIGINT)')}" if why else ""
        yield Hint(
            "warning",
            f"Stopped {after}{by}",
            resume,
            HISTORY_FILE if why else "step",
        )
    elif name == "done" and why:
        yield Hint("note", f"Done {after}: {why}", "other examples, or harder ones", HISTORY_FILE)


def _evaluation_hints(series: Series) -> Iterable[Hint]:
    """Yield the tasks with failed attempts in an evaluation: that with the largest share of them.

    Runs of earlier versions of the library did not count the attempts.
    """
    for name, points in series.items():
        if not (name.startswith("validation/") and name.endswith("/failed")):
            continue
        task = name.removeprefix("validation/").removesuffix("/failed")
        attempts = dict(series.get(f"validation/{task}/attempts", ()))
        shares = [
            (failed / attempts[version], version, failed)
            for version, failed in points
            if failed and attempts.get(version)
        ]
        if not shares:
            continue
        share, version, failed = max(shares)
        counts = f"{failed:,.0f} of {attempts[version]:,.0f} attempts at {task} failed"
        effect = "no reward" if share == 1 else "a mean that leaves them out"
        yield Hint(
            "error" if share > 0.5 else "warning",
            f"{counts} in the evaluation of version {version}: its figure is {effect}",
            "the page Evaluations has the cause",
            name,
            page="evaluations",
        )


def _ledger_hints(
    ledger: Mapping[str, Mapping[str, int]], causes: Mapping[str, str]
) -> Iterable[Hint]:
    """Yield the tasks of which many rollouts failed, or had no room in a row."""
    kinds = (
        ("failed", "failed", "the Ledger lists the causes"),
        ("oversized", "were longer than a row", "batcher.row_length"),
    )
    for task, columns in ledger.items():
        ended = sum(columns.values())
        for kind, what, field in kinds:
            count = sum(number for column, number in columns.items() if column.startswith(kind))
            if count > 0.05 * ended:
                cause = causes.get(task) if kind == "failed" else None
                most_often = f"; most often: {cause}" if cause else ""
                yield Hint(
                    "error" if count > 0.5 * ended else "warning",
                    f"{count / ended:.0%} of the rollouts of {task} {what} "
                    f"({count:,} of {ended:,}){most_often}",
                    field,
                    f"ledger/{task}/{kind}",
                    page="ledger",
                )


# ---- rewards


class Curve:
    """A reward over steps, and what can be told apart from its noise."""

    def __init__(self, points: Sequence[tuple[int, float]]):
        """Estimate the noise.

        Args:
            points: steps and values, at least `MIN_POINTS` over `EARLY_STEPS` steps.
        """
        self.steps, self.values = np.array(points, np.float64).T
        count = len(self.values)
        self._window = max(1, count // 8)
        """Number of neighbours of which a mean is taken."""
        weights = np.full(self._window, 1 / self._window)
        self._means = np.convolve(self.values, weights, "valid")
        self.start = float(self._means[0])
        self.end = float(self._means[-1])
        self._noise = self._standard_deviation()

    def _standard_deviation(self) -> float:
        """Return the standard deviation of one value, from the differences of neighbours.

        The largest tenth of the squared differences is left out, because the reward itself may have
        jumped there. The rest is 0.62 of all squares if they are those of a normal distribution.
        """
        squares = np.sort(np.diff(self.values) ** 2)
        usual = squares[: -max(1, len(squares) // 10)]
        if usual.any():
            mean_square = usual.mean() / 0.62
        else:  # the reward is rarely anything but zero
            mean_square = squares.mean()
        return math.sqrt(mean_square / 2)

    def rises(self) -> bool:
        """Return True if a part of the curve is above what came before by more than noise explains.

        The sum of the values strays from a straight line. In units of the noise, times the root of
        the number of values, its largest distance is above 1.63 for one in 200 of the curves that
        are noise alone (Kolmogorov).
        """
        furthest = np.cumsum(self.values.mean() - self.values).max()
        return bool(furthest > 1.63 * self._noise * math.sqrt(len(self.values)) + TINY)

    def falls_from(self) -> float | None:
        """Return the best mean of neighbours if the curve has fallen from it; None if it has not.

        It has fallen if it lost more than half of what it had gained, a tenth of what was there at
        first, and four standard errors.
        """
        best = float(self._means.max())
        least = max(
            0.5 * (best - self.start),
            0.1 * abs(self.start),
            4 * self._noise * math.sqrt(2 / self._window),
            TINY,
        )
        return best if best - self.end > least else None

    def stays_flat(self, last_step: int | None) -> bool:
        """Return True if the curve will not rise noticeably until the last step.

        Its slope is taken to be 2.5 standard errors steeper than the one that is seen. A curve that
        falls is not flat, and one of `SOLVED` need not rise.

        Args:
            last_step: step that the run ends with; None if it is not known, for as many steps more
                as were seen.
        """
        centered = self.steps - self.steps.mean()
        spread = centered @ centered
        slope = centered @ (self.values - self.values.mean()) / spread
        seen = self.steps[-1] - self.steps[0]
        until_end = max(last_step or 0, self.steps[-1]) - self.steps[0]
        horizon = min(until_end, 10 * seen)
        most = (slope + 2.5 * self._noise / math.sqrt(spread)) * horizon
        return bool(self.values.mean() < SOLVED and -TINY <= most < noticeable(self.start))


def noticeable(reward: float) -> float:
    """Return how much a reward has to rise until a person says that it rises."""
    return max(0.02, 0.2 * abs(reward))


def _reward_hints(series: Series, state: Mapping[str, Any]) -> Iterable[Hint]:
    """Yield that the reward falls, or that it is flat: at most one hint."""
    curves = {
        name: Curve(series[name])
        for name in (VALIDATION, REWARD)
        if _is_long_enough(series.get(name, ()))
    }
    for name, curve in curves.items():
        best = curve.falls_from()
        if best is not None:
            text = f"The reward falls: {best:.3g} at its best, {curve.end:.3g} now"
            yield Hint("warning", text, "trainer.optimizer.lr (lower it)", name)
            return
    if _has_gained(series) or any(curve.rises() for curve in curves.values()):
        return
    for name, curve in curves.items():
        if curve.stays_flat(state.get("steps")):
            text = f"The reward is flat: {curve.start:.3g} at first, {curve.end:.3g} now"
            field = "the rollouts: what does the model answer? then trainer.optimizer.lr"
            yield Hint("warning", text, field, name)
            return


def _is_long_enough(points: Sequence[tuple[int, float]]) -> bool:
    return len(points) >= MIN_POINTS and points[-1][0] - points[0][0] >= EARLY_STEPS


def _has_gained(series: Series) -> bool:
    """Return True if the last validation is noticeably better than the first."""
    rewards = [value for _, value in series.get(VALIDATION, ())]
    return bool(rewards) and rewards[-1] - rewards[0] > noticeable(rewards[0])


# ---- other metrics


def _metric_hints(series: Series) -> Iterable[Hint]:
    recent = _means(series, slice(-RECENT_STEPS, None))
    early = _means(series, slice(RECENT_STEPS), min_points=EARLY_STEPS)
    yield from _restart_hints(series)
    for limit in LIMITS:
        value = recent[limit.metric]
        if value > limit.most:
            yield Hint("warning", limit.text.format(value), limit.field, limit.metric)
    if recent[MISMATCH] > 0.1 and recent[MISMATCH] > 3 * early[MISMATCH]:
        text = (
            f"The mismatch rises: {early[MISMATCH]:.2g} nats a token at first, "
            f"{recent[MISMATCH]:.2g} now"
        )
        yield Hint("warning", text, FASTER_THAN_RIGHT, MISMATCH)
    # Equal rewards and no entropy are what is left of a task that the run has solved.
    is_solved = recent[REWARD] >= SOLVED > series[REWARD][0][1]
    if not is_solved:
        yield from _signal_hints(recent, early)
    yield from _balance_hints(series, recent)


def _means(series: Series, part: slice, *, min_points: int = 1) -> Mapping[str, float]:
    """Return the mean of each metric over a part of its steps.

    It is nan for a metric that has fewer than ``min_points``, which no comparison is true for.
    """
    means = {
        name: fmean(value for _, value in points[part])
        for name, points in series.items()
        if len(points) >= min_points
    }
    return defaultdict(lambda: math.nan, means)


def _restart_hints(series: Series) -> Iterable[Hint]:
    """Yield the processes that died and were restarted."""
    for name, points in series.items():
        count = points[-1][1] if name.startswith("restarts/") and points else 0
        if count > 0:
            process = name.partition("/")[2]
            times = "once" if count == 1 else f"{count:.0f} times"
            yield Hint(
                "warning",
                f"{process} died and was restarted {times}",
                f"logs/ of {process}; supervision.max_restarts",
                name,
            )


def _signal_hints(recent: Mapping[str, float], early: Mapping[str, float]) -> Iterable[Hint]:
    """Yield why there is little to learn from the rollouts."""
    if recent[EQUAL] > 0.8:
        cure = "harder examples"
        if not recent[REWARD] > 0.5:
            cure = "easier examples, or a reward with steps"
        text = f"{recent[EQUAL]:.0%} of the groups have equal rewards: they teach nothing"
        yield Hint("warning", text, f"tasks.NAME.dataset: {cure}", EQUAL)
    if recent[ENTROPY] < 0.02 and recent[ENTROPY] < early[ENTROPY] / 10:
        text = (
            f"The entropy has collapsed: {early[ENTROPY]:.2g} nats at first, "
            f"{recent[ENTROPY]:.2g} now"
        )
        field = "trainer.optimizer.lr (lower it), or more rollouts a step"
        yield Hint("warning", text, field, ENTROPY)


def _balance_hints(series: Series, recent: Mapping[str, float]) -> Iterable[Hint]:
    """Yield which side waits for the other one, generators or trainer."""
    generators = [
        name for name in series if name.startswith("perf/generator_") and name.endswith("/busy")
    ]
    if not generators or not recent["time/step_s"] > 0:
        return
    idle = 1 - fmean(recent[name] for name in generators)
    waiting = recent["time/wait_s"] / recent["time/step_s"]
    if idle > 1 - IDLE and waiting > WAITING:
        yield Hint(
            "warning",
            f"Generators idle {idle:.0%} of the time, and the trainer waits {waiting:.0%} of a "
            "step: slow envs",
            f"rollout_workers, if perf/event_loop_lag_max_s is above {LAG_S:g}; else the envs "
            "wait for something",
            generators[0],
        )
    elif idle > 1 - IDLE:
        yield Hint(
            "note",
            f"Generators idle {idle:.0%} of the time: the trainer is the slower side",
            "trainer.ranks (more), generator.replicas (fewer), max_offpolicy_steps (1 or 2)",
            generators[0],
        )
    elif waiting > 0.7 and not recent[EQUAL] >= 0.5:  # else there is little to train on
        yield Hint(
            "note",
            f"The trainer waits {waiting:.0%} of a step for rollouts, and the generators are busy",
            "generator.replicas (more), sampling.max_tokens (fewer)",
            "time/wait_s",
        )
