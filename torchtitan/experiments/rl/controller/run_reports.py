"""Says how a run goes, by steps and evaluations: to the metrics, to the console and, at its end, to the summary."""

from collections.abc import Callable, Mapping, Sequence

from torchtitan.experiments.rl.controller.step_metrics import StepRecord
from torchtitan.experiments.rl.controller.step_warnings import StepWarnings
from torchtitan.experiments.rl.controller.validation import ValidationReport
from torchtitan.experiments.rl.observability.console import Console
from torchtitan.experiments.rl.observability.metrics import MetricsLogger
from torchtitan.experiments.rl.observability.waits import Waits

FIRST_VALIDATION, FIRST_STEP = "validation before the first step", "the first step"


class RunReports:
    def __init__(
        self,
        *,
        console: Console,
        metrics: MetricsLogger,
        waits: Waits,
        compares_rewards: bool,
        restarts: Mapping[str, int],
        step_taken: Callable[[int], None],
        validations: Sequence[float | None] = (),
    ):
        """
        Args:
            compares_rewards: some algorithm learns from the differences in a group.
            restarts: counts of the parts that were made again, by part.
            step_taken: called with a step once its metrics are logged.
            validations: rewards of the evaluations that a resumed run has had.
        """
        self._console, self._metrics, self._waits = console, metrics, waits
        self._restarts, self._step_taken = restarts, step_taken
        self._warnings = StepWarnings(console.note, compares_rewards=compares_rewards)
        self._validations = [reward for reward in validations if reward is not None]
        self.ended_early: str | None = None
        """Why there is nothing left to learn."""

    def begin(self, steps_done: int, total_steps: int) -> None:
        """The training loop begins."""
        self._console.begin(steps_done, total_steps)
        self._waits.begin(FIRST_STEP if steps_done else FIRST_VALIDATION)

    def start(self, report: ValidationReport) -> None:
        """The evaluation before the first step has ended; one of no task has no reward."""
        self._waits.begin(FIRST_STEP)
        self._waits.end(FIRST_VALIDATION)
        self._metrics.log(0, report.metrics)
        if report.reward is not None:
            self._validations.append(report.reward)
            self._console.note(f"validation before the first step: reward {report.reward:.3f}")

    def step(self, record: StepRecord) -> None:
        """A step was taken.

        Raises:
            OSError: the metrics file can't be written.
        """
        restarts = {f"restarts/{part}": count for part, count in self._restarts.items()}
        self._metrics.log(record.step, record.metrics | restarts)
        self._metrics.log_samples(record.step, record.groups)
        self._step_taken(record.step)
        if record.validation is not None and record.validation.reward is not None:
            self._validations.append(record.validation.reward)
        self._waits.end(FIRST_STEP)
        self._console.step(record.report())
        self._warnings.step(record.metrics)

    def early_end(self, why: str, reports: Sequence[ValidationReport]) -> None:
        """There is nothing left to learn; ``reports`` are of no step's report."""
        self.ended_early = why
        for report in reports:
            self._metrics.log(report.step, report.metrics)
            if report.reward is not None:
                self._validations.append(report.reward)
                self._console.note(f"validation after step {report.step}: reward {report.reward:.3f}")

    def first_and_last_validation(self) -> tuple[float | None, float | None]:
        """Rewards."""
        rewards = self._validations
        return rewards[0] if rewards else None, rewards[-1] if len(rewards) > 1 else None
