"""Decides which groups may start and which the next step takes, so that staleness is bounded and no group is discarded for it.

A group is admitted at version ``g``, which the generators then hold. Its deadline is the step that consumes at version
``g + max_offpolicy_steps``. Three rules make every deadline possible:

1. At most ``(max_offpolicy_steps + 1) * groups_per_step`` groups hold a slot. A slot frees when its group is dropped, or when
   the generators hold the weights that the group was trained for.
2. A step takes finished groups, earliest deadline first, and only if the groups that are left can still meet their deadlines at
   ``groups_per_step`` a step. Otherwise the trainer waits, for a group that is due now or for one of several that are due soon.
3. A group sampled from a frozen model has no deadline, and the trainer never waits for it. Once finished it is ordered as if it
   had a deadline, so that it does not keep its slot for the rest of the run, unless that would make another group late.

A group may have a part of a slot: 1/8 where 8 rollouts of a slot are groups of their own, because they are not compared. A step
takes groups until they are at least ``groups_per_step`` slots, so it may exceed that by less than one.

Rule 1 bounds the open groups by what the steps up to the deadline can take; rule 2 keeps that true. The pacer only does
bookkeeping: it has no clock.
"""

import itertools
import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from operator import attrgetter

from torchtitan.experiments.rl.controller.saved_state import SlotState


@dataclass(kw_only=True, slots=True)
class _Slot:
    order: int
    admitted_version: int
    deadline: float
    """Infinite for a group sampled from a frozen model: its tokens have no age."""
    order_deadline: int
    """The deadline that a group sampled from the policy has; orders groups of frozen models among them."""
    share: Fraction
    """Of a slot."""
    finished: bool = False
    leads_to: int | None = None
    """Version its training leads to; None until a step takes it."""


class Pacer:
    def __init__(self, *, groups_per_step: int, max_offpolicy_steps: int):
        self.groups_per_step = groups_per_step
        """Slots that a step trains on."""
        self._max_offpolicy_steps = max_offpolicy_steps
        self._slots: dict[str, _Slot] = {}
        self._admitted = 0
        # Sums over the slots: a step may have thousands of groups with a part of a slot each.
        self._held, self._ready = Fraction(0), Fraction(0)
        self._unfinished: Counter[float] = Counter()
        """Shares of the slots that are not finished, by deadline, but for frozen ones."""
        self.untrained = Fraction(0)
        """Slots of groups admitted and neither dropped nor taken by a step."""

    @property
    def free_slots(self) -> Fraction:
        # A run that was resumed with fewer slots may hold more for a while.
        return max(Fraction(0), (self._max_offpolicy_steps + 1) * self.groups_per_step - self._held)

    @property
    def has_slot(self) -> bool:
        """Whether another slot may be filled."""
        # A run that was resumed may have lost parts of slots: the next step would wait for them for ever.
        return self.free_slots >= 1 or self._held == self.untrained < self.groups_per_step

    def admit(self, group_id: str, version: int, *, frozen: bool = False, parts: int = 1) -> None:
        """Give a group a slot; ``version`` is what the generators hold now.

        Args:
            frozen: its rollouts are sampled from a frozen model, or from none, and never go stale.
            parts: groups that share the slot.
        """
        assert parts > 1 or self.has_slot
        self._admit(group_id, version, frozen=frozen, parts=parts)

    def _admit(self, group_id: str, version: int, *, frozen: bool, parts: int) -> None:
        assert group_id not in self._slots
        order_deadline = version + self._max_offpolicy_steps
        slot = self._slots[group_id] = _Slot(
            order=self._admitted,
            admitted_version=version,
            deadline=math.inf if frozen else order_deadline,
            order_deadline=order_deadline,
            share=Fraction(1, parts),
        )
        self._admitted += 1
        self._held += slot.share
        self.untrained += slot.share
        self._count_unfinished(slot, slot.share)

    def finish(self, group_id: str) -> None:
        """The group's rollouts are done and scored; a step may take it."""
        slot = self._slots[group_id]
        slot.finished = True
        self._ready += slot.share
        self._count_unfinished(slot, -slot.share)

    def drop(self, group_id: str) -> None:
        """The group leaves untrained (failed, filtered, oversized); its slot frees at once.

        A step may have taken it already: when all groups of a step are dropped, the step takes others in their place.
        """
        slot = self._slots.pop(group_id)
        self._held -= slot.share
        if slot.leads_to is None:
            self.untrained -= slot.share
            if slot.finished:
                self._ready -= slot.share
            else:
                self._count_unfinished(slot, -slot.share)

    def take_groups(self, version: int) -> list[str] | None:
        """Groups for the step that consumes at ``version``, earliest deadline first; None while the trainer has to wait."""
        # The second is asked at the end of each group while the trainer waits, and nearly always says no. Looking at every
        # slot for that is quadratic in the slots of a step.
        if self._ready < self.groups_per_step or not self._in_time(self._unfinished, version):
            return None
        finished = [group_id for group_id, slot in self._slots.items() if slot.leads_to is None and slot.finished]
        # Without frozen groups the first two are one. The third is for a resumed run, where ``has_slot`` made more groups due
        # than a step takes.
        for of, all_due in (("order_deadline", False), ("deadline", False), ("deadline", True)):
            ordered = sorted(finished, key=lambda group_id: attrgetter(of, "order")(self._slots[group_id]))
            batch = ordered[: self._count(ordered, version if all_due else None)]
            if self._others_can_wait(batch, version):
                for group_id in batch:
                    self._take(group_id, version)
                return batch
        return None

    def _count(self, ordered: list[str], due: int | None) -> int:
        """How many of these a step takes: enough, and those whose deadline is ``due``."""
        held = Fraction(0)
        for count, slot in enumerate(self._slots[group_id] for group_id in ordered):
            if held >= self.groups_per_step and (due is None or slot.deadline > due):
                return count
            held += slot.share
        return len(ordered)

    def _others_can_wait(self, batch: list[str], version: int) -> bool:
        """Whether every group left, and all due before it, fit the steps from the next one to its deadline."""
        taken, waiting = set(batch), Counter[float]()
        for group_id, slot in self._slots.items():
            if slot.leads_to is None and group_id not in taken and slot.deadline < math.inf:
                waiting[slot.deadline] += slot.share  # type: ignore[assignment]  # Counter's values are declared as int
        return self._in_time(waiting, version)

    def _in_time(self, waiting: Counter[float], version: int) -> bool:
        """Whether slots, by deadline, fit the steps from the next one on."""
        deadlines = sorted(waiting)
        held = itertools.accumulate(waiting[deadline] for deadline in deadlines)
        return all(
            slots <= self.groups_per_step * (deadline - version) for slots, deadline in zip(held, deadlines, strict=True)
        )

    def _count_unfinished(self, slot: _Slot, share: Fraction) -> None:
        if slot.deadline < math.inf:
            self._unfinished[slot.deadline] += share  # type: ignore[assignment]
            if not self._unfinished[slot.deadline]:
                del self._unfinished[slot.deadline]

    def _take(self, group_id: str, version: int) -> None:
        slot = self._slots[group_id]
        age = version - slot.admitted_version
        assert version <= slot.deadline, f"group {group_id} is {age} versions old at version {version}"
        slot.leads_to = version + 1
        self.untrained -= slot.share
        self._ready -= slot.share

    def live(self, version: int) -> None:
        """The generators hold ``version`` now: slots of the groups that led to it are free."""
        for group_id in [k for k, slot in self._slots.items() if slot.leads_to is not None and slot.leads_to <= version]:
            self._held -= self._slots.pop(group_id).share

    def state(self) -> list[SlotState]:
        """The groups that no step has taken. Those that a step has taken lead to the version that a checkpoint is of."""
        untaken = [(slot.order, group_id, slot) for group_id, slot in self._slots.items() if slot.leads_to is None]
        return [
            SlotState(
                group_id=group_id,
                admitted_version=slot.admitted_version,
                frozen=slot.deadline == math.inf,
                finished=slot.finished,
                parts=slot.share.denominator,
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
            self._admit(slot.group_id, slot.admitted_version, frozen=slot.frozen, parts=slot.parts)
            if slot.finished:
                self.finish(slot.group_id)
            if self._slots[slot.group_id].deadline < version or not self._others_can_wait([], version - 1):
                self.drop(slot.group_id)
                late.append(slot.group_id)
        return late
