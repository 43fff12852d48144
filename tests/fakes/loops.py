"""The loops of a run, built as a run builds them, from the tests' own tasks and policy."""

from collections.abc import Sequence
from typing import Any

from tests.fakes.contexts import context_of
from torchtitan.experiments.rl.ask.ordered import OrderedCalls
from torchtitan.experiments.rl.batching.batcher import Batcher
from torchtitan.experiments.rl.configurable import build_with
from torchtitan.experiments.rl.data.task_mix import WeightedRoundRobin
from torchtitan.experiments.rl.loops.events import RunEvents
from torchtitan.experiments.rl.loops.group_runner import LocalRunner
from torchtitan.experiments.rl.loops.ledger import Ledger
from torchtitan.experiments.rl.loops.loop import Loops, Parts, Schedule, build_loop
from torchtitan.experiments.rl.loops.selection import Selection


def loops_of(
    *tasks: Any,
    policy: Any,
    schedule: Schedule,
    row_length: int,
    filters: Sequence[Any] = (),
    post_filters: Sequence[Any] = (),
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
    return build_loop(schedule, given, watchers=watchers, validator=validator or _NoEvaluations())


class _NoEvaluations:
    """Validator of tasks that have no validation set."""

    def stop(self) -> None:
        pass

    async def close(self) -> None:
        pass
