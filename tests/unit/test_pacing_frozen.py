"""Groups sampled from a frozen model: no deadline, and they neither starve nor make others late.

An asynchronous step does not wait for them. Nothing may run between two steps of a synchronous run.

That the bound holds and no run stalls, whatever is frozen, is proved in test_pacing.py.
"""

from torchtitan.experiments.rl.loops.pacing import Pacer


def test_a_frozen_group_may_be_trained_on_at_any_age():
    pacer = Pacer(rollouts_per_step=1, max_offpolicy_steps=1)
    pacer.admit("frozen", 0, rollouts=1, frozen=True)
    for version in range(5):
        pacer.admit(f"live{version}", version, rollouts=1)
        pacer.finish(f"live{version}")
        assert pacer.take_groups(version) == [f"live{version}"]
        pacer.live(version + 1)
    pacer.finish("frozen")
    assert pacer.take_groups(5) == ["frozen"]


def test_nobody_waits_for_a_frozen_group():
    pacer = Pacer(rollouts_per_step=1, max_offpolicy_steps=1)
    pacer.admit("frozen", 0, rollouts=1, frozen=True)
    pacer.admit("live", 0, rollouts=1)
    pacer.finish("live")
    assert pacer.take_groups(0) == ["live"]
    pacer.live(1)
    pacer.admit("next", 1, rollouts=1)
    pacer.finish("next")
    # A group of the policy's, admitted at 0, would be due now.
    assert pacer.take_groups(1) == ["next"]


def test_a_step_of_a_synchronous_run_waits_for_a_frozen_group_too():
    pacer = Pacer(rollouts_per_step=2, max_offpolicy_steps=0)
    pacer.admit("frozen", 0, rollouts=1, frozen=True)
    pacer.admit("live", 0, rollouts=2)  # one place was free
    pacer.finish("live")
    assert pacer.take_groups(0) is None
    pacer.finish("frozen")
    assert pacer.take_groups(0) == ["frozen", "live"]


def test_a_finished_frozen_group_takes_its_turn_and_frees_its_places():
    pacer = Pacer(rollouts_per_step=1, max_offpolicy_steps=2)
    pacer.admit("frozen", 0, rollouts=1, frozen=True)
    pacer.finish("frozen")
    for name in ("a", "b"):
        pacer.admit(name, 0, rollouts=1)
        pacer.finish(name)
    assert [pacer.take_groups(version) for version in range(3)] == [["frozen"], ["a"], ["b"]]


def test_a_frozen_group_lets_pass_whom_it_would_make_late():
    pacer = Pacer(rollouts_per_step=1, max_offpolicy_steps=2)
    pacer.admit("frozen", 0, rollouts=1, frozen=True)
    for name in ("a", "b"):
        pacer.admit(name, 0, rollouts=1)
    pacer.finish("a")
    assert pacer.take_groups(0) == ["a"]
    pacer.live(1)
    pacer.admit("c", 1, rollouts=1)
    pacer.finish("c")
    assert pacer.take_groups(1) == ["c"]
    # Both would have their turn at 2, the frozen one came first, and only b is late after it.
    pacer.finish("frozen")
    pacer.finish("b")
    assert [pacer.take_groups(version) for version in (2, 3)] == [["b"], ["frozen"]]
