"""Compares evaluations: which checkpoint is the best, and whether the run has come far enough.

    an evaluation ends ──▶ checkpoint.keep_best    its checkpoint stays if it is the best so far
                      └──▶ stop_at                 the run ends before its next step

An evaluation of step N may end some steps after N. Until then the checkpoint of step N stays too,
because it may turn out to be the best.
"""

import math
from collections.abc import Sequence
from typing import Literal

from torchtitan.experiments.rl.config.run_config import RunConfig
from torchtitan.experiments.rl.loops.events import NothingLeftToLearn, RunEvents
from torchtitan.experiments.rl.loops.saved_state import BestState, GoalsState, ValidationReport
from torchtitan.experiments.rl.loops.step_metrics import StepRecord


class ValidationGoals(RunEvents):
    """Observer of the evaluations that knows the best one, and ends the run by ``stop_at``."""

    def __init__(self, config: RunConfig):
        """Have seen no evaluation yet."""
        self._checkpoint = config.checkpoint
        self._stop = config.stop_at
        self._steps = config.steps
        self._state = GoalsState()
        self._last_step = 0
        """Number of the last step that was taken."""
        self._why: str | None = None
        """Reason to end the run before its next step; None if there is none."""

    @property
    def best(self) -> BestState | None:
        """The best checkpoint of the run; None if no evaluation has told one."""
        return self._state.kept

    def stays(self, step: int) -> bool:
        """Return True if the checkpoint of a step is the best, or may turn out to be."""
        if self._checkpoint.keep_best is None:
            return False
        best = self._state.kept
        return step > self._state.reported or (best is not None and best.step == step)

    def state(self) -> GoalsState:
        """Return the state that a checkpoint keeps."""
        return self._state

    def restore(self, state: GoalsState, step: int, *, checkpoints: Sequence[int]) -> None:
        """Go on from a checkpoint of ``step``.

        What was compared by another metric is forgotten, and so is a best checkpoint that is gone.

        Args:
            checkpoints: steps of the run's checkpoints.
        """
        self._last_step = step
        kept, stop = state.kept, state.stop
        if kept is not None and (
            kept.metric != self._checkpoint.keep_best or kept.step not in checkpoints
        ):
            kept = None
        if stop is not None and stop.metric != self._stop.metric:
            stop = None
        self._state = GoalsState(kept=kept, stop=stop, reported=state.reported)

    def started(self, report: ValidationReport) -> None:
        self._compare(report)

    async def step_begins(self, step: int) -> None:
        """End the run if an evaluation before this step asks for it.

        Raises:
            NothingLeftToLearn: ``stop_at`` is reached.
        """
        if self._why is not None:
            raise NothingLeftToLearn(self._why)

    def step_recorded(self, record: StepRecord) -> None:
        self._last_step = record.step
        for report in record.validations:
            self._compare(report)

    def ended_early(self, why: str, reports: Sequence[ValidationReport]) -> None:
        self._why = why
        for report in reports:
            self._compare(report)

    def _compare(self, report: ValidationReport) -> None:
        """Compare an evaluation with those before it."""
        kept, stop = self._state.kept, self._state.stop
        goal, checkpoint = self._stop, self._checkpoint
        if goal.is_set:
            stop = _better(
                stop, report, metric=goal.metric, best_is=goal.best_is, min_gain=goal.min_gain
            )
            self._why = self._why or self._reason(report, stop)
        if checkpoint.keep_best is not None and self._is_saved(report.step):
            kept = _better(kept, report, metric=checkpoint.keep_best, best_is=checkpoint.best_is)
        reported = max(self._state.reported, report.step)
        self._state = GoalsState(kept=kept, stop=stop, reported=reported)

    def _is_saved(self, step: int) -> bool:
        """Return True if a step has a checkpoint, or gets one because the run ends with it."""
        ends = step == self._steps or (self._why is not None and step == self._last_step)
        return step > 0 and (ends or step % self._checkpoint.interval == 0)

    def _reason(self, report: ValidationReport, best: BestState | None) -> str | None:
        """Return why the run ends with this evaluation; None if it goes on."""
        goal = self._stop
        value = report.metrics.get(goal.metric)
        if value is None or best is None:
            return None
        if goal.value is not None and _sign(goal.best_is) * (value - goal.value) >= 0:
            return (
                f"{goal.metric}, which is {value:.4g} at step {report.step} "
                f"(stop_at.value = {goal.value:g})"
            )
        if goal.patience is not None and best.since >= goal.patience:
            return (
                f"{goal.metric}, which is best at step {best.step} with {best.value:.4g}, and has "
                f"not gained in {best.since} evaluations since (stop_at.patience = {goal.patience})"
            )
        return None


def _better(
    best: BestState | None,
    report: ValidationReport,
    *,
    metric: str,
    best_is: Literal["highest", "lowest"],
    min_gain: float = 0.0,
) -> BestState | None:
    """Return the best value after an evaluation, which may have no value of the metric."""
    value = report.metrics.get(metric)
    if value is None or not math.isfinite(value):
        return best
    if best is None or _sign(best_is) * (value - best.value) > min_gain:
        return BestState(metric=metric, value=float(value), step=report.step)
    return BestState(metric=metric, value=best.value, step=best.step, since=best.since + 1)


def _sign(best_is: Literal["highest", "lowest"]) -> int:
    return 1 if best_is == "highest" else -1
