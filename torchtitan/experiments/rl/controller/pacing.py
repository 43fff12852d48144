"""Bounds staleness: decides which groups may start, and which groups the next step trains on.

A group is admitted at version ``g``, the version that the generators hold then. The step that
trains on it must begin from version ``g + max_offpolicy_steps`` or an earlier one: that version is
the group's deadline. No group is ever discarded for being stale, because three rules make every
deadline possible:

1. At most ``(max_offpolicy_steps + 1) * groups_per_step`` groups hold a slot. A group frees its
   slot when it is dropped, or when the generators hold the weights that it was trained for.
2. A step takes finished groups, earliest deadline first, and only if the groups that it leaves
   behind can still meet their deadlines at ``groups_per_step`` a step. Otherwise the trainer waits:
   for a group that is due now, or for one of several that are due soon.
3. A group sampled from a frozen model has no deadline, and the trainer never waits for it. A
   finished one is ordered as if it had a deadline, so that it does not keep its slot for the rest
   of the run, unless that would make another group late.

Rule 1 bounds the open groups by what the steps up to their deadlines can take. Rule 2 keeps it so.

Rollouts that are not compared with each other are groups of one, and those of one example share a
slot: each of 8 holds 1/8 of it. A step takes groups until they fill ``groups_per_step`` slots, so
it may exceed that by less than one slot.

The pacer only keeps books: it has no clock, and starts and stops nothing.
"""

import itertools
import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from copy import copy
from fractions import Fraction

from torchtitan.experiments.rl.controller.saved_state import SlotState


class Pacer:
    """Books of the groups that hold a slot, from their admission until their weights go live."""

    def __init__(self, *, groups_per_step: int, max_offpolicy_steps: int):
        self.groups_per_step = groups_per_step
        """Number of slots that a step trains on."""
        self._max_offpolicy_steps = max_offpolicy_steps
        self._untaken: dict[str, SlotState] = {}
        """Groups that no step has taken, by id, in the order of their admission."""
        self._taken: dict[str, tuple[int, Fraction]] = {}
        """Groups that a step has taken, by id: the version that the step makes, and their share of
        a slot."""
        # Running sums of the shares above. A step may have thousands of groups that hold a part of
        # a slot, and the trainer asks after each of them whether it may go on.
        self._finished_slots = Fraction(0)
        self._taken_slots = Fraction(0)
        self._unfinished_slots = defaultdict[float, Fraction](Fraction)
        """Slots of groups that still run, by deadline."""
        self.untrained = Fraction(0)
        """Number of slots of groups that were neither dropped nor taken by a step."""

    @property
    def free_slots(self) -> Fraction:
        all_slots = (self._max_offpolicy_steps + 1) * self.groups_per_step
        # A run that was resumed with fewer slots holds more than it has, for a while.
        return max(Fraction(0), all_slots - self.untrained - self._taken_slots)

    @property
    def has_slot(self) -> bool:
        """True if another slot may be filled."""
        if self.free_slots >= 1:
            return True
        # A resumed run may have lost parts of slots. Without this, the next step would wait for
        # them for ever.
        return not self._taken and self.untrained < self.groups_per_step

    def admit(self, group_id: str, version: int, *, frozen: bool = False, parts: int = 1) -> None:
        """Give a group a slot, or its part of one.

        Args:
            version: version that the generators hold now.
            frozen: True if the rollouts are sampled from a frozen model, or from none: they never
                go stale.
            parts: number of groups that share the slot.
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

    def finish(self, group_id: str) -> None:
        """Let a step take the group: its rollouts are done and scored."""
        slot = self._untaken[group_id]
        self._add_to_sums(slot, -1)
        slot.finished = True
        self._add_to_sums(slot, +1)

    def drop(self, group_id: str) -> None:
        """Free the slot of a group that leaves untrained: it failed, was filtered, or is too long.

        A step may have taken the group already. Where all groups of a step are dropped, the step
        takes others in their place.
        """
        if group_id in self._taken:
            _, share = self._taken.pop(group_id)
            self._taken_slots -= share
        else:
            self._remove_untaken(group_id)

    def live(self, version: int) -> None:
        """Free the slots of the groups that were trained for a version that the generators hold."""
        led_here = [
            group_id for group_id, (leads_to, _) in self._taken.items() if leads_to <= version
        ]
        for group_id in led_here:
            self.drop(group_id)

    def take_groups(self, version: int) -> list[str] | None:
        """Take the groups of the step that trains ``version``, earliest deadline first.

        Returns:
            Ids of the groups; None while the trainer has to wait.
        """
        # This is asked at the end of each group while the trainer waits, and nearly always answered
        # here: looking at every slot each time would be quadratic in the slots of a step.
        if self._finished_slots < self.groups_per_step:
            return None
        if not self._meet_deadlines(self._unfinished_slots, version):
            return None

        # Without groups of frozen models the first two orders are the same. The third one also
        # takes what is due and does not fit: `has_slot` lets a resumed run have more groups due
        # than a step takes.
        for batch in (
            self._earliest(_admitted_version, version),
            self._earliest(self._deadline, version),
            self._earliest(self._deadline, version, all_due=True),
        ):
            left_behind = self._untaken.keys() - {slot.group_id for slot in batch}
            if self._fit(left_behind, version):
                return self._take(batch, version)
        return None

    def state(self) -> list[SlotState]:
        """Return the groups that a checkpoint keeps: those that no step has taken.

        Those that a step has taken are in the weights of the checkpoint's version.
        """
        return [copy(slot) for slot in self._untaken.values()]

    def restore(self, slots: Sequence[SlotState], version: int) -> list[str]:
        """Admit the groups of a checkpoint of ``version`` again.

        Returns:
            Ids of groups that can't be admitted, because ``max_offpolicy_steps`` is smaller than
            the checkpoint's: their deadline has passed, or too few steps are left for them.
        """
        too_late = []
        for slot in slots:
            self._admit(copy(slot))
            if self._deadline(slot) < version or not self._fit(self._untaken, version - 1):
                self.drop(slot.group_id)
                too_late.append(slot.group_id)
        return too_late

    def _earliest(
        self, order: Callable[[SlotState], float], version: int, *, all_due: bool = False
    ) -> list[SlotState]:
        """Return the first finished groups, in this order, that fill a step.

        Args:
            all_due: also return every further group whose deadline is ``version``.
        """
        batch: list[SlotState] = []
        filled = Fraction(0)
        finished = [slot for slot in self._untaken.values() if slot.finished]
        for slot in sorted(finished, key=order):
            is_due = all_due and self._deadline(slot) <= version
            if filled >= self.groups_per_step and not is_due:
                break
            batch.append(slot)
            filled += _share(slot)
        return batch

    def _take(self, batch: Sequence[SlotState], version: int) -> list[str]:
        """Move groups from the untaken ones to those of the step that trains ``version``."""
        for slot in batch:
            age = version - slot.admitted_version
            assert version <= self._deadline(slot), (
                f"group {slot.group_id} is {age} versions old at version {version}"
            )
            self._remove_untaken(slot.group_id)
            self._taken[slot.group_id] = (version + 1, _share(slot))
            self._taken_slots += _share(slot)
        return [slot.group_id for slot in batch]

    def _deadline(self, slot: SlotState) -> float:
        """Return the last version that a step may train the group at; infinite where none is."""
        return math.inf if slot.frozen else slot.admitted_version + self._max_offpolicy_steps

    def _fit(self, group_ids: Iterable[str], version: int) -> bool:
        """Return True if the steps after the one at ``version`` can take these groups in time."""
        slots = defaultdict[float, Fraction](Fraction)
        for group_id in group_ids:
            slot = self._untaken[group_id]
            slots[self._deadline(slot)] += _share(slot)
        return self._meet_deadlines(slots, version)

    def _meet_deadlines(self, slots: Mapping[float, Fraction], version: int) -> bool:
        """Return True if the steps after the one at ``version`` can take these slots in time.

        Args:
            slots: number of slots by deadline.
        """
        deadlines = sorted(slots)
        due_by_then = itertools.accumulate(slots[deadline] for deadline in deadlines)
        return all(
            due <= self.groups_per_step * (deadline - version)
            for due, deadline in zip(due_by_then, deadlines, strict=True)
        )

    def _admit(self, slot: SlotState) -> None:
        assert slot.group_id not in self._untaken and slot.group_id not in self._taken
        self._untaken[slot.group_id] = slot
        self.untrained += _share(slot)
        self._add_to_sums(slot, +1)

    def _remove_untaken(self, group_id: str) -> None:
        slot = self._untaken.pop(group_id)
        self.untrained -= _share(slot)
        self._add_to_sums(slot, -1)

    def _add_to_sums(self, slot: SlotState, sign: int) -> None:
        """Add a group's share to the running sums of untaken slots; subtract it if sign is -1."""
        share = sign * _share(slot)
        if slot.finished:
            self._finished_slots += share
            return
        deadline = self._deadline(slot)
        self._unfinished_slots[deadline] += share
        if not self._unfinished_slots[deadline]:
            del self._unfinished_slots[deadline]


def _share(slot: SlotState) -> Fraction:
    """Return the fraction of a slot that the group holds."""
    return Fraction(1, slot.parts)


def _admitted_version(slot: SlotState) -> float:
    """Order groups of frozen models among the others, as if they had deadlines."""
    return slot.admitted_version
