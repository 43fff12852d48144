"""The rollout loop: every slot busy, every rollout in one column, and a trainer that waits only for what may still come."""

import asyncio
import contextlib
import threading
from dataclasses import dataclass

import pytest

from tests.fakes.filters import Odd
from tests.fakes.loops import Loop, ids, train_until
from tests.fakes.tasks import StubTask, number_of
from tests.fakes.waiting import LIMIT_S, settle, until
from torchtitan.experiments.rl.errors import RunError
from torchtitan.experiments.rl.loops import rollout_loop
from torchtitan.experiments.rl.loops.events import NothingLeftToLearn
from torchtitan.experiments.rl.loops.rollout_loop import RunStopped
from torchtitan.experiments.rl.rollouts.filters import Filter, ZeroAdvantage
from torchtitan.experiments.rl.rollouts.recorder import RolloutRecorder, read_rollouts
from torchtitan.experiments.rl.rollouts.types import RolloutStatus

# ---- the way through


async def test_run_trains_on_every_group_once_and_starts_no_more_than_it_needs():
    task = StubTask(lambda number: [0.0, 1.0])
    loop = Loop(task, steps=3)
    loop.fill()
    seen = []
    for _ in range(3):
        batch = await loop.batch()
        seen += ids(batch)
        loop.step_taken(batch)
    assert sorted(seen) == sorted(task.started) == [0, 1, 2, 3, 4, 5] and task.samples == 6
    assert sorted(task.observed) == [f"stub-{number}" for number in range(6)]
    await loop.close()
    assert loop.ledger.counts() == {"stub/dispatched": 12, "stub/trained": 12, "stub/open": 0}
    assert loop.pacer.free_places == 8


async def test_a_record_names_the_step_that_trained_on_the_rollout(tmp_path):
    """It was started one version or two before; a rollout that a filter drops has no step."""
    recorder = RolloutRecorder.Config().build(run_dir=tmp_path)
    task = StubTask(lambda number: [0.0, 1.0])
    loop = Loop(task, steps=4, recorder=recorder, post_filters=[Odd.Config()])
    loop.fill()
    trained = {}
    for step in (1, 2, 3, 4):
        batch = await loop.batch()
        trained |= {
            rollout.rollout_id: step for group in batch.groups for rollout in group.rollouts
        }
        loop.step_taken(batch)
    await loop.close()
    recorder.close()
    records = list(read_rollouts(tmp_path))
    assert {
        record.rollout.rollout_id: record.trained_step
        for record in records
        if record.outcome == "trained"
    } == trained
    assert {record.trained_step for record in records if record.outcome != "trained"} == {None}
    assert {
        record.trained_step - record.admitted_version for record in records if record.trained_step
    } == {1, 2}


async def test_a_group_that_something_else_cancelled_ends_the_run():
    class Cancelled(StubTask):
        async def run_group(self, *args, **options):
            raise asyncio.CancelledError

    loop = Loop(Cancelled(lambda number: [0.0, 1.0]))
    loop.fill()
    with pytest.raises(RunError, match="stub-0 was cancelled, and not by the run"):
        await loop.batch()
    await loop.close()


async def test_an_unexpected_error_of_a_coroutine_ends_the_run():
    async def failing() -> None:
        raise AssertionError("of the library")

    loop = Loop(StubTask(lambda number: [0.0, 1.0], held=True))
    loop._start_coroutine(failing(), "task mix")
    with pytest.raises(AssertionError, match="of the library"):
        await loop.batch()
    await loop.close()


async def test_every_free_slot_is_filled_at_once_and_again_when_weights_are_live():
    task = StubTask(lambda number: [0.0, 1.0], held=True)
    loop = Loop(task, steps=9)
    loop.fill()
    await settle()
    assert task.started == [0, 1, 2, 3]
    task.released = {0, 1}
    batch = await loop.batch()
    loop.trained(batch)
    await settle()
    assert task.started == [0, 1, 2, 3], "the weights of the step are not live yet"
    loop.policy.version = 1
    loop.live(1)
    await settle()
    assert task.started == [0, 1, 2, 3, 4, 5]
    await loop.close()


async def test_slow_group_holds_up_nobody_before_its_deadline():
    task = StubTask(lambda number: [0.0, 1.0], held=True)
    loop = Loop(task)
    loop.fill()
    task.released = {1, 3}
    assert ids(await loop.batch()) == [1, 3]
    await loop.close()


async def test_trainer_waits_for_a_group_that_is_due():
    task = StubTask(lambda number: [0.0, 1.0], held=True)
    loop = Loop(task)
    loop.fill()
    task.released = {1, 3}
    loop.step_taken(await loop.batch())
    # Groups 0 and 2 are of version 0, and this step consumes at 1: without them it must not go on.
    task.released |= {4, 5}
    waiting = asyncio.create_task(loop.batch())
    await settle()
    assert not waiting.done()
    task.released |= {0, 2}
    assert ids(await waiting) == [0, 2]
    await loop.close()


async def test_tasks_take_turns():
    tasks = [StubTask(lambda number: [0.0, 1.0], name=name) for name in ("a", "b")]
    loop = Loop(*tasks)
    loop.fill()
    await settle()
    assert tasks[0].started == [0, 2] and tasks[1].started == [1, 3]
    await loop.close()


# ---- what leaves on the way


async def test_finished_group_is_trained_on_though_some_of_its_rollouts_failed():
    task = StubTask(
        lambda number: [0.0, RolloutStatus.ERROR, 1.0, RolloutStatus.TIMEOUT], group_size=4
    )
    loop = Loop(task, rollouts_per_step=2, max_offpolicy_steps=0, steps=1)
    loop.fill()
    batch = await loop.batch()
    assert [rollout.index_in_group for rollout in batch.groups[0].rollouts] == [0, 2]
    loop.step_taken(batch)
    assert loop.ledger.counts() == {
        "stub/dispatched": 4,
        "stub/failed/error": 1,
        "stub/failed/timeout": 1,
        "stub/trained": 2,
        "stub/open": 0,
    }


async def test_filtered_rollouts_leave_by_name_and_the_rest_is_trained_on():
    loop = Loop(
        StubTask(lambda number: [0.0, 1.0]),
        filters=[Odd.Config()],
        rollouts_per_step=2,
        max_offpolicy_steps=0,
        steps=1,
    )
    loop.fill()
    batch = await loop.batch()
    assert [rollout.index_in_group for rollout in batch.groups[0].rollouts] == [0]
    assert batch.filter_matches == {"pre/odd": 1} and batch.dropped_groups == 0
    loop.step_taken(batch)
    assert (
        loop.ledger.counts()["stub/filtered/pre/odd"] == 1
        and loop.ledger.counts()["stub/trained"] == 1
    )


async def test_group_that_is_filtered_whole_gives_its_slot_to_another():
    # Groups 0 and 1 teach nothing.
    task = StubTask(lambda number: [0.0, 0.0] if number < 2 else [0.0, 1.0])
    loop = Loop(task, filters=[ZeroAdvantage.Config()], max_offpolicy_steps=0, steps=1)
    loop.fill()
    batch = await loop.batch()
    assert (
        ids(batch) == [2, 3]
        and batch.dropped_groups == 2
        and batch.filter_matches == {"pre/zero_advantage": 4}
    )
    loop.step_taken(batch)
    assert loop.ledger.counts() == {
        "stub/dispatched": 8,
        "stub/filtered/pre/zero_advantage": 4,
        "stub/trained": 4,
        "stub/open": 0,
    }
    assert loop.pacer.free_places == 4
    await loop.close()


async def test_counts_of_dropped_groups_and_matches_start_anew_with_each_batch():
    task = StubTask(lambda number: [0.0, 0.0] if number == 0 else [0.0, 1.0])
    loop = Loop(
        task, filters=[ZeroAdvantage.Config()], rollouts_per_step=2, max_offpolicy_steps=0, steps=2
    )
    loop.fill()
    batch = await loop.batch()
    assert (batch.dropped_groups, batch.filter_matches["pre/zero_advantage"]) == (1, 2)
    loop.step_taken(batch)
    batch = await loop.batch()
    assert (batch.dropped_groups, batch.filter_matches["pre/zero_advantage"]) == (0, 0)
    await loop.close()


async def test_group_too_small_is_dropped_whole_and_its_slot_freed():
    task = StubTask(
        lambda number: "1 of 2 rollouts scored, 2 needed" if number == 0 else [0.0, 1.0]
    )
    loop = Loop(task, rollouts_per_step=2, max_offpolicy_steps=0, steps=1)
    loop.fill()
    loop.step_taken(await loop.batch())
    assert (
        loop.ledger.counts()["stub/failed/group_too_small"] == 2
        and loop.ledger.counts()["stub/trained"] == 2
    )


async def test_rollout_longer_than_a_row_is_left_out_and_counted():
    loop = Loop(
        StubTask(lambda number: [0.0, "long"]), rollouts_per_step=2, max_offpolicy_steps=0, steps=1
    )
    loop.fill()
    batch = await loop.batch()
    assert [rollout.index_in_group for rollout in batch.groups[0].rollouts] == [0]
    loop.step_taken(batch)
    assert loop.ledger.counts()["stub/oversized"] == 1


async def test_while_filters_look_at_the_last_step_no_group_starts_that_no_step_needs():
    class Slow(Filter):
        entered, let_go = threading.Event(), threading.Event()

        def matches(self, group):
            self.entered.set()
            assert self.let_go.wait(LIMIT_S)
            return [False] * len(group.scored)

    task = StubTask(lambda number: [0.0, 1.0])
    loop = Loop(task, post_filters=[Slow.Config()], rollouts_per_step=2, steps=1)
    loop.fill()
    step = asyncio.create_task(loop.batch())
    assert await asyncio.to_thread(Slow.entered.wait, LIMIT_S)
    loop.fill()  # as when a group settles
    Slow.let_go.set()
    loop.step_taken(await step)
    await loop.close()
    assert loop.ledger.counts() == {"stub/dispatched": 2, "stub/trained": 2, "stub/open": 0}


async def test_dropped_groups_of_the_last_step_are_replaced_so_that_it_is_whole():
    # Nothing but the fourth group of each step is any good, and the run needs just four.
    task = StubTask(lambda number: [0.0, 1.0] if number % 4 == 3 else [0.0, 0.0])
    loop = Loop(
        task, filters=[ZeroAdvantage.Config()], rollouts_per_step=4, max_offpolicy_steps=1, steps=2
    )
    loop.fill()
    for _ in range(2):
        loop.step_taken(await loop.batch())
    await loop.close()
    counts = loop.ledger.counts()
    assert counts["stub/trained"] == 8 and counts["stub/open"] == 0
    assert counts["stub/dispatched"] == sum(
        n for key, n in counts.items() if key != "stub/dispatched"
    )


# ---- how it ends


async def test_run_that_keeps_nothing_ends_with_the_causes():
    outcomes = [[0.0, 0.0], [RolloutStatus.ERROR, RolloutStatus.TIMEOUT], ["long", "long"]]
    loop = Loop(
        StubTask(lambda number: outcomes[number % 3]), filters=[ZeroAdvantage.Config()], max_drops=6
    )
    loop.fill()
    with pytest.raises(RunError, match="6 groups in a row gave nothing to train on") as failure:
        await loop.batch()
    for cause in (
        "4 filtered/pre/zero_advantage",
        "2 failed/error",
        "2 failed/timeout",
        "4 oversized",
        "rewards 0 in 50%, 1 in 50%",
    ):
        assert cause in str(failure.value)
    await loop.close()
    assert loop.ledger.counts()["stub/open"] == 0


async def test_run_whose_every_reward_ties_ends_and_says_so_though_nothing_is_filtered():
    loop = Loop(StubTask(lambda number: [0.25, 0.25]), max_drops=4, steps=100)

    async def train():
        loop.fill()
        while True:
            loop.step_taken(await loop.batch())

    # The stub's advantage is its reward; here they are those of rewards that tie.
    loop._tasks["stub"].rollout = lambda *args: with_advantage(
        StubTask.rollout(loop._tasks["stub"], *args), 0.0
    )
    with pytest.raises(
        RunError,
        match=r"none of the first 4 groups teaches anything: .* same reward \(0.25 in 100%\)",
    ):
        await train()
    await loop.close()


async def test_ties_after_a_group_that_taught_something_are_what_success_looks_like():
    task = StubTask(lambda number: [0.0, 1.0] if number == 0 else [0.0, 0.0])
    loop = Loop(task, rollouts_per_step=2, steps=20, max_drops=4)
    loop.fill()
    for _ in range(20):
        loop.step_taken(await loop.batch())
    await loop.close()
    assert loop.ledger.counts()["stub/trained"] == 40


def with_advantage(rollout, value):
    rollout.assign_advantages(value)
    return rollout


class Late(Filter):
    """Matches every rollout of the groups it is told, when it is asked the second time: after it passed the first slot."""

    @dataclass(kw_only=True, slots=True)
    class Config(Filter.Config):
        groups: tuple[int, ...] = ()

    def matches(self, group):
        return [int(group.group_id.rsplit("-", 1)[1]) in self.config.groups] * len(group.scored)


async def test_second_slot_makes_the_batch_smaller_and_refills_nothing():
    task = StubTask(lambda number: [0.0, 1.0])
    loop = Loop(
        task, post_filters=[Late.Config(groups=(1,)), Odd.Config()], max_offpolicy_steps=0, steps=2
    )
    loop.fill()
    batch = await loop.batch()
    assert ids(batch) == [0] and [
        rollout.index_in_group for rollout in batch.groups[0].rollouts
    ] == [0]
    assert batch.dropped_groups == 1 and batch.filter_matches == {"post/late": 2, "post/odd": 2}
    assert [[rollout.index_in_group for rollout in group.rollouts] for group in batch.sampled] == [
        [0, 1],
        [0, 1],
    ]
    tokens = [[rollout.completion_tokens for rollout in group.rollouts] for group in batch.sampled]
    assert batch.filter_tokens == {
        "post/late": sum(tokens[1]),
        "post/odd": tokens[0][1] + tokens[1][1],
    }
    loop.step_taken(batch)
    assert loop.ledger.counts() == {
        "stub/dispatched": 8,
        "stub/filtered/post/odd": 1,
        "stub/filtered/post/late": 2,
        "stub/trained": 1,
        "stub/open": 4,
    }
    assert loop.pacer.free_places == 0
    await loop.close()


async def test_batch_that_the_second_slot_empties_is_replaced():
    task = StubTask(lambda number: [0.0, 1.0])
    loop = Loop(task, post_filters=[Late.Config(groups=(0, 1))], max_offpolicy_steps=0, steps=1)
    loop.fill()
    batch = await loop.batch()
    assert ids(batch) == [2, 3] and batch.dropped_groups == 2
    loop.step_taken(batch)
    assert loop.pacer.free_places == 4 and loop.ledger.counts()["stub/filtered/post/late"] == 4
    await loop.close()


async def test_second_slot_that_empties_every_batch_ends_the_run_with_its_name():
    task = StubTask(lambda number: [0.0, 1.0])
    loop = Loop(task, post_filters=[Late.Config(groups=tuple(range(100)))], max_drops=6)
    loop.fill()
    with pytest.raises(
        RunError,
        match="6 groups in a row gave nothing to train on .rollouts: 12 filtered/post/late",
    ):
        await loop.batch()
    await loop.close()
    assert loop.ledger.counts()["stub/open"] == 0


async def test_one_group_kept_starts_the_count_of_drops_anew():
    task = StubTask(lambda number: [0.0, 1.0] if number % 5 == 4 else [0.0, 0.0])
    loop = Loop(
        task,
        filters=[ZeroAdvantage.Config()],
        rollouts_per_step=2,
        max_offpolicy_steps=0,
        steps=3,
        max_drops=5,
    )
    loop.fill()
    for _ in range(3):
        loop.step_taken(await loop.batch())
    assert task.started == list(range(15))


async def test_failure_in_our_own_code_reaches_the_trainer_and_the_ledger_still_balances():
    loop = Loop(StubTask(lambda number: KeyError("surprise") if number == 1 else [0.0, 1.0]))
    loop.fill()
    await settle()
    with pytest.raises(KeyError, match="surprise"):
        await loop.batch()
    await loop.close()
    assert loop.ledger.counts() == {"stub/dispatched": 8, "stub/untrained": 8, "stub/open": 0}


async def test_broken_filter_ends_the_run_and_the_ledger_still_balances():
    class Broken(Filter):
        def matches(self, group):
            raise ValueError("no")

    loop = Loop(StubTask(lambda number: [RolloutStatus.ERROR, 1.0]), filters=[Broken.Config()])
    loop.fill()
    await settle()
    with pytest.raises(RunError, match="filter broken failed"):
        await loop.batch()
    await loop.close()
    # A group settles whole or not at all.
    assert loop.ledger.counts() == {"stub/dispatched": 8, "stub/untrained": 8, "stub/open": 0}


async def test_failure_from_outside_wakes_a_trainer_that_waits():
    loop = Loop(StubTask(lambda number: [0.0, 1.0], held=True))
    loop.fill()
    waiting = asyncio.create_task(loop.batch())
    await settle()
    loop.fail(RunError("a generator stopped"))
    with pytest.raises(RunError, match="a generator stopped"):
        await waiting
    await loop.close()


async def test_stop_wakes_the_trainer_and_starts_nothing_more():
    task = StubTask(lambda number: [0.0, 1.0], held=True)
    loop = Loop(task)
    loop.fill()
    waiting = asyncio.create_task(loop.batch())
    await settle()
    loop.stop()
    with pytest.raises(RunStopped):
        await waiting
    loop.live(1)
    await settle()
    assert task.started == [0, 1, 2, 3]
    await loop.close()


async def test_close_cancels_what_runs_and_counts_what_was_not_used():
    task = StubTask(lambda number: [0.0, 1.0, RolloutStatus.ERROR], group_size=3, held=True)
    loop = Loop(task, rollouts_per_step=6)
    loop.fill()
    task.released = {0}
    await settle()
    await loop.close()
    assert task.cancelled == [1, 2, 3]
    assert loop.ledger.counts() == {
        "stub/dispatched": 12,
        "stub/failed/error": 1,
        "stub/untrained": 11,
        "stub/open": 0,
    }


class Stubborn(StubTask):
    """Task whose groups ignore their cancellation until the test releases them."""

    async def run_group(self, sample, policy, *, group_id, seed, **single):
        while number_of(group_id) not in self.released:
            with contextlib.suppress(asyncio.CancelledError):
                await asyncio.sleep(0)
        return await super().run_group(sample, policy, group_id=group_id, seed=seed, **single)


async def test_a_close_that_is_cancelled_leaves_no_rollout_open():
    task = Stubborn(lambda number: [0.0, 1.0])
    loop = Loop(task)
    loop.fill()
    await settle()
    closing = asyncio.create_task(loop.close())
    await settle()
    closing.cancel()
    await asyncio.wait([closing])
    task.released |= set(range(9))
    await settle()
    assert closing.cancelled()
    assert loop.ledger.counts() == {
        "stub/dispatched": 8,
        "stub/untrained": 8,
        "stub/open": 0,
    }


async def test_a_group_that_ends_after_the_close_gave_up_on_it_changes_nothing(monkeypatch, caplog):
    monkeypatch.setattr(rollout_loop, "CANCEL_S", 0.01)
    task = Stubborn(lambda number: [0.0, 1.0])
    loop = Loop(task)
    loop.fill()
    await settle()
    await loop.close()
    closed = loop.ledger.counts()
    assert closed["stub/untrained"] == 8 and task.observed == []
    task.released |= set(range(9))
    await until(lambda: not loop._running)
    assert [record.getMessage() for record in caplog.records] == [
        "4 groups ignored their cancellation and were abandoned"
    ]
    assert loop.ledger.counts() == closed and task.observed == [] and not list(loop._buffer)


async def test_one_filter_in_both_slots_is_counted_in_each_by_its_slot():
    # The first slot only counts; the second drops.
    loop = Loop(
        StubTask(lambda number: [0.0, 1.0]),
        filters=[Odd.Config(mode="monitor")],
        post_filters=[Odd.Config()],
        rollouts_per_step=2,
        max_offpolicy_steps=0,
        steps=1,
    )
    loop.fill()
    batch = await loop.batch()
    assert batch.filter_matches == {"pre/odd": 1, "post/odd": 1}
    loop.step_taken(batch)
    counts = loop.ledger.counts()
    assert (
        counts["stub/filtered/post/odd"] == 1
        and counts["stub/trained"] == 1
        and "stub/filtered/pre/odd" not in counts
    )


# ---- mastered tasks, with the zero-advantage filter in a slot


@pytest.mark.parametrize("slot", ["filters", "post_filters"])
async def test_run_whose_only_task_is_mastered_is_complete(slot):
    # Advantages are the rewards: groups of the first ten have a signal, at a mean of -0.5; then all tie at 0.
    task = StubTask(lambda number: [-1.0, 0.0] if number < 10 else [0.0, 0.0])
    loop = Loop(
        task, rollouts_per_step=2, steps=1000, max_drops=5, **{slot: [ZeroAdvantage.Config()]}
    )
    said = await train_until(loop, NothingLeftToLearn)
    rewards = "stub at reward 0, after groups with a learning signal at -0.5"
    assert (
        said
        == f"nothing left to learn: in the last 5 groups of each task all rewards tie ({rewards})"
    )
    assert loop.ledger.counts()["stub/trained"] == 20


async def test_ties_by_rounding_end_a_run_as_ties_do():
    """The advantages of a StubTask are its rewards."""
    tie = [0.1 + 0.2 - 0.3, 0.0]
    loop = Loop(
        StubTask(lambda number: tie),
        rollouts_per_step=2,
        filters=[ZeroAdvantage.Config()],
        max_drops=5,
    )
    said = await train_until(loop, RunError)
    assert said.startswith("none of the first 5 groups teaches anything")


async def test_mastered_task_beside_one_that_learns_ends_nothing():
    mastered = StubTask(lambda number: [-1.0, 0.0] if number < 4 else [0.0, 0.0])
    learns = StubTask(lambda number: [0.0, 1.0], name="other", held=True)
    loop = Loop(
        mastered,
        learns,
        rollouts_per_step=2,
        steps=1000,
        max_drops=5,
        filters=[ZeroAdvantage.Config()],
    )
    loop.fill()
    trained = 0
    while trained < 6:
        for _ in range(100):  # the other task's groups take long: meanwhile many ties are dropped
            await settle()
        learns.released = set(learns.started)
        batch = await loop.batch()
        trained += len(batch.groups)
        loop.step_taken(batch)
    await loop.close()
    assert loop.ledger.counts()["other/trained"] >= 6


async def test_mastered_task_beside_one_that_fails_ends_the_run_with_that_cause():
    mastered = StubTask(lambda number: [-1.0, 0.0] if number < 4 else [0.0, 0.0])
    fails = StubTask(lambda number: [RolloutStatus.ERROR, RolloutStatus.ERROR], name="other")
    loop = Loop(
        mastered,
        fails,
        rollouts_per_step=2,
        steps=1000,
        max_drops=10,
        filters=[ZeroAdvantage.Config()],
    )
    said = await train_until(loop, RunError)
    assert "groups in a row gave nothing to train on" in said and "failed/error" in said


async def test_few_failures_among_the_ties_of_a_mastered_task_are_no_stall():
    def outcome(number):
        if number < 4:
            return [-1.0, 0.0]
        return [RolloutStatus.ERROR, RolloutStatus.ERROR] if number % 4 == 0 else [0.0, 0.0]

    loop = Loop(
        StubTask(outcome),
        rollouts_per_step=2,
        steps=1000,
        max_drops=8,
        filters=[ZeroAdvantage.Config()],
    )
    assert (await train_until(loop, NothingLeftToLearn)).startswith("nothing left to learn")
