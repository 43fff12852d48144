"""Events of a run, for its observers.

An observer extends ``RunEvents`` and overrides the methods that it needs::

    started                       version 0 was evaluated; not in a run that resumed after a step
    step_begins          <--+
      groups_taken          |     the step has its groups, none of which may be dropped any more
      step_trained          |     the optimizer step was taken
      step_published        |     its weights are being sent, or are loaded
      step_recorded         |     its record is complete
      step_ended            |     nothing is left to do for it
    step_over            ---+
    ended_early                   only if nothing is left to learn, or `stop_at` is reached

    meanwhile, for each group of an evaluation: validation_arrived; and for each that has settled:

    group_arrived ──▶ group_scored ──▶ group_kept, or group_dropped
                 └──▶ group_dropped    it failed
                      group_dropped    later: a step took it, and its filters emptied the step

Each event is told to all observers, in their order, once the change that it tells of is whole. So
the run's state is consistent whatever an observer raises. If a method raises, the observers after
it do not hear of the event, and the run ends with that error. A method of the rollout loop's events
and `step_begins` may raise NothingLeftToLearn: the run then ends as complete.
"""

from collections.abc import Iterable, Sequence

from torchtitan.experiments.rl.loops.saved_state import ValidationReport
from torchtitan.experiments.rl.loops.step_metrics import StepRecord
from torchtitan.experiments.rl.rollouts.types import RolloutGroup


class NothingLeftToLearn(Exception):
    """Raised by an observer if the run is complete before its last step.

    Every task is mastered, or an evaluation has reached what the config asks for.
    """


class RunEvents:
    """Observer of a run that ignores every event. Override the methods you need.

    Example::

        from torchtitan.experiments.rl.loops.events import RunEvents

        class Drops(RunEvents):
            def group_dropped(self, columns, group, *, signal, taken):
                print(f"{group.group_id} was dropped: {', '.join(sorted(set(columns)))}")
    """

    # From the rollout loop.

    def group_arrived(self, group: RolloutGroup) -> None:
        """Handle a group that has run, and was scored or failed."""

    def group_scored(self, group: RolloutGroup, *, signal: bool) -> None:
        """Handle a group that did not fail, before any of its rollouts is dropped.

        Args:
            signal: True if training on the group changes anything.
        """

    def group_kept(self) -> None:
        """Handle that the group of the last `group_scored` has rollouts left for a step."""

    def group_dropped(
        self, columns: Sequence[str], group: RolloutGroup, *, signal: bool, taken: bool
    ) -> None:
        """Handle a group of which nothing is left to train on.

        A group that post-batch filters have emptied is told of only if they emptied all groups of
        the step.

        Args:
            columns: columns of the ledger in which the group's rollouts ended.
            signal: True if training on the group would have changed anything.
            taken: True if a step had taken the group.
        """

    def groups_taken(self) -> None:
        """Handle that a step has its groups: post-batch filters have left something of them."""

    # From the validator.

    def validation_arrived(self, group: RolloutGroup) -> None:
        """Handle a group of an evaluation that has run, and was scored or failed."""

    # From the training loop.

    def started(self, report: ValidationReport) -> None:
        """Handle the evaluation of version 0, whose reward is None if no task is evaluated."""

    async def step_begins(self, step: int) -> None:
        """Act before the step waits for anything."""

    def step_trained(self, step: int, metrics: dict[str, float]) -> None:
        """Handle the trainer's step.

        Args:
            metrics: metrics that the trainer reported. The observer may add to them.
        """

    async def step_published(self, step: int, metrics: dict[str, float]) -> None:
        """Act once the step's weights are being sent; in a synchronous run, once they are loaded.

        Args:
            metrics: metrics that the trainer reported. The observer may add to them.
        """

    def step_recorded(self, record: StepRecord) -> None:
        """Handle the complete record of a step.

        A step whose weights could not be published is recorded too, before the run ends.
        """

    async def step_ended(self, step: int) -> None:
        """Act once the step is complete. No rollout of a synchronous run is open then."""

    async def step_over(self, step: int) -> None:
        """Act before the next step begins, or the run ends."""

    def ended_early(self, why: str, reports: Sequence[ValidationReport]) -> None:
        """Handle a run that ends before its last step because it is complete.

        Args:
            reports: evaluations that are in no step's record.
        """


class Watchers(RunEvents):
    """Tells each event to all observers of a run, in their order."""

    def __init__(self, observers: Iterable[RunEvents] = ()):
        self._observers = list(observers)

    def add(self, observer: RunEvents) -> None:
        """Tell an observer too, after the others, from the next event on."""
        self._observers.append(observer)

    def group_arrived(self, group: RolloutGroup) -> None:
        for observer in self._observers:
            observer.group_arrived(group)

    def group_scored(self, group: RolloutGroup, *, signal: bool) -> None:
        for observer in self._observers:
            observer.group_scored(group, signal=signal)

    def group_kept(self) -> None:
        for observer in self._observers:
            observer.group_kept()

    def group_dropped(
        self, columns: Sequence[str], group: RolloutGroup, *, signal: bool, taken: bool
    ) -> None:
        for observer in self._observers:
            observer.group_dropped(columns, group, signal=signal, taken=taken)

    def groups_taken(self) -> None:
        for observer in self._observers:
            observer.groups_taken()

    def validation_arrived(self, group: RolloutGroup) -> None:
        for observer in self._observers:
            observer.validation_arrived(group)

    def started(self, report: ValidationReport) -> None:
        for observer in self._observers:
            observer.started(report)

    async def step_begins(self, step: int) -> None:
        for observer in self._observers:
            await observer.step_begins(step)

    def step_trained(self, step: int, metrics: dict[str, float]) -> None:
        for observer in self._observers:
            observer.step_trained(step, metrics)

    async def step_published(self, step: int, metrics: dict[str, float]) -> None:
        for observer in self._observers:
            await observer.step_published(step, metrics)

    def step_recorded(self, record: StepRecord) -> None:
        for observer in self._observers:
            observer.step_recorded(record)

    async def step_ended(self, step: int) -> None:
        for observer in self._observers:
            await observer.step_ended(step)

    async def step_over(self, step: int) -> None:
        for observer in self._observers:
            await observer.step_over(step)

    def ended_early(self, why: str, reports: Sequence[ValidationReport]) -> None:
        for observer in self._observers:
            observer.ended_early(why, reports)
