"""Starts groups in free slots: which task is next, and how many groups share a slot.

A group whose rollouts are compared has a slot of its own. Rollouts that are not compared are groups of their own; those of one
example share a slot, and a dropped one is replaced by one of its task, so that slots stay whole.
"""

from collections.abc import Callable, Coroutine, Mapping
from typing import Any

from torchtitan.experiments.rl.controller.open_groups import OpenGroups
from torchtitan.experiments.rl.controller.pacing import Pacer
from torchtitan.experiments.rl.controller.running import Running
from torchtitan.experiments.rl.controller.stillness import Stillness
from torchtitan.experiments.rl.controller.user_parts import UserParts
from torchtitan.experiments.rl.errors import RunError
from torchtitan.experiments.rl.tasks.task import Task
from torchtitan.experiments.rl.user_code.gate import Call


class GroupStarts:
    """``fill`` whenever a slot may be free."""

    def __init__(
        self,
        *,
        tasks: Mapping[str, Task],
        parts: UserParts,
        pacer: Pacer,
        opened: OpenGroups,
        running: Running,
        stillness: Stillness,
        version: Callable[[], int],
        wanted: Callable[[], bool],
        run: Callable[..., Coroutine[Any, Any, None]],
        fail: Callable[[Exception], None],
    ):
        """
        Args:
            version: returns what the generators hold.
            wanted: returns whether the run needs more groups.
            run: runs a group by its id; the ids after the first share its example.
            fail: called with the error of the task mix.
        """
        self._tasks, self._parts, self._pacer, self._open = tasks, parts, pacer, opened
        self._running, self._stillness, self._version = running, stillness, version
        self._wanted, self._run, self._fail = wanted, run, fail
        self._picking = False
        """The task mix has not answered yet; ``fill`` goes on when it has."""
        self._replacements: list[Task] = []
        self.started = 0
        """Groups since the run began: the number of the next."""

    def fill(self) -> None:
        """Start groups in every free slot."""
        while self._replacements and self._may_start():
            self._start(self._replacements.pop(0), groups=1)
        while self._may_start() and self._pacer.has_slot:
            pick = self._parts.pick_task()
            if not pick.answered:
                self._picking = True
                self._stillness.begin()
                self._running.start(self._fill_later(pick), "task mix")
                return
            try:
                self._start_slot(self._parts.picked(pick.value_now()))
            except RunError as error:
                self._fail(error)

    def dropped(self, task: Task) -> None:
        """A group of ``task`` was dropped before a step took it."""
        if not task.needs_group:
            self._replacements.append(task)

    def _may_start(self) -> bool:
        return self._wanted() and not (self._picking or self._stillness.wanted)

    async def _fill_later(self, pick: Call) -> None:
        try:
            name = self._parts.picked(await pick.value())
            if self._wanted() and self._pacer.has_slot:
                self._start_slot(name)
        except RunError as error:
            return self._fail(error)
        finally:
            self._picking = False
            self._stillness.end()
        self.fill()

    def _start_slot(self, name: str) -> None:
        task = self._tasks[name]
        groups = 1 if task.needs_group else task.config.group_size
        if task.repeats_example:
            return self._start(task, groups=groups)
        for _ in range(groups):
            self._start(task, groups=1)

    def _start(self, task: Task, *, groups: int) -> None:
        """Start this many groups of one example."""
        group_ids = [f"{task.name}-{self.started + number}" for number in range(groups)]
        self.started += groups
        parts = 1 if task.needs_group else task.config.group_size
        for group_id in group_ids:
            self._pacer.admit(group_id, self._version(), frozen=not task.goes_stale, parts=parts)
            self._open.dispatch(task, group_id)
        self._running.start(self._run(*group_ids), group_ids[0])
