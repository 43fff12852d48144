"""What a run tells those who watch it: one event each, in order.

A watcher extends ``RunEvents`` and says what it wants to hear. One that raises ends the run with that error.
"""

from collections.abc import Sequence

from torchtitan.experiments.rl.controller.saved_state import ValidationReport
from torchtitan.experiments.rl.controller.step_metrics import StepRecord
from torchtitan.experiments.rl.rollouts.types import RolloutGroup


class NothingLeftToLearn(Exception):
    """Every task of the run is mastered. The run is complete before its last step."""


class RunEvents:
    """Hears nothing. A subclass overrides what it wants to hear."""

    # From the rollout loop.

    def group_arrived(self, group: RolloutGroup) -> None:
        """A group has run; it is scored, or failed."""

    def group_scored(self, group: RolloutGroup, *, signal: bool) -> None:
        """It is scored. ``signal``: training on it changes something."""

    def group_kept(self) -> None:
        """Something of a group is left after the pre-batch filters."""

    def group_dropped(
        self, columns: Sequence[str], group: RolloutGroup, *, signal: bool, taken: bool
    ) -> None:
        """Nothing of a group is left.

        Args:
            columns: of the ledger, in which its rollouts ended.
            taken: a step had taken it.
        """

    def groups_taken(self) -> None:
        """A step has groups of which something is left after the post-batch filters."""

    # From the training loop.

    def started(self, report: ValidationReport) -> None:
        """The evaluation of version 0 has ended; its reward is None where no task is evaluated."""

    async def step_begins(self, step: int) -> None:
        """Before anything of the step is waited for."""

    def step_trained(self, step: int, metrics: dict[str, float]) -> None:
        """The trainer has taken the step. ``metrics`` are what it reported; more may be added."""

    async def step_published(self, step: int, metrics: dict[str, float]) -> None:
        """Its weights are on their way to the generators, or there. More ``metrics`` may be added."""

    def step_taken(self, record: StepRecord) -> None:
        """The record of the step is complete."""

    async def step_ended(self, step: int) -> None:
        """Nothing of the step is left to do, and in a synchronous run no rollout is open."""

    async def step_over(self, step: int) -> None:
        """The next step begins, or the run ends."""

    def ended_early(self, why: str, reports: Sequence[ValidationReport]) -> None:
        """There is nothing left to learn before the last step. ``reports`` are evaluations that no step's record has."""
