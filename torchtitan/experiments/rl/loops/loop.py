"""Builds the loops of a run from their parts.

    schedule    how many steps, of how many rollouts, how stale
    parts       tasks, runner, policy, trainer, weights
        |
        v
    pacer, validator, rollout loop, training loop, which share the parts and the watchers

The run, the simulation, the tests and the benchmarks call `build_loop`, each with parts of its own.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Self

from torchtitan.experiments.rl.ask.ordered import OrderedCalls
from torchtitan.experiments.rl.batching.batcher import Batcher
from torchtitan.experiments.rl.config.run_config import RunConfig
from torchtitan.experiments.rl.loops.events import RunEvents
from torchtitan.experiments.rl.loops.group_runner import GroupRunner
from torchtitan.experiments.rl.loops.ledger import Ledger
from torchtitan.experiments.rl.loops.pacing import Pacer
from torchtitan.experiments.rl.loops.rollout_loop import RolloutLoop
from torchtitan.experiments.rl.loops.selection import Selection
from torchtitan.experiments.rl.loops.training_loop import TrainingLoop
from torchtitan.experiments.rl.loops.validation import Validator
from torchtitan.experiments.rl.rollouts.group_replay import GroupReplay
from torchtitan.experiments.rl.rollouts.policy import PolicyClient
from torchtitan.experiments.rl.rollouts.recorder import RolloutRecorder
from torchtitan.experiments.rl.rollouts.types import RolloutGroup
from torchtitan.experiments.rl.tasks.task import ValidationConfig
from torchtitan.experiments.rl.training.client import TrainerClient
from torchtitan.experiments.rl.weights.sync import WeightSync


@dataclass(kw_only=True, slots=True)
class Schedule:
    """Numbers that decide which groups a step trains on, and when the run ends."""

    steps: int
    """Number of the last optimizer step."""
    first_step: int = 1
    """Number of the first step to take; above 1 in a resumed run."""
    rollouts_per_step: int
    """Minimum number of rollouts of a step, replayed ones included."""
    max_offpolicy_steps: int
    """Maximum number of versions that a rollout may be behind when a step trains on it. 0 makes the
    run synchronous."""
    validation: ValidationConfig = field(default_factory=lambda: ValidationConfig(every=0))
    """Schedule of the evaluations of the tasks that have none of their own."""
    sleep: bool = False
    """True if the generators free their memory while the trainer steps."""

    @classmethod
    def of_config(cls, config: RunConfig, *, steps_done: int = 0) -> Self:
        """Return the schedule of a run's config.

        Args:
            steps_done: number of steps that were taken before a resume.
        """
        return cls(
            steps=config.steps,
            first_step=steps_done + 1,
            rollouts_per_step=config.rollouts_per_step,
            max_offpolicy_steps=config.max_offpolicy_steps,
            validation=config.validation,
            sleep=config.generator.engine.sleep,
        )

    @property
    def synchronous(self) -> bool:
        """True if rollouts start only once the generators hold the newest version."""
        return self.max_offpolicy_steps == 0


@dataclass(kw_only=True, slots=True)
class Parts:
    """Components that the loops work with, each built elsewhere."""

    selection: Selection
    """Tasks, task mix and filters of the run."""
    runner: GroupRunner
    policy: PolicyClient
    batcher: Batcher
    trainer: TrainerClient
    weights: WeightSync
    ordered: OrderedCalls
    """Calls the datasets of evaluations. A run gives it to ``selection`` too, so that datasets,
    samplers, task mix and filters are called in one thread."""
    ledger: Ledger
    recorder: RolloutRecorder | None = None
    replay: GroupReplay | None = None
    """Store of groups that steps train on again."""
    generated_tokens: Callable[[], int] = lambda: 0
    """Function that returns the number of tokens sampled since the run began."""


@dataclass(kw_only=True, slots=True)
class Loops:
    """The loops of a run. Nothing runs before `TrainingLoop.run`, or `RolloutLoop.fill`."""

    pacer: Pacer
    rollouts: RolloutLoop
    training: TrainingLoop
    validator: Validator


def build_loop(
    schedule: Schedule,
    parts: Parts,
    *,
    watchers: Sequence[RunEvents] = (),
    on_failure: Callable[[Exception], None] | None = None,
    pacer: Pacer | None = None,
    validator: Validator | None = None,
) -> Loops:
    """Build the loops of a run.

    Args:
        watchers: observers of the run, in the order in which they hear of each event. The loops
            keep this very list. So an observer that needs the loops, such as the one that saves
            checkpoints, is appended to it afterwards.
        on_failure: called with an error of an evaluation; by default it ends the run. A given
            ``validator`` has its own.
        pacer: takes the place of the pacer that is built otherwise.
        validator: takes the place of the validator that is built otherwise.
    """
    replay = parts.replay
    if pacer is None:
        fresh = schedule.rollouts_per_step if replay is None else replay.fresh_rollouts
        pacer = Pacer(rollouts_per_step=fresh, max_offpolicy_steps=schedule.max_offpolicy_steps)
    rollouts = RolloutLoop(
        selection=parts.selection,
        runner=parts.runner,
        policy=parts.policy,
        pacer=pacer,
        batcher=parts.batcher,
        steps=max(0, schedule.steps - schedule.first_step + 1),
        ledger=parts.ledger,
        recorder=parts.recorder,
        replay=replay,
        watchers=watchers,
    )

    def validation_arrived(group: RolloutGroup) -> None:
        for watcher in watchers:
            watcher.validation_arrived(group)

    if validator is None:
        validator = Validator(
            parts.selection.tasks,
            parts.runner,
            schedule.validation,
            on_failure=on_failure or rollouts.fail,
            ordered=parts.ordered,
            recorder=parts.recorder,
            on_group=validation_arrived,
        )
    training = TrainingLoop(
        steps=schedule.steps,
        synchronous=schedule.synchronous,
        rollouts=rollouts,
        batcher=parts.batcher,
        trainer=parts.trainer,
        weights=parts.weights,
        validator=validator,
        runner=parts.runner,
        watchers=watchers,
        generated_tokens=parts.generated_tokens,
        first_step=schedule.first_step,
        sleep=schedule.sleep,
    )
    return Loops(pacer=pacer, rollouts=rollouts, training=training, validator=validator)
