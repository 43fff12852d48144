"""Starts groups in free slots: which task is next, and how many groups share a slot.

A group whose rollouts are compared has a slot of its own. Rollouts that are not compared are groups of their own; those of one
example share a slot. One that is dropped is replaced by one of its task as soon as another of the slot is kept, so that slots
stay whole. A slot of which all are dropped is free for any task, as a dropped group's is.
"""

from collections.abc import Callable, Coroutine, Mapping
from dataclasses import dataclass
from typing import Any

from torchtitan.experiments.rl.controller.open_groups import OpenGroups, groups_in_slot
from torchtitan.experiments.rl.controller.pacing import Pacer
from torchtitan.experiments.rl.controller.running import Running
from torchtitan.experiments.rl.controller.stillness import Stillness
from torchtitan.experiments.rl.controller.user_parts import UserParts
from torchtitan.experiments.rl.errors import RunError
from torchtitan.experiments.rl.tasks.task import Task
from torchtitan.experiments.rl.user_code.gate import Call


@dataclass(kw_only=True, slots=True)
class _SharedSlot:
    task: Task
    open: int = 0
    """Groups of it that are neither kept nor dropped yet."""
    dropped: int = 0
    """Groups of it that were dropped and not replaced."""
    kept: bool = False
    """Whether one of it was kept."""


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
        self._shared: dict[str, _SharedSlot] = {}
        """By group, of those that share a slot, until it is kept or dropped."""
        self._incomplete: list[_SharedSlot] = []
        """Slots of which groups were dropped and others kept."""
        self.started = 0
        """Groups since the run began: the number of the next."""

    def fill(self) -> None:
        """Start groups in every free slot."""
        self._replace()
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

    def dropped(self, group_id: str, task: Task) -> None:
        """A group of ``task`` was dropped before a step took it; ``fill`` comes next."""
        if not task.needs_group:
            # Of one that a resumed run goes on with, the others are not known.
            slot = self._shared.pop(group_id, None) or _SharedSlot(task=task, open=1, kept=True)
            slot.open -= 1
            slot.dropped += 1
            self._note(slot)

    def kept(self, group_id: str) -> None:
        """A group was scored, and passed the filters."""
        if (slot := self._shared.pop(group_id, None)) is not None:
            slot.open -= 1
            slot.kept = True
            self._note(slot)
            self._replace()

    def _note(self, slot: _SharedSlot) -> None:
        if slot.kept and slot.dropped and not any(slot is known for known in self._incomplete):
            self._incomplete.append(slot)

    def _replace(self) -> None:
        while self._incomplete and self._may_start():
            slot = self._incomplete[0]
            slot.dropped -= 1
            if not slot.dropped:
                self._incomplete.pop(0)
            self._start(slot.task, groups=1, slot=slot)

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
        groups = groups_in_slot(task)
        slot = _SharedSlot(task=task)
        if task.repeats_example:
            return self._start(task, groups=groups, slot=slot)
        for _ in range(groups):
            self._start(task, groups=1, slot=slot)

    def _start(self, task: Task, *, groups: int, slot: _SharedSlot) -> None:
        """Start this many groups of one example in a slot."""
        group_ids = [f"{task.name}-{self.started + number}" for number in range(groups)]
        self.started += groups
        parts = groups_in_slot(task)
        for group_id in group_ids:
            self._pacer.admit(group_id, self._version(), frozen=not task.goes_stale, parts=parts)
            self._open.dispatch(task, group_id)
        if not task.needs_group:
            slot.open += groups
            self._shared |= dict.fromkeys(group_ids, slot)
        self._running.start(self._run(*group_ids), group_ids[0])
