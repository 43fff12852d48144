"""Tracks open groups: those dispatched, and not yet trained on or dropped.

    DispatchedGroup ──example──▶ RunningGroup ──scored, filtered──▶ SettledGroup ──▶ trained
                                                                         └─────────▶ dropped

The ledger records for each rollout in which column it ended.

A checkpoint keeps the open groups in two files. ``controller.json`` has an ``OpenGroupState`` for
each. ``groups.jsonl.gz`` has the rollouts of the settled ones, in the format of the recorded
rollouts: a gzip member for each group, and in it a line for each rollout. Of another group only its
id and its example are saved, and a resumed run runs it again.
"""

import asyncio
import logging
from collections import Counter
from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any

import msgspec

from torchtitan.experiments.rl.errors import RunError
from torchtitan.experiments.rl.loops.ledger import Ledger
from torchtitan.experiments.rl.loops.saved_state import (
    ExampleState,
    OpenGroupState,
    PickState,
)
from torchtitan.experiments.rl.rollouts.filters import ZERO_ADVANTAGE
from torchtitan.experiments.rl.rollouts.record_file import compress, read_groups
from torchtitan.experiments.rl.rollouts.recorder import RolloutRecorder
from torchtitan.experiments.rl.rollouts.records import (
    decode_rollout,
    encode_rollout,
    is_json_example,
    plain_example,
)
from torchtitan.experiments.rl.rollouts.types import DataSample, RolloutGroup
from torchtitan.experiments.rl.tasks.task import Task

logger = logging.getLogger(__name__)

GROUPS_FILE = "groups.jsonl.gz"
"""Name of the file in a checkpoint's folder that has the rollouts of groups."""
UNLIMITED = 2**62
"""Size limit in bytes that no rollout reaches: a checkpoint never shortens a rollout."""


def groups_per_pick(task: Task) -> int:
    """Return how many groups the task starts each time the task mix picks it.

    If the task does not compare its rollouts, each rollout is a group.
    """
    return 1 if task.needs_group else task.config.group_size


def rollouts_per_group(task: Task) -> int:
    """Return how many rollouts a group of the task has."""
    return task.config.group_size if task.needs_group else 1


class SharedExample:
    """The example of a group, or of several groups. The first that needs it asks the sampler."""

    def __init__(self, value: DataSample | None = None, *, key: str = ""):
        """Make an example, for which the sampler is not asked yet.

        Args:
            value: the example, if it is known already: the sampler is never asked then.
            key: id of the first group that has the example, by which a checkpoint tells the groups
                that share one; "" if no group has started.
        """
        self.value = value
        """The example; None before the sampler returns it."""
        self.key = key
        self._lock = asyncio.Lock()

    async def get(self, ask: Callable[[], Awaitable[DataSample]]) -> DataSample:
        """Return the example. Those who ask meanwhile wait for the same answer."""
        async with self._lock:
            if self.value is None:
                self.value = await ask()
            return self.value

    def state(self, task: Task) -> ExampleState:
        """Return what a checkpoint keeps of the example."""
        return ExampleState(
            task=task.name,
            example=None if self.value is None else plain_example(self.value),
            example_is_json=self.value is not None and is_json_example(self.value),
            example_key=self.key,
        )


@dataclass(kw_only=True, slots=True)
class Pick:
    """A task that the task mix picked, until all groups of the pick have started.

    A task that compares its rollouts starts one group. Another starts ``group_size`` groups of one
    rollout, as places free up, so that the task mix picks the same number of rollouts of each.
    """

    task: Task
    groups_left: int
    """Number of groups that have not started."""
    example: SharedExample = field(default_factory=SharedExample)
    """Example of all groups of the pick, if the task repeats its examples."""

    def start(self, group_id: str) -> SharedExample:
        """Count one group as started, and return its example."""
        self.groups_left -= 1
        if not self.task.repeats_example:
            return SharedExample(key=group_id)
        self.example.key = self.example.key or group_id
        return self.example

    def state(self) -> PickState:
        """Return what a checkpoint keeps of the pick."""
        example = self.example.state(self.task)
        return PickState(**msgspec.structs.asdict(example), groups_left=self.groups_left)


@dataclass(kw_only=True, slots=True)
class OpenGroup:
    """Base class of the states of a group, from its dispatch until it leaves."""

    group_id: str
    task: Task
    rollout_ids: set[str]
    """Ids of the rollouts that have not ended in a column of the ledger."""
    example: SharedExample
    """The example that the rollouts are made from."""

    def state(self) -> OpenGroupState:
        """Return what a checkpoint keeps of the group."""
        example = self.example.state(self.task)
        return OpenGroupState(
            **msgspec.structs.asdict(example),
            group_id=self.group_id,
            rollout_ids=sorted(self.rollout_ids),
            outcomes={},
            settled=False,
            signal=False,
        )


@dataclass(kw_only=True, slots=True)
class DispatchedGroup(OpenGroup):
    """A group that has not begun to run, because it waits for its example."""


@dataclass(kw_only=True, slots=True)
class RunningGroup(OpenGroup):
    """A group whose rollouts run, or are being scored and filtered."""

    data_sample: DataSample
    """Value of ``example``."""


@dataclass(kw_only=True, slots=True)
class SettledGroup(OpenGroup):
    """A group that was scored and filtered, until it is trained on or dropped.

    A step may take it, unless filters left nothing of it: then it is dropped at once.
    """

    group: RolloutGroup
    """The group with all its rollouts."""
    signal: bool
    """True if the group has a learning signal."""
    outcomes: dict[str, str] = field(default_factory=dict)
    """Ledger column of each rollout that has ended, by its id."""

    def remaining(self) -> RolloutGroup:
        """Return the group with only the rollouts that have not ended."""
        remaining = [
            rollout for rollout in self.group.rollouts if rollout.rollout_id in self.rollout_ids
        ]
        return replace(self.group, rollouts=remaining).freeze()

    def state(self) -> OpenGroupState:
        return msgspec.structs.replace(
            OpenGroup.state(self),
            outcomes=dict(self.outcomes),
            settled=True,
            signal=self.signal,
            costs=dict(self.group.costs),
            credit_s=self.group.credit_s,
        )


@dataclass(kw_only=True, slots=True)
class StepGroups:
    """The groups of one optimizer step, and what happened to others since the step before."""

    groups: list[RolloutGroup] = field(default_factory=list)
    """Groups to train on, with only the rollouts that passed all filters."""
    sampled: list[RolloutGroup] = field(default_factory=list)
    """Groups that the step took, as they were before the post-batch filters, which may have emptied
    some of them."""
    replayed: list[RolloutGroup] = field(default_factory=list)
    """Groups that an earlier step trained on, and that this step trains on again."""
    dropped_groups: int = 0
    """Number of groups dropped since the step before."""
    filter_matches: Counter[str] = field(default_factory=Counter)
    """Number of rollouts that matched a filter since the step before, by ``pre/<filter>``
    and ``post/<filter>``. Filters that only monitor are counted too."""
    filter_tokens: Counter[str] = field(default_factory=Counter)
    """Number of tokens that the policy sampled in these rollouts."""


class OpenGroups:
    """Open groups by id, in the order of their dispatch.

    Reports each rollout that ends to the ledger, and each scored group that leaves to the recorder.
    """

    def __init__(
        self, ledger: Ledger, recorder: RolloutRecorder | None, version: Callable[[], int]
    ):
        """Make an empty table.

        Args:
            version: returns the policy version that the generators hold.
        """
        self.ledger = ledger
        self._recorder = recorder
        self._version = version
        self._groups: dict[str, OpenGroup] = {}

    def __iter__(self) -> Iterator[OpenGroup]:
        return iter(self._groups.values())

    def __contains__(self, group_id: str) -> bool:
        return group_id in self._groups

    def dispatch(self, task: Task, group_id: str, example: SharedExample) -> DispatchedGroup:
        """Open a group, and a ledger record for each of its rollouts."""
        group = DispatchedGroup(
            group_id=group_id,
            task=task,
            rollout_ids={f"{group_id}/{index}" for index in range(rollouts_per_group(task))},
            example=example,
        )
        self._groups[group_id] = group
        self.ledger.dispatch(task.name, group.rollout_ids, version=self._version())
        return group

    def give_example(self, dispatched: DispatchedGroup, data_sample: DataSample) -> RunningGroup:
        """Give a dispatched group its example. The caller runs it next."""
        running = RunningGroup(**_common(dispatched), data_sample=data_sample)
        self._groups[running.group_id] = running
        return running

    def settle(self, running: RunningGroup, group: RolloutGroup, *, signal: bool) -> SettledGroup:
        """Give a running group its scored rollouts. The caller ends those that filters drop."""
        settled = SettledGroup(**_common(running), group=group, signal=signal)
        self._groups[settled.group_id] = settled
        return settled

    def settled(self, group_id: str) -> SettledGroup:
        """Return a group that has settled, as all have that a step takes."""
        group = self._groups[group_id]
        assert isinstance(group, SettledGroup)
        return group

    def end_rollout(
        self, group: OpenGroup, rollout_id: str, column: str, why: str | None = None
    ) -> None:
        """End a rollout in a column of the ledger, and log why if a reason is given."""
        group.rollout_ids.remove(rollout_id)
        if isinstance(group, SettledGroup):
            group.outcomes[rollout_id] = column
        self.ledger.end(rollout_id, column, version=self._version())
        if why is not None:
            logger.info("%s: rollout %s: %s", column, rollout_id, why)

    def leave(
        self, group_id: str, column: str | None = None, *, trained_step: int | None = None
    ) -> None:
        """Close a group, and record it if it was scored.

        Args:
            column: column of the ledger in which its remaining rollouts end; None if all have
                ended.
            trained_step: step that trained on its remaining rollouts; None if none did.
        """
        group = self._groups.pop(group_id)
        if column is not None:
            for rollout_id in sorted(group.rollout_ids):
                self.end_rollout(group, rollout_id, column)
        if self._recorder is not None and isinstance(group, SettledGroup):
            self._recorder.record(group.group, group.outcomes, trained_step=trained_step)

    def check(self) -> None:
        """Compare the ledger's open rollouts with those of the open groups.

        Raises:
            RunError: they differ, so a rollout was lost or counted twice.
        """
        self.ledger.check({rollout_id for group in self for rollout_id in group.rollout_ids})

    def settled_groups(self) -> list[RolloutGroup]:
        """Return the groups that have settled, with all their rollouts."""
        return [group.group for group in self if isinstance(group, SettledGroup)]

    def states(self) -> list[OpenGroupState]:
        """Return what a checkpoint keeps of each group."""
        return [group.state() for group in self]

    def restore(
        self,
        states: Sequence[OpenGroupState],
        saved: Mapping[str, RolloutGroup],
        tasks: Mapping[str, Task],
        examples: "SavedExamples",
    ) -> list[str]:
        """Open the groups of a checkpoint again. The ledger has their rollouts already.

        Args:
            saved: the checkpoint's groups with rollouts, by id.

        Returns:
            Ids of groups that can't be run again, because their example can't be recovered. They
            are open too, until the caller has them leave.

        Raises:
            RunError: a group that had settled is not among ``saved``.
        """
        lost = []
        for state in states:
            if state.settled and state.group_id not in saved:
                raise RunError(
                    f"the checkpoint lacks the rollouts of group {state.group_id}: "
                    "resume from another checkpoint"
                )
            group = DispatchedGroup(
                group_id=state.group_id,
                task=tasks[state.task],
                rollout_ids=set(state.rollout_ids),
                example=examples.restore(state, copy_is_enough=state.settled),
            )
            self._groups[state.group_id] = group
            if state.settled:
                self._groups[state.group_id] = _restored(group, state, saved[state.group_id])
            elif state.example is not None and group.example.value is None:
                lost.append(state.group_id)
        return lost


def _common(group: OpenGroup) -> dict[str, Any]:
    """Return the fields that a group keeps from one state to the next."""
    return {entry.name: getattr(group, entry.name) for entry in fields(OpenGroup)}


def _restored(group: OpenGroup, state: OpenGroupState, scored: RolloutGroup) -> SettledGroup:
    """Return a group of a checkpoint as it was when it had settled.

    Args:
        scored: the group with its rollouts, as they were read. It gets its costs back, and shares
            its example with its rollouts again.
    """
    scored.amend(costs=state.costs, credit_s=state.credit_s)
    example = group.example.value
    if example is not None:
        scored.amend(data_sample=example)
        for rollout in scored.rollouts:
            rollout.amend(data_sample=example)
    return SettledGroup(
        **_common(group), group=scored, signal=state.signal, outcomes=dict(state.outcomes)
    )


class SavedExamples:
    """Examples of a checkpoint's open groups and of its pick."""

    def __init__(self, dataset_examples: Mapping[str, Mapping[str, DataSample]]):
        """Begin with the examples of each task's dataset, by task and sample id."""
        self._dataset_examples = dataset_examples
        self._not_given: dict[str, SharedExample] = {}
        """Examples that the sampler had not given, by their key."""

    def restore(self, state: ExampleState, *, copy_is_enough: bool) -> SharedExample:
        """Return the example of a group or a pick, without a value if it can't be recovered.

        Groups that waited for one example share it again. See `example_of` for the rest.
        """
        dataset_examples = self._dataset_examples.get(state.task, {})
        value = example_of(state, dataset_examples, copy_is_enough=copy_is_enough)
        example = SharedExample(value, key=state.example_key)
        if state.example is None and state.example_key:
            return self._not_given.setdefault(state.example_key, example)
        return example


def write_groups(folder: Path, groups: Iterable[RolloutGroup]) -> None:
    """Write groups with their rollouts into a checkpoint's folder.

    It may run in a thread beside the next step, so nothing may change the groups meanwhile but
    their samples' ``trainer_logprobs``. Their costs are in their `OpenGroupState`.
    """
    with (folder / GROUPS_FILE).open("wb") as file:
        for group in groups:
            lines = [
                encode_rollout(
                    rollout,
                    outcome=None,
                    admitted_version=group.admitted_version,
                    max_bytes=UNLIMITED,
                )
                for rollout in group.rollouts
            ]
            file.write(compress(b"".join(lines)))


def read_saved_groups(folder: Path) -> dict[str, RolloutGroup]:
    """Read the groups with rollouts of a checkpoint, by id.

    Raises:
        RunError: the file is damaged.
    """
    groups = {}
    try:
        for _, lines in read_groups(folder / GROUPS_FILE):
            records = [decode_rollout(line) for line in lines.splitlines()]
            first = records[0].rollout
            assert first.data_sample is not None, "every rollout of a run has an example"
            groups[first.group_id] = RolloutGroup(
                group_id=first.group_id,
                task_name=first.task_name,
                data_sample=first.data_sample,
                rollouts=[record.rollout for record in records],
                admitted_version=records[0].admitted_version,
            )
    except (OSError, ValueError) as error:
        raise RunError(
            f"{folder / GROUPS_FILE} can't be read ({error}): resume from another checkpoint"
        ) from error
    return groups


def example_of(
    state: ExampleState, dataset_examples: Mapping[str, DataSample], *, copy_is_enough: bool
) -> DataSample | None:
    """Return the example of a checkpoint's group.

    The dataset's own example is preferred, because JSON turns tuples into lists. The checkpoint's
    copy is used if it differs and JSON held it whole.

    Args:
        dataset_examples: examples of the task's dataset, by sample id.
        copy_is_enough: True if the group has settled. It is not run again, so a copy that lost its
            types will do.

    Returns:
        The example; None if the sampler had given none, or if it can't be recovered.
    """
    if state.example is None:
        return None
    own = dataset_examples.get(state.example["sample_id"])
    if own is None:
        is_enough = state.example_is_json or copy_is_enough
        return DataSample(**state.example) if is_enough else None
    was_changed = state.example_is_json and plain_example(own) != state.example
    return DataSample(**state.example) if was_changed else own


def has_signal(group: RolloutGroup) -> bool:
    """Return True if training on the group changes anything.

    That is so if some advantage is not 0, or some token has a ce or a ref_kl weight.
    """
    return not all(ZERO_ADVANTAGE.matches(group))
