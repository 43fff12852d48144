"""Tracks open groups: those dispatched, and not yet trained on or dropped.

A group is dispatched, runs, is scored, and settles: filters keep some of its rollouts. Then a step
trains on it, or it is dropped. The ledger records for each rollout in which column it ended.

A checkpoint keeps the open groups in two files. ``controller.json`` has an ``OpenGroupState`` for
each. ``groups.jsonl.gz`` has the rollouts of the finished ones, in the format of the recorded
rollouts: a gzip member for each group, and in it a line for each rollout. Of an unfinished group
only its id and its example are saved, and a resumed run runs it again.
"""

import asyncio
import dataclasses
import logging
from collections import Counter
from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from torchtitan.experiments.rl.controller.ledger import Ledger
from torchtitan.experiments.rl.controller.saved_state import (
    ExampleState,
    OpenGroupState,
    PickState,
)
from torchtitan.experiments.rl.errors import RunError
from torchtitan.experiments.rl.rollouts.filters import ZERO_ADVANTAGE
from torchtitan.experiments.rl.rollouts.record_file import compress, read_groups
from torchtitan.experiments.rl.rollouts.recorder import RolloutRecorder
from torchtitan.experiments.rl.rollouts.records import (
    decode_rollout,
    encode_rollout,
    plain_example,
)
from torchtitan.experiments.rl.rollouts.types import DataSample, RolloutGroup
from torchtitan.experiments.rl.tasks.task import Task

logger = logging.getLogger(__name__)

GROUPS_FILE = "groups.jsonl.gz"
"""Name of the file of finished groups in a checkpoint's folder."""
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

    def __init__(self, value: DataSample | None = None):
        self.value = value
        """The example; None before the sampler returns it."""
        self._lock = asyncio.Lock()

    async def get(self, ask: Callable[[], Awaitable[DataSample]]) -> DataSample:
        """Return the example. Those who ask meanwhile wait for the same answer."""
        async with self._lock:
            if self.value is None:
                self.value = await ask()
            return self.value

    def as_json(self) -> tuple[Any, bool]:
        """Return the example as JSON, and True if JSON holds the whole of it."""
        if self.value is None:
            return None, False
        example = plain_example(self.value)
        return example, example == dataclasses.asdict(self.value)


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

    def start(self) -> SharedExample:
        """Count one group as started, and return its example."""
        self.groups_left -= 1
        return self.example if self.task.repeats_example else SharedExample()

    def state(self) -> PickState:
        """Return what a checkpoint keeps of the pick."""
        example, example_is_json = self.example.as_json()
        return PickState(
            task=self.task.name,
            example=example,
            example_is_json=example_is_json,
            groups_left=self.groups_left,
        )


@dataclass(kw_only=True, slots=True)
class OpenGroup:
    """A group from its dispatch until it leaves."""

    task: Task
    rollout_ids: set[str]
    """Ids of the rollouts that have not ended in a column of the ledger."""
    example: SharedExample = field(default_factory=SharedExample)
    """The example that the rollouts are made from."""
    group: RolloutGroup | None = None
    """The group with all its rollouts; None until they were scored."""
    settling: bool = False
    """True while the scored group settles; it stays True if a filter, sampler or observer fails."""
    signal: bool = False
    """True if the scored group has a learning signal."""
    outcomes: dict[str, str] = field(default_factory=dict)
    """Ledger column of each rollout that has ended, by its id."""

    def remaining(self) -> RolloutGroup:
        """Return the scored group with only the rollouts that have not ended."""
        assert self.group is not None, "the group was not scored yet"
        remaining = [
            rollout for rollout in self.group.rollouts if rollout.rollout_id in self.rollout_ids
        ]
        return replace(self.group, rollouts=remaining).freeze()

    def state(self, group_id: str) -> OpenGroupState:
        """Return what a checkpoint keeps of the group.

        Raises:
            RunError: the group failed while it settled, so it is neither running nor finished.
        """
        if self.settling:
            raise RunError(
                f"group {group_id} failed while it settled: the state of the run can't be saved"
            )
        example, example_is_json = self.example.as_json()
        return OpenGroupState(
            group_id=group_id,
            task=self.task.name,
            example=example,
            example_is_json=example_is_json,
            rollout_ids=sorted(self.rollout_ids),
            outcomes=dict(self.outcomes),
            finished=self.group is not None,
            signal=self.signal,
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

    def __getitem__(self, group_id: str) -> OpenGroup:
        return self._groups[group_id]

    def __iter__(self) -> Iterator[str]:
        return iter(self._groups)

    def __contains__(self, group_id: str) -> bool:
        return group_id in self._groups

    def dispatch(self, task: Task, group_id: str, example: SharedExample) -> None:
        """Open a group, and a ledger record for each of its rollouts."""
        rollout_ids = {f"{group_id}/{index}" for index in range(rollouts_per_group(task))}
        self._groups[group_id] = OpenGroup(task=task, rollout_ids=rollout_ids, example=example)
        self.ledger.dispatch(task.name, rollout_ids, version=self._version())

    def end_rollout(
        self, open_group: OpenGroup, rollout_id: str, column: str, why: str | None = None
    ) -> None:
        """End a rollout in a column of the ledger, and log why if a reason is given."""
        open_group.rollout_ids.remove(rollout_id)
        open_group.outcomes[rollout_id] = column
        self.ledger.end(rollout_id, column, version=self._version())
        if why is not None:
            logger.info("%s: rollout %s: %s", column, rollout_id, why)

    def leave(self, group_id: str, column: str | None = None) -> OpenGroup:
        """Close a group, and record it if it was scored.

        Args:
            column: column of the ledger in which its remaining rollouts end; None if all have
            ended.
        """
        open_group = self._groups.pop(group_id)
        if column is not None:
            for rollout_id in sorted(open_group.rollout_ids):
                self.end_rollout(open_group, rollout_id, column)
        if self._recorder is not None and open_group.group is not None:
            self._recorder.record(open_group.group, open_group.outcomes)
        return open_group

    def check(self) -> None:
        """Compare the ledger's open rollouts with those of the open groups.

        Raises:
            RunError: they differ, so a rollout was lost or counted twice.
        """
        self.ledger.check(
            {
                rollout_id
                for open_group in self._groups.values()
                for rollout_id in open_group.rollout_ids
            }
        )

    def finished(self) -> list[RolloutGroup]:
        """Return the scored groups."""
        return [
            open_group.group for open_group in self._groups.values() if open_group.group is not None
        ]

    def states(self) -> list[OpenGroupState]:
        """Return what a checkpoint keeps of each group.

        Raises:
            RunError: a group failed while it settled.
        """
        return [open_group.state(group_id) for group_id, open_group in self._groups.items()]

    def restore(
        self,
        states: Sequence[OpenGroupState],
        finished: Mapping[str, RolloutGroup],
        tasks: Mapping[str, Task],
        examples: Mapping[str, Mapping[str, DataSample]],
    ) -> list[str]:
        """Open the groups of a checkpoint again. The ledger has their rollouts already.

        Args:
            finished: the scored groups by id.
            examples: examples of each task's dataset, by task and sample id.

        Returns:
            Ids of groups that can't be run again, because their example can't be recovered.

        Raises:
            RunError: a finished group is not among ``finished``.
        """
        lost = []
        for state in states:
            if state.finished and state.group_id not in finished:
                raise RunError(
                    f"the checkpoint lacks the rollouts of group {state.group_id}: "
                    "resume from another checkpoint"
                )
            example = example_of(state, examples.get(state.task, {}), copy_is_enough=state.finished)
            group = finished[state.group_id] if state.finished else None
            if group is not None and example is not None:
                group.amend(data_sample=example)
                for rollout in group.rollouts:
                    rollout.amend(data_sample=example)
            self._groups[state.group_id] = OpenGroup(
                task=tasks[state.task],
                rollout_ids=set(state.rollout_ids),
                example=SharedExample(example),
                group=group,
                signal=state.signal,
                outcomes=dict(state.outcomes),
            )
            if state.example is not None and example is None:
                lost.append(state.group_id)
        return lost


def write_groups(folder: Path, groups: Iterable[RolloutGroup]) -> None:
    """Write finished groups into a checkpoint's folder. Nothing may change them meanwhile."""
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


def read_finished_groups(folder: Path) -> dict[str, RolloutGroup]:
    """Read the finished groups of a checkpoint, by id.

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
        copy_is_enough: True if the group has finished. It is not run again, so a copy that lost its
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
