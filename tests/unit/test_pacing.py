"""The pacer: no group is trained on too late, nobody waits for nothing, and every place comes back once.

``Machine`` is the proof: it has a count of its own of groups, versions and places, and makes any moves in any order.
"""

from copy import deepcopy
from dataclasses import dataclass
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
)

from torchtitan.experiments.rl.loops.pacing import Pacer

TASKS = st.lists(st.tuples(st.integers(1, 9), st.booleans()), min_size=1, max_size=3)
"""Group size of each task of a run, and True if a frozen model samples them."""


@dataclass(frozen=True)
class Group:
    """What a test knows of a group."""

    born: int
    """Version that the generators held when the group was admitted."""
    size: int
    frozen: bool


class Machine(RuleBasedStateMachine):
    """A run as the pacer sees it."""

    @initialize(rollouts_per_step=st.integers(1, 12), bound=st.integers(0, 4), tasks=TASKS)
    def begin(self, rollouts_per_step, bound, tasks):
        self.size, self.bound, self.tasks = rollouts_per_step, bound, tasks
        self.pacer = Pacer(rollouts_per_step=rollouts_per_step, max_offpolicy_steps=bound)
        self.trainer = self.generators = 0
        """Version that the trainer holds, and the one live in the generators."""
        self.groups: dict[str, Group] = {}
        self.running: list[str] = []
        self.finished: list[str] = []
        self.taken: dict[str, int] = {}
        """Groups that hold places after training, and the version they led to."""

    # Moves.

    @precondition(lambda self: self.pacer.free_places)
    @rule(data=st.data())
    def start(self, data):
        self.start_group(*data.draw(st.sampled_from(self.tasks)))

    def start_group(self, size, frozen):
        name = f"g{len(self.groups)}"
        self.pacer.admit(name, self.generators, rollouts=size, frozen=frozen)
        self.groups[name] = Group(born=self.generators, size=size, frozen=frozen)
        self.running.append(name)

    @precondition(lambda self: self.pacer.free_places)
    @rule(data=st.data())
    def fill(self, data):
        while self.pacer.free_places:
            self.start(data)

    @precondition(lambda self: self.running)
    @rule(data=st.data())
    def finish(self, data):
        count = data.draw(st.integers(1, len(self.running)))
        for name in data.draw(st.permutations(self.running))[:count]:
            self.finish_group(name)

    def finish_group(self, name):
        self.running.remove(name)
        self.pacer.finish(name)
        self.finished.append(name)

    @precondition(lambda self: self.running or self.finished)
    @rule(data=st.data())
    def drop(self, data):
        name = data.draw(st.sampled_from(self.running + self.finished))
        (self.running if name in self.running else self.finished).remove(name)
        self.pacer.drop(name)

    @rule(emptied=st.booleans())
    def step(self, emptied):
        """Take a step. If filters emptied it, its groups are dropped, and the trainer stays where it is."""
        batch = self.take()
        if batch is None:
            return
        if emptied:
            for name in batch:
                self.pacer.drop(name)
        else:
            self.trainer += 1
            self.taken |= dict.fromkeys(batch, self.trainer)

    def take(self):
        finished = list(self.finished)
        batch = self.pacer.take_groups(self.trainer)
        if batch is None:
            assert self.running or self.rollouts(finished) < self.size, (
                "the trainer waits, and nothing is left to wait for"
            )
            return None
        assert len(batch) == len(set(batch)) and set(batch) <= set(finished)
        # The step is full, and was not before its last group.
        assert self.rollouts(batch[:-1]) < self.size <= self.rollouts(batch)
        assert all(self.deadline(name) >= self.trainer for name in batch)
        self.finished = [name for name in finished if name not in batch]
        left = [*self.running, *self.finished]
        assert all(self.deadline(name) > self.trainer for name in left), "a group was left behind"
        # Of the policy's groups those with the earliest deadlines are taken.
        deadlines = [self.deadline(name) for name in batch if not self.groups[name].frozen]
        others = [self.deadline(name) for name in self.finished if not self.groups[name].frozen]
        assert deadlines == sorted(deadlines)
        assert not deadlines or not others or deadlines[-1] <= min(others)
        return batch

    @precondition(lambda self: self.generators < self.trainer)
    @rule()
    def live(self):
        self.generators += 1
        self.pacer.live(self.generators)
        self.taken = {
            name: version for name, version in self.taken.items() if version > self.generators
        }

    @rule()
    def resume(self):
        """Go on from a checkpoint: the generators hold the trainer's version; nothing is lost."""
        self.restore(self.pacer.state(self.trainer))

    @rule()
    def step_fails(self):
        """Go on from a checkpoint that was taken after a step had its groups and was not taken."""
        finished = list(self.finished)
        if self.take() is not None:
            self.finished = finished
            self.restore(self.pacer.state(self.trainer))

    def restore(self, state):
        names = [group.group_id for group in state]
        untaken = {*self.running, *self.finished}
        assert names == [name for name in self.groups if name in untaken]
        self.pacer = Pacer(rollouts_per_step=self.size, max_offpolicy_steps=self.bound)
        assert self.pacer.restore(state, self.trainer) == []
        self.generators, self.taken = self.trainer, {}

    # What holds after each of them.

    @invariant()
    def places_are_counted(self):
        if not hasattr(self, "pacer"):
            return
        untaken = self.rollouts([*self.running, *self.finished])
        held = untaken + self.rollouts(self.taken)
        capacity = (self.bound + 1) * self.size
        assert self.pacer.untaken_rollouts == untaken
        assert self.pacer.free_places == max(0, capacity - held)
        assert held < capacity + max(size for size, _ in self.tasks)

    @invariant()
    def nobody_waits_for_nothing(self):
        """Once what runs has finished, the step has its groups, or a group may start."""
        if not hasattr(self, "pacer"):
            return
        later = deepcopy(self.pacer)
        for name in self.running:
            later.finish(name)
        if self.rollouts([*self.running, *self.finished]) >= self.size:
            assert later.take_groups(self.trainer) is not None
        else:
            later.live(self.trainer)
            assert later.free_places

    def teardown(self):
        """Whatever was done before, the run gets to its end."""
        if not hasattr(self, "pacer"):
            return
        random, end = Random(len(self.groups)), self.trainer + self.bound + 2
        while self.trainer < end:
            while self.pacer.free_places:
                self.start_group(*random.choice(self.tasks))
            for name in random.sample(self.running, random.randint(0, len(self.running))):
                self.finish_group(name)
            if (batch := self.take()) is not None:
                self.trainer += 1
                self.taken |= dict.fromkeys(batch, self.trainer)
            elif self.generators < self.trainer:
                self.live()

    def rollouts(self, names):
        return sum(self.groups[name].size for name in names)

    def deadline(self, name):
        group = self.groups[name]
        return float("inf") if group.frozen else group.born + self.bound


TestPacer = Machine.TestCase
TestPacer.settings = settings(max_examples=200, stateful_step_count=60, deadline=None)


@settings(max_examples=100)
@given(
    seed=st.integers(0, 2**32),
    lag=st.integers(0, 4),
    bound=st.integers(0, 4),
    groups=st.integers(1, 4),
    size=st.integers(1, 9),
)
def test_groups_of_one_size_that_divides_a_step_fill_places_and_steps_exactly(
    seed, lag, bound, groups, size
):
    """They finish in any order, some are dropped, and the generators are ``lag`` versions behind at most."""
    random = Random(seed)
    pacer = Pacer(rollouts_per_step=groups * size, max_offpolicy_steps=bound)
    trainer = generators = started = 0
    running: list[str] = []

    def fill() -> None:
        nonlocal started
        while pacer.free_places:
            pacer.admit(f"g{started}", generators, rollouts=size)
            running.append(f"g{started}")
            started += 1

    fill()
    while trainer < 8:
        if (batch := pacer.take_groups(trainer)) is not None:
            assert len(batch) == groups
            trainer += 1
        elif running and random.random() < 0.2:
            pacer.drop(running.pop(random.randrange(len(running))))
        elif running:
            pacer.finish(running.pop(random.randrange(len(running))))
        if generators < trainer - min(lag, bound) or not running:
            generators = trainer
            pacer.live(generators)
        fill()
        assert pacer.free_places == 0 or generators < trainer


def admit_all(pacer: Pacer, groups: str, version: int) -> None:
    for group in groups.split():
        pacer.admit(group, version, rollouts=1)


def finish_all(pacer: Pacer, groups: str) -> None:
    for group in groups.split():
        pacer.finish(group)


def test_batch_of_late_deadlines_waits_when_it_would_make_an_earlier_deadline_infeasible():
    pacer = Pacer(rollouts_per_step=2, max_offpolicy_steps=2)
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
    pacer = Pacer(rollouts_per_step=2, max_offpolicy_steps=2)
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
    pacer = Pacer(rollouts_per_step=2, max_offpolicy_steps=2)
    admit_all(pacer, "a b c d e f", version=0)
    finish_all(pacer, "f e")
    # a to d are due at 2: the steps at 1 and 2 take all four.
    assert pacer.take_groups(0) == ["e", "f"]


def test_synchronous_pacing_waits_for_every_group_and_starts_none_before_their_weights_are_live():
    pacer = Pacer(rollouts_per_step=2, max_offpolicy_steps=0)
    admit_all(pacer, "a b", version=0)
    assert pacer.free_places == 0
    pacer.finish("b")
    assert pacer.take_groups(0) is None
    pacer.finish("a")
    assert pacer.take_groups(0) == ["a", "b"]
    assert (pacer.free_places, pacer.untaken_rollouts) == (0, 0)
    pacer.live(1)
    assert pacer.free_places == 2


def test_places_come_back_when_the_weights_they_led_to_are_live_and_not_before():
    pacer = Pacer(rollouts_per_step=1, max_offpolicy_steps=1)
    admit_all(pacer, "a b", version=0)
    finish_all(pacer, "a b")
    assert pacer.take_groups(0) == ["a"] and pacer.free_places == 0
    assert pacer.take_groups(1) == ["b"] and pacer.free_places == 0
    pacer.live(1)
    assert pacer.free_places == 1
    pacer.live(2)
    pacer.live(2)
    assert pacer.free_places == 2


def test_no_group_is_admitted_without_a_free_place_or_twice():
    pacer = Pacer(rollouts_per_step=1, max_offpolicy_steps=1)
    pacer.admit("a", 0, rollouts=1)
    with pytest.raises(AssertionError):
        pacer.admit("a", 0, rollouts=1)
    pacer.admit("b", 0, rollouts=1)
    with pytest.raises(AssertionError):
        pacer.admit("c", 0, rollouts=1)


def test_a_batch_dropped_whole_frees_its_places_and_another_may_be_taken_at_the_same_version():
    pacer = Pacer(rollouts_per_step=1, max_offpolicy_steps=0)
    pacer.admit("a", 0, rollouts=1)
    pacer.finish("a")
    assert pacer.take_groups(0) == ["a"]
    pacer.drop("a")
    assert pacer.free_places == 1
    pacer.admit("b", 0, rollouts=1)
    pacer.finish("b")
    assert pacer.take_groups(0) == ["b"]


# ---- groups that do not divide a step


def test_a_step_that_groups_do_not_divide_starts_and_takes_one_group_more():
    pacer = Pacer(rollouts_per_step=20, max_offpolicy_steps=0)
    for name in "abc":
        assert pacer.free_places
        pacer.admit(name, 0, rollouts=8)
    assert pacer.free_places == 0 and pacer.untaken_rollouts == 24
    finish_all(pacer, "a b")
    assert pacer.take_groups(0) is None
    pacer.finish("c")
    assert pacer.take_groups(0) == ["a", "b", "c"]


def test_a_group_that_is_dropped_frees_as_many_places_as_it_took_over_the_capacity():
    pacer = Pacer(rollouts_per_step=20, max_offpolicy_steps=0)
    for name in "abc":
        pacer.admit(name, 0, rollouts=8)
    pacer.drop("b")
    assert pacer.free_places == 4


def test_a_step_takes_no_group_beyond_the_one_that_fills_it():
    pacer = Pacer(rollouts_per_step=10, max_offpolicy_steps=1)
    for name, rollouts in (("a", 8), ("b", 1), ("c", 8), ("d", 1)):
        pacer.admit(name, 0, rollouts=rollouts)
    finish_all(pacer, "a b c d")
    # 8 and 1 are too few, and 17 are enough. The 1 that is left is due at version 1.
    assert pacer.take_groups(0) == ["a", "b", "c"]
    pacer.live(1)
    assert pacer.free_places == 19


def test_a_group_larger_than_a_step_is_a_step_by_itself():
    pacer = Pacer(rollouts_per_step=4, max_offpolicy_steps=1)
    pacer.admit("a", 0, rollouts=9)
    assert pacer.free_places == 0
    pacer.finish("a")
    assert pacer.take_groups(0) == ["a"]


def test_the_last_group_that_is_due_counts_as_begun_and_not_as_ended():
    pacer = Pacer(rollouts_per_step=10, max_offpolicy_steps=1)
    for name in "abc":
        pacer.admit(name, 0, rollouts=8)
    finish_all(pacer, "a b c")
    # 24 rollouts are due by version 1. Two steps take 16 and 8: the second begins before its tenth rollout.
    assert pacer.take_groups(0) == ["a", "b"]
    assert pacer.take_groups(1) is None, "8 rollouts do not fill a step"
    pacer.live(1)
    pacer.admit("d", 1, rollouts=8)
    pacer.finish("d")
    assert pacer.take_groups(1) == ["c", "d"]
