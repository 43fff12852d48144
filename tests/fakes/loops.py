"""The loops of a run, built as a run builds them, from the tests' own tasks and policy."""

import asyncio
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.fakes.contexts import context_of
from tests.fakes.states import through_json
from tests.fakes.tasks import ROW_LENGTH, DatasetTask, number_of
from tests.fakes.waiting import LIMIT_S
from torchtitan.experiments.rl.ask.ordered import OrderedCalls
from torchtitan.experiments.rl.batching.batcher import Batcher
from torchtitan.experiments.rl.configurable import build_with
from torchtitan.experiments.rl.data.task_mix import WeightedRoundRobin
from torchtitan.experiments.rl.loops.events import RunEvents
from torchtitan.experiments.rl.loops.group_runner import LocalRunner
from torchtitan.experiments.rl.loops.groups import StepGroups, groups_per_pick
from torchtitan.experiments.rl.loops.ledger import Ledger
from torchtitan.experiments.rl.loops.loop import Loops, build_loop
from torchtitan.experiments.rl.loops.parts import Parts, Schedule
from torchtitan.experiments.rl.loops.saved_groups import read_saved_groups, write_groups
from torchtitan.experiments.rl.loops.saved_state import RolloutLoopState
from torchtitan.experiments.rl.loops.selection import Selection
from torchtitan.experiments.rl.rollouts.filters import Filter
from torchtitan.experiments.rl.watch.alarms import StallDetectors


def loops_of(
    *tasks: Any,
    policy: Any,
    schedule: Schedule,
    row_length: int,
    filters: Sequence[Filter.Config] = (),
    post_filters: Sequence[Filter.Config] = (),
    watchers: Sequence[RunEvents] = (),
    trainer: Any = None,
    weights: Any = None,
    validator: Any = None,
    **parts: Any,
) -> Loops:
    """Build the loops of tasks that the mix picks in turn. Filters are given by their configs."""
    selection = Selection(
        OrderedCalls(),
        tasks={task.name: task for task in tasks},
        mix=WeightedRoundRobin.Config().build(weights={task.name: 1.0 for task in tasks}),
        pre_batch_filters=[build_with(entry, context_of(None)) for entry in filters],
        post_batch_filters=[build_with(entry, context_of(None)) for entry in post_filters],
    )
    given = Parts(
        selection=selection,
        runner=LocalRunner(policy, seed=0),
        policy=policy,
        batcher=Batcher.Config(row_length=row_length).build(),
        trainer=trainer,
        weights=weights,
        ordered=OrderedCalls(),
        ledger=Ledger(),
        **parts,
    )
    no_evaluations: Any = _NoEvaluations()
    return build_loop(schedule, given, watchers=watchers, validator=validator or no_evaluations)


class _NoEvaluations:
    """Validator of tasks that have no validation set."""

    def stop(self) -> None:
        pass

    async def close(self) -> None:
        pass


class Loop:
    """Rollout loop whose trainer is the test.

    ``step_taken`` is a step, whose weights are live at once. Every other attribute is the rollout
    loop's own.
    """

    def __init__(
        self,
        *tasks: Any,
        rollouts_per_step: int = 4,
        max_offpolicy_steps: int = 1,
        steps: int = 3,
        filters: Sequence[Filter.Config] = (),
        post_filters: Sequence[Filter.Config] = (),
        max_drops: int = 5,
        policy: Any = None,
        row_length: int = ROW_LENGTH,
        replay: Any = None,
        recorder: Any = None,
        watchers: Sequence[RunEvents] = (),
    ):
        self.version = 0
        self.policy = policy or SimpleNamespace(version=0)
        stall = StallDetectors(max_drops, {task.name: groups_per_pick(task) for task in tasks})
        loops = loops_of(
            *tasks,
            policy=self.policy,
            schedule=Schedule(
                steps=steps,
                rollouts_per_step=rollouts_per_step,
                max_offpolicy_steps=max_offpolicy_steps,
            ),
            row_length=row_length,
            filters=filters,
            post_filters=post_filters,
            watchers=[stall, *watchers],
            replay=replay,
            recorder=recorder,
        )
        self.pacer = loops.pacer
        self.rollouts = loops.rollouts

    def __getattr__(self, name: str) -> Any:
        return getattr(self.rollouts, name)

    async def batch(self) -> StepGroups:
        """Return the groups of the next step."""
        return await asyncio.wait_for(self.next_groups(self.version), LIMIT_S)

    def step_taken(self, batch: StepGroups) -> None:
        """Train on the groups of a step, and have the new weights live."""
        self.trained(batch)
        self.version += 1
        self.policy.version = self.version
        self.live(self.version)


def ids(batch: StepGroups) -> list[int]:
    """Return the numbers of the groups of a step."""
    return [number_of(group.group_id) for group in batch.groups]


async def train_until(loop: Loop, error: type[Exception], steps: int = 1000) -> str:
    """Take steps until the loop raises ``error``, and return what the error says."""
    loop.fill()
    with pytest.raises(error) as caught:
        for _ in range(steps):
            loop.step_taken(await loop.batch())
    await loop.close()
    assert loop.ledger.counts()["stub/open"] == 0
    return str(caught.value)


async def saved(loop: Loop, folder: Path) -> tuple[RolloutLoopState, dict[str, Any]]:
    """Return what a checkpoint of the loop holds, as it is read again."""
    state, groups, _ = await loop.capture(lambda: None)
    write_groups(folder, groups)
    return through_json(state, RolloutLoopState), read_saved_groups(folder)


async def resumed(
    task: DatasetTask,
    state: RolloutLoopState,
    groups: dict[str, Any],
    version: int,
    *,
    steps: int,
    **options: Any,
) -> Loop:
    """Return a loop that goes on from a checkpoint, to the end of a run of ``steps``."""
    loop = Loop(task, steps=steps - version, **options)
    loop.version = version
    loop.policy.version = version
    await loop.restore(state, groups, version)
    loop.fill()
    return loop
