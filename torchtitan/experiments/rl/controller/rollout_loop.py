"""Starts a group in every free slot, and gives finished groups to the trainer by deadline.

Consumes examples and the policy; produces scored `RolloutGroup`s; waits for nothing but a free slot. The pacer decides
which groups may start and which a step takes; the ledger records where every rollout ended.

A group is dispatched, run and scored (`GroupRunner`), filtered, taken by an optimizer step, filtered again, and trained.
Wherever it leaves this path, its slot frees exactly once and each of its rollouts ends in one column of the ledger.
"""

import asyncio
import logging
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import TypeVar

from torchtitan.experiments.rl.batching.batcher import Batcher
from torchtitan.experiments.rl.controller.group_runner import GroupRunner
from torchtitan.experiments.rl.controller.group_starts import GroupStarts
from torchtitan.experiments.rl.controller.late_credit import LateCredit
from torchtitan.experiments.rl.controller.ledger import Ledger
from torchtitan.experiments.rl.controller.open_groups import OpenGroup, OpenGroups, StepGroups, groups_in_slot
from torchtitan.experiments.rl.controller.pacing import Pacer
from torchtitan.experiments.rl.controller.running import Running
from torchtitan.experiments.rl.controller.saved_state import RolloutLoopState
from torchtitan.experiments.rl.controller.stall import NothingLeftToLearn, StallDetectors, has_signal
from torchtitan.experiments.rl.controller.stillness import Stillness
from torchtitan.experiments.rl.controller.user_parts import FilterSlot, UserParts, check_whole, refuse_future_versions
from torchtitan.experiments.rl.data.task_mix import TaskMix
from torchtitan.experiments.rl.errors import RunError
from torchtitan.experiments.rl.rollouts.filters import Filter, FilterResult
from torchtitan.experiments.rl.rollouts.group_replay import GroupReplay
from torchtitan.experiments.rl.rollouts.policy import PolicyClient
from torchtitan.experiments.rl.rollouts.recorder import RolloutRecorder
from torchtitan.experiments.rl.rollouts.types import RolloutGroup
from torchtitan.experiments.rl.tasks.task import Task
from torchtitan.experiments.rl.user_code.calls import cause_of
from torchtitan.experiments.rl.user_code.gate import Gate

logger = logging.getLogger(__name__)


Captured = TypeVar("Captured")


class RunStopped(Exception):
    """``stop`` was called while the trainer waited for groups."""


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
        replay: GroupReplay | None = None,
        gate: Gate | None = None,
        note: Callable[[str], None] = lambda line: None,
    ):
        """
        Args:
            total_groups: slots of groups the run will train on; the loop starts no more than may still be needed.
            max_drops_in_a_row: limit of the stall detectors (`stall.py`).
            replay: the groups that steps train on again.
            gate: calls the samplers, the mix and the filters.
            note: prints a line.
        """
        self._tasks, self._runner, self._policy = tasks, runner, policy
        self._parts = UserParts(gate or Gate(), mix=mix, tasks=tasks)
        self._pacer, self._batcher = pacer, batcher
        self._pre_batch, self._post_batch = FilterSlot("pre", pre_batch_filters), FilterSlot("post", post_batch_filters)
        self._groups_left = total_groups
        self._open = OpenGroups(ledger or Ledger(), recorder, lambda: policy.version)
        self._replay = replay
        self._late_credit = LateCredit(tasks, slot=self._pre_batch, parts=self._parts, runner=runner, batcher=batcher)
        self._running = Running()
        self._stall = StallDetectors(max_drops_in_a_row, {name: groups_in_slot(task) for name, task in tasks.items()}, note)
        self._next_step = StepGroups()
        """What there is to tell of the next step: groups dropped, rollouts matched."""
        self._changed = asyncio.Event()
        self._failure: Exception | None = None
        self._rollouts_failing = False
        self._stopping = False
        self._stillness = Stillness()
        self._starts = GroupStarts(
            tasks=tasks,
            parts=self._parts,
            pacer=pacer,
            opened=self._open,
            running=self._running,
            stillness=self._stillness,
            version=lambda: policy.version,
            wanted=self._wants_groups,
            run=self._run_group,
            fail=self._end,
        )

    @property
    def ledger(self) -> Ledger:
        return self._open.ledger

    def fill(self) -> None:
        """Start groups in every free slot."""
        self._starts.fill()

    def _wants_groups(self) -> bool:
        return self._pacer.untrained < self._groups_left and not self._stopping and self._failure is None

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
            sampled = [self._open[group_id].kept() for group_id in taken]
            groups = [await self._filtered_again(group_id) for group_id in taken]
            if any(group.rollouts for group in groups):
                break
            for group_id in taken:
                self._pacer.drop(group_id)
                self._drop(group_id, taken=True)
            self.fill()
        self._stall.taken()
        for group in groups:
            if not group.rollouts:  # its slot frees with the others of the step
                self._drop(group.group_id, counted=False)
        self._groups_left -= self._pacer.groups_per_step
        step, self._next_step = self._next_step, StepGroups()
        step.groups, step.sampled = [group for group in groups if group.rollouts], sampled
        if self._replay is not None:
            step.replayed = self._replay.draw(version)
        return step

    def trained(self, taken: StepGroups) -> None:
        """The optimizer step on these groups was taken: their rollouts end as trained."""
        for group in taken.groups:
            self._open.leave(group.group_id, "trained")
        for group in taken.replayed:
            self.ledger.replay(group.task_name, len(group.rollouts))
        if self._replay is not None:
            self._replay.add(taken.groups)
        self._open.check()

    def live(self, version: int, *, fill: bool = True) -> None:
        """The generators hold ``version``: free the slots of the groups trained for it, and start groups in them.

        ``fill`` False leaves them free until ``fill`` is called.
        """
        self._pacer.live(version)
        if fill:
            self.fill()

    def fail(self, error: Exception) -> None:
        """Have ``next_groups`` raise ``error``: rollouts depend on something that has failed. None ends any more."""
        self._rollouts_failing = True
        self._end(error)

    def _end(self, error: Exception) -> None:
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
        try:
            await self._running.cancel()
            for group_id in list(self._open):
                self._open.leave(group_id, "untrained")
            self._open.check()
        finally:
            self.ledger.close()

    async def capture(self, at_once: Callable[[], Captured]) -> tuple[RolloutLoopState, list[RolloutGroup], Captured]:
        """What a resumed run continues from, the groups that have finished or are stored, and what ``at_once`` returns then.

        Groups go on running meanwhile; none starts, ends or is filtered. Call it between steps, when no group is taken and not
        trained; call ``fill`` after it.

        Raises:
            RunError: a sampler, the mix or a filter failed, now or before.
        """
        async with self._stillness.still():
            samplers, mix = await self._parts.states()
            self.ledger.flush()
            state = RolloutLoopState(
                started=self._starts.started,
                groups=self._open.states(),
                slots=self._pacer.state(),
                ledger=self.ledger.state(),
                stall=self._stall.state(),
                dropped_groups=self._next_step.dropped_groups,
                filter_matches=dict(self._next_step.filter_matches),
                filter_tokens=dict(self._next_step.filter_tokens),
                samplers=samplers,
                mix=mix,
                replay=[] if self._replay is None else self._replay.state(),
            )
            stored = [] if self._replay is None else self._replay.groups()
            return state, [*self._open.finished(), *stored], at_once()

    async def restore(self, state: RolloutLoopState, finished: Mapping[str, RolloutGroup], version: int) -> None:
        """Continue from a checkpoint of ``version``, which the generators hold: run again what had not finished.

        Raises:
            RunError: a sampler, the mix or a dataset failed, or the checkpoint is of other ones.
        """
        await self._parts.restore(state.samplers, state.mix)
        examples = await self._parts.examples_of(state.groups)
        self._starts.started = state.started
        matches, tokens = Counter(state.filter_matches), Counter(state.filter_tokens)
        self._next_step = StepGroups(dropped_groups=state.dropped_groups, filter_matches=matches, filter_tokens=tokens)
        self._stall.restore(state.stall)
        if self._replay is not None:
            self._replay.restore(state.replay, finished)
        self.ledger.restore(state.ledger)
        lost = self._open.restore(state.groups, finished, self._tasks, examples)
        lost += self._pacer.restore([slot for slot in state.slots if slot.group_id not in lost], version)
        for group_id in lost:
            logger.warning("group %s of the checkpoint can't be run again, or is too old now", group_id)
            self._open.leave(group_id, "lost")
        self._open.check()
        for group_id in self._open:
            if self._open[group_id].group is None:
                self._running.start(self._run_group(group_id), group_id)

    async def _run_group(self, group_id: str, *others: str) -> None:
        """``others`` have the same example, and start when it is known."""
        entry = self._open[group_id]
        try:
            task = entry.task
            if entry.example is None:
                async with self._stillness.change():
                    entry.example = await self._parts.next_example(task)
                    for other in others:
                        self._open[other].example = entry.example
            for other in others:
                self._running.start(self._run_group(other), other)
            late = self._late_credit.applies(task)
            group = await self._runner.run(task, entry.example, group_id=group_id, credit=not late)
            check_whole(group, entry.rollout_ids, task)
            refuse_future_versions(group, self._policy.version)
            filtered = None
            if late:
                group, filtered = await self._late_credit.give(task, group)
            if self._rollouts_failing:  # what their envs and rewards did not cause says nothing about them
                return
            async with self._stillness.change():
                entry.settling = True
                await self._parts.observe(group, task)
                await self._settle(group, entry, filtered)
                entry.settling = False
        except asyncio.CancelledError:
            raise
        except NothingLeftToLearn as end:
            logger.info("%s", end)
            self._end(end)
        except BaseException as error:  # failures of envs, rewards and algorithms end in statuses, and don't come here
            if self._failure is None:
                logger.exception("group %s", group_id)
            # A SystemExit would stop the event loop.
            self._end(error if isinstance(error, Exception) else RunError(f"group {group_id}: {cause_of(error)}"))
        self._changed.set()

    async def _settle(self, group: RolloutGroup, entry: OpenGroup, filtered: FilterResult | None) -> None:
        """Keep the rollouts of a scored group that may be trained on; end the others in their columns.

        Args:
            filtered: what the filters before the batch said of it already.
        """
        entry.group = group
        self._stall.arrived(group)
        for rollout in group.rollouts:
            if rollout.reward is None:
                self._open.end(entry, rollout.rollout_id, f"failed/{rollout.status.value}", rollout.error)
        if group.failure is not None:
            for rollout in group.scored:
                self._open.end(entry, rollout.rollout_id, "failed/group_too_small", group.failure)
        else:
            entry.signal = has_signal(group)
            self._stall.scored(group, signal=entry.signal)
            self._end_filtered(filtered or await self._parts.filter(self._pre_batch, group), entry)
            for rollout in entry.kept().rollouts:
                if self._batcher.oversized(rollout.samples):
                    self._open.end(entry, rollout.rollout_id, "oversized", "longer than batcher.row_length")
        if entry.rollout_ids:
            self._pacer.finish(group.group_id)
            self._stall.kept()
            self._starts.kept(group.group_id)
        else:
            self._pacer.drop(group.group_id)
            self._starts.dropped(group.group_id, entry.task)
            self._drop(group.group_id)
            self.fill()

    async def _filtered_again(self, group_id: str) -> RolloutGroup:
        """The group without the rollouts that post-batch filters drop."""
        entry = self._open[group_id]
        self._end_filtered(await self._parts.filter(self._post_batch, entry.kept()), entry)
        return entry.kept()

    def _end_filtered(self, filtered: FilterResult, entry: OpenGroup) -> None:
        self._next_step.filter_matches.update(filtered.matched)
        self._next_step.filter_tokens.update(filtered.tokens)
        for rollout, name in filtered.dropped:
            self._open.end(entry, rollout.rollout_id, f"filtered/{name}")

    def _drop(self, group_id: str, *, taken: bool = False, counted: bool = True) -> None:
        """Close a group of which nothing is left to train on. ``counted``: towards a stall of the run."""
        entry = self._open.leave(group_id)
        self._next_step.dropped_groups += 1
        if counted and entry.group is not None:
            self._stall.dropped(list(entry.outcomes.values()), entry.group, signal=entry.signal, taken=taken)
