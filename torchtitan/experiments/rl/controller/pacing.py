"""Decides which groups may start and which the next step takes, so that staleness is bounded and no group is discarded for it.

A group is admitted at version ``g``, which the generators then hold. Its deadline is the step that consumes at version
``g + max_offpolicy_steps``. Three rules make every deadline possible:

1. At most ``(max_offpolicy_steps + 1) * groups_per_step`` groups hold a slot. A slot frees when its group is dropped, or when
   the generators hold the weights that the group was trained for.
2. A step takes finished groups, earliest deadline first, and only if the groups that are left can still meet their deadlines at
   ``groups_per_step`` a step. Otherwise the trainer waits, for a group that is due now or for one of several that are due soon.
3. A group sampled from a frozen model has no deadline, and the trainer never waits for it. Once finished it is ordered as if it
   had a deadline, so that it does not keep its slot for the rest of the run, unless that would make another group late.

Rule 1 bounds the open groups by what the steps up to the deadline can take; rule 2 keeps that true. The pacer only does
bookkeeping: it has no clock.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from torchtitan.experiments.rl.controller.saved_state import SlotState


@dataclass(kw_only=True, slots=True)
class _Slot:
    order: int
    admitted_version: int
    deadline: float
    """Infinite for a group sampled from a frozen model: its tokens have no age."""
    order_deadline: int
    """The deadline that a group sampled from the policy has; orders groups of frozen models among them."""
    finished: bool = False
    leads_to: int | None = None
    """Version its training leads to; None until a step takes it."""


class Pacer:
    def __init__(self, *, groups_per_step: int, max_offpolicy_steps: int):
        self._groups_per_step = groups_per_step
        self._max_offpolicy_steps = max_offpolicy_steps
        self._slots: dict[str, _Slot] = {}
        self._admitted = 0

    @property
    def free_slots(self) -> int:
        # A run that was resumed with fewer slots may hold more for a while.
        return max(0, (self._max_offpolicy_steps + 1) * self._groups_per_step - len(self._slots))

    @property
    def untrained(self) -> int:
        """Groups admitted and neither dropped nor taken by a step."""
        return sum(slot.leads_to is None for slot in self._slots.values())

    def admit(self, group_id: str, version: int, *, frozen: bool = False) -> None:
        """Give a group a slot; ``version`` is what the generators hold now.

        Args:
            frozen: its rollouts are sampled from a frozen model, which never goes stale.
        """
        assert self.free_slots > 0
        self._admit(group_id, version, frozen=frozen)

    def _admit(self, group_id: str, version: int, *, frozen: bool) -> None:
        assert group_id not in self._slots
        order_deadline = version + self._max_offpolicy_steps
        deadline = math.inf if frozen else order_deadline
        self._slots[group_id] = _Slot(
            order=self._admitted, admitted_version=version, deadline=deadline, order_deadline=order_deadline
        )
        self._admitted += 1

    def finish(self, group_id: str) -> None:
        """The group's rollouts are done and scored; a step may take it."""
        self._slots[group_id].finished = True

    def drop(self, group_id: str) -> None:
        """The group leaves untrained (failed, filtered, oversized); its slot frees at once.

        A step may have taken it already: when all groups of a step are dropped, the step takes others in their place.
        """
        del self._slots[group_id]

    def take_groups(self, version: int) -> list[str] | None:
        """Groups for the step that consumes at ``version``, earliest deadline first; None while the trainer has to wait."""
        finished = [group_id for group_id, slot in self._slots.items() if slot.leads_to is None and slot.finished]
        if len(finished) < self._groups_per_step:
            return None
        # Without frozen groups the two orders are one.
        for of in (lambda slot: slot.order_deadline, lambda slot: slot.deadline):
            ordered = sorted(finished, key=lambda group_id: (of(self._slots[group_id]), self._slots[group_id].order))
            batch = ordered[: self._groups_per_step]
            if self._others_can_wait(batch, version):
                for group_id in batch:
                    self._take(group_id, version)
                return batch
        return None

    def _others_can_wait(self, batch: list[str], version: int) -> bool:
        """Whether every group left, and all due before it, fit the steps from the next one to its deadline."""
        taken = set(batch)
        waiting = (slot.deadline for group_id, slot in self._slots.items() if slot.leads_to is None and group_id not in taken)
        return all(
            position + 1 <= self._groups_per_step * (deadline - version) for position, deadline in enumerate(sorted(waiting))
        )

    def _take(self, group_id: str, version: int) -> None:
        slot = self._slots[group_id]
        age = version - slot.admitted_version
        assert version <= slot.deadline, f"group {group_id} is {age} versions old at version {version}"
        slot.leads_to = version + 1

    def live(self, version: int) -> None:
        """The generators hold ``version`` now: slots of the groups that led to it are free."""
        self._slots = {k: s for k, s in self._slots.items() if s.leads_to is None or s.leads_to > version}

    def state(self) -> list[SlotState]:
        """The groups that no step has taken. Those that a step has taken lead to the version that a checkpoint is of."""
        untaken = [(slot.order, group_id, slot) for group_id, slot in self._slots.items() if slot.leads_to is None]
        return [
            SlotState(
                group_id=group_id,
                admitted_version=slot.admitted_version,
                frozen=slot.deadline == math.inf,
                finished=slot.finished,
            )
            for _, group_id, slot in sorted(untaken, key=lambda entry: entry[0])
        ]

    def restore(self, slots: Sequence[SlotState], version: int) -> list[str]:
        """Admit the groups of a checkpoint of ``version`` again.

        Returns:
            Groups that are not admitted: a smaller ``max_offpolicy_steps`` than the checkpoint's puts their deadline before
            ``version``, or leaves too few steps for them.
        """
        late = []
        for slot in slots:
            self._admit(slot.group_id, slot.admitted_version, frozen=slot.frozen)
            self._slots[slot.group_id].finished = slot.finished
            if self._slots[slot.group_id].deadline < version or not self._others_can_wait([], version - 1):
                del self._slots[slot.group_id]
                late.append(slot.group_id)
        return late
