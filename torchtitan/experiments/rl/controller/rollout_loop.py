"""Starts a group in every free slot, and gives finished groups to the trainer by deadline.

Consumes examples and the policy; produces scored `RolloutGroup`s; waits for nothing but a free slot. The pacer decides
which groups may start and which a step takes; the ledger records where every rollout ended.

A group is dispatched, run and scored (`GroupRunner`), filtered, taken by an optimizer step, filtered again, and trained.
Wherever it leaves this path, its slot frees exactly once and each of its rollouts ends in one column of the ledger.
"""

import asyncio
import logging
from collections import Counter
from collections.abc import Coroutine, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from torchtitan.experiments.rl.batching.batcher import Batcher
from torchtitan.experiments.rl.controller.group_runner import GroupRunner
from torchtitan.experiments.rl.controller.ledger import Ledger
from torchtitan.experiments.rl.controller.pacing import Pacer
from torchtitan.experiments.rl.controller.stall import (
    ConsecutiveDrops,
    Mastery,
    NoSignalFromStart,
    NothingLeftToLearn,
    has_signal,
)
from torchtitan.experiments.rl.controller.user_parts import FilterSlot, UserParts, check_whole
from torchtitan.experiments.rl.data.task_mix import TaskMix
from torchtitan.experiments.rl.errors import RunError
from torchtitan.experiments.rl.rollouts.filters import Filter
from torchtitan.experiments.rl.rollouts.policy import PolicyClient
from torchtitan.experiments.rl.rollouts.recorder import RolloutRecorder
from torchtitan.experiments.rl.rollouts.types import RolloutGroup
from torchtitan.experiments.rl.tasks.task import Task
from torchtitan.experiments.rl.user_code.calls import cause_of
from torchtitan.experiments.rl.user_code.gate import Call, Gate

logger = logging.getLogger(__name__)


CANCEL_GROUPS_S = 60.0
"""How long cancelled groups may take to close their envs before they are abandoned."""


class RunStopped(Exception):
    """``stop`` was called while the trainer waited for groups."""


@dataclass(kw_only=True, slots=True)
class _OpenGroup:
    task: Task
    rollout_ids: set[str]
    """Rollouts of the group that are in no ledger column yet."""
    group: RolloutGroup | None = None
    """All its rollouts; None until they were scored."""
    signal: bool = False
    """Whether the scored group has a learning signal."""
    outcomes: dict[str, str] = field(default_factory=dict)
    """Ledger column of each rollout that has ended."""

    def kept(self) -> RolloutGroup:
        """The scored group with only the rollouts that are still open."""
        assert self.group is not None
        return replace(self.group, rollouts=[r for r in self.group.rollouts if r.rollout_id in self.rollout_ids])


@dataclass(kw_only=True, slots=True)
class StepGroups:
    """What one optimizer step trains on."""

    groups: list[RolloutGroup]
    """With only those rollouts that are trained on."""
    dropped_groups: int
    """Groups dropped since the step before."""
    filter_matches: Counter[str] = field(default_factory=Counter)
    """Rollouts matched since the step before, by ``<slot>/<filter>``, monitors included."""


class RolloutLoop:
    def __init__(
        self,
        *,
        tasks: dict[str, Task],
        mix: TaskMix,
        runner: GroupRunner,
        policy: PolicyClient,
        pacer: Pacer,
        batcher: Batcher,
        pre_batch_filters: Sequence[Filter],
        post_batch_filters: Sequence[Filter],
        total_groups: int,
        max_drops_in_a_row: int,
        ledger: Ledger | None = None,
        recorder: RolloutRecorder | None = None,
        gate: Gate | None = None,
    ):
        """
        Args:
            total_groups: groups the run will train on; the loop starts no more than may still be needed.
            max_drops_in_a_row: limit of the stall detectors (`stall.py`).
            gate: calls the samplers, the mix and the filters.
        """
        self.ledger = ledger or Ledger()
        self._tasks, self._runner, self._policy = tasks, runner, policy
        self._parts = UserParts(gate or Gate(), mix=mix, tasks=tasks)
        self._pacer, self._batcher, self._recorder = pacer, batcher, recorder
        self._pre_batch, self._post_batch = FilterSlot("pre", pre_batch_filters), FilterSlot("post", post_batch_filters)
        self._frozen = {name: task.frozen_source is not None for name, task in tasks.items()}
        self._groups_left = total_groups
        self._open: dict[str, _OpenGroup] = {}
        self._running: set[asyncio.Task[None]] = set()
        self._started = 0
        # A post-batch filter may drop every group that the pre-batch filters kept: its drops are counted on their own.
        self._drops = ConsecutiveDrops(max_drops_in_a_row)
        self._emptied = ConsecutiveDrops(max_drops_in_a_row)
        self._no_signal = NoSignalFromStart(max_drops_in_a_row)
        self._mastery = Mastery(max_drops_in_a_row, list(tasks))
        self._dropped_groups = 0
        self._filter_matches: Counter[str] = Counter()
        self._changed = asyncio.Event()
        self._failure: Exception | None = None
        self._stopping = False
        self._picking = False
        """The task mix has not answered yet; ``fill`` goes on when it has."""

    def fill(self) -> None:
        """Start a group in every free slot."""
        while self._may_start():
            pick = self._parts.pick_task()
            if not pick.answered:
                self._picking = True
                self._run_beside(self._fill_later(pick), "task mix")
                return
            try:
                self._start_group(self._parts.picked(pick.value_now()))
            except RunError as error:
                self.fail(error)

    def _may_start(self) -> bool:
        wanted = self._pacer.free_slots and self._pacer.untrained < self._groups_left
        return bool(wanted) and not (self._stopping or self._picking) and self._failure is None

    async def _fill_later(self, pick: Call) -> None:
        try:
            name = self._parts.picked(await pick.value())
        except RunError as error:
            return self.fail(error)
        finally:
            self._picking = False
        if self._may_start():
            self._start_group(name)
        self.fill()

    def _start_group(self, task_name: str) -> None:
        task = self._tasks[task_name]
        group_id = f"{task.name}-{self._started}"
        self._started += 1
        version = self._policy.version
        self._pacer.admit(group_id, version, frozen=self._frozen[task_name])
        entry = _OpenGroup(task=task, rollout_ids={f"{group_id}/{index}" for index in range(task.config.group_size)})
        self.ledger.dispatch(task.name, entry.rollout_ids, version=version)
        self._open[group_id] = entry
        self._run_beside(self._run_group(group_id, entry), group_id)

    def _run_beside(self, work: Coroutine[Any, Any, None], name: str) -> None:
        running = asyncio.create_task(work, name=name)
        self._running.add(running)
        running.add_done_callback(self._running.discard)

    async def next_groups(self, version: int) -> StepGroups:
        """The groups for the step that trains ``version``. Waits while the pacer finds none that may be taken.

        Raises:
            RunStopped: ``stop`` was called.
            NothingLeftToLearn: every task is mastered.
            RunError: code that is no rollout's failed, or the run has stalled.
        """
        while True:
            if self._failure is not None:
                raise self._failure
            if self._stopping:
                raise RunStopped
            self._changed.clear()
            taken = self._pacer.take_groups(version)
            if taken is None:
                await self._changed.wait()
                continue
            groups = [await self._filtered_again(group_id) for group_id in taken]
            if any(group.rollouts for group in groups):
                break
            for group_id in taken:
                self._pacer.drop(group_id)
                self._drop(group_id, self._emptied)
            self.fill()
        self._emptied.clear()
        for group in groups:
            if not group.rollouts:  # its slot frees with the others of the step
                self._drop(group.group_id)
        groups = [group for group in groups if group.rollouts]
        self._groups_left -= len(taken)
        taken_groups = StepGroups(groups=groups, dropped_groups=self._dropped_groups, filter_matches=self._filter_matches)
        self._dropped_groups, self._filter_matches = 0, Counter()
        return taken_groups

    def trained(self, taken: StepGroups) -> None:
        """The optimizer step on these groups was taken: their rollouts end as trained."""
        for group in taken.groups:
            entry = self._open.pop(group.group_id)
            for rollout in group.rollouts:
                self._end(entry, rollout.rollout_id, "trained")
            self._record(entry)
        self.ledger.check(self._open_rollouts())

    def live(self, version: int) -> None:
        """The generators hold ``version``: free the slots of the groups trained for it, and start groups in them."""
        self._pacer.live(version)
        self.fill()

    def fail(self, error: Exception) -> None:
        """Have ``next_groups`` raise ``error``: rollouts depend on something that has failed."""
        self._failure = self._failure or error
        self._changed.set()

    def stop(self) -> None:
        """Start no more groups, and have ``next_groups`` raise RunStopped."""
        self._stopping = True
        self._changed.set()

    async def close(self) -> None:
        """Cancel running groups. Rollouts that are still open end as untrained.

        Raises:
            RunError: the ledger does not balance. Everything is closed then too.
        """
        self.stop()
        running = list(self._running)
        for task in running:
            task.cancel()
        try:
            if running:
                _, late = await asyncio.wait(running, timeout=CANCEL_GROUPS_S)
                if late:
                    logger.warning("%d groups ignored their cancellation and were abandoned", len(late))
            for entry in self._open.values():
                for rollout_id in sorted(entry.rollout_ids):
                    self._end(entry, rollout_id, "untrained")
                self._record(entry)
            self._open.clear()
            self.ledger.check([])
        finally:
            self.ledger.close()

    def _open_rollouts(self) -> set[str]:
        return {rollout_id for entry in self._open.values() for rollout_id in entry.rollout_ids}

    async def _run_group(self, group_id: str, entry: _OpenGroup) -> None:
        try:
            task = entry.task
            example = await self._parts.next_example(task)
            group = await self._runner.run(task, example, group_id=group_id)
            check_whole(group, entry.rollout_ids, task)
            await self._parts.observe(group, task)
            await self._settle(group, entry)
        except asyncio.CancelledError:
            raise
        except NothingLeftToLearn as end:
            logger.info("%s", end)
            self.fail(end)
        except BaseException as error:  # failures of envs, rewards and algorithms end in statuses, and don't come here
            if self._failure is None:
                logger.exception("group %s", group_id)
            # A SystemExit would stop the event loop.
            self.fail(error if isinstance(error, Exception) else RunError(f"group {group_id}: {cause_of(error)}"))
        self._changed.set()

    async def _settle(self, group: RolloutGroup, entry: _OpenGroup) -> None:
        """Keep the rollouts of a scored group that may be trained on; end the others in their columns."""
        entry.group = group
        for rollout in group.rollouts:
            if rollout.reward is None:
                self._end(entry, rollout.rollout_id, f"failed/{rollout.status.value}", rollout.error)
        if group.failure is not None:
            for rollout in group.scored:
                self._end(entry, rollout.rollout_id, "failed/group_too_small", group.failure)
        else:
            entry.signal = has_signal(group)
            self._no_signal.add(group, signal=entry.signal)
            self._mastery.scored(group, signal=entry.signal)
            await self._filter(self._pre_batch, group, entry)
            for rollout in entry.kept().rollouts:
                if self._batcher.oversized(rollout.samples):
                    self._end(entry, rollout.rollout_id, "oversized", "longer than batcher.row_length")
        if entry.rollout_ids:
            self._pacer.finish(group.group_id)
            self._drops.clear()
        else:
            self._pacer.drop(group.group_id)
            self._drop(group.group_id, self._drops)
            self.fill()

    async def _filtered_again(self, group_id: str) -> RolloutGroup:
        """The group without the rollouts that post-batch filters drop."""
        entry = self._open[group_id]
        await self._filter(self._post_batch, entry.kept(), entry)
        return entry.kept()

    async def _filter(self, slot: FilterSlot, group: RolloutGroup, entry: _OpenGroup) -> None:
        filtered = await self._parts.filter(slot, group)
        self._filter_matches.update(filtered.matched)
        for rollout, name in filtered.dropped:
            self._end(entry, rollout.rollout_id, f"filtered/{name}")

    def _end(self, entry: _OpenGroup, rollout_id: str, column: str, why: str | None = None) -> None:
        entry.rollout_ids.remove(rollout_id)
        entry.outcomes[rollout_id] = column
        self.ledger.end(rollout_id, column, version=self._policy.version)
        if why is not None:
            logger.info("%s: rollout %s: %s", column, rollout_id, why)

    def _drop(self, group_id: str, drops: ConsecutiveDrops | None = None) -> None:
        """Close a group of which nothing is left to train on."""
        entry = self._open.pop(group_id)
        self._record(entry)
        self._dropped_groups += 1
        if drops is not None and entry.group is not None:
            columns = list(entry.outcomes.values())
            tie = self._mastery.dropped(columns, entry.group, signal=entry.signal)
            drops.add(columns, entry.group, tie=tie)

    def _record(self, entry: _OpenGroup) -> None:
        if self._recorder is not None and entry.group is not None:
            self._recorder.record(entry.group, entry.outcomes)
