"""Bounds staleness: decides which groups may start, and which groups the next step trains on.

Step n starts from version n - 1, its base version, and makes version n. A group is admitted at the
version that the generators hold then. Its deadline is ``max_offpolicy_steps`` versions later: the
last base version of a step that may train on it. The groups that no step has taken always satisfy

    due(d) - last(d) < rollouts_per_step * (d - b)     for each of their deadlines d

    b        base version of the step that started last
    d - b    number of steps that have not started, and whose base version is at most d
    due(d)   rollouts of the groups whose deadline is d or earlier
    last(d)  rollouts of one of these groups: of those with the latest deadline, the one that was
             admitted last

So the steps can take all groups in time, by deadline and in the order of admission: each step takes
at least ``rollouts_per_step`` rollouts, and the last one takes the last group whole. In an
uninterrupted run no group is ever discarded for being stale. Three rules keep the inequality true:

1. A group of n rollouts takes n places, and a group may start while any of the
   ``(max_offpolicy_steps + 1) * rollouts_per_step`` places is free. Its places free when it is
   dropped, or when the generators hold the version that was made from it.
2. A step takes finished groups, earliest deadline first, until it has ``rollouts_per_step``
   rollouts, and only if the groups that it leaves behind satisfy the inequality. Otherwise the
   trainer waits until enough of the unfinished groups with near deadlines have finished.
3. A group sampled from a frozen model has no deadline. A step waits for it only if it has too few
   rollouts without it, or if the run is synchronous: there nothing may run between two steps. A
   finished one is taken in the order of admission like the others, so that it does not keep its
   places for the rest of the run. It is passed over if taking it would make another group late.

It stays true

- when a group is admitted: no other that has a deadline has a later one, and fewer than all places
  were in use. If the trainer is k steps ahead of the generators, k fewer steps are left until the
  deadline, but the groups of these k steps hold at least ``k * rollouts_per_step`` of the places;
- when a group is dropped, because fewer rollouts are due then;
- when a step takes groups, by rule 2.

A group is whole: the last group of a step may make the step larger than ``rollouts_per_step``, and
the last group to start may take more places than were free, each by less than one group. If a group
could start only where all its places are free, 4 places would stay empty when groups of 8 make
steps of 20, and the step would never fill.

`docs/architecture.md` (Staleness) works an example out.

The pacer is bookkeeping alone: it has no clock, and starts and stops nothing.
"""

import math
from collections.abc import Callable, Collection, Sequence
from copy import copy

from torchtitan.experiments.rl.loops.saved_state import PacedGroup


class Pacer:
    """Tracks groups from their admission until the generators hold the weights made from them."""

    def __init__(self, *, rollouts_per_step: int, max_offpolicy_steps: int):
        self.rollouts_per_step = rollouts_per_step
        """Minimum number of rollouts that a step takes."""
        self.untaken_rollouts = 0
        """Number of rollouts of the groups that no step has taken."""
        self._max_offpolicy_steps = max_offpolicy_steps
        self._groups: dict[str, PacedGroup] = {}
        """Groups that hold places, by id, in the order of their admission."""
        self._made_versions: dict[str, int] = {}
        """Groups that a step has taken, by id, with the version that this step makes."""
        # Running sums. `take_groups` is called whenever a group has finished, and looking at all
        # groups each time would be quadratic in the groups of a step.
        self._finished_rollouts = 0
        """Number of rollouts of the groups that have finished and that no step has taken."""
        self._taken_rollouts = 0
        """Number of rollouts of the groups that a step has taken and that still hold places."""
        self._unfinished = DueGroups(rollouts_per_step)
        """Groups that have not finished."""

    @property
    def free_places(self) -> int:
        """Number of rollouts that may still start. The last group to start may exceed it."""
        places = (self._max_offpolicy_steps + 1) * self.rollouts_per_step
        return max(0, places - self.untaken_rollouts - self._taken_rollouts)

    def admit(self, group_id: str, version: int, *, rollouts: int, frozen: bool = False) -> None:
        """Give a group its places. Some place is free.

        Args:
            version: version that the generators hold now.
            rollouts: number of rollouts of the group.
            frozen: True if the rollouts are sampled from a frozen model, or from none: they never
                go stale.
        """
        assert self.free_places
        self._admit(
            PacedGroup(
                group_id=group_id,
                rollouts=rollouts,
                admitted_version=version,
                frozen=frozen,
                finished=False,
            )
        )

    def finish(self, group_id: str) -> None:
        """Mark the group as finished, so that a step may take it."""
        group = self._groups[group_id]
        assert not group.finished
        self._unfinished.remove(group_id, self._deadline(group))
        group.finished = True
        self._finished_rollouts += group.rollouts

    def drop(self, group_id: str) -> None:
        """Free the places of a group of which nothing is left: it failed, was filtered or too long.

        A step may have taken the group already. If all groups of a step are dropped, the step takes
        others in their place.
        """
        if group_id in self._made_versions:
            self._release_taken(group_id)
        else:
            self._leave_untaken(self._groups.pop(group_id))

    def live(self, version: int) -> None:
        """Free the places of groups whose step made ``version``, or an earlier version."""
        released = [group_id for group_id, made in self._made_versions.items() if made <= version]
        for group_id in released:
            self._release_taken(group_id)

    def take_groups(self, base_version: int) -> list[str] | None:
        """Take the groups of the step that starts from ``base_version``, earliest deadline first.

        Returns:
            Ids of the groups; None while the trainer has to wait.
        """
        # Nearly all calls end here, by the running sums. Every batch leaves at least the unfinished
        # groups behind, so none passes below if these alone do not fit.
        if self._finished_rollouts < self.rollouts_per_step:
            return None
        if not self._unfinished.fit_after(base_version):
            return None
        if self._max_offpolicy_steps == 0 and self._unfinished:
            return None
        # By admission, groups without a deadline leave too. By deadline, they make no other late.
        # Without such groups the two orders are the same.
        by_deadline = self._deadline
        for order in (by_admission, by_deadline):
            batch = self._first_finished(order)
            left_behind = self._untaken_ids() - {group.group_id for group in batch}
            if self._fit_after(base_version, left_behind):
                return self._take(batch, base_version)
        return None

    def state(self, version: int) -> list[PacedGroup]:
        """Return the groups that a checkpoint of ``version`` keeps: no step up to it took them.

        Groups that the next step has taken are among them: that step may have failed, and a resumed
        run takes it again.
        """
        return [
            copy(group)
            for group_id, group in self._groups.items()
            if self._made_versions.get(group_id, version + 1) > version
        ]

    def restore(self, groups: Sequence[PacedGroup], version: int) -> list[str]:
        """Admit the groups of a checkpoint of ``version`` again.

        Returns:
            Ids of groups that can't be admitted, because ``max_offpolicy_steps`` is smaller than
            the checkpoint's: their deadline has passed, or too few steps are left for them.
        """
        too_late = []
        for group in groups:
            self._admit(copy(group))
            # No step has started from ``version`` yet, so that step too may take them.
            if not self._fit_after(version - 1, self._untaken_ids()):
                self.drop(group.group_id)
                too_late.append(group.group_id)
        return too_late

    def _first_finished(self, order: Callable[[PacedGroup], float]) -> list[PacedGroup]:
        """Return the first finished groups, in this order, that fill a step."""
        batch: list[PacedGroup] = []
        rollouts = 0
        untaken = self._untaken_ids()
        finished = [
            group
            for group_id, group in self._groups.items()
            if group.finished and group_id in untaken
        ]
        for group in sorted(finished, key=order):
            if rollouts >= self.rollouts_per_step:
                break
            batch.append(group)
            rollouts += group.rollouts
        return batch

    def _take(self, batch: Sequence[PacedGroup], base_version: int) -> list[str]:
        """Move groups from the untaken ones to those that a step has taken."""
        for group in batch:
            age = base_version - group.admitted_version
            assert base_version <= self._deadline(group), (
                f"group {group.group_id} is {age} versions old at version {base_version}"
            )
            self._leave_untaken(group)
            self._made_versions[group.group_id] = base_version + 1
            self._taken_rollouts += group.rollouts
        return [group.group_id for group in batch]

    def _deadline(self, group: PacedGroup) -> float:
        """Return the last base version for the group; infinity if it never goes stale."""
        return math.inf if group.frozen else group.admitted_version + self._max_offpolicy_steps

    def _untaken_ids(self) -> set[str]:
        """Return the ids of the groups that no step has taken."""
        return self._groups.keys() - self._made_versions.keys()

    def _fit_after(self, base_version: int, group_ids: Collection[str]) -> bool:
        """Return True if the steps after the one from ``base_version`` can take all these groups.

        Each group counts only for steps up to its deadline.
        """
        due = DueGroups(self.rollouts_per_step)
        for group_id, group in self._groups.items():
            if group_id in group_ids:
                due.add(group_id, self._deadline(group), group.rollouts)
        return due.fit_after(base_version)

    def _admit(self, group: PacedGroup) -> None:
        assert group.group_id not in self._groups
        self._groups[group.group_id] = group
        self.untaken_rollouts += group.rollouts
        if group.finished:
            self._finished_rollouts += group.rollouts
        else:
            self._unfinished.add(group.group_id, self._deadline(group), group.rollouts)

    def _leave_untaken(self, group: PacedGroup) -> None:
        """Take a group, which a step takes or which is dropped, out of the sums of the untaken."""
        self.untaken_rollouts -= group.rollouts
        if group.finished:
            self._finished_rollouts -= group.rollouts
        else:
            self._unfinished.remove(group.group_id, self._deadline(group))

    def _release_taken(self, group_id: str) -> None:
        del self._made_versions[group_id]
        self._taken_rollouts -= self._groups.pop(group_id).rollouts


class DueGroups:
    """Groups by deadline, each with its number of rollouts. Knows if the coming steps can take all.

    Groups are added in the order of their admission.
    """

    def __init__(self, rollouts_per_step: int):
        self._rollouts_per_step = rollouts_per_step
        self._groups: dict[float, dict[str, int]] = {}
        """Number of rollouts of each group by deadline and id."""
        self._rollouts: dict[float, int] = {}
        """Sum of these numbers by deadline."""

    def __bool__(self) -> bool:
        return bool(self._groups)

    def add(self, group_id: str, deadline: float, rollouts: int) -> None:
        self._groups.setdefault(deadline, {})[group_id] = rollouts
        self._rollouts[deadline] = self._rollouts.get(deadline, 0) + rollouts

    def remove(self, group_id: str, deadline: float) -> None:
        self._rollouts[deadline] -= self._groups[deadline].pop(group_id)
        if not self._groups[deadline]:
            del self._groups[deadline]
            del self._rollouts[deadline]

    def fit_after(self, base_version: int) -> bool:
        """Return True if the steps after the one from ``base_version`` can take all in time.

        That is the inequality of this module, with ``base_version`` as b.
        """
        due = 0
        for deadline in sorted(self._groups):
            due += self._rollouts[deadline]
            last = next(reversed(self._groups[deadline].values()))
            if due - last >= self._rollouts_per_step * (deadline - base_version):
                return False
        return True


def by_admission(group: PacedGroup) -> float:
    """Return a sort key: the order of admission, which is that of deadlines if a group has one."""
    return group.admitted_version
