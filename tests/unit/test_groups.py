"""The buffer between rollouts and steps: its example, and groups that leave it."""

import doctest
from types import SimpleNamespace

import pytest

from tests.fakes.rollouts import rewarded_group
from tests.fakes.tasks import StubTask
from torchtitan.experiments.rl.loops import groups
from torchtitan.experiments.rl.loops.groups import Ending, GroupBuffer, Pick
from torchtitan.experiments.rl.loops.ledger import Ledger
from torchtitan.experiments.rl.loops.pacing import Pacer
from torchtitan.experiments.rl.rollouts.types import DataSample

EXAMPLE = DataSample(sample_id="0", env_input=None)


def sums() -> StubTask:
    return StubTask(lambda number: [0.0, 1.0], name="sums")


def scored(claimed):
    """The claimed group with the rewards 0 and 1."""
    return rewarded_group(EXAMPLE, 0.0, 1.0, group_id=claimed.group_id, task="sums")


def buffer_of(*, steps=3, bound=1, recorder=None) -> GroupBuffer:
    pacer = Pacer(rollouts_per_step=4, max_offpolicy_steps=bound)
    policy = SimpleNamespace(version=0)
    return GroupBuffer(pacer, Ledger(), policy, steps=steps, recorder=recorder)


def test_the_example_of_the_buffer_does_what_it_says():
    names = vars(groups) | {
        "sums": sums(),
        "policy": SimpleNamespace(version=0),
        "scored": scored,
    }
    (example,) = doctest.DocTestFinder(recurse=False).find(GroupBuffer, globs=names)
    printed = []
    result = doctest.DocTestRunner().run(example, out=printed.append)
    assert result == doctest.TestResults(failed=0, attempted=18), "".join(printed)


def test_no_group_gets_a_place_that_no_step_needs():
    buffer, pick = buffer_of(steps=1), Pick(task=sums(), groups_left=9)
    claimed = [buffer.claim(pick) for _ in range(3)]
    # 8 places are free. The only step takes 4 rollouts.
    assert [group and group.group_id for group in claimed] == ["sums-0", "sums-1", None]
    assert pick.groups_left == 7 and not buffer.has_place


@pytest.mark.parametrize("emptied", [1, 2])
def test_groups_of_a_step_that_filters_emptied_free_their_places_with_it_or_at_once(emptied):
    """If filters emptied all of them, the step takes others, which need places now."""
    buffer, pick = buffer_of(steps=1, bound=0), Pick(task=sums(), groups_left=9)
    for _ in range(2):
        claimed = buffer.claim(pick)
        buffer.settle(claimed, scored(claimed), {})
    taken = buffer.take(0)
    for group in taken[:emptied]:
        buffer.end(group, dict.fromkeys(sorted(group.rollout_ids), Ending("filtered/post/late")))
    assert buffer.drop_emptied(taken) == taken[:emptied]
    assert buffer.has_place == (emptied == 2)
    buffer.check()
    if emptied == 1:
        buffer.trained(["sums-1"])
        assert buffer.ledger.counts()["sums/trained"] == 2
    assert buffer.ledger.counts()["sums/open"] == 0 and list(buffer) == []


def test_each_scored_group_is_recorded_once_as_it_leaves():
    recorded = []
    recorder = SimpleNamespace(
        record=lambda group, outcomes, *, trained_step: recorded.append(
            (group.group_id, dict(outcomes), trained_step)
        )
    )
    buffer, pick = buffer_of(recorder=recorder), Pick(task=sums(), groups_left=9)
    first, second, third, _ = [buffer.claim(pick) for _ in range(4)]
    buffer.settle(first, scored(first), dict.fromkeys(["sums-0/0", "sums-0/1"], Ending("lost")))
    buffer.settle(second, scored(second), {"sums-1/1": Ending("oversized")})
    buffer.settle(third, scored(third), {})
    assert [group.group_id for group in buffer.take(0)] == ["sums-1", "sums-2"]
    buffer.trained(["sums-1"])
    buffer.close()  # the fourth group has no rollouts to record
    assert recorded == [
        ("sums-0", {"sums-0/0": "lost", "sums-0/1": "lost"}, None),
        ("sums-1", {"sums-1/1": "oversized", "sums-1/0": "trained"}, 1),
        ("sums-2", {"sums-2/0": "untrained", "sums-2/1": "untrained"}, None),
    ]
    counts = buffer.ledger.counts()
    assert counts["sums/untrained"] == 4 and counts["sums/open"] == 0
