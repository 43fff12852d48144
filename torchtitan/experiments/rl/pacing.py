"""Which groups may start, and which the next batch takes: staleness bounded by construction, nobody discarded for it.

A group is admitted at the version ``g`` its generators then hold and must be trained by the step that consumes at version
``g + max_offpolicy_steps``, its deadline. Two rules make that always possible:

1. At most ``(max_offpolicy_steps + 1) * groups_per_step`` groups hold a slot. A slot frees when its group is dropped, or when
   the weights its training led to are live in the generators.
2. A batch takes finished groups, earliest deadline first, and only if the groups then left can still meet their deadlines at
   ``groups_per_step`` a step. Otherwise the trainer waits: for a group due now, or for one of several due soon.

Rule 1 bounds what is open by what the steps up to the deadline can take; rule 2 keeps it so. Pure bookkeeping, no clock.
"""

from dataclasses import dataclass


@dataclass(kw_only=True, slots=True)
class _Slot:
    order: int
    admitted_version: int
    deadline: int
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

    def admit(self, group_id: str, version: int) -> None:
        """Give a group a slot; ``version`` is what the generators hold now."""
        assert self.free_slots > 0 and group_id not in self._slots
        deadline = version + self._max_offpolicy_steps
        self._slots[group_id] = _Slot(order=self._admitted, admitted_version=version, deadline=deadline)
        self._admitted += 1

    def finish(self, group_id: str) -> None:
        """The group's rollouts are done and scored; a batch may take it."""
        self._slots[group_id].finished = True

    def drop(self, group_id: str) -> None:
        """The group leaves untrained (failed, filtered, oversized); its slot frees at once."""
        slot = self._slots.pop(group_id)
        assert slot.leads_to is None

    def take_batch(self, version: int) -> list[str] | None:
        """Groups for the step that consumes at ``version``, earliest deadline first; None while the trainer has to wait."""
        waiting = [(slot.deadline, slot.order, group_id) for group_id, slot in self._slots.items() if slot.leads_to is None]
        batch = sorted(entry for entry in waiting if self._slots[entry[2]].finished)[: self._groups_per_step]
        if len(batch) < self._groups_per_step:
            return None
        left = sorted(deadline for deadline, _, group_id in waiting if (deadline, _, group_id) not in set(batch))
        for position, deadline in enumerate(left):
            # This one and all due before it must fit the steps from the next one to its deadline.
            if position + 1 > self._groups_per_step * (deadline - version):
                return None
        for _, _, group_id in batch:
            slot = self._slots[group_id]
            age = version - slot.admitted_version
            assert age <= self._max_offpolicy_steps, f"group {group_id} is {age} versions old at version {version}"
            slot.leads_to = version + 1
        return [group_id for _, _, group_id in batch]

    def live(self, version: int) -> None:
        """The generators hold ``version`` now: slots of the groups that led to it are free."""
        self._slots = {k: s for k, s in self._slots.items() if s.leads_to is None or s.leads_to > version}
