"""Groups sampled from a frozen model: no deadline, nobody waits for them, and they neither starve nor make others late."""

from hypothesis import given, settings
from hypothesis import strategies as st

from torchtitan.experiments.rl.controller.pacing import Pacer


def test_a_frozen_group_may_be_trained_on_at_any_age():
    pacer = Pacer(groups_per_step=1, max_offpolicy_steps=1)
    pacer.admit("frozen", 0, frozen=True)
    for version in range(5):
        pacer.admit(f"live{version}", version)
        pacer.finish(f"live{version}")
        assert pacer.take_groups(version) == [f"live{version}"]
        pacer.live(version + 1)
    pacer.finish("frozen")
    assert pacer.take_groups(5) == ["frozen"]


def test_nobody_waits_for_a_frozen_group():
    pacer = Pacer(groups_per_step=1, max_offpolicy_steps=1)
    pacer.admit("frozen", 0, frozen=True)
    pacer.admit("live", 0)
    pacer.finish("live")
    assert pacer.take_groups(0) == ["live"]
    pacer.live(1)
    pacer.admit("next", 1)
    pacer.finish("next")
    # A group of the policy's, admitted at 0, would be due now.
    assert pacer.take_groups(1) == ["next"]


def test_a_finished_frozen_group_takes_its_turn_and_frees_its_slot():
    pacer = Pacer(groups_per_step=1, max_offpolicy_steps=2)
    pacer.admit("frozen", 0, frozen=True)
    pacer.finish("frozen")
    for name in ("a", "b"):
        pacer.admit(name, 0)
        pacer.finish(name)
    assert [pacer.take_groups(version) for version in range(3)] == [["frozen"], ["a"], ["b"]]


def test_a_frozen_group_lets_pass_whom_it_would_make_late():
    pacer = Pacer(groups_per_step=1, max_offpolicy_steps=2)
    pacer.admit("frozen", 0, frozen=True)
    for name in ("a", "b"):
        pacer.admit(name, 0)
    pacer.finish("a")
    assert pacer.take_groups(0) == ["a"]
    pacer.live(1)
    pacer.admit("c", 1)
    pacer.finish("c")
    assert pacer.take_groups(1) == ["c"]
    # Both would have their turn at 2, the frozen one came first, and only b is late after it.
    pacer.finish("frozen")
    pacer.finish("b")
    assert [pacer.take_groups(version) for version in (2, 3)] == [["b"], ["frozen"]]


@settings(max_examples=200, deadline=None)
@given(data=st.data(), groups_per_step=st.integers(1, 4), bound=st.integers(0, 4))
def test_the_bound_holds_and_the_run_never_stalls_whatever_is_frozen(data, groups_per_step, bound):
    pacer = Pacer(groups_per_step=groups_per_step, max_offpolicy_steps=bound)
    trainer = generators = 0
    born: dict[str, tuple[int, bool]] = {}
    running: list[str] = []
    for _ in range(data.draw(st.integers(1, 60))):
        while pacer.free_slots:
            name, frozen = f"g{len(born)}", data.draw(st.booleans())
            pacer.admit(name, generators, frozen=frozen)
            born[name] = (generators, frozen)
            running.append(name)
        for name in data.draw(st.permutations(running))[: data.draw(st.integers(0, len(running)))]:
            running.remove(name)
            pacer.finish(name)
        batch = pacer.take_groups(trainer)
        # All finished, and the generators up to date: there is nothing left to wait for.
        assert batch is not None or running or generators < trainer
        if batch is not None:
            for name in batch:
                version, frozen = born[name]
                assert frozen or trainer - version <= bound
            trainer += 1
        if generators < trainer and data.draw(st.booleans()):
            generators += 1
            pacer.live(generators)
