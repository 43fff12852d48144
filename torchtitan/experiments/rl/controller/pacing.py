"""Bounds staleness: decides which groups may start, and which groups the next step trains on.

Step n starts from version n - 1, its base version, and makes version n. A group is admitted at the
version that the generators hold then. Its deadline is ``max_offpolicy_steps`` versions later: the
last base version of a step that may train on it. In an uninterrupted run no group is ever discarded
for being stale, because three rules keep every deadline possible:

1. At most ``(max_offpolicy_steps + 1) * groups_per_step`` slots are in use. A slot frees when its
   group is dropped, or when the generators hold the version that was made from the group.
2. A step takes finished groups, earliest deadline first, and only if the groups that it leaves
   behind can still meet their deadlines at ``groups_per_step`` slots a step. Otherwise the trainer
   waits until enough of the unfinished groups with near deadlines have finished.
3. A group sampled from a frozen model has no deadline, and the trainer never waits for it. A
   finished one is taken in the order of admission like the others, so that it does not keep its
   slot for the rest of the run. It is passed over if taking it would make another group late.

The invariant is: for every deadline d, the slots that are due by d are at most ``groups_per_step``
times the number of steps not yet started whose base version is at most d.

A group that compares its rollouts uses a slot of its own. Rollouts that are not compared are groups
of one, and those of one example share a slot: each of 8 uses 1/8 of it. A step takes groups until
they fill ``groups_per_step`` slots, so it may exceed that by less than one slot. Only a resumed run
may exceed it by more.

The pacer is bookkeeping alone: it has no clock, and starts and stops nothing.
"""

import itertools
import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from copy import copy
from fractions import Fraction

from torchtitan.experiments.rl.controller.saved_state import SlotState


class Pacer:
    """Tracks groups from their admission until the generators hold the weights made from them."""

    def __init__(self, *, groups_per_step: int, max_offpolicy_steps: int):
        self.groups_per_step = groups_per_step
        """Number of slots that a step takes."""
        self._max_offpolicy_steps = max_offpolicy_steps
        self._untaken: dict[str, SlotState] = {}
        """Groups that no step has taken, by id, in the order of their admission."""
        self._taken: dict[str, tuple[int, Fraction]] = {}
        """Groups that a step has taken, by id: the version that the step makes, and their share of
        a slot."""
        # Running sums of the shares. `take_groups` is called whenever a group has finished, and
        # looking at all slots each time would be quadratic in the slots of a step.
        self._finished_slots = Fraction(0)
        self._taken_slots = Fraction(0)
        self._unfinished_slots = defaultdict[float, Fraction](Fraction)
        """Slots of groups that still run, by deadline."""
        self.untrained = Fraction(0)
        """Number of slots of the groups that no step has taken."""

    @property
    def free_slots(self) -> Fraction:
        all_slots = (self._max_offpolicy_steps + 1) * self.groups_per_step
        # A run that was resumed with a lower limit exceeds it at first.
        return max(Fraction(0), all_slots - self.untrained - self._taken_slots)

    @property
    def has_slot(self) -> bool:
        """True if another slot may be opened."""
        if self.free_slots >= 1:
            return True
        # A resumed run may have lost parts of slots, without which its next step would never fill.
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
        """Mark the group as finished, so that a step may take it."""
        slot = self._untaken[group_id]
        self._add_to_sums(slot, -1)
        slot.finished = True
        self._add_to_sums(slot, +1)

    def drop(self, group_id: str) -> None:
        """Free the slot of a group that is not trained on: it failed, was filtered or is too long.

        A step may have taken the group already. If all groups of a step are dropped, the step takes
        others in their place.
        """
        if group_id in self._taken:
            self._release_taken(group_id)
        else:
            self._remove_untaken(group_id)

    def live(self, version: int) -> None:
        """Free the slots of groups whose step made ``version``, or an earlier version."""
        released = [group_id for group_id, (made, _) in self._taken.items() if made <= version]
        for group_id in released:
            self._release_taken(group_id)

    def take_groups(self, base_version: int) -> list[str] | None:
        """Take the groups of the step that starts from ``base_version``, earliest deadline first.

        Returns:
            Ids of the groups; None while the trainer has to wait.
        """
        # Nearly all calls end here, by the running sums.
        if self._finished_slots < self.groups_per_step:
            return None
        if not self._meet_deadlines(self._unfinished_slots, base_version):
            return None
        for batch in self._candidates(base_version):
            left_behind = self._untaken.keys() - {slot.group_id for slot in batch}
            if self._fit(left_behind, base_version):
                return self._take(batch, base_version)
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
            # No step has started from ``version`` yet, so that step too may take them.
            if self._deadline(slot) < version or not self._fit(self._untaken, version - 1):
                self.drop(slot.group_id)
                too_late.append(slot.group_id)
        return too_late

    def _candidates(self, base_version: int) -> Iterator[list[SlotState]]:
        """Generate the batches that a step may take, the preferred one first."""
        # Without groups of frozen models these two are the same.
        yield self._earliest(_admitted_version)
        yield self._earliest(self._deadline)
        # `has_slot` lets a resumed run have more groups due now than a step takes: take them all.
        yield self._earliest(self._deadline, and_due_at=base_version)

    def _earliest(
        self, order: Callable[[SlotState], float], *, and_due_at: float = -math.inf
    ) -> list[SlotState]:
        """Return the first finished groups, in this order, that fill a step.

        Args:
            and_due_at: also return every further group whose deadline is this version.
        """
        batch: list[SlotState] = []
        filled = Fraction(0)
        finished = [slot for slot in self._untaken.values() if slot.finished]
        for slot in sorted(finished, key=order):
            if filled >= self.groups_per_step and self._deadline(slot) > and_due_at:
                break
            batch.append(slot)
            filled += _share(slot)
        return batch

    def _take(self, batch: Sequence[SlotState], base_version: int) -> list[str]:
        """Move groups from the untaken ones to those that a step has taken."""
        for slot in batch:
            age = base_version - slot.admitted_version
            assert base_version <= self._deadline(slot), (
                f"group {slot.group_id} is {age} versions old at version {base_version}"
            )
            self._remove_untaken(slot.group_id)
            self._taken[slot.group_id] = (base_version + 1, _share(slot))
            self._taken_slots += _share(slot)
        return [slot.group_id for slot in batch]

    def _deadline(self, slot: SlotState) -> float:
        """Return the last base version for the group; infinity if it never goes stale."""
        return math.inf if slot.frozen else slot.admitted_version + self._max_offpolicy_steps

    def _fit(self, group_ids: Iterable[str], base_version: int) -> bool:
        """Return True if the steps after the one from ``base_version`` can take all these groups.

        Each group counts only for steps up to its deadline.
        """
        slots = defaultdict[float, Fraction](Fraction)
        for group_id in group_ids:
            slot = self._untaken[group_id]
            slots[self._deadline(slot)] += _share(slot)
        return self._meet_deadlines(slots, base_version)

    def _meet_deadlines(self, slots: Mapping[float, Fraction], base_version: int) -> bool:
        """Return True if the steps after the one from ``base_version`` can take slots in time.

        Args:
            slots: number of slots by deadline.
        """
        deadlines = sorted(slots)
        cumulative = itertools.accumulate(slots[deadline] for deadline in deadlines)
        return all(
            due <= self.groups_per_step * (deadline - base_version)
            for due, deadline in zip(cumulative, deadlines, strict=True)
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

    def _release_taken(self, group_id: str) -> None:
        _, share = self._taken.pop(group_id)
        self._taken_slots -= share

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
    """Sort key: the order of admission, which is that of the deadlines for groups that have one."""
    return slot.admitted_version
