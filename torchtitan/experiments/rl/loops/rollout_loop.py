"""Runs rollout groups, and hands finished groups to the trainer by their deadlines.

Consumes:  the task mix's choice of a task, and examples of the task's sampler.
Produces:  scored groups, those of one step at a time (`next_groups`).
Waits for: a free place in the buffer. Places free as versions go live, and as groups are dropped.
Unblocks:  the training loop, which waits in `next_groups`.

    fill         claim ──▶ example ──▶ run, score, credit ──▶ settle
    next_groups  take ──▶ filter ──▶ the trainer

The life of a group:

1. `fill` claims its places in the buffer (`groups.py`), for the task that the task mix picks.
2. `_run_group` takes it from here to 5. The task's sampler gives an example, unless another group
   of the pick has it already.
3. The runner runs its rollouts, scores them, and gives their tokens credit. If credit is expensive,
   the pre-batch filters look at the group first, and only a group that they keep gets credit.
4. The sampler and the task mix observe it.
5. It settles: the pre-batch filters and the row length end some of its rollouts. If none is left,
   it is dropped.
6. It waits for its step. `next_groups` takes it, and the post-batch filters end some of its
   rollouts. If none is left, it is dropped.
7. `trained` closes it after the optimizer step, and `live` frees its places when the generators
   hold the version that the step made.

The buffer says which groups may start and which ones a step takes. Wherever a group leaves, its
places free exactly once, and each of its rollouts ends in one column of the ledger (`ledger.py`).
Observers of all this extend ``RunEvents`` (`events.py`). They are told of a change once all of it
is made: whatever they raise, the state that is saved then is consistent.

A task whose rollouts are not compared has groups of one rollout. When the mix picks it, it starts
``group_size`` of them, of one example, as places free up (`groups.Pick`).
"""

import asyncio
import logging
from collections import Counter
from collections.abc import Callable, Coroutine, Mapping
from dataclasses import replace
from functools import partial
from typing import Any, TypeVar

import msgspec

from torchtitan.experiments.rl.ask.ordered import OrderedCall
from torchtitan.experiments.rl.errors import RunError, cause_of
from torchtitan.experiments.rl.loops.events import NothingLeftToLearn, RunEvents
from torchtitan.experiments.rl.loops.group_runner import GroupRequest
from torchtitan.experiments.rl.loops.groups import (
    ClaimedGroup,
    Ending,
    GroupBuffer,
    Pick,
    SettledGroup,
    StepGroups,
    groups_per_pick,
    has_signal,
)
from torchtitan.experiments.rl.loops.ledger import Ledger
from torchtitan.experiments.rl.loops.parts import Parts
from torchtitan.experiments.rl.loops.saved_groups import SavedExamples
from torchtitan.experiments.rl.loops.saved_state import PickState, RolloutLoopState
from torchtitan.experiments.rl.loops.selection import (
    check_whole,
    refuse_future_versions,
)
from torchtitan.experiments.rl.process.logs import ENDS_THE_RUN
from torchtitan.experiments.rl.process.shared_lock import SharedLock
from torchtitan.experiments.rl.rollouts.filters import FilterResult
from torchtitan.experiments.rl.rollouts.types import DataSample, Rollout, RolloutGroup

logger = logging.getLogger(__name__)

CANCEL_S = 60.0
"""Seconds that cancelled groups get to close their envs before they are abandoned."""
Captured = TypeVar("Captured")


class RunStopped(Exception):
    """Raised to the training loop if the run was stopped while the loop waited for groups."""


class RolloutLoop:
    """The coroutines that run groups, and the groups of the next step."""

    def __init__(self, parts: Parts, *, buffer: GroupBuffer, watchers: RunEvents):
        """Make a loop without groups. `fill` starts them."""
        self._tasks = parts.selection.tasks
        self._selection = parts.selection
        self._runner = parts.runner
        self._policy = parts.policy
        self._batcher = parts.batcher
        self._replay = parts.replay
        self._buffer = buffer
        self._watchers = watchers
        self._running: set[asyncio.Task[None]] = set()
        self._picking = False
        """True while the task mix picks a task in a thread. `fill` starts nothing until it has."""
        self._pick: Pick | None = None
        """The task whose groups start next; None if the task mix is to pick one."""
        self._next_step = StepGroups()
        """Counts since the last step, for the step that is taken next."""
        self._changed = asyncio.Event()
        """Wakes `next_groups`: a group has settled, or the run ends."""
        self._failure: Exception | None = None
        self._half_settled: str | None = None
        """Id and failure of a group that sampler or task mix may have observed, and that could not
        settle because one of them or a filter failed. A resumed run would have it observed
        twice."""
        self._cause_outside: Exception | None = None
        """Error of something that rollouts depend on, and that has failed; None if none has."""
        self._stopping = False
        self._closed = False
        """True once all rollouts have ended. A group that ignored its cancellation may go on."""
        self._snapshots = SharedLock()

    @property
    def ledger(self) -> Ledger:
        return self._buffer.ledger

    # Called by the training loop.

    def fill(self) -> None:
        """Start groups as long as places are free and the coming steps need more rollouts.

        Starts none while a snapshot is pending; the caller of `capture` calls this again.
        """
        while self._may_start:
            if self._pick is None:
                self._pick_task()
            else:
                self._start_group(self._pick)

    async def next_groups(self, base_version: int) -> StepGroups:
        """Return the groups of the step that starts from ``base_version``, once they have finished.

        Raises:
            RunStopped: `stop` was called.
            NothingLeftToLearn: every task is mastered.
            RunError: a sampler, the task mix, a filter or an observer failed, or a part of the run
                that rollouts depend on did.
        """
        while True:
            taken = await self._take(base_version)
            sampled = [group.remaining() for group in taken]
            # All of them before a rollout ends: if a filter fails, a resumed run takes and filters
            # all groups of the step again.
            filtered = [await self._selection.filter("post", group) for group in sampled]
            for group, result in zip(taken, filtered, strict=True):
                self._count_matches(result)
                self._buffer.end(group, _filter_endings(result))
            emptied = self._buffer.drop_emptied(taken)
            self._next_step.dropped_groups += len(emptied)
            if len(emptied) < len(taken):
                return self._make_step(taken, sampled, base_version)
            for group in emptied:
                self._tell_dropped(group, taken=True)
            self.fill()

    def trained(self, step: StepGroups) -> None:
        """End the rollouts of these groups as trained: their optimizer step was taken."""
        self._buffer.trained(group.group_id for group in step.groups)
        for group in step.replayed:
            self.ledger.replay(group.task_name, len(group.rollouts))
        if self._replay is not None:
            self._replay.count(step.replayed)
            self._replay.add(step.groups)
        self._buffer.check()

    def live(self, version: int, *, fill: bool = True) -> None:
        """Free the places of the groups that ``version`` was made from: the generators hold it.

        Args:
            fill: True to start groups in these places at once; else they stay free until `fill`.
        """
        self._buffer.live(version)
        if fill:
            self.fill()

    def fail(self, error: Exception) -> None:
        """Have `next_groups` raise ``error``, because something that rollouts depend on has failed.

        Called when a client of the generators, a weight update or an evaluation fails. Groups that
        end after this do not settle, and their rollouts end as untrained: if they fail, their envs
        and rewards need not have caused it.
        """
        if self._cause_outside is None:
            self._cause_outside = error
        self._end_run(error)

    def raise_failure(self) -> None:
        """Raise the error that `fail` was given, if any: no call of `next_groups` follows."""
        if self._cause_outside is not None:
            raise self._cause_outside

    def stop(self) -> None:
        """Start no more groups, and have `next_groups` raise RunStopped."""
        self._stopping = True
        self._changed.set()

    async def close(self) -> None:
        """Cancel running groups, and end the rollouts that are still open as untrained.

        Raises:
            RunError: the ledger does not balance. Everything is closed all the same.
        """
        self.stop()
        running = list(self._running)
        try:
            for task in running:
                task.cancel()
            if running:
                _, late = await asyncio.wait(running, timeout=CANCEL_S)
                if late:
                    logger.warning(
                        "%d groups ignored their cancellation and were abandoned", len(late)
                    )
        finally:  # also if this call is cancelled while it waits
            self._closed = True
            self._buffer.close()

    async def _take(self, base_version: int) -> list[SettledGroup]:
        """Wait until the step may take its groups, and return them."""
        while True:
            if self._failure is not None:
                raise self._failure
            if self._stopping:
                raise RunStopped
            self._changed.clear()
            taken = self._buffer.take(base_version)
            if taken is not None:
                return taken
            await self._changed.wait()

    def _make_step(
        self, taken: list[SettledGroup], sampled: list[RolloutGroup], base_version: int
    ) -> StepGroups:
        """Return what the step trains on.

        Args:
            taken: groups after the post-batch filters.
            sampled: the same groups before them.
        """
        step = self._next_step
        self._next_step = StepGroups()
        step.groups = [group.remaining() for group in taken if group.rollout_ids]
        step.sampled = sampled
        if self._replay is not None:
            step.replayed = self._replay.draw(base_version)
        self._watchers.groups_taken()
        return step

    # Starting groups.

    @property
    def _may_start(self) -> bool:
        """True if a group may start now, and some step needs it."""
        return (
            not self._stopping
            and self._failure is None
            and not self._picking
            and not self._snapshots.is_excluding
            and self._buffer.has_place
        )

    def _pick_task(self) -> None:
        """Have the task mix pick the task whose groups start next, now or when it has answered."""
        try:
            call = self._selection.pick_task()
            if call.answered:
                self._begin_pick(call.value_now())
                return
        except RunError as error:
            self._end_run(error)
            return
        self._picking = True
        self._snapshots.begin_shared()
        self._start_coroutine(self._pick_task_later(call), "task mix")

    async def _pick_task_later(self, call: OrderedCall[str]) -> None:
        """Wait for the task mix's answer, and go on with `fill`."""
        try:
            self._begin_pick(await call.value())
        except RunError as error:
            self._end_run(error)
            return
        finally:
            self._picking = False
            self._snapshots.end_shared()
        self.fill()

    def _begin_pick(self, answer: object) -> None:
        """Have the groups of the task that the task mix has named start next.

        Raises:
            RunError: the answer is not the name of a task.
        """
        task = self._tasks[self._selection.checked_pick(answer)]
        self._pick = Pick(task=task, groups_left=groups_per_pick(task))

    def _start_group(self, pick: Pick) -> None:
        """Start the next group of a pick."""
        claimed = self._buffer.claim(pick)
        assert claimed is not None, "the buffer has a place"
        self._start_coroutine(self._run_group(claimed), claimed.group_id)
        if not pick.groups_left:
            self._pick = None

    def _start_coroutine(self, coroutine: Coroutine[Any, Any, None], name: str) -> None:
        task = asyncio.create_task(coroutine, name=name)
        self._running.add(task)
        task.add_done_callback(self._coroutine_ended)

    def _coroutine_ended(self, task: "asyncio.Task[None]") -> None:
        self._running.discard(task)
        if self._stopping:
            return
        # A coroutine handles the failures that it expects. Any other end but a normal one would
        # leave `next_groups` waiting for ever.
        if task.cancelled():
            self._end_run(RunError(f"{task.get_name()} was cancelled, and not by the run"))
        elif (error := task.exception()) is not None:
            self._end_run(error if isinstance(error, Exception) else RunError(cause_of(error)))

    # Running a group.

    async def _run_group(self, claimed: ClaimedGroup) -> None:
        """Run a group until it has settled. A failure that is not a rollout's ends the run."""
        group_id = claimed.group_id
        try:
            await self._run_until_settled(claimed)
        except asyncio.CancelledError:
            raise
        except NothingLeftToLearn as end:
            logger.info("%s", end)
            self._end_run(end)
        # Failures of envs, rewards and algorithms are statuses of rollouts, and not raised. All
        # others end the run. A SystemExit is caught too: it would stop the event loop.
        except BaseException as error:  # noqa: BLE001
            if self._closed:
                return
            if self._failure is None and not self._stopping:
                logger.exception("group %s", group_id, extra=ENDS_THE_RUN)
            else:
                logger.warning("group %s failed as the run ended", group_id, exc_info=True)
            if not isinstance(error, Exception):
                error = RunError(f"group {group_id}: {cause_of(error)}")
            self._end_run(error)
        self._changed.set()

    async def _run_until_settled(self, claimed: ClaimedGroup) -> None:
        """Get the group's example, run and score its rollouts, and settle it."""
        example = await self._example_of(claimed)
        group, filtered = await self._run_rollouts(claimed, example)
        if self._closed or self._cause_outside is not None:
            # The run ends, and these rollouts say nothing about their envs and rewards.
            return
        async with self._snapshots.shared():
            settled = await self._settle(claimed, group, filtered)
            self._tell_settled(settled)
            self.fill()

    async def _example_of(self, claimed: ClaimedGroup) -> DataSample:
        """Return the group's example. The first group of a pick asks the sampler for it."""
        example = claimed.example.value
        if example is None:
            async with self._snapshots.shared():
                example = await claimed.example.get(
                    partial(self._selection.next_example, claimed.task)
                )
        return example

    async def _run_rollouts(
        self, claimed: ClaimedGroup, example: DataSample
    ) -> tuple[RolloutGroup, FilterResult | None]:
        """Run the rollouts of a group, score them, and give their tokens credit.

        Credit is expensive where an algorithm asks models for it. Such a group has one rollout, is
        filtered first, and gets its credit only if it is trained on.

        Returns:
            The group, and the result of the pre-batch filters if they have looked at it already.
        """
        task = claimed.task
        credit_is_late = self._selection.credit_is_late(task)
        request = GroupRequest(
            data_sample=example,
            group_id=claimed.group_id,
            group_size=None if task.needs_group else 1,
            credit=not credit_is_late,
        )
        group = await self._runner.run(task, request)
        check_whole(group, claimed.rollout_ids, task)
        refuse_future_versions(group, self._policy.version)
        if not credit_is_late:
            return group, None

        filtered = await self._selection.filter("pre", group) if group.scored else None
        is_trainable = filtered is None or (
            filtered.kept and not any(self._is_oversized(rollout) for rollout in filtered.kept)
        )
        if is_trainable:
            # A group without a reward comes here too: the runner then sets its `failure`.
            request = replace(request, credit=True, uncredited=group)
            group = await self._runner.run(task, request)
        return group, filtered

    # Settling a group.

    async def _settle(
        self, claimed: ClaimedGroup, group: RolloutGroup, filtered: FilterResult | None
    ) -> SettledGroup:
        """Have sampler and task mix observe a group, and settle it.

        Args:
            filtered: result of the pre-batch filters, if they have looked at the group already.
        """
        try:
            await self._selection.observe(group, claimed.task)
            if filtered is None and group.failure is None:
                filtered = await self._selection.filter("pre", group)
            endings = self._endings_of(group, filtered)
            signal = group.failure is None and has_signal(group)
            settled = self._buffer.settle(claimed, group, endings, signal=signal)
        except BaseException as error:
            self._half_settled = f"{claimed.group_id} failed while it settled ({cause_of(error)})"
            raise
        if group.failure is None and filtered is not None:
            self._count_matches(filtered)
        if not settled.rollout_ids:
            self._next_step.dropped_groups += 1
        return settled

    def _endings_of(self, group: RolloutGroup, filtered: FilterResult | None) -> dict[str, Ending]:
        """Return the ends of the rollouts that no step may train on, by their id.

        Args:
            filtered: result of the pre-batch filters. None if the group failed before they saw it;
                it may also have failed after that, when its algorithm gave credit late.
        """
        endings = {
            rollout.rollout_id: Ending(f"failed/{rollout.status.value}", rollout.error)
            for rollout in group.rollouts
            if rollout.reward is None
        }
        if group.failure is not None or filtered is None:
            too_small = Ending("failed/group_too_small", group.failure)
            return endings | {rollout.rollout_id: too_small for rollout in group.scored}
        endings |= _filter_endings(filtered)
        for rollout in group.rollouts:
            if rollout.rollout_id not in endings and self._is_oversized(rollout):
                endings[rollout.rollout_id] = Ending("oversized", "longer than batcher.row_length")
        return endings

    def _is_oversized(self, rollout: Rollout) -> bool:
        return self._batcher.oversized(rollout.samples)

    def _count_matches(self, filtered: FilterResult) -> None:
        """Count the matches of filters for the next step."""
        self._next_step.filter_matches.update(filtered.matched)
        self._next_step.filter_tokens.update(filtered.tokens)

    def _tell_settled(self, settled: SettledGroup) -> None:
        """Tell the observers of a group that has settled."""
        group = settled.group
        self._watchers.group_arrived(group)
        if group.failure is None:
            self._watchers.group_scored(group, signal=settled.signal)
        if settled.rollout_ids:
            self._watchers.group_kept()
        else:
            self._tell_dropped(settled, taken=False)

    def _tell_dropped(self, dropped: SettledGroup, *, taken: bool) -> None:
        columns = list(dropped.outcomes.values())
        self._watchers.group_dropped(columns, dropped.group, signal=dropped.signal, taken=taken)

    def _end_run(self, error: Exception) -> None:
        """Have `next_groups` raise the error, unless an earlier one ends the run already."""
        if self._failure is None:
            self._failure = error
        self._changed.set()

    # Checkpointing: capture and restore the loop's state.

    async def capture(
        self, at_once: Callable[[], Captured]
    ) -> tuple[RolloutLoopState, list[RolloutGroup], Captured]:
        """Capture what a resumed run continues from. Call `fill` after it.

        Groups go on running meanwhile, but none starts or settles. If a step has taken groups and
        failed, a resumed run has them to take again.

        Args:
            at_once: called within the snapshot, to capture what else belongs to this moment.

        Returns:
            The loop's state, the groups that have settled or are stored for replay, and what
            ``at_once`` returned.

        Raises:
            RunError: a sampler or the task mix can't give its state, or a group has failed while it
                settled.
        """
        async with self._snapshots.exclusive():
            if self._half_settled is not None:
                raise RunError(f"group {self._half_settled}: the state of the run can't be saved")
            samplers, mix = await self._selection.states()
            state = RolloutLoopState(
                **msgspec.structs.asdict(self._buffer.state()),
                pick=None if self._pick is None else self._pick.state(),
                dropped_groups=self._next_step.dropped_groups,
                filter_matches=dict(self._next_step.filter_matches),
                filter_tokens=dict(self._next_step.filter_tokens),
                samplers=samplers,
                mix=mix,
                replay=[] if self._replay is None else self._replay.state(),
            )
            stored = [] if self._replay is None else self._replay.groups()
            return state, [*self._buffer.settled_groups(), *stored], at_once()

    async def restore(
        self, state: RolloutLoopState, saved: Mapping[str, RolloutGroup], version: int
    ) -> None:
        """Continue from a checkpoint, and run groups that had not settled again.

        Call `fill` after it.

        Args:
            saved: the checkpoint's groups with rollouts, by id.
            version: the checkpoint's version, which the generators hold.

        Raises:
            RunError: a sampler, the task mix or a dataset failed, or differs from the checkpoint's.
        """
        await self._selection.restore(state.samplers, state.mix)
        saved_examples = SavedExamples(
            await self._selection.examples_of(
                state.groups if state.pick is None else [*state.groups, state.pick]
            )
        )
        if state.pick is not None:
            self._restore_pick(state.pick, saved_examples)
        self._next_step = StepGroups(
            dropped_groups=state.dropped_groups,
            filter_matches=Counter(state.filter_matches),
            filter_tokens=Counter(state.filter_tokens),
        )
        if self._replay is not None:
            self._replay.restore(state.replay, saved)
        examples = {
            group.group_id: saved_examples.restore(group, copy_is_enough=group.settled)
            for group in state.groups
        }
        unsettled = self._buffer.restore(
            state, version, tasks=self._tasks, saved=saved, examples=examples
        )
        for claimed in unsettled:
            self._start_coroutine(self._run_group(claimed), claimed.group_id)

    def _restore_pick(self, state: PickState, examples: SavedExamples) -> None:
        """Continue a pick of a checkpoint, unless its example can't be recovered."""
        example = examples.restore(state, copy_is_enough=False)
        if state.example is not None and example.value is None:
            logger.warning(
                "%d groups of task %s of the checkpoint can't be started: their example is gone",
                state.groups_left,
                state.task,
            )
            return
        self._pick = Pick(
            task=self._tasks[state.task],
            groups_left=state.groups_left,
            example=example,
        )


def _filter_endings(filtered: FilterResult) -> dict[str, Ending]:
    """Return the ends of the rollouts that filters dropped, by their id."""
    return {rollout.rollout_id: Ending(f"filtered/{name}") for rollout, name in filtered.dropped}
