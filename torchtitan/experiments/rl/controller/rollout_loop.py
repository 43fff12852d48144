"""The heart of a run: starts a group in every free slot, and gives finished groups to the trainer by deadline.

    mix.next ─▶ task ─▶ sampler.next ─▶ example ─▶ GroupRunner.run ─▶ scored group
       ▲                     ▲                                            │
       │                     └──────────────── observe ◀──────────────────┤
    a free slot (Pacer)                                                   ▼
       ▲                                    nothing left ◀── pre-batch filters, row length
       ├─────────────── drop ◀───────────────────┘                        │
       │                                                                  ▼
       │                                              waits for its step, earliest deadline first
       │                                                                  │
       │                                    nothing left ◀── post-batch filters
       ├─────────────── drop ◀───────────────────┘                        │ next_groups
       │                                                                  ▼
       └── live ◀── generators hold the weights ◀── WeightSync ◀── the trainer's step (TrainingLoop)

A group goes this way in one coroutine, from its dispatch to its end (``_run_group``), and then waits for its step. The pacer
(`pacing.py`) decides which groups may start and which a step takes. Wherever a group leaves, its slot frees exactly once, and
each of its rollouts ends in one column of the ledger (`ledger.py`). Who watches all this extends ``RunEvents`` (`events.py`).

A group whose rollouts are compared has a slot of its own. Rollouts that are not compared are groups of their own; those of one
example share a slot. One that is dropped is replaced by one of its task as soon as another of the slot is kept, so that slots
stay whole. A slot of which all are dropped is free for any task, as a dropped group's is.
"""

import asyncio
import logging
from collections import Counter
from collections.abc import AsyncIterator, Callable, Coroutine, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any, TypeVar

from torchtitan.experiments.rl.batching.batcher import Batcher
from torchtitan.experiments.rl.controller.events import NothingLeftToLearn, RunEvents
from torchtitan.experiments.rl.controller.group_runner import GroupRequest, GroupRunner
from torchtitan.experiments.rl.controller.groups import (
    OpenGroup,
    OpenGroups,
    Slot,
    StepGroups,
    groups_in_slot,
    has_signal,
)
from torchtitan.experiments.rl.controller.ledger import Ledger
from torchtitan.experiments.rl.controller.pacing import Pacer
from torchtitan.experiments.rl.controller.saved_state import RolloutLoopState
from torchtitan.experiments.rl.controller.selection import (
    Selection,
    check_whole,
    refuse_future_versions,
)
from torchtitan.experiments.rl.errors import RunError
from torchtitan.experiments.rl.rollouts.filters import FilterResult
from torchtitan.experiments.rl.rollouts.group_replay import GroupReplay
from torchtitan.experiments.rl.rollouts.policy import PolicyClient
from torchtitan.experiments.rl.rollouts.recorder import RolloutRecorder
from torchtitan.experiments.rl.rollouts.types import Rollout, RolloutGroup
from torchtitan.experiments.rl.tasks.task import Task
from torchtitan.experiments.rl.user_code.calls import Call, cause_of

logger = logging.getLogger(__name__)

CANCEL_S = 60.0
"""How long cancelled groups may take to close their envs before they are abandoned."""
Captured = TypeVar("Captured")


class RunStopped(Exception):
    """``stop`` was called while the trainer waited for groups."""


class Stillness:
    """Any number of changes at a time, or one reader. It waits for changes that have begun; later ones wait for it."""

    def __init__(self) -> None:
        self.wanted = False
        """A reader waits or reads."""
        self._changes = 0
        self._moved = asyncio.Event()

    def begin(self) -> None:
        """A change begins now; ``end`` it."""
        self._changes += 1

    def end(self) -> None:
        self._changes -= 1
        self._moved.set()

    @asynccontextmanager
    async def change(self) -> AsyncIterator[None]:
        """A change. It begins without giving way to other coroutines where nobody reads."""
        while self.wanted:
            await self._next()
        self.begin()
        try:
            yield
        finally:
            self.end()

    @asynccontextmanager
    async def still(self) -> AsyncIterator[None]:
        """No change is under way."""
        while self.wanted:
            await self._next()
        self.wanted = True
        try:
            while self._changes:
                await self._next()
            yield
        finally:
            self.wanted = False
            self._moved.set()

    async def _next(self) -> None:
        self._moved.clear()
        await self._moved.wait()


class RolloutLoop:
    def __init__(
        self,
        *,
        selection: Selection,
        runner: GroupRunner,
        policy: PolicyClient,
        pacer: Pacer,
        batcher: Batcher,
        total_groups: int,
        ledger: Ledger | None = None,
        recorder: RolloutRecorder | None = None,
        replay: GroupReplay | None = None,
        watchers: Sequence[RunEvents] = (),
    ):
        """
        Args:
            selection: tasks, task mix and filters.
            total_groups: slots of groups the run will train on; the loop starts no more than may still be needed.
            replay: the groups that steps train on again.
        """
        self._tasks, self._selection, self._runner, self._policy = (
            selection.tasks,
            selection,
            runner,
            policy,
        )
        self._pacer, self._batcher, self._replay, self._watchers = pacer, batcher, replay, watchers
        self._groups_left = total_groups
        self._open = OpenGroups(ledger or Ledger(), recorder, lambda: policy.version)
        self._started = 0
        """Groups since the run began: the number of the next."""
        self._running: set[asyncio.Task[None]] = set()
        self._picking = False
        """The task mix has not answered yet; ``fill`` goes on when it has."""
        self._to_replace: list[OpenGroup] = []
        """Groups that were dropped from a slot of which others were kept."""
        self._next_step = StepGroups()
        """What there is to tell of the next step: groups dropped, rollouts matched."""
        self._changed = asyncio.Event()
        self._failure: Exception | None = None
        self._rollouts_failing = False
        self._stopping = False
        self._stillness = Stillness()

    @property
    def ledger(self) -> Ledger:
        return self._open.ledger

    # What the training loop calls.

    def fill(self) -> None:
        """Start groups in the place of dropped ones, and in free slots."""
        while self._wants_groups and not (self._picking or self._stillness.wanted):
            if self._to_replace:
                dropped = self._to_replace.pop(0)
                self._start(dropped.task, dropped.slot, 1)
                continue
            if not self._pacer.has_slot:
                return
            pick = self._selection.pick_task()
            if not pick.answered:
                self._picking = True
                self._stillness.begin()
                self._run_beside(self._fill_later(pick), "task mix")
                return
            try:
                self._start_slot(self._selection.picked(pick.value_now()))
            except RunError as error:
                self._end(error)

    async def next_groups(self, version: int) -> StepGroups:
        """The groups for the step that trains ``version``. Waits while the pacer finds none that may be taken.

        Raises:
            RunStopped: ``stop`` was called.
            NothingLeftToLearn: every task is mastered.
            RunError: code that is no rollout's failed, or a watcher ends the run.
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
            groups = []
            for group_id in taken:
                entry = self._open[group_id]
                self._end_filtered(await self._selection.filter("post", entry.kept()), entry)
                groups.append(entry.kept())
            if any(group.rollouts for group in groups):
                break
            for group_id in taken:
                self._pacer.drop(group_id)
                self._drop(group_id, taken=True)
            self.fill()
        for watcher in self._watchers:
            watcher.groups_taken()
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
            running = list(self._running)
            for task in running:
                task.cancel()
            if running:
                _, late = await asyncio.wait(running, timeout=CANCEL_S)
                if late:
                    logger.warning(
                        "%d groups ignored their cancellation and were abandoned", len(late)
                    )
            for group_id in list(self._open):
                self._open.leave(group_id, "untrained")
            self._open.check()
        finally:
            self.ledger.close()

    # The way of a group.

    def _start_slot(self, name: str) -> None:
        task, slot = self._tasks[name], Slot()
        groups = groups_in_slot(task)
        for of_one_example in [groups] if task.repeats_example else [1] * groups:
            self._start(task, slot, of_one_example)

    def _start(self, task: Task, slot: Slot, groups: int) -> None:
        """Start this many groups of one example in a slot."""
        group_ids = [f"{task.name}-{self._started + number}" for number in range(groups)]
        self._started += groups
        for group_id in group_ids:
            self._pacer.admit(
                group_id,
                self._policy.version,
                frozen=not task.goes_stale,
                parts=groups_in_slot(task),
            )
            self._open.dispatch(task, group_id, slot)
        self._run_beside(self._run_group(*group_ids), group_ids[0])

    async def _run_group(self, group_id: str, *others: str) -> None:
        """``others`` have the same example, and start when it is known."""
        entry = self._open[group_id]
        try:
            task = entry.task
            if entry.example is None:
                async with self._stillness.change():
                    entry.example = await self._selection.next_example(task)
                    for other in others:
                        self._open[other].example = entry.example
            for other in others:
                self._run_beside(self._run_group(other), other)
            late = self._selection.credit_is_late(task)
            size = None if task.needs_group else 1
            request = GroupRequest(
                data_sample=entry.example, group_id=group_id, group_size=size, credit=not late
            )
            group = await self._runner.run(task, request)
            check_whole(group, entry.rollout_ids, task)
            refuse_future_versions(group, self._policy.version)
            filtered = await self._selection.filter("pre", group) if late and group.scored else None
            if late and (
                filtered is None
                or (filtered.kept and not any(map(self._is_oversized, filtered.kept)))
            ):
                # Which also says why a group fails that has no reward.
                group = await self._runner.run(
                    task, replace(request, credit=True, uncredited=group)
                )
            if (
                self._rollouts_failing
            ):  # what their envs and rewards did not cause says nothing about them
                return
            async with self._stillness.change():
                entry.settling = True
                await self._selection.observe(group, task)
                await self._settle(group, entry, filtered)
                entry.settling = False
        except asyncio.CancelledError:
            raise
        except NothingLeftToLearn as end:
            logger.info("%s", end)
            self._end(end)
        except (
            BaseException
        ) as error:  # failures of envs, rewards and algorithms end in statuses, and don't come here
            if self._failure is None:
                logger.exception("group %s", group_id)
            # A SystemExit would stop the event loop.
            self._end(
                error
                if isinstance(error, Exception)
                else RunError(f"group {group_id}: {cause_of(error)}")
            )
        self._changed.set()

    async def _settle(
        self, group: RolloutGroup, entry: OpenGroup, filtered: FilterResult | None
    ) -> None:
        """Keep the rollouts of a scored group that may be trained on; end the others in their columns.

        Args:
            filtered: what the filters before the batch said of it already.
        """
        entry.group = group
        for watcher in self._watchers:
            watcher.group_arrived(group)
        for rollout in group.rollouts:
            if rollout.reward is None:
                self._open.end(
                    entry, rollout.rollout_id, f"failed/{rollout.status.value}", rollout.error
                )
        if group.failure is not None:
            for rollout in group.scored:
                self._open.end(entry, rollout.rollout_id, "failed/group_too_small", group.failure)
        else:
            entry.signal = has_signal(group)
            for watcher in self._watchers:
                watcher.group_scored(group, signal=entry.signal)
            self._end_filtered(filtered or await self._selection.filter("pre", group), entry)
            for rollout in entry.kept().rollouts:
                if self._is_oversized(rollout):
                    self._open.end(
                        entry, rollout.rollout_id, "oversized", "longer than batcher.row_length"
                    )
        slot = entry.slot
        if entry.rollout_ids:
            self._pacer.finish(group.group_id)
            for watcher in self._watchers:
                watcher.group_kept()
            slot.kept = True
        else:
            self._pacer.drop(group.group_id)
            slot.dropped += 1
            self._drop(group.group_id)
        if slot.kept:
            self._to_replace += [entry] * slot.dropped
            slot.dropped = 0
        self.fill()

    def _is_oversized(self, rollout: Rollout) -> bool:
        return self._batcher.oversized(rollout.samples)

    def _end_filtered(self, filtered: FilterResult, entry: OpenGroup) -> None:
        self._next_step.filter_matches.update(filtered.matched)
        self._next_step.filter_tokens.update(filtered.tokens)
        for rollout, name in filtered.dropped:
            self._open.end(entry, rollout.rollout_id, f"filtered/{name}")

    def _drop(self, group_id: str, *, taken: bool = False, counted: bool = True) -> None:
        """Close a group of which nothing is left to train on. ``counted``: watchers hear of it."""
        entry = self._open.leave(group_id)
        self._next_step.dropped_groups += 1
        if counted and entry.group is not None:
            for watcher in self._watchers:
                watcher.group_dropped(
                    list(entry.outcomes.values()), entry.group, signal=entry.signal, taken=taken
                )

    @property
    def _wants_groups(self) -> bool:
        return (
            self._pacer.untrained < self._groups_left
            and not self._stopping
            and self._failure is None
        )

    async def _fill_later(self, pick: Call) -> None:
        try:
            name = self._selection.picked(await pick.value())
            if self._wants_groups and self._pacer.has_slot:
                self._start_slot(name)
        except RunError as error:
            return self._end(error)
        finally:
            self._picking = False
            self._stillness.end()
        self.fill()

    def _end(self, error: Exception) -> None:
        self._failure = self._failure or error
        self._changed.set()

    def _run_beside(self, work: Coroutine[Any, Any, None], name: str) -> None:
        task = asyncio.create_task(work, name=name)
        self._running.add(task)
        task.add_done_callback(self._running.discard)

    # What a checkpoint has of it.

    async def capture(
        self, at_once: Callable[[], Captured]
    ) -> tuple[RolloutLoopState, list[RolloutGroup], Captured]:
        """What a resumed run continues from, the groups that have finished or are stored, and what ``at_once`` returns then.

        Groups go on running meanwhile; none starts, ends or is filtered. Call it between steps, when no group is taken and not
        trained; call ``fill`` after it.

        Raises:
            RunError: a sampler, the mix or a filter failed, now or before.
        """
        async with self._stillness.still():
            samplers, mix = await self._selection.states()
            self.ledger.flush()
            state = RolloutLoopState(
                started=self._started,
                groups=self._open.states(),
                slots=self._pacer.state(),
                ledger=self.ledger.state(),
                stall=None,
                dropped_groups=self._next_step.dropped_groups,
                filter_matches=dict(self._next_step.filter_matches),
                filter_tokens=dict(self._next_step.filter_tokens),
                samplers=samplers,
                mix=mix,
                replay=[] if self._replay is None else self._replay.state(),
            )
            stored = [] if self._replay is None else self._replay.groups()
            return state, [*self._open.finished(), *stored], at_once()

    async def restore(
        self, state: RolloutLoopState, finished: Mapping[str, RolloutGroup], version: int
    ) -> None:
        """Continue from a checkpoint of ``version``, which the generators hold: run again what had not finished.

        Raises:
            RunError: a sampler, the mix or a dataset failed, or the checkpoint is of other ones.
        """
        await self._selection.restore(state.samplers, state.mix)
        examples = await self._selection.examples_of(state.groups)
        self._started = state.started
        matches, tokens = Counter(state.filter_matches), Counter(state.filter_tokens)
        self._next_step = StepGroups(
            dropped_groups=state.dropped_groups, filter_matches=matches, filter_tokens=tokens
        )
        if self._replay is not None:
            self._replay.restore(state.replay, finished)
        self.ledger.restore(state.ledger)
        lost = self._open.restore(state.groups, finished, self._tasks, examples)
        lost += self._pacer.restore(
            [slot for slot in state.slots if slot.group_id not in lost], version
        )
        for group_id in lost:
            logger.warning(
                "group %s of the checkpoint can't be run again, or is too old now", group_id
            )
            self._open.leave(group_id, "lost")
        self._open.check()
        for group_id in self._open:
            if self._open[group_id].group is None:
                self._run_beside(self._run_group(group_id), group_id)
