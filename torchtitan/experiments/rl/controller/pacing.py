"""Which groups may start, and which the next batch takes: staleness bounded by construction, nobody discarded for it.

A group is admitted at the version ``g`` its generators then hold and must be trained by the step that consumes at version
``g + max_offpolicy_steps``, its deadline. Two rules make that always possible:

1. At most ``(max_offpolicy_steps + 1) * groups_per_step`` groups hold a slot. A slot frees when its group is dropped, or when
   the weights its training led to are live in the generators.
2. A batch takes finished groups, earliest deadline first, and only if the groups then left can still meet their deadlines at
   ``groups_per_step`` a step. Otherwise the trainer waits: for a group due now, or for one of several due soon.
3. A group sampled from a frozen model has no deadline and nobody waits for it. Finished, it takes its turn as if it had one, so
   that it doesn't hold its slot for good; where that would make another late, it lets it pass.

Rule 1 bounds what is open by what the steps up to the deadline can take; rule 2 keeps it so. Pure bookkeeping, no clock.
"""

import math
from dataclasses import dataclass


@dataclass(kw_only=True, slots=True)
class _Slot:
    order: int
    admitted_version: int
    deadline: float
    """Infinite where its tokens have no age."""
    turn: int
    """What the deadline is, or would be."""
    finished: bool = False
    leads_to: int | None = None
    """Version its training leads to, once a batch took it."""


class Pacer:
    def __init__(self, *, groups_per_step: int, max_offpolicy_steps: int):
        self._groups_per_step = groups_per_step
        self._max_offpolicy_steps = max_offpolicy_steps
        self._slots: dict[str, _Slot] = {}
        self._admitted = 0

    @property
    def free_slots(self) -> int:
        return (self._max_offpolicy_steps + 1) * self._groups_per_step - len(self._slots)

    @property
    def untrained(self) -> int:
        """Groups admitted and neither dropped nor taken by a batch."""
        return sum(slot.leads_to is None for slot in self._slots.values())

    def admit(self, group_id: str, version: int, *, frozen: bool = False) -> None:
        """Give a group a slot; ``version`` is what the generators hold now.

        Args:
            frozen: its rollouts are sampled from a frozen model, which never goes stale.
        """
        assert self.free_slots > 0 and group_id not in self._slots
        turn = version + self._max_offpolicy_steps
        deadline = math.inf if frozen else turn
        self._slots[group_id] = _Slot(order=self._admitted, admitted_version=version, deadline=deadline, turn=turn)
        self._admitted += 1

    def finish(self, group_id: str) -> None:
        """The group's rollouts are done and scored; a batch may take it."""
        self._slots[group_id].finished = True

    def drop(self, group_id: str) -> None:
        """The group leaves untrained (failed, filtered, oversized); its slot frees at once.

        Also where a batch had taken it: if every group of a batch is dropped, that step's place is there for another batch.
        """
        del self._slots[group_id]

    def take_batch(self, version: int) -> list[str] | None:
        """Groups for the step that consumes at ``version``, earliest deadline first; None while the trainer has to wait."""
        finished = [group_id for group_id, slot in self._slots.items() if slot.leads_to is None and slot.finished]
        if len(finished) < self._groups_per_step:
            return None
        # Without frozen groups the two orders are one.
        for of in (lambda slot: slot.turn, lambda slot: slot.deadline):
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
