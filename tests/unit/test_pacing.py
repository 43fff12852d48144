"""The pacer: no group is trained on too late, nobody waits for nothing, and every slot comes back once."""

from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from torchtitan.experiments.rl.controller.pacing import Pacer


class World:
    """A run as the pacer sees it, with its own count of everything: groups, versions, slots."""

    def __init__(self, groups_per_step: int, max_offpolicy_steps: int):
        self.n, self.bound = groups_per_step, max_offpolicy_steps
        self.pacer = Pacer(groups_per_step=groups_per_step, max_offpolicy_steps=max_offpolicy_steps)
        self.slots = (max_offpolicy_steps + 1) * groups_per_step
        self.trainer = self.generators = 0
        """Version the trainer holds, and the one live in the generators."""
        self.running: list[str] = []
        self.finished: list[str] = []
        self.taken: dict[str, int] = {}
        """Groups that hold a slot after training, and the version they led to."""
        self.born: dict[str, int] = {}

    def admit(self) -> None:
        group = f"g{len(self.born)}"
        self.pacer.admit(group, self.generators)
        self.born[group] = self.generators
        self.running.append(group)

    def fill(self) -> None:
        while self.pacer.free_slots:
            self.admit()

    def finish(self, index: int) -> None:
        self.finished.append(self.running.pop(index))
        self.pacer.finish(self.finished[-1])

    def drop(self, index: int) -> None:
        groups = self.running + self.finished
        group = groups[index]
        (self.running if index < len(self.running) else self.finished).remove(group)
        self.pacer.drop(group)

    def take(self) -> list[str] | None:
        batch = self.pacer.take_groups(self.trainer)
        if batch is not None:
            self.trainer += 1
            for group in batch:
                self.finished.remove(group)
                self.taken[group] = self.trainer
        return batch

    def live(self) -> None:
        self.generators += 1
        self.pacer.live(self.generators)
        self.taken = {
            group: version for group, version in self.taken.items() if version > self.generators
        }

    def deadline(self, group: str) -> int:
        return self.born[group] + self.bound

    def check_slots(self) -> None:
        held = len(self.running) + len(self.finished) + len(self.taken)
        assert self.pacer.free_slots == self.slots - held >= 0
        assert self.pacer.untrained == len(self.running) + len(self.finished)


SIZES = dict(groups_per_step=st.integers(1, 4), max_offpolicy_steps=st.integers(0, 4))


@settings(max_examples=150)
@given(data=st.data(), **SIZES)
def test_bound_slots_order_and_progress_hold_in_every_run(
    data, groups_per_step, max_offpolicy_steps
):
    world = World(groups_per_step, max_offpolicy_steps)
    for _ in range(data.draw(st.integers(1, 120), label="events")):
        possible = [
            name
            for name, can in (
                ("admit", world.pacer.free_slots > 0),
                ("finish", world.running),
                ("drop", world.running or world.finished),
                ("take", True),
                ("live", world.generators < world.trainer),
            )
            if can
        ]
        match data.draw(st.sampled_from(possible)):
            case "admit":
                world.admit()
            case "finish":
                world.finish(data.draw(st.integers(0, len(world.running) - 1)))
            case "drop":
                world.drop(data.draw(st.integers(0, len(world.running) + len(world.finished) - 1)))
            case "live":
                world.live()
            case "take":
                before = list(world.finished)
                version = world.trainer
                due = [group for group in world.running if world.deadline(group) == version]
                batch = world.take()
                if batch is None:
                    everybody_is_done = not world.running and len(before) >= world.n
                    assert not everybody_is_done, (
                        "the trainer waits, and nothing is left to wait for"
                    )
                else:
                    assert len(batch) == len(set(batch)) == world.n and set(batch) <= set(before)
                    assert all(
                        version - world.born[group] <= max_offpolicy_steps for group in batch
                    )
                    assert not due, "the trainer went on without a group that is due now"
                    # Earliest deadline first: whoever was left behind is due no earlier than whoever was taken.
                    left = [world.deadline(group) for group in before if group not in batch]
                    deadlines = [world.deadline(group) for group in batch]
                    assert deadlines == sorted(deadlines) and deadlines[-1] <= min(
                        left, default=deadlines[-1]
                    )
        world.check_slots()


@settings(max_examples=100)
@given(seed=st.integers(0, 2**32), lag=st.integers(0, 4), **SIZES)
def test_a_run_that_keeps_its_slots_full_always_ends(
    seed, lag, groups_per_step, max_offpolicy_steps
):
    """Groups finish in any order and some are dropped; the generators are ``lag`` versions behind at most."""
    random = Random(seed)
    world = World(groups_per_step, max_offpolicy_steps)
    world.fill()
    while world.trainer < 8:
        if world.generators < world.trainer - min(lag, max_offpolicy_steps):
            world.live()
            world.fill()
        if world.take() is not None:
            continue
        if not world.running:  # every slot is held by groups whose weights are not live yet
            assert world.generators < world.trainer
            world.live()
        elif random.random() < 0.2:
            world.drop(random.randrange(len(world.running)))
        else:
            world.finish(random.randrange(len(world.running)))
        world.fill()
    world.check_slots()


def admit_all(pacer: Pacer, groups: str, version: int) -> None:
    for group in groups.split():
        pacer.admit(group, version)


def finish_all(pacer: Pacer, groups: str) -> None:
    for group in groups.split():
        pacer.finish(group)


def test_batch_of_late_deadlines_waits_when_it_would_make_an_earlier_deadline_infeasible():
    pacer = Pacer(groups_per_step=2, max_offpolicy_steps=2)
    admit_all(pacer, "a b c d e f", version=0)
    finish_all(pacer, "a b")
    assert pacer.take_groups(0) == ["a", "b"]
    pacer.live(1)
    admit_all(pacer, "g h", version=1)
    finish_all(pacer, "g h")
    # g and h are due at 3. Taken now, at 1, they would leave c to f, due at 2, to a step that takes two.
    assert pacer.take_groups(1) is None
    # With c done, c and g would go now, and d, e and f remain for step 2.
    pacer.finish("c")
    assert pacer.take_groups(1) is None
    pacer.finish("d")
    assert pacer.take_groups(1) == ["c", "d"]


def test_dropping_a_group_can_be_what_the_trainer_waited_for():
    pacer = Pacer(groups_per_step=2, max_offpolicy_steps=2)
    admit_all(pacer, "a b c d e f", version=0)
    finish_all(pacer, "a b")
    assert pacer.take_groups(0) == ["a", "b"]
    pacer.live(1)
    admit_all(pacer, "g h", version=1)
    finish_all(pacer, "g h")
    pacer.drop("c")
    assert pacer.take_groups(1) is None
    pacer.drop("d")
    # e and f, due at 2, now fit the step at 2.
    assert pacer.take_groups(1) == ["g", "h"]


def test_late_deadlines_may_go_first_while_the_earlier_ones_still_fit():
    pacer = Pacer(groups_per_step=2, max_offpolicy_steps=2)
    admit_all(pacer, "a b c d e f", version=0)
    finish_all(pacer, "f e")
    # a to d are due at 2: the steps at 1 and 2 take all four.
    assert pacer.take_groups(0) == ["e", "f"]


def test_synchronous_pacing_waits_for_every_group_and_starts_none_before_their_weights_are_live():
    pacer = Pacer(groups_per_step=2, max_offpolicy_steps=0)
    admit_all(pacer, "a b", version=0)
    assert pacer.free_slots == 0
    pacer.finish("b")
    assert pacer.take_groups(0) is None
    pacer.finish("a")
    assert pacer.take_groups(0) == ["a", "b"]
    assert (pacer.free_slots, pacer.untrained) == (0, 0)
    pacer.live(1)
    assert pacer.free_slots == 2


def test_slots_come_back_when_the_weights_they_led_to_are_live_and_not_before():
    pacer = Pacer(groups_per_step=1, max_offpolicy_steps=1)
    admit_all(pacer, "a b", version=0)
    finish_all(pacer, "a b")
    assert pacer.take_groups(0) == ["a"] and pacer.free_slots == 0
    assert pacer.take_groups(1) == ["b"] and pacer.free_slots == 0
    pacer.live(1)
    assert pacer.free_slots == 1
    pacer.live(2)
    pacer.live(2)
    assert pacer.free_slots == 2


def test_no_group_is_admitted_without_a_slot_or_twice():
    pacer = Pacer(groups_per_step=1, max_offpolicy_steps=1)
    pacer.admit("a", 0)
    with pytest.raises(AssertionError):
        pacer.admit("a", 0)
    pacer.admit("b", 0)
    with pytest.raises(AssertionError):
        pacer.admit("c", 0)


def test_a_batch_dropped_whole_frees_its_slots_and_another_may_be_taken_at_the_same_version():
    pacer = Pacer(groups_per_step=1, max_offpolicy_steps=0)
    pacer.admit("a", 0)
    pacer.finish("a")
    assert pacer.take_groups(0) == ["a"]
    pacer.drop("a")
    assert pacer.free_slots == 1
    pacer.admit("b", 0)
    pacer.finish("b")
    assert pacer.take_groups(0) == ["b"]
