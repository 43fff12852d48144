"""Builds the loops of a run from their parts.

    schedule    how many steps, of how many rollouts, how stale
    parts       tasks, runner, policy, trainer, weights
        |
        v
    pacer, buffer of groups, validator, rollout loop, training loop, which share the parts and the
    watchers

The run, the simulation, the tests and the benchmarks call `build_loop`, each with parts of its own.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from torchtitan.experiments.rl.loops.events import RunEvents, Watchers
from torchtitan.experiments.rl.loops.groups import GroupBuffer
from torchtitan.experiments.rl.loops.pacing import Pacer
from torchtitan.experiments.rl.loops.parts import Parts, Schedule
from torchtitan.experiments.rl.loops.rollout_loop import RolloutLoop
from torchtitan.experiments.rl.loops.training_loop import TrainingLoop
from torchtitan.experiments.rl.loops.validation import Validator


@dataclass(kw_only=True, slots=True)
class Loops:
    """The loops of a run. Nothing runs before `TrainingLoop.run`, or `RolloutLoop.fill`."""

    pacer: Pacer
    rollouts: RolloutLoop
    training: TrainingLoop
    validator: Validator
    watchers: Watchers
    """Observers of the run. One that needs the loops is added to them afterwards."""


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
        watchers: observers of the run, in the order in which they hear of each event.
        on_failure: called with an error of an evaluation; by default it ends the run. A given
            ``validator`` has its own.
        pacer: takes the place of the pacer that is built otherwise.
        validator: takes the place of the validator that is built otherwise.
    """
    told = Watchers(watchers)
    if pacer is None:
        replay = parts.replay
        fresh = schedule.rollouts_per_step if replay is None else replay.fresh_rollouts
        pacer = Pacer(rollouts_per_step=fresh, max_offpolicy_steps=schedule.max_offpolicy_steps)
    buffer = GroupBuffer(
        pacer,
        parts.ledger,
        parts.policy,
        steps=max(0, schedule.steps - schedule.first_step + 1),
        recorder=parts.recorder,
    )
    rollouts = RolloutLoop(parts, buffer=buffer, watchers=told)
    if validator is None:
        validator = Validator(
            parts.selection.tasks,
            parts.runner,
            schedule.validation,
            on_failure=on_failure or rollouts.fail,
            ordered=parts.ordered,
            recorder=parts.recorder,
            on_group=told.validation_arrived,
        )
    training = TrainingLoop(schedule, parts, rollouts=rollouts, validator=validator, watchers=told)
    return Loops(
        pacer=pacer, rollouts=rollouts, training=training, validator=validator, watchers=told
    )
