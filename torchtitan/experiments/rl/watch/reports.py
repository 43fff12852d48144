"""Tells people how a run goes: its metrics, lines on the console and, at its end, the summary.

`StepWarnings` warns of a run that goes on and learns nothing, or waits for no good reason.
"""

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import NamedTuple

from torchtitan.experiments.rl.fleet.context import RunContext
from torchtitan.experiments.rl.loops.events import RunEvents
from torchtitan.experiments.rl.loops.saved_state import ValidationReport
from torchtitan.experiments.rl.loops.step_metrics import StepRecord
from torchtitan.experiments.rl.observability import IDLE, LAG_S, WAITING
from torchtitan.experiments.rl.observability.console import (
    MEASURES,
    Course,
    counted_failures,
    measure_of,
)
from torchtitan.experiments.rl.observability.metrics import MetricsLogger
from torchtitan.experiments.rl.rollouts.rounding import are_equal

FIRST_VALIDATION = "validation before the first step"
FIRST_STEP = "the first step"
WARN_AFTER_STEPS = 3
"""Number of steps in a row that a warning waits for: one step may be odd."""
BROKEN = 0.05
"""Share of a step's rollouts, matched by a filter of broken text, above which there is a warning.

Of a healthy model it is below 0.005.
"""
ALL = 0.999
"""Share that counts as all rollouts of a step."""


class Evaluated(NamedTuple):
    """Result of an evaluation, as the summary of a run has it."""

    reward: float | None
    failed: int = 0
    """Number of attempts without a reward."""
    attempts: int = 0


class RunReports(RunEvents):
    """Observer that logs metrics, and prints a line for each step and evaluation."""

    def __init__(
        self,
        context: RunContext,
        *,
        metrics: MetricsLogger,
        compares_rewards: bool,
        validations: Sequence[Evaluated] = (),
    ):
        """Report to a run's console and to its metrics.

        Args:
            compares_rewards: True if some algorithm learns from the differences in a group.
            validations: first and last evaluation that a resumed run has had.
        """
        self.validation_examples: int | None = None
        """Number of examples in the last evaluation."""
        self.why_ended_early: str | None = None
        """Reason why nothing is left to learn; None if something is."""
        self._course: Course | None = None
        """Course of what the steps minimize, in steps that have no reward."""
        self._has_rewards = False
        """True once a step had a reward."""
        self._console = context.console
        self._restarts = context.restarts
        self._metrics = metrics
        self._warnings = StepWarnings(context.console.note, compares_rewards=compares_rewards)
        self._validations = list(validations)

    def begin(self, steps_done: int, total_steps: int) -> None:
        """Show that training begins, or goes on after ``steps_done`` steps."""
        self._console.begin(steps_done, total_steps)
        self._console.waits.begin(FIRST_STEP if steps_done else FIRST_VALIDATION)

    def started(self, report: ValidationReport) -> None:
        """Show the evaluation before the first step."""
        self._console.waits.begin(FIRST_STEP)
        self._console.waits.end(FIRST_VALIDATION)
        self._metrics.log(report.step, report.metrics)
        self._count(report)
        self._show(report, "before the first step")

    def step_recorded(self, record: StepRecord) -> None:
        """Log a step's metrics, and print its line.

        Raises:
            OSError: the metrics file can't be written.
        """
        restarts = {f"restarts/{label}": count for label, count in self._restarts.counts.items()}
        self._metrics.log(record.step, record.metrics | restarts)
        self._metrics.log_samples(record.step, record.groups)
        validation = None
        for report in record.validations:
            self._count(report)
            if report.reward is not None:
                validation = report.reward, report.step
        self._console.waits.end(FIRST_STEP)
        self._console.step(record.step, record.metrics, validation)
        self._follow(record)
        for report in record.validations:
            if report.failed:
                self._show(report, f"of version {report.step}")
        self._warnings.step(record.metrics)

    def ended_early(self, why: str, reports: Sequence[ValidationReport]) -> None:
        """Show the evaluations that no step has reported."""
        self.why_ended_early = why
        for report in reports:
            self._metrics.log_more(report.metrics)
            self._count(report)
            self._show(report, f"after step {report.step}")

    def first_and_last_validation(self) -> list[Evaluated]:
        """Return the first evaluation and the last: fewer than two if there were fewer."""
        return self._validations[:1] + self._validations[1:][-1:]

    @property
    def course(self) -> Course | None:
        """Course of what was minimized since this command began; None for a run with rewards."""
        return None if self._has_rewards else self._course

    def _follow(self, record: StepRecord) -> None:
        """Note what a step without a reward shows in its place."""
        measure = measure_of(record.metrics)
        value = record.metrics.get(MEASURES[measure])
        if measure == "reward" or value is None:
            self._has_rewards |= value is not None
            return
        if self._course is None or self._course.measure != measure:
            self._course = Course(
                measure=measure,
                first=value,
                first_step=record.step,
                last=value,
                last_step=record.step,
            )
        self._course.last = value
        self._course.last_step = record.step

    def _show(self, report: ValidationReport, when: str) -> None:
        """Print an evaluation's reward and its failures, unless no task was evaluated."""
        if report.reward is None and not report.failed:
            return
        reward = "no reward" if report.reward is None else f"reward {report.reward:.3f}"
        counts = f", {counted_failures(report.failed, report.attempts)}" if report.failed else ""
        self._console.note(f"validation {when}: {reward}{counts}")
        if report.step > 0:  # the run ends if it is so before the first step
            for fault in report.unmeasured.values():
                self._console.note(f"warning: validation {when}: {fault}")

    def _count(self, report: ValidationReport) -> None:
        if report.reward is None and not report.failed:
            return
        self._validations.append(Evaluated(report.reward, report.failed, report.attempts))
        examples = [n for name, n in report.metrics.items() if name.endswith("/examples")]
        self.validation_examples = int(sum(examples))


class StepWarnings:
    """Warnings about the steps of a run, each of which is given once."""

    def __init__(self, note: Callable[[str], None], *, compares_rewards: bool):
        """Warn through ``note``.

        Args:
            note: prints a line.
            compares_rewards: True if some algorithm learns from the differences in a group.
        """
        self._note = note
        self._compares_rewards = compares_rewards
        self._steps_in_a_row: Counter[str] = Counter()
        self._given: set[str] = set()

    def step(self, metrics: Mapping[str, float]) -> None:
        """Look at a step's metrics, and warn of what has been wrong for some steps."""
        warnings = dict(self._warnings(metrics))
        self._steps_in_a_row = Counter({name: self._steps_in_a_row[name] + 1 for name in warnings})
        for name, text in warnings.items():
            if self._steps_in_a_row[name] >= WARN_AFTER_STEPS and name not in self._given:
                self._given.add(name)
                self._note(f"warning: {text}")

    def _warnings(self, metrics: Mapping[str, float]) -> Iterator[tuple[str, str]]:
        """Yield the name and the text of each warning that this step gives reason for."""
        lag = metrics.get("perf/event_loop_lag_max_s", 0.0)
        if lag > LAG_S:
            yield (
                "lag",
                f"something blocks the event loop of the rollouts, for {lag:.1f} s in this step: "
                "make an async function that computes or waits without await a plain one, or set "
                "rollout_workers",
            )
        mean = metrics.get("rollout/reward_mean", 0.0)
        spread = metrics.get("rollout/reward_std")
        if self._compares_rewards and spread is not None and are_equal([mean, mean + spread]):
            yield (
                "rewards",
                f"in each of the last {WARN_AFTER_STEPS} steps all rewards were equal, "
                f"{metrics['rollout/reward_mean']:.4g} now: nothing is learned from them; the "
                "examples are too easy or too hard for this model, or the rubric tells nothing "
                "apart",
            )
        truncated = sum(
            share for name, share in metrics.items() if name.startswith("rollout/status/truncated")
        )
        if truncated > ALL:
            yield (
                "truncated",
                f"every rollout of the last {WARN_AFTER_STEPS} steps was cut off, at "
                f"{metrics['rollout/completion_tokens_mean']:.0f} tokens on average: raise the "
                "task's sampling.max_tokens, env.max_rollout_tokens or env.max_turns",
            )
        for name in ("gibberish", "repetition"):
            share = metrics.get(f"filter/post/{name}", 0) / max(metrics.get("rollout/count", 0), 1)
            if share > BROKEN:
                yield (
                    name,
                    f"the filter {name} matches {share:.0%} of the rollouts: read some of these "
                    "(rl-report, or observability.rollouts); if they are no broken text, "
                    "--post-batch-filters zero_advantage leaves it out",
                )
        busy = [
            share
            for name, share in metrics.items()
            if name.startswith("perf/generator") and name.endswith("/busy")
        ]
        waiting = metrics.get("time/wait_s", 0.0) / max(metrics.get("time/step_s", 0.0), 1e-9)
        if busy and max(busy) < IDLE and waiting > WAITING:
            yield (
                "idle",
                f"the trainer waits for {waiting:.0%} of the step, and the generators work for "
                f"{max(busy):.0%} of it: the envs or reward functions are slow, see env_s of the "
                "recorded rollouts, or take a profile (--profile-steps)",
            )
