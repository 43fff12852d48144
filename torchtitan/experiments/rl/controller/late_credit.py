"""Credit after the filters before the batch, for algorithms that ask models: what is dropped costs no model's time.

    usual   rollout -> samples -> models -> reward -> filters
    late    rollout -> samples -> reward -> filters -> models

Late credit is given to groups of one rollout (``Task.needs_group``): such a group is kept or dropped whole.
"""

from collections.abc import Mapping

from torchtitan.experiments.rl.batching.batcher import Batcher
from torchtitan.experiments.rl.controller.group_runner import GroupRunner
from torchtitan.experiments.rl.controller.user_parts import FilterSlot, UserParts
from torchtitan.experiments.rl.rollouts.filters import FilterResult
from torchtitan.experiments.rl.rollouts.types import RolloutGroup
from torchtitan.experiments.rl.tasks.task import Task


class LateCredit:
    """Which tasks get it, and how."""

    def __init__(self, tasks: Mapping[str, Task], *, slot: FilterSlot, parts: UserParts, runner: GroupRunner, batcher: Batcher):
        filters = [entry for entry, _ in slot.filters]
        useful = any(entry.config.mode == "enforce" for entry in filters) and not any(entry.reads_credit for entry in filters)
        self._tasks = {
            name
            for name, task in tasks.items()
            if useful and not task.needs_group and task.goes_stale and task.algorithm.asks_models
        }
        self._slot, self._parts, self._runner, self._batcher = slot, parts, runner, batcher

    def applies(self, task: Task) -> bool:
        """Whether a group of ``task`` comes from the runner without credit."""
        return task.name in self._tasks

    async def give(self, task: Task, group: RolloutGroup) -> tuple[RolloutGroup, FilterResult | None]:
        """Give credit to what the filters keep.

        Returns:
            The group, and what the filters said of it; None where its rollout had failed before.

        Raises:
            RunError: a filter failed.
        """
        if not group.scored:
            return await self._runner.credit(task, group), None  # which says why the group fails
        filtered = await self._parts.filter(self._slot, group)
        if filtered.kept and not any(self._batcher.oversized(rollout.samples) for rollout in filtered.kept):
            group = await self._runner.credit(task, group)
        return group, filtered
