"""The rollout loop across a checkpoint: no example is skipped or served twice, every rollout is in one column."""

import asyncio
from collections import Counter
from random import Random

import pytest

from tests.fakes.loops import Loop, ids, resumed, saved
from tests.fakes.tasks import DatasetTask
from tests.fakes.waiting import iterations, settle
from torchtitan.experiments.rl.errors import RunError
from torchtitan.experiments.rl.loops.events import RunEvents
from torchtitan.experiments.rl.rollouts.filters import Filter, ZeroAdvantage
from torchtitan.experiments.rl.rollouts.types import RolloutStatus


async def test_finished_groups_are_trained_and_running_ones_run_again_with_their_ids(tmp_path):
    task = DatasetTask(100, held=True)
    loop = Loop(task, rollouts_per_step=4, max_offpolicy_steps=1, steps=3)
    loop.fill()
    await settle()
    task.released |= {0, 1, 3}
    await settle()
    batch = await loop.batch()
    assert ids(batch) == [0, 1]
    loop.trained(batch)
    loop.version = 1
    _, (settled,), _ = await loop.capture(lambda: None)
    settled.amend(costs={"judge/calls": 2.0}, credit_s=0.5)
    state, groups = await saved(loop, tmp_path)
    assert list(groups) == ["stub-3"]
    before = dict(task.examples)
    await loop.close()

    again = DatasetTask(100)
    loop = await resumed(again, state, groups, 1, steps=3)
    _, (settled,), _ = await loop.capture(lambda: None)
    assert settled.costs == {"judge/calls": 2.0} and settled.credit_s == 0.5
    assert ids(await loop.batch()) == [2, 3]
    # Group 3 had finished. 2 ran, 4 and 5 take the slots that the trained groups leave.
    assert again.started == [2, 4, 5]
    assert again.examples[2] == before[2] and not {again.examples[4], again.examples[5]} & set(
        before.values()
    )
    await loop.close()
    counts = loop.ledger.counts()
    assert (
        counts["stub/dispatched"] == 12 and counts["stub/trained"] == 4 and counts["stub/open"] == 0
    )


@pytest.mark.parametrize("seed", range(6))
async def test_two_epochs_with_five_crashes_serve_each_example_twice(tmp_path, seed):
    random, size, steps = Random(seed), 12, 12  # 12 steps of 2 groups are two epochs of 12 examples
    served: dict[int, str] = {}
    trained: list[int] = []
    outcome = {}
    state = groups = None
    version = 0
    crashes = sorted(random.sample(range(1, steps), 5))
    for crash in [*crashes, steps]:
        task = DatasetTask(size, held=True)
        if state is None:
            loop = Loop(task, rollouts_per_step=4, max_offpolicy_steps=2, steps=steps)
            loop.fill()
        else:
            loop = await resumed(
                task,
                state,
                groups,
                version,
                steps=steps,
                rollouts_per_step=4,
                max_offpolicy_steps=2,
            )
        while loop.version < crash:
            await settle()
            ready = [number for number in task.started if number not in task.released]
            task.released |= set(random.sample(ready, min(len(ready), random.randint(1, 3))))
            waiting = asyncio.ensure_future(loop.next_groups(loop.version))
            await iterations(40)
            if not waiting.done():
                waiting.cancel()
                await asyncio.wait([waiting])
                continue
            batch = waiting.result()
            loop.step_taken(batch)
            trained += ids(batch)
            if loop.version == crash:
                break
        for number, example in task.examples.items():
            assert served.setdefault(number, example) == example, (
                "a group that is run again has its example"
            )
        version = loop.version
        state, groups = await saved(loop, tmp_path)
        if crash < steps:  # what happens between the checkpoint and the crash is forgotten
            loop.fill()
            task.released |= set(range(99))
            await settle()
            loop.step_taken(await loop.batch())
        await loop.close()
        outcome = loop.ledger.counts()
    assert sorted(trained) == sorted(set(trained)) and len(trained) == 2 * steps
    assert set(Counter(served[number] for number in trained).values()) == {2}
    assert outcome["stub/trained"] == 4 * steps
    assert outcome["stub/dispatched"] == sum(
        n for key, n in outcome.items() if not key.endswith("/dispatched")
    )


async def test_rollouts_of_a_finished_group_that_ended_stay_where_they_ended(tmp_path):
    task = DatasetTask(100, lambda number: [RolloutStatus.ERROR, 0.0, 1.0], group_size=3)
    loop = Loop(task, rollouts_per_step=3, max_offpolicy_steps=0, steps=2)
    loop.fill()
    await settle()
    state, groups = await saved(loop, tmp_path)
    await loop.close()
    again = DatasetTask(100, lambda number: [RolloutStatus.ERROR, 0.0, 1.0], group_size=3)
    loop = await resumed(
        again, state, groups, 0, steps=2, rollouts_per_step=3, max_offpolicy_steps=0
    )
    batch = await loop.batch()
    assert again.started == [] and [rollout.rollout_id for rollout in batch.groups[0].rollouts] == [
        "stub-0/1",
        "stub-0/2",
    ]
    assert (
        batch.groups[0].data_sample
        is again.dataset[int(batch.groups[0].data_sample.sample_id.split()[1])]
    )
    loop.trained(batch)
    assert (
        loop.ledger.counts()["stub/failed/error"] == 1 and loop.ledger.counts()["stub/trained"] == 2
    )
    await loop.close()


async def test_groups_that_are_too_old_for_the_resumed_runs_bound_end_as_lost(tmp_path):
    task = DatasetTask(100)
    loop = Loop(task, rollouts_per_step=2, max_offpolicy_steps=3, steps=9)
    loop.fill()
    await settle()
    loop.step_taken(await loop.batch())
    await settle()
    state, groups = await saved(loop, tmp_path)
    await loop.close()
    again = DatasetTask(100)
    loop = await resumed(
        again, state, groups, 1, steps=9, rollouts_per_step=2, max_offpolicy_steps=0
    )
    # Three groups were sampled at version 0, and one at version 1.
    assert loop.ledger.counts()["stub/lost"] == 6 and ids(await loop.batch()) == [4]
    await loop.close()
    counts = loop.ledger.counts()
    assert (
        sum(n for key, n in counts.items() if key != "stub/dispatched") == counts["stub/dispatched"]
    )


async def test_a_group_without_an_example_yet_draws_it_after_the_checkpoint(tmp_path):
    task = DatasetTask(100, held=True)
    loop = Loop(task, rollouts_per_step=2, max_offpolicy_steps=1, steps=3)
    loop.fill()  # the groups are dispatched, and no coroutine has run yet
    state, groups = await saved(loop, tmp_path)
    assert [group.example for group in state.groups] == [None, None] and state.samplers["stub"][
        "cursor"
    ] == 0
    await settle()
    first = [task.examples[0], task.examples[1]]
    await loop.close()
    again = DatasetTask(100)
    loop = await resumed(
        again, state, groups, 0, steps=3, rollouts_per_step=2, max_offpolicy_steps=1
    )
    await loop.batch()
    assert [again.examples[0], again.examples[1]] == first
    await loop.close()


async def test_a_failure_of_what_rollouts_depend_on_leaves_their_groups_open(tmp_path):
    task = DatasetTask(100, lambda number: [RolloutStatus.ERROR, RolloutStatus.ERROR], held=True)
    loop = Loop(task, rollouts_per_step=2, max_offpolicy_steps=0, steps=3)
    loop.fill()
    await settle()
    loop.fail(RunError("a generator stopped"))
    task.released |= {0}
    await settle()
    state, groups = await saved(loop, tmp_path)
    assert [group.group_id for group in state.groups] == ["stub-0"] and not groups
    await loop.close()
    assert loop.ledger.counts()["stub/untrained"] == 2


async def test_groups_of_a_step_that_failed_are_taken_again_by_the_resumed_run(tmp_path):
    loop = Loop(DatasetTask(100), rollouts_per_step=4, max_offpolicy_steps=1, steps=3)
    loop.fill()
    assert ids(await loop.batch()) == [0, 1]  # and the trainer fails
    await settle()
    state, groups = await saved(loop, tmp_path)
    await loop.close()

    loop = await resumed(DatasetTask(100), state, groups, 0, steps=3)
    trained = []
    for _ in range(3):
        batch = await loop.batch()
        trained += ids(batch)
        loop.step_taken(batch)
    assert sorted(trained) == [0, 1, 2, 3, 4, 5]
    await loop.close()
    assert loop.ledger.counts() == {"stub/dispatched": 12, "stub/trained": 12, "stub/open": 0}


class Objects(RunEvents):
    """Raises in one event, once."""

    def __init__(self, event: str):
        self.event = event
        setattr(self, event, self.object_to)

    def object_to(self, *args, **options):
        delattr(self, self.event)
        raise RunError(f"an observer of {self.event}")


@pytest.mark.parametrize(
    "event", ["group_arrived", "group_scored", "group_kept", "group_dropped", "groups_taken"]
)
async def test_whatever_an_observer_raises_in_the_state_is_that_of_a_run_that_goes_on(
    tmp_path, event
):
    """Group 0 is filtered whole, 1 and 2 fill the first step."""

    def outcome(number):
        return [0.0, 0.0] if number == 0 else [0.0, 1.0]

    options = {"filters": [ZeroAdvantage.Config()], "rollouts_per_step": 4, "steps": 2}
    loop = Loop(DatasetTask(100, outcome), watchers=[Objects(event)], **options)
    loop.fill()
    with pytest.raises(RunError, match=f"an observer of {event}"):
        await loop.batch()
    state, groups = await saved(loop, tmp_path)
    await loop.close()

    loop = await resumed(DatasetTask(100, outcome), state, groups, 0, **options)
    trained = []
    for _ in range(2):
        batch = await loop.batch()
        trained += ids(batch)
        loop.step_taken(batch)
    assert sorted(trained) == [1, 2, 3, 4]
    await loop.close()
    counts = loop.ledger.counts()
    assert counts["stub/trained"] == 8 and counts["stub/filtered/pre/zero_advantage"] == 2
    assert counts["stub/dispatched"] == 10 and counts["stub/open"] == 0


class DropsFirst(Filter):
    """Drops the groups 0 and 1."""

    def matches(self, group):
        return [group.group_id in ("stub-0", "stub-1")] * len(group.rollouts)


async def test_an_observer_that_objects_to_an_emptied_step_leaves_none_of_its_groups_open(tmp_path):
    options = {"post_filters": [DropsFirst.Config()], "rollouts_per_step": 4, "steps": 1}
    loop = Loop(DatasetTask(100), watchers=[Objects("group_dropped")], **options)
    loop.fill()
    with pytest.raises(RunError, match="an observer of group_dropped"):
        await loop.batch()
    state, groups = await saved(loop, tmp_path)
    assert not {"stub-0", "stub-1"} & {group.group_id for group in state.groups}
    await loop.close()

    loop = await resumed(DatasetTask(100), state, groups, 0, **options)
    loop.step_taken(await loop.batch())
    await loop.close()
    counts = loop.ledger.counts()
    assert counts["stub/trained"] == 4 and counts["stub/filtered/post/drops_first"] == 4


async def test_rollouts_of_one_pick_have_one_example_in_the_resumed_run_too(tmp_path):
    """No coroutine has run, so the sampler has given none. One rollout of the pick has not started."""

    def singles():
        task = DatasetTask(100, lambda number: [1.0], group_size=4)
        task.needs_group = False
        return task

    options = {"rollouts_per_step": 3, "max_offpolicy_steps": 0}
    loop = Loop(singles(), steps=2, **options)
    loop.fill()
    state, groups = await saved(loop, tmp_path)
    assert [group.example for group in state.groups] == [None] * 3 and state.pick.groups_left == 1
    await loop.close()

    task = singles()
    loop = await resumed(task, state, groups, 0, steps=2, **options)
    loop.step_taken(await loop.batch())
    await loop.batch()
    await loop.close()
    examples = [task.examples[number] for number in range(6)]
    assert len({*examples[:4]}) == 1 and examples[4] == examples[5] != examples[0]


class First(Filter):
    """Matches the first rollout of each group, and fails on the group ``broken_on``."""

    broken_on = "stub-1"

    def matches(self, group):
        if group.group_id == self.broken_on:
            raise ValueError("no")
        return [rollout.index_in_group == 0 for rollout in group.rollouts]


@pytest.mark.parametrize("mode", ["enforce", "monitor"])
async def test_a_step_whose_filter_failed_is_taken_and_filtered_again_by_the_resumed_run(
    tmp_path, monkeypatch, mode
):
    """No rollout has ended in the failed step, and no match was counted: a match is counted once."""
    options = {"post_filters": [First.Config(mode=mode)], "steps": 1}
    loop = Loop(DatasetTask(100), **options)
    loop.fill()
    with pytest.raises(RunError, match="failed on group stub-1"):
        await loop.batch()
    assert loop.ledger.counts() == {"stub/dispatched": 4, "stub/open": 4}
    state, groups = await saved(loop, tmp_path)
    await loop.close()

    monkeypatch.setattr(First, "broken_on", "")
    loop = await resumed(DatasetTask(100), state, groups, 0, **options)
    batch = await loop.batch()
    kept = [rollout.rollout_id for group in batch.groups for rollout in group.rollouts]
    second = ["stub-0/1", "stub-1/1"]
    assert kept == (
        second if mode == "enforce" else ["stub-0/0", "stub-0/1", "stub-1/0", "stub-1/1"]
    )
    assert batch.filter_matches == {"post/first": 2}
    loop.step_taken(batch)
    await loop.close()
    counts = loop.ledger.counts()
    assert counts["stub/trained"] == len(kept)
    assert counts.get("stub/filtered/post/first", 0) == 4 - len(kept)


async def test_a_group_that_a_filter_failed_on_is_no_state_to_resume(tmp_path):
    class Broken(Filter):
        def matches(self, group):
            raise ValueError("no")

    loop = Loop(DatasetTask(100), filters=[Broken.Config()])
    loop.fill()
    await settle()
    with pytest.raises(RunError, match="failed while it settled"):
        await saved(loop, tmp_path)
    await loop.close()


async def test_a_group_that_could_not_be_put_into_the_buffer_is_no_state_to_resume(tmp_path):
    loop = Loop(DatasetTask(100))

    def oversized(samples):
        raise ValueError("no")

    loop._batcher.oversized = oversized
    loop.fill()
    await settle()
    with pytest.raises(RunError, match="failed while it settled"):
        await saved(loop, tmp_path)
    await loop.close()
    assert loop.ledger.counts()["stub/open"] == 0


async def test_a_checkpoint_without_the_rollouts_of_a_group_leaves_nothing_open(tmp_path):
    loop = Loop(DatasetTask(100))
    loop.fill()
    await settle()
    state, groups = await saved(loop, tmp_path)
    await loop.close()
    del groups["stub-2"]

    again = Loop(DatasetTask(100))
    with pytest.raises(RunError, match="lacks the rollouts of group stub-2"):
        await again.restore(state, groups, 0)
    await again.close()  # and not: the ledger does not balance
    assert again.ledger.counts() == {}
