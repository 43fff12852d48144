"""Which task and which example is next, and which rollouts stay: the task mix, samplers and filters, behind the gate.

Users may have written any of them. Each call goes through the gate (`user_code/calls.py`), and each answer is checked here, so
that a fault is named where it arises.
"""

import json
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import numpy as np

from torchtitan.experiments.rl.controller.saved_state import ExampleState
from torchtitan.experiments.rl.data.dataset import fault_of_example, find_examples
from torchtitan.experiments.rl.data.sampler import SampleStrategy
from torchtitan.experiments.rl.data.task_mix import TaskMix
from torchtitan.experiments.rl.errors import RunError
from torchtitan.experiments.rl.rollouts.filters import Filter, FilterResult, combine, matches_of
from torchtitan.experiments.rl.rollouts.sealed import is_own, sealed_group
from torchtitan.experiments.rl.rollouts.types import DataSample, RolloutGroup, RolloutStatus
from torchtitan.experiments.rl.tasks.task import Task
from torchtitan.experiments.rl.user_code.calls import Call, Gate, name_of

SMALL_GROUP = 16_384
"""Sampled tokens up to which the library's own filters run on the event loop: a millisecond at most, and most often less than
the gate's thread takes to be asked and to answer."""


STATE_METHODS = ("state_dict", "load_state_dict")


class Selection:
    """Samplers, task mix and filters of a run."""

    def __init__(
        self,
        gate: Gate,
        *,
        mix: TaskMix,
        tasks: dict[str, Task],
        pre_batch_filters: Sequence[Filter] = (),
        post_batch_filters: Sequence[Filter] = (),
    ):
        self.tasks = tasks
        self._gate, self._mix = gate, mix
        self.filters = {
            "pre": named("pre", pre_batch_filters),
            "post": named("post", post_batch_filters),
        }
        """By slot: before a step takes a group, and after. Each with the name that it is counted under."""

    def pick_task(self) -> Call:
        start = self._gate.start_own if is_own(self._mix) else self._gate.start
        return start(self._mix.next, owner=_owner("task mix", self._mix, "next"))

    def picked(self, name: Any) -> str:
        """What the mix returned, checked.

        Raises:
            RunError: it is no task of the run.
        """
        if not isinstance(name, str) or name not in self.tasks:
            shown = repr(name) if isinstance(name, str) else type(name).__name__
            raise RunError(
                f"{_owner('task mix', self._mix, 'next')} returned {shown}, want one of {sorted(self.tasks)}"
            )
        return name

    async def next_example(self, task: Task) -> DataSample:
        """The next example of a task.

        Raises:
            RunError: the sampler, or the dataset under it, failed or returned something else.
        """
        owner = _owner(f"task {task.name!r}: sampler", task.sampler, "next")
        start = (
            self._gate.start_own
            if is_own(task.sampler) and task.sampler.quick
            else self._gate.start
        )
        example = await start(task.sampler.next, owner=owner).value()
        if not isinstance(example, DataSample):
            raise RunError(
                f"{owner} returned {type(example).__name__}, want an example (DataSample) of its dataset"
            )
        if fault := fault_of_example(example):
            raise RunError(f"{owner} returned an example whose {fault}")
        return example

    async def states(self) -> tuple[dict[str, Any], Any]:
        """What the sampler of each task, and the mix, say of themselves, as JSON values of their own.

        Raises:
            RunError: one of them failed, or returned what JSON can't hold.
        """
        states = {
            name: await self._gate.call(
                _plain, part.state_dict, owner=_owner(what, part, "state_dict")
            )
            for name, what, part in self._stateful()
        }
        return states, states.pop(None)

    async def restore(self, samplers: Mapping[str, Any], mix: Any) -> None:
        """Have samplers and mix continue from a checkpoint. A task that is new since then begins with its first example.

        Raises:
            RunError: one of them failed, or the state is of another dataset or seed.
        """
        states: dict[Any, Any] = {None: mix, **samplers}
        for name, what, part in self._stateful():
            if name in states:
                await self._gate.call(
                    part.load_state_dict, states[name], owner=_owner(what, part, "load_state_dict")
                )

    def _stateful(self) -> list[tuple[Any, str, SampleStrategy | TaskMix]]:
        """The samplers, by task, and the mix, by None: the name, what errors call it, and the part."""
        samplers = [
            (name, f"task {name!r}: sampler", task.sampler) for name, task in self.tasks.items()
        ]
        return [*samplers, (None, "task mix", self._mix)]

    async def examples_of(self, groups: Sequence[ExampleState]) -> dict[str, dict[str, DataSample]]:
        """The examples of a checkpoint's groups that their tasks' datasets have, by task and id.

        Raises:
            RunError: a dataset failed.
        """
        wanted: dict[str, set[str]] = {}
        for group in groups:
            if group.example is not None:
                wanted.setdefault(group.task, set()).add(group.example["sample_id"])
        return {
            name: await self._gate.call(
                find_examples,
                self.tasks[name].dataset,
                ids,
                owner=f"task {name!r}: the examples of its open groups",
            )
            for name, ids in wanted.items()
        }

    async def observe(self, group: RolloutGroup, task: Task) -> None:
        """Show a scored group to the task's sampler, then to the mix, each with a list of rollouts of its own.

        Raises:
            RunError: one of them failed.
        """
        for what, part in ((f"task {task.name!r}: sampler", task.sampler), ("task mix", self._mix)):
            if getattr(type(part), "observe", None) in (SampleStrategy.observe, TaskMix.observe):
                continue
            owner = f"{_owner(what, part, 'observe')} of group {group.group_id}"
            await self._gate.call(
                part.observe, group if is_own(part) else sealed_group(group), owner=owner
            )

    async def filter(self, slot: str, group: RolloutGroup) -> FilterResult:
        """Run every filter of a slot on every scored rollout, so that no filter hides another's matches.

        Raises:
            RunError: a filter failed. That is a fault of the run, not of a rollout.
        """
        small = sum(rollout.completion_tokens for rollout in group.rollouts) <= SMALL_GROUP
        matches = []
        for entry, name in self.filters[slot]:
            start = self._gate.start_own if small and is_own(entry) else self._gate.start
            call = start(
                matches_of,
                entry,
                group,
                owner=f"filter {name.partition('/')[2]} failed on group {group.group_id}",
            )
            matches.append(await call.value())
        return combine(self.filters[slot], group, matches)

    def credit_is_late(self, task: Task) -> bool:
        """Whether a group of ``task`` gets its credit after the pre-batch filters: what they drop costs no model's time.

            usual   rollout -> samples -> models -> reward -> filters
            late    rollout -> samples -> reward -> filters -> models

        So it is where an algorithm asks models and no pre-batch filter reads what it sets. Such a group has one rollout: it is
        kept or dropped whole.
        """
        filters = [entry for entry, _ in self.filters["pre"]]
        useful = any(entry.config.mode == "enforce" for entry in filters) and not any(
            entry.reads_credit for entry in filters
        )
        return useful and not task.needs_group and task.goes_stale and task.algorithm.asks_models

    def without_state(self) -> list[str]:
        """A line for people about each sampler, and the mix, that a resumed run can't have go on where it was."""
        lines = []
        for _, what, part in self._stateful():
            undefined = (
                None,
                *(
                    vars(base).get(name)
                    for base in (SampleStrategy, TaskMix)
                    for name in STATE_METHODS
                ),
            )
            methods = " and ".join(
                name for name in STATE_METHODS if getattr(type(part), name, None) in undefined
            )
            if methods:
                lines.append(
                    f"{what} {name_of(part)} has no {methods}: a resumed run has it begin again; write {methods} "
                    "if it should not"
                )
        return lines


def named(slot: str, filters: Sequence[Filter]) -> list[tuple[Filter, str]]:
    """Each filter with its name, ``<slot>/<name>``; the second of one class is ``<slot>/<name>_2``."""
    names = [entry.name for entry in filters]
    counts = [names[:place].count(name) for place, name in enumerate(names, 1)]
    found = zip(filters, names, counts, strict=True)
    return [
        (entry, f"{slot}/{name}" + (f"_{count}" if count > 1 else ""))
        for entry, name, count in found
    ]


def check_whole(group: RolloutGroup, dispatched: Collection[str], task: Task) -> None:
    """
    Raises:
        RunError: the group lacks rollouts that were dispatched, or has others.
    """
    found = [getattr(rollout, "rollout_id", "?") for rollout in group.rollouts]
    if len(found) != len(dispatched) or set(found) != set(dispatched):
        parts = [
            part
            for part in (getattr(task, "rubric", None), getattr(task, "algorithm", None))
            if part is not None
        ]
        changers = " or ".join(name_of(part) for part in [task, *parts])
        raise RunError(
            f"task {task.name!r}: group {group.group_id} came back with {len(found)} rollouts, not the {len(dispatched)} that "
            f"were dispatched: {changers} changed group.rollouts"
        )


def refuse_future_versions(group: RolloutGroup, newest: int) -> None:
    """Fail each rollout with tokens of a policy version that no generator can hold: the engine gave a wrong one.

    Args:
        newest: version that all generators hold; a replica may hold the next one already.
    """
    for rollout in group.rollouts:
        last = max(
            (int(np.max(turn.completion.policy_versions, initial=-1)) for turn in rollout.turns),
            default=-1,
        )
        if last > newest + 1:
            rollout.status, rollout.reward = RolloutStatus.ERROR, None
            rollout.error = (
                f"generator: gave tokens of version {last}, and the newest is {newest + 1}"
            )


def _owner(what: str, part: SampleStrategy | TaskMix, method: str) -> str:
    return f"{what} {name_of(part, method)}"


def _plain(state_dict: Callable[[], Any]) -> Any:
    return json.loads(json.dumps(state_dict()))
