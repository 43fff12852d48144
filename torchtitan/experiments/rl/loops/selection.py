"""Chooses what runs and what stays: the task mix, each task's sampler, and the filters.

    task mix ─▶ task ─▶ sampler ─▶ example ─▶ (rollouts) ─▶ pre-batch filters ─▶ post-batch filters

Users may have written any of them. They are called in one thread, in order (`ask/ordered.py`). Each
answer is checked here, so that a fault is named where it arises: a RunError, which ends the run.
"""

import inspect
import json
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import numpy as np

from torchtitan.experiments.rl.ask.ordered import OrderedCall, OrderedCalls
from torchtitan.experiments.rl.data.dataset import fault_of_example, find_examples
from torchtitan.experiments.rl.data.sampler import SampleStrategy
from torchtitan.experiments.rl.data.task_mix import TaskMix
from torchtitan.experiments.rl.errors import RunError
from torchtitan.experiments.rl.loops.saved_state import ExampleState
from torchtitan.experiments.rl.rollouts.filters import Filter, FilterResult, combine, matches_of
from torchtitan.experiments.rl.rollouts.types import DataSample, RolloutGroup
from torchtitan.experiments.rl.tasks.task import Task

STATE_METHODS = ("state_dict", "load_state_dict")
"""Methods of samplers and task mixes that a checkpoint needs."""


class Selection:
    """Samplers, task mix and filters of a run."""

    def __init__(
        self,
        ordered: OrderedCalls,
        *,
        mix: TaskMix,
        tasks: dict[str, Task],
        pre_batch_filters: Sequence[Filter] = (),
        post_batch_filters: Sequence[Filter] = (),
    ):
        self.tasks = tasks
        self.filters = {
            "pre": named("pre", pre_batch_filters),
            "post": named("post", post_batch_filters),
        }
        """Filters with the names that they are counted under, by slot: "pre" filters see a group
        before a step takes it, "post" filters after."""
        self._ordered = ordered
        self._mix = mix

    # Choosing a task and an example.

    def pick_task(self) -> OrderedCall[Any]:
        """Ask the task mix for the next task. The answer is unchecked: give it to `checked_pick`.

        A call and not its value, so that the rollout loop need not await an answer that is there.
        """
        return self._ordered.start(self._mix.next, owner=_owner("task mix", self._mix, "next"))

    def checked_pick(self, name: object) -> str:
        """Return the answer of the task mix, if it names a task.

        Raises:
            RunError: it names no task of the run.
        """
        if not isinstance(name, str) or name not in self.tasks:
            answer = repr(name) if isinstance(name, str) else type(name).__name__
            raise RunError(
                f"{_owner('task mix', self._mix, 'next')} returned {answer}, "
                f"want one of {sorted(self.tasks)}"
            )
        return name

    async def next_example(self, task: Task) -> DataSample:
        """Return the next example of a task.

        Raises:
            RunError: the sampler, or the dataset under it, failed or returned something else.
        """
        owner = _owner(f"task {task.name!r}: sampler", task.sampler, "next")
        example = await self._ordered.call(task.sampler.next, owner=owner)
        if not isinstance(example, DataSample):
            kind = type(example).__name__
            raise RunError(f"{owner} returned {kind}, want an example (DataSample) of its dataset")
        if fault := fault_of_example(example):
            raise RunError(f"{owner} returned an example whose {fault}")
        return example

    async def observe(self, group: RolloutGroup, task: Task) -> None:
        """Show a group that has ended to the task's sampler and to the mix, if they ``observe``.

        Raises:
            RunError: one of them failed.
        """
        parts = ((f"task {task.name!r}: sampler", task.sampler), ("task mix", self._mix))
        for what, part in parts:
            if getattr(type(part), "observe", None) in (SampleStrategy.observe, TaskMix.observe):
                continue
            owner = f"{_owner(what, part, 'observe')} of group {group.group_id}"
            await self._ordered.call(part.observe, group, owner=owner)

    # Filtering.

    async def filter(self, slot: str, group: RolloutGroup) -> FilterResult:
        """Run every filter of a slot on every scored rollout: no filter hides another's matches.

        Raises:
            RunError: a filter failed. That is a fault of the run, not of a rollout.
        """
        matches = []
        for entry, name in self.filters[slot]:
            owner = f"filter {name.partition('/')[2]} failed on group {group.group_id}"
            matches.append(await self._ordered.call(matches_of, entry, group, owner=owner))
        return combine(self.filters[slot], group, matches)

    def credit_is_late(self, task: Task) -> bool:
        """Return True if groups of a task get their credit after the pre-batch filters.

            usual   rollout -> samples -> models -> reward -> filters
            late    rollout -> samples -> reward -> filters -> models

        Here "models" are those that the algorithm asks, such as a teacher. In the late order they
        spend no time on what the filters drop. It is possible if some pre-batch filter drops
        rollouts, and none reads what the algorithm sets. A group has one rollout then: it is kept
        or dropped whole.
        """
        filters = [entry for entry, _ in self.filters["pre"]]
        may_drop = any(entry.config.mode == "enforce" for entry in filters)
        if not may_drop or any(entry.reads_credit for entry in filters):
            return False
        return not task.needs_group and task.trains_on_policy_samples and task.algorithm.asks_models

    # Checkpointing: capture and restore the state of samplers and mix.

    async def states(self) -> tuple[dict[str, Any], Any]:
        """Return the states of the samplers, by task, and of the mix, as JSON values.

        Raises:
            RunError: one of them failed, or returned what JSON can't hold.
        """
        samplers = {}
        mix = None
        for name, what, part in self._stateful():
            owner = _owner(what, part, "state_dict")
            state = await self._ordered.call(_json_state, part.state_dict, owner=owner)
            if name is None:
                mix = state
            else:
                samplers[name] = state
        return samplers, mix

    async def restore(self, samplers: Mapping[str, Any], mix: Any) -> None:  # noqa: ANN401 - JSON
        """Have samplers and mix continue from a checkpoint.

        A task that is new since then begins with its first example.

        Raises:
            RunError: one of them failed, or the state is of another dataset or seed.
        """
        for name, what, part in self._stateful():
            if name is None:
                state = mix
            elif name in samplers:
                state = samplers[name]
            else:
                continue
            owner = _owner(what, part, "load_state_dict")
            await self._ordered.call(part.load_state_dict, state, owner=owner)

    async def examples_of(self, groups: Sequence[ExampleState]) -> dict[str, dict[str, DataSample]]:
        """Return the examples of a checkpoint's groups, by task and id.

        An example that its task's dataset lacks is left out.

        Raises:
            RunError: a dataset failed.
        """
        wanted: dict[str, set[str]] = {}
        for group in groups:
            if group.example is not None:
                wanted.setdefault(group.task, set()).add(group.example["sample_id"])
        examples = {}
        for name, ids in wanted.items():
            owner = f"task {name!r}: the examples of its open groups"
            dataset = self.tasks[name].dataset
            examples[name] = await self._ordered.call(find_examples, dataset, ids, owner=owner)
        return examples

    def without_state(self) -> list[str]:
        """Return a line about each sampler, and the mix, that a resumed run has begin again."""
        lines = []
        for _, what, part in self._stateful():
            methods = " and ".join(name for name in STATE_METHODS if not _defines(part, name))
            if methods:
                lines.append(
                    f"{what} {_name_of(part)} has no {methods}: a resumed run has it begin again; "
                    f"write {methods} if it should not"
                )
        return lines

    def _stateful(self) -> list[tuple[str | None, str, SampleStrategy | TaskMix]]:
        """Return each part that has a state: the task's name, the words of errors, and the part.

        The name is None for the mix, because a task may have any name.
        """
        samplers = [
            (name, f"task {name!r}: sampler", task.sampler) for name, task in self.tasks.items()
        ]
        return [*samplers, (None, "task mix", self._mix)]


def named(slot: str, filters: Sequence[Filter]) -> list[tuple[Filter, str]]:
    """Return each filter with its name, ``<slot>/<name>``.

    The second filter of one class is ``<slot>/<name>_2``.
    """
    pairs = []
    counts: dict[str, int] = {}
    for entry in filters:
        count = counts[entry.name] = counts.get(entry.name, 0) + 1
        suffix = f"_{count}" if count > 1 else ""
        pairs.append((entry, f"{slot}/{entry.name}{suffix}"))
    return pairs


def check_whole(group: RolloutGroup, dispatched: Collection[str], task: Task) -> None:
    """Refuse a group that does not have exactly the rollouts that were dispatched.

    Raises:
        RunError: it lacks some or has others; names the user's parts that may have changed it.
    """
    ids = [getattr(rollout, "rollout_id", "?") for rollout in group.rollouts]
    if len(ids) == len(dispatched) and set(ids) == set(dispatched):
        return
    parts = [task, getattr(task, "rubric", None), getattr(task, "algorithm", None)]
    changers = " or ".join(_name_of(part) for part in parts if part is not None)
    raise RunError(
        f"task {task.name!r}: group {group.group_id} came back with {len(ids)} rollouts, not the "
        f"{len(dispatched)} that were dispatched: {changers} changed group.rollouts"
    )


def refuse_future_versions(group: RolloutGroup, newest: int) -> None:
    """Fail each rollout with tokens of a version that no generator can hold: its engine is wrong.

    Args:
        newest: version that all generators hold; a replica may hold the next one already.
    """
    for rollout in group.rollouts:
        by_turn = [turn.completion.policy_versions for turn in rollout.turns]
        last = max((int(np.max(versions, initial=-1)) for versions in by_turn), default=-1)
        if last > newest + 1:
            rollout.fail(
                f"generator: gave tokens of version {last}, and the newest is {newest + 1}"
            )


def _name_of(part: object, method: str | None = None) -> str:
    """Return the name of a part of the run as errors say it: its class, and the method called."""
    cls = part if inspect.isclass(part) else type(part)
    return f"{cls.__name__}.{method}" if method else cls.__name__


def _defines(part: SampleStrategy | TaskMix, method: str) -> bool:
    """Return True if the part's class has a method that is not that of a base class."""
    defined = getattr(type(part), method, None)
    inherited = [vars(base).get(method) for base in (SampleStrategy, TaskMix)]
    return defined is not None and defined not in inherited


def _owner(what: str, part: SampleStrategy | TaskMix, method: str) -> str:
    return f"{what} {_name_of(part, method)}"


def _json_state(state_dict: Callable[[], Any]) -> Any:  # noqa: ANN401 - the user's
    return json.loads(json.dumps(state_dict()))
