"""The buffer between rollouts and optimizer steps: groups from their claim until they leave.

    claim ──▶ ClaimedGroup ──settle──▶ SettledGroup ──take──▶ trained
                               │                       └────▶ dropped, if filters left nothing
                               └─────▶ dropped, if failures or filters left nothing

The rollouts of groups that are still open when the run ends, end as untrained.

The pacer (`pacing.py`) says which groups may start and which ones a step takes. The ledger
(`ledger.py`) records for each rollout in which column it ended.
"""

import asyncio
import logging
from collections import Counter
from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any, NamedTuple

import msgspec

from torchtitan.experiments.rl.errors import RunError
from torchtitan.experiments.rl.loops.ledger import Ledger
from torchtitan.experiments.rl.loops.pacing import Pacer
from torchtitan.experiments.rl.loops.saved_state import (
    BufferState,
    ExampleState,
    OpenGroupState,
    PickState,
)
from torchtitan.experiments.rl.rollouts.filters import ZERO_ADVANTAGE
from torchtitan.experiments.rl.rollouts.policy import PolicyClient
from torchtitan.experiments.rl.rollouts.recorder import RolloutRecorder
from torchtitan.experiments.rl.rollouts.records import TRAINED, is_json_example, plain_example
from torchtitan.experiments.rl.rollouts.types import DataSample, RolloutGroup
from torchtitan.experiments.rl.tasks.task import Task

logger = logging.getLogger(__name__)


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
        """Return the example. Others wait meanwhile; if asking fails, the next asks again."""
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
    """Base class of the states of a group, from its claim until it leaves."""

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
class ClaimedGroup(OpenGroup):
    """A group that waits for its example, or whose rollouts run, are scored or are filtered."""


@dataclass(kw_only=True, slots=True)
class SettledGroup(OpenGroup):
    """A group that has run, until it is trained on or dropped.

    A step may take it, unless a failure, a filter or the length of a row ended each of its
    rollouts: then it is dropped at once.
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
    """The groups of one optimizer step, and counts of what was dropped since the last."""

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


class Ending(NamedTuple):
    """End of a rollout: its column of the ledger, and why it ended there."""

    column: str
    """Column of the ledger."""
    why: str | None = None
    """Reason to log; None to log nothing."""


class GroupBuffer:
    """Open groups, between the coroutines that run rollouts and the steps that train on them.

    In this example ``sums`` is a task whose groups have 2 rollouts, and ``scored`` stands for the
    runner of groups. A step trains on 4 rollouts, which may be one version old, so that 8 may be
    open::

        >>> buffer = GroupBuffer(
        ...     Pacer(rollouts_per_step=4, max_offpolicy_steps=1), Ledger(), policy, steps=3
        ... )
        >>> pick = Pick(task=sums, groups_left=9)

    *claim* gives a group an id and its places, or None while none is free::

        >>> a, b, c, d = [buffer.claim(pick) for _ in range(4)]
        >>> d.group_id, sorted(d.rollout_ids), buffer.claim(pick)
        ('sums-3', ['sums-3/0', 'sums-3/1'], None)

    *settle* puts in a group that was scored. Some of its rollouts may end here::

        >>> settled = buffer.settle(c, scored(c), {})
        >>> settled = buffer.settle(d, scored(d), {"sums-3/1": Ending("oversized")})

    *take* gives a step its groups, or None while it has to wait. The step that starts from version
    0 need not wait for a and b, and the one from version 1 has to::

        >>> [sorted(group.rollout_ids) for group in buffer.take(base_version=0)]
        [['sums-2/0', 'sums-2/1'], ['sums-3/0']]
        >>> buffer.trained(["sums-2", "sums-3"])
        >>> policy.version = 1
        >>> buffer.live(1)
        >>> e, f = buffer.claim(pick), buffer.claim(pick)
        >>> settled = [buffer.settle(group, scored(group), {}) for group in (e, f)]
        >>> buffer.take(base_version=1) is None
        True

    A group of which nothing is left is dropped as it settles. Its places are free at once::

        >>> lost = dict.fromkeys(b.rollout_ids, Ending("filtered/pre/zero_advantage"))
        >>> settled = buffer.settle(b, scored(b), lost)
        >>> g = buffer.claim(pick)
        >>> settled = buffer.settle(a, scored(a), {})
        >>> [group.group_id for group in buffer.take(base_version=1)]
        ['sums-0', 'sums-4']

    The ledger has a record of each rollout. The recorder is given each settled group that leaves.
    """

    def __init__(
        self,
        pacer: Pacer,
        ledger: Ledger,
        policy: PolicyClient,
        *,
        steps: int,
        recorder: RolloutRecorder | None = None,
    ):
        """Make an empty buffer.

        Args:
            policy: tells the version that the generators hold.
            steps: number of steps that are to take groups. No group is given a place that none of
                them needs.
        """
        self.ledger = ledger
        self._pacer = pacer
        self._policy = policy
        self._recorder = recorder
        self._groups: dict[str, OpenGroup] = {}
        """Groups by id, in the order of their claim."""
        self._claimed = 0
        """Number of groups claimed since the run began, which numbers their ids."""
        self._steps_left = steps
        """Number of steps that have not taken their groups."""
        self._trained_version = 0
        """Version that the trainer holds: the number of optimizer steps that were taken."""

    def __iter__(self) -> Iterator[OpenGroup]:
        return iter(self._groups.values())

    def __contains__(self, group_id: str) -> bool:
        return group_id in self._groups

    @property
    def has_place(self) -> bool:
        """True if a group may start now, and some step needs it."""
        needed = self._steps_left * self._pacer.rollouts_per_step
        return self._pacer.free_places > 0 and self._pacer.untaken_rollouts < needed

    def claim(self, pick: Pick) -> ClaimedGroup | None:
        """Open the next group of a pick, and a ledger record for each of its rollouts.

        Returns:
            The group; None if no place is free, or no step needs it.
        """
        if not self.has_place:
            return None
        task = pick.task
        group_id = f"{task.name}-{self._claimed}"
        self._claimed += 1
        size = rollouts_per_group(task)
        version = self._policy.version
        self._pacer.admit(
            group_id, version, rollouts=size, frozen=not task.trains_on_policy_samples
        )
        group = ClaimedGroup(
            group_id=group_id,
            task=task,
            rollout_ids={f"{group_id}/{index}" for index in range(size)},
            example=pick.start(group_id),
        )
        self._groups[group_id] = group
        self.ledger.dispatch(task.name, group.rollout_ids, version=version)
        return group

    def settle(
        self,
        claimed: ClaimedGroup,
        group: RolloutGroup,
        endings: Mapping[str, Ending],
        *,
        signal: bool = True,
    ) -> SettledGroup:
        """Keep the rollouts of a scored group that may be trained on, and end the others.

        If some are left, a step may take the group; else it is dropped. All of it is done at once:
        nothing is awaited, and no code of users or observers is called.

        Args:
            group: the claimed group with all its rollouts.
            endings: ends of rollouts that no step may train on, by their id.
            signal: True if the group has a learning signal.
        """
        settled = SettledGroup(**_common(claimed), group=group, signal=signal)
        self._groups[settled.group_id] = settled
        self.end(settled, endings)
        if settled.rollout_ids:
            self._pacer.finish(settled.group_id)
        else:
            self._pacer.drop(settled.group_id)
            self._leave(settled)
        return settled

    def take(self, base_version: int) -> list[SettledGroup] | None:
        """Take the groups of the step that starts from ``base_version``.

        Returns:
            The groups, earliest deadline first; None while the step has to wait.
        """
        group_ids = self._pacer.take_groups(base_version)
        if group_ids is None:
            return None
        self._steps_left -= 1
        taken = []
        for group_id in group_ids:
            group = self._groups[group_id]
            assert isinstance(group, SettledGroup), "the pacer gives finished groups"
            taken.append(group)
        return taken

    def end(self, group: OpenGroup, endings: Mapping[str, Ending]) -> None:
        """End rollouts of an open group, and log why if a reason is given."""
        version = self._policy.version
        for rollout_id, ending in endings.items():
            group.rollout_ids.remove(rollout_id)
            if isinstance(group, SettledGroup):
                group.outcomes[rollout_id] = ending.column
            self.ledger.end(rollout_id, ending.column, version=version)
            if ending.why is not None:
                logger.info("%s: rollout %s: %s", ending.column, rollout_id, ending.why)

    def drop_emptied(self, taken: Sequence[SettledGroup]) -> list[SettledGroup]:
        """Drop those of a step's groups of which nothing is left, and return them.

        If all are empty, their places free at once, and the step takes other groups. Otherwise they
        free when the version is live that the step makes.
        """
        emptied = [group for group in taken if not group.rollout_ids]
        if len(emptied) == len(taken):
            self._steps_left += 1
            for group in emptied:
                self._pacer.drop(group.group_id)
        for group in emptied:
            self._leave(group)
        return emptied

    def trained(self, group_ids: Iterable[str]) -> None:
        """Close the groups of a step as trained: its optimizer step was taken."""
        self._trained_version += 1
        for group_id in group_ids:
            self._leave(self._groups[group_id], TRAINED, trained_step=self._trained_version)

    def live(self, version: int) -> None:
        """Free the places of the groups that ``version`` was made from: the generators hold it."""
        self._pacer.live(version)

    def check(self) -> None:
        """Compare the ledger's open rollouts with those of the open groups.

        Raises:
            RunError: they differ, so a rollout was lost or counted twice.
        """
        self.ledger.check({rollout_id for group in self for rollout_id in group.rollout_ids})

    def close(self) -> None:
        """End the rollouts that are open as untrained, and close the ledger.

        Raises:
            RunError: the ledger does not balance. Everything is closed all the same.
        """
        try:
            for group in list(self):
                self._leave(group, "untrained")
            self.check()
        finally:
            self.ledger.close()

    def _leave(
        self, group: OpenGroup, column: str | None = None, *, trained_step: int | None = None
    ) -> None:
        """Close a group, and record it if it had settled.

        Args:
            column: column of the ledger in which its remaining rollouts end; None if all have
                ended.
            trained_step: step that trained on its remaining rollouts; None if none did.
        """
        del self._groups[group.group_id]
        if column is not None:
            self.end(group, dict.fromkeys(sorted(group.rollout_ids), Ending(column)))
        if self._recorder is not None and isinstance(group, SettledGroup):
            self._recorder.record(group.group, group.outcomes, trained_step=trained_step)

    # Checkpointing: capture and restore the open groups.

    def settled_groups(self) -> list[RolloutGroup]:
        """Return the groups that have settled, with all their rollouts."""
        return [group.group for group in self if isinstance(group, SettledGroup)]

    def state(self) -> BufferState:
        """Return what a checkpoint keeps: all groups that no step has trained on."""
        self.ledger.flush()
        return BufferState(
            started=self._claimed,
            groups=[group.state() for group in self],
            paced=[
                group
                for group in self._pacer.state(self._trained_version)
                if group.group_id in self  # and not one that filters have emptied
            ],
            ledger=self.ledger.state(),
        )

    def restore(
        self,
        state: BufferState,
        version: int,
        *,
        tasks: Mapping[str, Task],
        saved: Mapping[str, RolloutGroup],
        examples: Mapping[str, SharedExample],
    ) -> list[ClaimedGroup]:
        """Open the groups of a checkpoint of ``version`` again.

        A group that has to be run again and whose example can't be recovered ends as lost, and so
        does one that is too old for a smaller ``max_offpolicy_steps``.

        Args:
            saved: the checkpoint's groups with rollouts, by id.
            examples: example of each open group by its id, without a value if it can't be
                recovered.

        Returns:
            The groups that are to be run again, because they had not settled.

        Raises:
            RunError: a group that had settled is not among ``saved``.
        """
        # All of them, or an error, before anything is open: else the ledger would not balance.
        restored = [
            _restored(entry, tasks[entry.task], saved, examples[entry.group_id])
            for entry in state.groups
        ]
        self._claimed = state.started
        self._trained_version = version
        self.ledger.restore(state.ledger)
        lost = []
        for entry, group in zip(state.groups, restored, strict=True):
            self._groups[entry.group_id] = group
            had_example = entry.example is not None
            if isinstance(group, ClaimedGroup) and had_example and group.example.value is None:
                lost.append(entry.group_id)
        paced = [group for group in state.paced if group.group_id not in lost]
        lost += self._pacer.restore(paced, version)
        for group_id in lost:
            logger.warning(
                "group %s of the checkpoint can't be run again, or is too old now", group_id
            )
            self._leave(self._groups[group_id], "lost")
        self.check()
        return [group for group in self if isinstance(group, ClaimedGroup)]


def _restored(
    state: OpenGroupState, task: Task, saved: Mapping[str, RolloutGroup], example: SharedExample
) -> ClaimedGroup | SettledGroup:
    """Return a group of a checkpoint as it was.

    A settled one gets its costs back, and shares its example with its rollouts again.

    Raises:
        RunError: it had settled, and is not among ``saved``.
    """
    claimed = ClaimedGroup(
        group_id=state.group_id, task=task, rollout_ids=set(state.rollout_ids), example=example
    )
    if not state.settled:
        return claimed
    if state.group_id not in saved:
        raise RunError(
            f"the checkpoint lacks the rollouts of group {state.group_id}: "
            "resume from another checkpoint"
        )
    group = saved[state.group_id]
    group.amend(costs=state.costs, credit_s=state.credit_s)
    if example.value is not None:
        group.amend(data_sample=example.value)
        for rollout in group.rollouts:
            rollout.amend(data_sample=example.value)
    return SettledGroup(
        **_common(claimed), group=group, signal=state.signal, outcomes=dict(state.outcomes)
    )


def _common(group: OpenGroup) -> dict[str, Any]:
    """Return the fields that a group keeps from one state to the next."""
    return {entry.name: getattr(group, entry.name) for entry in fields(OpenGroup)}


def has_signal(group: RolloutGroup) -> bool:
    """Return True if training on the group changes anything.

    That is so if some advantage is not 0, or some token has a ce or a ref_kl weight.
    """
    return not all(ZERO_ADVANTAGE.matches(group))
