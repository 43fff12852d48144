"""Compares evaluations: which checkpoint is the best, and whether the run has come far enough.

    an evaluation ends ──▶ checkpoint.keep_best    its checkpoint stays if it is the best so far
                      └──▶ stop_at                 the run ends before its next step

An evaluation of step N may end some steps after N. Until then the checkpoint of step N stays too,
because it may turn out to be the best. A run also writes a checkpoint at its last step, wherever
that lies between two of `checkpoint.interval`: that one may be the best too.
"""

import math
from collections.abc import Sequence

import msgspec

from torchtitan.experiments.rl.config.run_config import RunConfig
from torchtitan.experiments.rl.loops.events import NothingLeftToLearn, RunEvents
from torchtitan.experiments.rl.loops.saved_state import (
    BestIs,
    BestState,
    GoalsState,
    ValidationReport,
)
from torchtitan.experiments.rl.loops.step_metrics import StepRecord


class ValidationGoals(RunEvents):
    """Observer that names the best checkpoint by its evaluation, and ends a run by ``stop_at``."""

    def __init__(self, config: RunConfig):
        """Begin without an evaluation."""
        self._checkpoint = config.checkpoint
        self._stop = config.stop_at
        self._state = GoalsState()
        self._extra: set[int] = set()
        """Steps between two of the interval that have a checkpoint."""
        self._unsaved: BestState | None = None
        """Value of the newest evaluated step that has no checkpoint."""

    @property
    def best(self) -> BestState | None:
        """The best checkpoint of the run; None if no checkpoint has an evaluation."""
        return self._state.kept

    @property
    def more_patience(self) -> int | None:
        """Value of ``stop_at.patience`` to go on with, if the run gained after it was ended."""
        if self._stop.patience is None or self._state.late_gain is None:
            return None
        return 2 * self._stop.patience

    def with_late_gain(self, why: str) -> str:
        """Return why the run ended early, and the value that has gained since, if one has."""
        late = self._state.late_gain
        if late is None:
            return why
        return f"{why}; after that it gained: {late.value:.4g} at step {late.step}"

    def stays(self, step: int) -> bool:
        """Return True if the checkpoint of a step is the best, or may turn out to be."""
        if self._checkpoint.keep_best is None:
            return False
        best = self._state.kept
        is_best = best is not None and best.step == step and not best.set_aside
        return is_best or step > self._state.reported

    def state(self) -> GoalsState:
        """Return the state that a checkpoint keeps."""
        return self._state

    def restore(
        self, state: GoalsState, *, checkpoints: Sequence[int], set_aside: Sequence[BestState] = ()
    ) -> None:
        """Continue from the state of a checkpoint.

        A value is dropped if the config now names another metric or direction, or if its checkpoint
        has been deleted. A goal that was reached ends the run, unless the config now asks for more.

        Args:
            checkpoints: steps of the run's checkpoints.
            set_aside: checkpoints that were the best, and that resumes from earlier steps kept.
        """
        best = self._checkpoint.keep_best, self._checkpoint.best_is
        goal = self._stop.metric, self._stop.best_is
        kept = _if_by(state.kept, *best)
        if kept is not None and (kept.set_aside or kept.step not in checkpoints):
            kept = None
        for other in set_aside:
            candidate = _if_by(other, *best)
            if candidate is not None and (kept is None or _gain(kept, candidate.value) > 0):
                kept = candidate
        stop = _if_by(state.stop, *goal)
        reached = _if_by(state.reached, *goal)
        if reached is not None and not self._reaches(reached):
            reached = None
        late_gain = _if_by(state.late_gain, *goal)
        self._state = GoalsState(
            kept=kept, stop=stop, reached=reached, late_gain=late_gain, reported=state.reported
        )
        if late_gain is not None and self._why_to_end() is None:
            self._state = msgspec.structs.replace(self._state, stop=late_gain, late_gain=None)
        self._extra = set(checkpoints)

    def add_checkpoint(self, step: int) -> None:
        """Count the checkpoint of the run's last step, which the interval may not ask for."""
        self._extra.add(step)
        unsaved = self._unsaved
        if unsaved is not None and unsaved.step == step:
            self._unsaved = None
            self._keep_if_better(unsaved)

    def started(self, report: ValidationReport) -> None:
        self._compare(report)

    async def step_begins(self, step: int) -> None:
        """End the run if an evaluation before this step has reached ``stop_at``.

        Raises:
            NothingLeftToLearn: names the metric, its value and the field of ``stop_at``.
        """
        why = self._why_to_end()
        if why is not None:
            raise NothingLeftToLearn(why)

    def step_recorded(self, record: StepRecord) -> None:
        for report in record.validations:
            self._compare(report)

    def ended_early(self, why: str, reports: Sequence[ValidationReport]) -> None:
        for report in reports:
            self._compare(report)

    def _compare(self, report: ValidationReport) -> None:
        """Compare an evaluation with those before it."""
        goal = self._stop
        value = _value_of(report, goal.metric, goal.best_is) if goal.is_set else None
        if value is not None:
            stop = _better(self._state.stop, value, min_gain=goal.min_gain)
            if self._why_to_end() is None:
                reached = value if self._reaches(value) else None
                self._state = msgspec.structs.replace(self._state, stop=stop, reached=reached)
            # The values that end a run stay: a resume ends it in the same words.
            elif self._state.reached is None and stop is value:
                self._state = msgspec.structs.replace(self._state, late_gain=value)
        keep_best = self._checkpoint.keep_best
        if keep_best is not None and report.step > 0:
            value = _value_of(report, keep_best, self._checkpoint.best_is)
            if value is not None and self._has_checkpoint(report.step):
                self._keep_if_better(value)
            elif value is not None:
                self._unsaved = value
        reported = max(self._state.reported, report.step)
        self._state = msgspec.structs.replace(self._state, reported=reported)

    def _has_checkpoint(self, step: int) -> bool:
        """Return True if a step has a checkpoint, or gets one when it ends."""
        interval = self._checkpoint.interval
        return step in self._extra or (interval > 0 and step % interval == 0)

    def _keep_if_better(self, value: BestState) -> None:
        kept = _better(self._state.kept, value)
        self._state = msgspec.structs.replace(self._state, kept=kept)

    def _reaches(self, value: BestState) -> bool:
        """Return True if an evaluation's value is ``stop_at.value`` or better."""
        goal = self._stop.value
        return goal is not None and _gain(value, goal) <= 0

    def _why_to_end(self) -> str | None:
        """Return why the run ends before its next step; None if it goes on."""
        goal, stop, reached = self._stop, self._state.stop, self._state.reached
        if reached is not None:
            return (
                f"{goal.metric}, which is {reached.value:.4g} at step {reached.step} "
                f"(stop_at.value = {goal.value:g})"
            )
        if goal.patience is not None and stop is not None and stop.since >= goal.patience:
            return (
                f"{goal.metric}, which is best at step {stop.step} with {stop.value:.4g}, and has "
                f"not gained in {stop.since} evaluations since (stop_at.patience = {goal.patience})"
            )
        return None


def _value_of(report: ValidationReport, metric: str, best_is: BestIs) -> BestState | None:
    """Return an evaluation's value of a metric; None if it has none that is finite."""
    value = report.metrics.get(metric)
    if value is None or not math.isfinite(value):
        return None
    return BestState(metric=metric, value=float(value), step=report.step, best_is=best_is)


def _if_by(value: BestState | None, metric: str | None, best_is: BestIs) -> BestState | None:
    """Return a value; None if it is of another metric, or was compared in another direction."""
    if value is None or (value.metric, value.best_is) != (metric, best_is):
        return None
    return value


def _better(best: BestState | None, new: BestState, *, min_gain: float = 0.0) -> BestState:
    """Return the best value once there is a new one, which must gain more than ``min_gain``."""
    if best is None or _gain(best, new.value) > min_gain:
        return new
    return msgspec.structs.replace(best, since=best.since + 1)


def _gain(best: BestState, value: float) -> float:
    """Return by how much a value is better than another; below 0 if it is worse."""
    return value - best.value if best.best_is == "highest" else best.value - value
