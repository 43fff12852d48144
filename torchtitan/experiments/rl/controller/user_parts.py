"""What the rollout loop asks of code that users may have written: samplers, the task mix and filters.

Each call of users' code goes through the gate (`user_code/gate.py`). Each answer is checked here, so that a fault is named
where it arises.
"""

import functools
import json
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from torchtitan.experiments.rl.controller.saved_state import OpenGroupState
from torchtitan.experiments.rl.data.dataset import fault_of_example, find_examples
from torchtitan.experiments.rl.data.sampler import SampleStrategy
from torchtitan.experiments.rl.data.task_mix import TaskMix
from torchtitan.experiments.rl.errors import RunError
from torchtitan.experiments.rl.rollouts.filters import Filter, FilterResult, combine, is_own, matches_of
from torchtitan.experiments.rl.rollouts.finished import leaving_unchanged
from torchtitan.experiments.rl.rollouts.types import DataSample, RolloutGroup, RolloutStatus
from torchtitan.experiments.rl.tasks.task import Task
from torchtitan.experiments.rl.user_code.gate import Call, Gate, name_of, sentence

LIBRARY = f"{SampleStrategy.__module__.rpartition('.')[0]}."
"""Package of the library's own samplers and mixes."""
SMALL_GROUP = 16_384
"""Sampled tokens up to which the library's own filters run on the event loop: a millisecond at most, and most often less than
the gate's thread takes to be asked and to answer."""


class FilterSlot:
    """The filters of one place on the path: "pre" or "post" the taking of a batch. Each is counted as ``<slot>/<name>``, and
    the second of one class as ``<slot>/<name>_2``."""

    def __init__(self, slot: str, filters: Sequence[Filter]):
        seen: Counter[str] = Counter()
        self.filters: list[tuple[Filter, str]] = []
        for entry in filters:
            seen[entry.name] += 1
            number = f"_{seen[entry.name]}" if seen[entry.name] > 1 else ""
            self.filters.append((entry, f"{slot}/{entry.name}{number}"))


class UserParts:
    """Samplers, task mix and filters of a run, behind the gate."""

    def __init__(self, gate: Gate, *, mix: TaskMix, tasks: dict[str, Task]):
        self._gate, self._mix, self._tasks = gate, mix, tasks

    def pick_task(self) -> Call:
        """Ask the mix for the next task."""
        start = self._gate.start_own if _is_own(self._mix) else self._gate.start
        return start(self._mix.next, owner=f"task mix {name_of(self._mix, 'next')}")

    def picked(self, name: Any) -> str:
        """What the mix returned, checked.

        Raises:
            RunError: it is no task of the run.
        """
        if not isinstance(name, str) or name not in self._tasks:
            shown = repr(name) if isinstance(name, str) else type(name).__name__
            raise RunError(f"task mix {name_of(self._mix, 'next')} returned {shown}, want one of {sorted(self._tasks)}")
        return name

    async def next_example(self, task: Task) -> DataSample:
        """The next example of a task.

        Raises:
            RunError: the sampler, or the dataset under it, failed or returned something else.
        """
        owner = f"task {task.name!r}: sampler {name_of(task.sampler, 'next')}"
        example = await self._gate.call(task.sampler.next, owner=owner)
        if not isinstance(example, DataSample):
            raise RunError(f"{owner} returned {type(example).__name__}, want an example (DataSample) of its dataset")
        if fault := fault_of_example(example):
            raise RunError(f"{owner} returned an example whose {fault}")
        return example

    async def states(self) -> tuple[dict[str, Any], Any]:
        """What the sampler of each task, and the mix, say of themselves, as JSON values of their own.

        Raises:
            RunError: one of them failed, or returned what JSON can't hold.
        """
        samplers = {
            name: await self._gate.call(
                _plain, task.sampler.state_dict, owner=f"task {name!r}: sampler {name_of(task.sampler, 'state_dict')}"
            )
            for name, task in self._tasks.items()
        }
        return samplers, await self._gate.call(
            _plain, self._mix.state_dict, owner=f"task mix {name_of(self._mix, 'state_dict')}"
        )

    async def restore(self, samplers: Mapping[str, Any], mix: Any) -> None:
        """Have samplers and mix continue from a checkpoint. A task that is new since then starts anew.

        Raises:
            RunError: one of them failed, or the state is of another dataset or seed.
        """
        for name, task in self._tasks.items():
            if name in samplers:
                owner = f"task {name!r}: sampler {name_of(task.sampler, 'load_state_dict')}"
                await self._gate.call(task.sampler.load_state_dict, samplers[name], owner=owner)
        owner = f"task mix {name_of(self._mix, 'load_state_dict')}"
        await self._gate.call(self._mix.load_state_dict, mix, owner=owner)

    async def examples_of(self, groups: Sequence[OpenGroupState]) -> dict[str, dict[str, DataSample]]:
        """The examples of a checkpoint's open groups that their tasks' datasets have, by task and id.

        Raises:
            RunError: a dataset failed.
        """
        wanted: dict[str, set[str]] = {}
        for group in groups:
            if group.example is not None:
                wanted.setdefault(group.task, set()).add(group.example["sample_id"])
        return {
            name: await self._gate.call(
                find_examples, self._tasks[name].dataset, ids, owner=f"task {name!r}: the examples of its open groups"
            )
            for name, ids in wanted.items()
        }

    async def observe(self, group: RolloutGroup, task: Task) -> None:
        """Show a scored group to the task's sampler, then to the mix.

        Raises:
            RunError: one of them failed.
        """
        if getattr(type(task.sampler), "observe", None) is not SampleStrategy.observe:
            owner = f"task {task.name!r}: sampler {name_of(task.sampler, 'observe')} of group {group.group_id}"
            await self._gate.call(_observe, task.sampler, group, owner=owner)
        if type(self._mix).observe is not TaskMix.observe:
            owner = f"task mix {name_of(self._mix, 'observe')} of group {group.group_id}"
            await self._gate.call(_observe, self._mix, group, owner=owner)

    async def filter(self, slot: FilterSlot, group: RolloutGroup) -> FilterResult:
        """Run every filter of a slot on every scored rollout, so that no filter hides another's matches.

        Raises:
            RunError: a filter failed. That is a fault of the run, not of a rollout.
        """
        small = sum(rollout.completion_tokens for rollout in group.rollouts) <= SMALL_GROUP
        matches = []
        for entry, name in slot.filters:
            owner = f"filter {name.partition('/')[2]} failed on group {group.group_id}"
            if not (small and is_own(entry)):
                matches.append(await self._gate.call(matches_of, entry, group, owner=owner))
                continue
            try:
                matches.append(matches_of(entry, group))
            except Exception as error:
                raise RunError(f"{owner}: {sentence(error)}") from error
        return combine(slot.filters, group, matches)


def parts_without_state(mix: TaskMix, tasks: Mapping[str, Task]) -> list[str]:
    """A line for people about each sampler, and the mix, that a resumed run can't have go on where it was."""
    parts: list[tuple[str, SampleStrategy | TaskMix, type[SampleStrategy] | type[TaskMix]]] = [
        *((f"task {name!r}: sampler", task.sampler, SampleStrategy) for name, task in tasks.items()),
        ("task mix", mix, TaskMix),
    ]
    lines = []
    for what, part, base in parts:
        both = ("state_dict", "load_state_dict")
        lacking = [name for name in both if getattr(type(part), name, None) in (None, getattr(base, name))]
        if lacking:
            methods = " and ".join(lacking)
            lines.append(
                f"{what} {name_of(part)} has no {methods}: after a resume it begins anew; write {methods} if it should not"
            )
    return lines


def check_whole(group: RolloutGroup, dispatched: Collection[str], task: Task) -> None:
    """
    Raises:
        RunError: the group lacks rollouts that were dispatched, or has others.
    """
    found = [getattr(rollout, "rollout_id", "?") for rollout in group.rollouts]
    if len(found) != len(dispatched) or set(found) != set(dispatched):
        parts = [part for part in (getattr(task, "rubric", None), getattr(task, "algorithm", None)) if part is not None]
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
        last = max((int(np.max(turn.completion.policy_versions, initial=-1)) for turn in rollout.turns), default=-1)
        if last > newest + 1:
            rollout.status, rollout.reward = RolloutStatus.ERROR, None
            rollout.error = f"generator: gave tokens of version {last}, and the newest is {newest + 1}"


def _plain(state_dict: Callable[[], Any]) -> Any:
    return json.loads(json.dumps(state_dict()))


def _observe(part: SampleStrategy | TaskMix, group: RolloutGroup) -> Any:
    """Show the group to a sampler or a mix, with a list of its own: what happens to the list changes nothing for others."""
    call = functools.partial(part.observe, replace(group, rollouts=list(group.rollouts)))
    return call() if _is_own(part) else leaving_unchanged(group, call)


def _is_own(part: SampleStrategy | TaskMix) -> bool:
    """Whether it is the library's: it changes nothing."""
    return type(part).__module__.startswith(LIBRARY)
