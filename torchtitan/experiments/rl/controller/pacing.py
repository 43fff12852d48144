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
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from copy import copy
from fractions import Fraction

from torchtitan.experiments.rl.controller.saved_state import SlotState


class Pacer:
    def __init__(self, *, groups_per_step: int, max_offpolicy_steps: int):
        self.groups_per_step = groups_per_step
        """Slots that a step trains on."""
        self._max_offpolicy_steps = max_offpolicy_steps
        self._untaken: dict[str, SlotState] = {}
        """Groups that no step has taken, by id, in the order they were admitted."""
        self._taken: dict[str, tuple[int, Fraction]] = {}
        """The version that a group's training leads to, and its share of a slot."""
        # Sums over the slots: a step may have thousands of groups with a part of a slot each.
        self._ready, self._in_training = Fraction(0), Fraction(0)
        self._unfinished = defaultdict[float, Fraction](Fraction)
        """Shares of the slots that are not finished, by deadline."""
        self.untrained = Fraction(0)
        """Slots of groups admitted and neither dropped nor taken by a step."""

    @property
    def free_slots(self) -> Fraction:
        # A run that was resumed with fewer slots may hold more for a while.
        all_slots = (self._max_offpolicy_steps + 1) * self.groups_per_step
        return max(Fraction(0), all_slots - self.untrained - self._in_training)

    @property
    def has_slot(self) -> bool:
        """Whether another slot may be filled."""
        # A run that was resumed may have lost parts of slots: the next step would wait for them for ever.
        return self.free_slots >= 1 or (not self._taken and self.untrained < self.groups_per_step)

    def admit(self, group_id: str, version: int, *, frozen: bool = False, parts: int = 1) -> None:
        """Give a group a slot; ``version`` is what the generators hold now.

        Args:
            frozen: its rollouts are sampled from a frozen model, or from none, and never go stale.
            parts: groups that share the slot.
        """
        assert parts > 1 or self.has_slot
        self._admit(
            SlotState(
                group_id=group_id,
                admitted_version=version,
                frozen=frozen,
                finished=False,
                parts=parts,
            )
        )

    def _admit(self, slot: SlotState) -> None:
        assert slot.group_id not in self._untaken and slot.group_id not in self._taken
        self._untaken[slot.group_id] = slot
        self.untrained += _share(slot)
        self._count(slot, 1)

    def finish(self, group_id: str) -> None:
        """The group's rollouts are done and scored; a step may take it."""
        slot = self._untaken[group_id]
        self._count(slot, -1)
        slot.finished = True
        self._count(slot, 1)

    def drop(self, group_id: str) -> None:
        """The group leaves untrained (failed, filtered, oversized); its slot frees at once.

        A step may have taken it already: when all groups of a step are dropped, the step takes others in their place.
        """
        if group_id in self._taken:
            self._in_training -= self._taken.pop(group_id)[1]
        else:
            self._leave(group_id)

    def take_groups(self, version: int) -> list[str] | None:
        """Groups for the step that consumes at ``version``, earliest deadline first; None while the trainer has to wait."""
        # The second is asked at the end of each group while the trainer waits, and nearly always says no. Looking at every
        # slot for that is quadratic in the slots of a step.
        if self._ready < self.groups_per_step or not self._in_time(self._unfinished, version):
            return None
        finished = [slot for slot in self._untaken.values() if slot.finished]
        # Without frozen groups the first two are one. The third is for a resumed run, where ``has_slot`` made more groups due
        # than a step takes.
        for by, all_due in ((_by_version, False), (self._deadline, False), (self._deadline, True)):
            batch, held = list[SlotState](), Fraction(0)
            for slot in sorted(finished, key=by):
                if held >= self.groups_per_step and not (
                    all_due and self._deadline(slot) <= version
                ):
                    break
                batch.append(slot)
                held += _share(slot)
            taken = {slot.group_id for slot in batch}
            if self._fit(self._untaken.keys() - taken, version):
                for slot in batch:
                    age = version - slot.admitted_version
                    assert version <= self._deadline(slot), (
                        f"group {slot.group_id} is {age} versions old at version {version}"
                    )
                    self._taken[slot.group_id] = version + 1, self._leave(slot.group_id)
                self._in_training += held
                return [slot.group_id for slot in batch]
        return None

    def _deadline(self, slot: SlotState) -> float:
        """Infinite for a group sampled from a frozen model: its tokens have no age."""
        return math.inf if slot.frozen else slot.admitted_version + self._max_offpolicy_steps

    def _fit(self, group_ids: Iterable[str], version: int) -> bool:
        """Whether each of these groups, and all due before it, fit the steps from the next one to its deadline."""
        waiting = defaultdict[float, Fraction](Fraction)
        for slot in (self._untaken[group_id] for group_id in group_ids):
            waiting[self._deadline(slot)] += _share(slot)
        return self._in_time(waiting, version)

    def _in_time(self, waiting: Mapping[float, Fraction], version: int) -> bool:
        """Whether slots, by deadline, fit the steps from the next one on."""
        deadlines = sorted(waiting)
        held = itertools.accumulate(waiting[deadline] for deadline in deadlines)
        return all(
            slots <= self.groups_per_step * (deadline - version)
            for slots, deadline in zip(held, deadlines, strict=True)
        )

    def _count(self, slot: SlotState, sign: int) -> None:
        """Count a slot that no step has taken as what it is now; -1: no longer."""
        share = sign * _share(slot)
        if slot.finished:
            self._ready += share
            return
        deadline = self._deadline(slot)
        self._unfinished[deadline] += share
        if not self._unfinished[deadline]:
            del self._unfinished[deadline]

    def _leave(self, group_id: str) -> Fraction:
        """A step takes a group, or it is dropped. Returns its share of a slot."""
        slot = self._untaken.pop(group_id)
        self._count(slot, -1)
        self.untrained -= _share(slot)
        return _share(slot)

    def live(self, version: int) -> None:
        """The generators hold ``version`` now: slots of the groups that led to it are free."""
        for group_id in [
            group_id for group_id, (leads_to, _) in self._taken.items() if leads_to <= version
        ]:
            self.drop(group_id)

    def state(self) -> list[SlotState]:
        """The groups that no step has taken. Those that a step has taken lead to the version that a checkpoint is of."""
        return [copy(slot) for slot in self._untaken.values()]

    def restore(self, slots: Sequence[SlotState], version: int) -> list[str]:
        """Admit the groups of a checkpoint of ``version`` again.

        Returns:
            Groups that are not admitted: a smaller ``max_offpolicy_steps`` than the checkpoint's puts their deadline before
            ``version``, or leaves too few steps for them.
        """
        late = []
        for slot in slots:
            self._admit(copy(slot))
            if self._deadline(slot) < version or not self._fit(self._untaken, version - 1):
                self.drop(slot.group_id)
                late.append(slot.group_id)
        return late


def _share(slot: SlotState) -> Fraction:
    """Of a slot."""
    return Fraction(1, slot.parts)


def _by_version(slot: SlotState) -> float:
    """Orders groups of frozen models as if they had deadlines."""
    return slot.admitted_version
