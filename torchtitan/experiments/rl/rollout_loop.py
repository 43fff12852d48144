"""Keeps every free slot busy with a group, and hands finished groups to the trainer by deadline.

Consumes data samples and the policy; produces scored `RolloutGroup`s; waits for a free slot before it starts one, and for
nothing else. The pacer says who may start and what a batch takes, the ledger where every rollout ended.
"""

import asyncio
import logging
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

from torchtitan.experiments.rl.batching.batcher import Batcher
from torchtitan.experiments.rl.data.task_mix import TaskMix
from torchtitan.experiments.rl.errors import RunError
from torchtitan.experiments.rl.ledger import Ledger
from torchtitan.experiments.rl.pacing import Pacer
from torchtitan.experiments.rl.rollouts.filters import Filter, apply_filters
from torchtitan.experiments.rl.rollouts.policy import PolicyClient
from torchtitan.experiments.rl.rollouts.types import Rollout, RolloutGroup
from torchtitan.experiments.rl.tasks.task import Task

logger = logging.getLogger(__name__)


class RunStopped(Exception):
    """The run was asked to stop while the trainer waited for groups."""


@dataclass(kw_only=True, slots=True)
class _OpenGroup:
    task: Task
    rollouts: int
    """Rollouts of the group that are in no ledger column yet."""
    work: asyncio.Task | None = None
    group: RolloutGroup | None = None
    """Set when it is finished: only rollouts that will be trained on are left in it."""


@dataclass(kw_only=True, slots=True)
class Batch:
    groups: list[RolloutGroup]
    dropped_groups: int
    """Groups that left untrained since the last batch."""
    filter_matches: Counter[str] = field(default_factory=Counter)
    """Rollouts matched since the last batch, by filter, monitors included."""


class RolloutLoop:
    def __init__(
        self,
        *,
        tasks: dict[str, Task],
        mix: TaskMix,
        policy: PolicyClient,
        pacer: Pacer,
        batcher: Batcher,
        filters: Sequence[Filter],
        seed: int,
        total_groups: int,
        max_drops_in_a_row: int,
    ):
        """
        Args:
            total_groups: groups the run will train on; no more are started than may still be needed.
            max_drops_in_a_row: dropped groups without one kept between them after which the run is given up.
        """
        self.ledger = Ledger()
        self._tasks, self._mix, self._policy = tasks, mix, policy
        self._pacer, self._batcher, self._filters = pacer, batcher, filters
        self._seed = seed
        self._groups_left = total_groups
        self._max_drops_in_a_row = max_drops_in_a_row
        self._open: dict[str, _OpenGroup] = {}
        self._started = 0
        self._drops_in_a_row: Counter[str] = Counter()
        self._batch_drops = 0
        self._filter_matches: Counter[str] = Counter()
        self._changed = asyncio.Event()
        self._failure: Exception | None = None
        self._stopping = False

    def fill(self) -> None:
        """Start a group in every free slot."""
        while self._pacer.free_slots and self._pacer.untrained < self._groups_left and not self._stopping:
            task = self._tasks[self._mix.next()]
            group_id = f"{task.name}-{self._started}"
            self._started += 1
            self._pacer.admit(group_id, self._policy.version, frozen=task.frozen_source is not None)
            self.ledger.dispatch(task.name, task.config.group_size)
            entry = self._open[group_id] = _OpenGroup(task=task, rollouts=task.config.group_size)
            entry.work = asyncio.create_task(self._run_group(group_id, entry), name=group_id)

    async def next_batch(self, version: int) -> Batch:
        """Groups for the step that trains ``version``; waits only while the pacer says so.

        Raises:
            RunStopped: ``stop`` was called.
            RunError: a group's work failed in our own code, or nothing that was generated could be kept.
        """
        while True:
            if self._failure is not None:
                raise self._failure
            if self._stopping:
                raise RunStopped
            self._changed.clear()
            taken = self._pacer.take_batch(version)
            if taken is not None:
                break
            await self._changed.wait()
        self._groups_left -= len(taken)
        groups = [self._open[group_id].group for group_id in taken]
        batch = Batch(groups=groups, dropped_groups=self._batch_drops, filter_matches=self._filter_matches)
        self._batch_drops, self._filter_matches = 0, Counter()
        return batch

    def trained(self, batch: Batch) -> None:
        """The optimizer step on ``batch`` was taken; its rollouts are in their last column."""
        for group in batch.groups:
            entry = self._open.pop(group.group_id)
            self.ledger.end(group.task_name, "trained", entry.rollouts)
        self.ledger.check(self._open_rollouts())

    def live(self, version: int) -> None:
        """The generators hold ``version``: slots are free, and filled again."""
        self._pacer.live(version)
        self.fill()

    def fail(self, error: Exception) -> None:
        """Something the rollouts depend on is gone: the trainer must not wait for them."""
        self._failure = self._failure or error
        self._changed.set()

    def stop(self) -> None:
        """Start nothing more, and wake a trainer that waits."""
        self._stopping = True
        self._changed.set()

    async def close(self) -> None:
        """Cancel what runs; what is left was dispatched and not trained on."""
        self.stop()
        work = [entry.work for entry in self._open.values() if not entry.work.done()]
        for task in work:
            task.cancel()
        await asyncio.gather(*work, return_exceptions=True)
        for entry in self._open.values():
            self.ledger.end(entry.task.name, "untrained", entry.rollouts)
        self._open.clear()
        self.ledger.check({})

    def _open_rollouts(self) -> dict[str, int]:
        counts: Counter[str] = Counter()
        for entry in self._open.values():
            counts[entry.task.name] += entry.rollouts
        return counts

    async def _run_group(self, group_id: str, entry: _OpenGroup) -> None:
        try:
            task = entry.task
            group = await task.run_group(task.sampler.next(), self._policy, group_id=group_id, seed=self._seed)
            problem = await task.score_group(group)
            task.sampler.observe(group)
            self._settle(group, entry, problem)
        except asyncio.CancelledError:
            raise
        except Exception as error:  # our own code or a filter's: user envs, rewards and algorithms end in statuses
            logger.exception("group %s", group_id)
            self.fail(error)
        self._changed.set()

    def _settle(self, group: RolloutGroup, entry: _OpenGroup, problem: str | None) -> None:
        """Sort a scored group's rollouts into the ones to train on and the columns of the others."""
        for rollout in group.rollouts:
            if rollout.reward is None:
                self._end(entry, f"failed/{rollout.status.value}", f"rollout {rollout.rollout_id}: {rollout.error}")
        kept: list[Rollout] = group.scored
        if problem is not None:
            for _ in kept:
                self._end(entry, "failed/group_too_small", f"group {group.group_id}: {problem}")
            kept = []
        else:
            filtered = apply_filters(self._filters, group)
            self._filter_matches.update(filtered.matched)
            for _, name in filtered.dropped:
                self._end(entry, f"filtered/{name}", None)
            kept = []
            for rollout in filtered.kept:
                if self._batcher.oversized(rollout.samples):
                    self._end(entry, "oversized", f"rollout {rollout.rollout_id} is longer than batcher.row_length")
                else:
                    kept.append(rollout)
        group.rollouts = kept
        if kept:
            entry.group = group
            self._pacer.finish(group.group_id)
            self._drops_in_a_row.clear()
        else:
            self._drop(group.group_id)

    def _end(self, entry: _OpenGroup, column: str, why: str | None) -> None:
        entry.rollouts -= 1
        self.ledger.end(entry.task.name, column)
        self._drops_in_a_row[column] += 1
        if why is not None:
            logger.info("%s: %s", column, why)

    def _drop(self, group_id: str) -> None:
        self._open.pop(group_id)
        self._pacer.drop(group_id)
        self._batch_drops += 1
        self._drops_in_a_row["groups"] += 1
        if self._drops_in_a_row["groups"] >= self._max_drops_in_a_row:
            causes = ", ".join(f"{n} {column}" for column, n in self._drops_in_a_row.most_common() if column != "groups")
            raise RunError(
                f"{self._drops_in_a_row['groups']} groups in a row gave nothing to train on (rollouts: {causes}); "
                "see logs/controller.jsonl for each cause"
            )
        self.fill()
