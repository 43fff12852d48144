"""Rollouts that are not compared: each is scored and trained on as it ends, and models see only what the filters keep."""

import pytest

from tests.fakes.contexts import context_of
from tests.fakes.filters import Odd
from tests.fakes.loops import Loop, ids, resumed, saved
from tests.fakes.policy import TEACHER, Scorer
from tests.fakes.rollouts import EXAMPLE, rewarded_group
from tests.fakes.tasks import DatasetTask, StubTask, TalkTask
from tests.fakes.waiting import settle
from torchtitan.experiments.rl.algorithms import GRPO, OPD, OPSD, SFT, MaxRL
from torchtitan.experiments.rl.controller import signals as session
from torchtitan.experiments.rl.errors import RunError
from torchtitan.experiments.rl.loops.pacing import Pacer
from torchtitan.experiments.rl.process.actor import cause_in
from torchtitan.experiments.rl.rollouts.filters import Filter, Truncated, ZeroAdvantage
from torchtitan.experiments.rl.rollouts.policy import SamplingConfig
from torchtitan.experiments.rl.rollouts.types import DataSample, RolloutStatus
from torchtitan.experiments.rl.rubrics.rubric import RewardFn, Rubric
from torchtitan.experiments.rl.watch.alarms import StallDetectors


def free(outcome=lambda number: [1.0], *, kind=StubTask, size=4, **options):
    """A task whose rollouts are groups of their own, ``size`` of them of one example."""
    task = kind(outcome=outcome, group_size=size, **options)
    task.needs_group = False
    return task


# ---- pacing


def test_a_resumed_run_that_lost_rollouts_fills_its_places_up():
    state = Pacer(rollouts_per_step=4, max_offpolicy_steps=0)
    for number in range(4):
        state.admit(f"g{number}", 0, rollouts=1)
    pacer = Pacer(rollouts_per_step=4, max_offpolicy_steps=0)
    assert pacer.restore(state.state(0)[:3], 0) == []
    assert pacer.free_places == 1
    pacer.admit("new", 0, rollouts=1)
    for group in ("g0", "g1", "g2", "new"):
        pacer.finish(group)
    assert pacer.take_groups(0) == ["g0", "g1", "g2", "new"]


# ---- the loop


async def test_a_step_takes_the_rollouts_that_have_ended_of_whatever_example():
    task = free(held=True)
    loop = Loop(task, rollouts_per_step=4, max_offpolicy_steps=1, steps=4)
    loop.fill()
    await settle()
    assert sorted(task.started) == list(range(8)) and task.samples == 2, (
        "four rollouts of each example"
    )
    task.released = {1, 2, 6, 7}
    batch = await loop.batch()
    assert ids(batch) == [1, 2, 6, 7] and {len(group.rollouts) for group in batch.groups} == {1}
    loop.step_taken(batch)
    task.released |= set(range(99))
    second = await loop.batch()
    assert ids(second) == [0, 3, 4, 5], "the slow ones, before they are too old"
    await loop.close()
    assert loop.ledger.counts() == {
        "stub/dispatched": 12,
        "stub/trained": 4,
        "stub/untrained": 8,
        "stub/open": 0,
    }


async def test_the_place_of_a_dropped_rollout_is_free_at_once_and_each_step_gets_its_rollouts():
    task = free(
        lambda number: [RolloutStatus.ERROR] if number in (0, 2) else [1.0], size=2, held=True
    )
    loop = Loop(task, rollouts_per_step=4, max_offpolicy_steps=1, steps=6)
    loop.fill()
    task.released = {0, 2}
    await settle()
    assert sorted(task.started) == list(range(10)) and task.samples == 5
    task.released |= set(range(99))
    for _ in range(6):
        batch = await loop.batch()
        assert len(batch.groups) == 4
        loop.step_taken(batch)
    await loop.close()
    assert loop.ledger.counts()["stub/trained"] == 24


async def test_a_pick_starts_its_rollouts_as_places_free_up_and_all_have_one_example():
    """Else a task would get fewer rollouts than its weight says wherever a pick does not fit."""
    task = free(kind=lambda **given: DatasetTask(100, **given), size=4)
    other = StubTask(lambda number: [0.0, 1.0, 0.0, 1.0], name="other", group_size=4)
    loop = Loop(task, other, rollouts_per_step=6, max_offpolicy_steps=0, steps=8)
    loop.fill()
    for _ in range(8):
        loop.step_taken(await loop.batch())
    await loop.close()
    counts = loop.ledger.counts()
    # Each step of 6 is 4 and 4, or 2, 4 and a beginning: the mix picks both tasks equally often.
    assert abs(counts["stub/trained"] - counts["other/trained"]) <= 4
    examples = list(dict(sorted(task.examples.items())).values())
    whole = len(examples) // 4 * 4
    for start in range(0, whole, 4):
        assert len(set(examples[start : start + 4])) == 1
    assert len(set(examples[:whole])) == whole // 4


async def test_a_resumed_run_goes_on_with_the_rollouts_that_a_pick_has_left(tmp_path):
    def task():
        return free(kind=lambda **given: DatasetTask(100, **given), size=4)

    sizes = dict(rollouts_per_step=6, max_offpolicy_steps=0)
    first = task()
    loop = Loop(first, steps=3, **sizes)
    loop.fill()
    for step in range(3):
        batch = await loop.batch()
        loop.trained(batch)
        loop.version = loop.policy.version = step + 1
        loop.live(step + 1, fill=False)
        if step == 0:
            state, groups = await saved(loop, tmp_path)
        loop.fill()
    await loop.close()
    assert state.pick is not None and state.pick.groups_left == 2 and state.groups == []

    again = task()
    loop = await resumed(again, state, groups, 1, steps=3, **sizes)
    for _ in range(2):
        loop.step_taken(await loop.batch())
    await loop.close()
    # Rollouts 4 and 5 are of the example of 6 and 7, which start after the checkpoint.
    assert first.examples[5] == first.examples[6] != first.examples[8]
    assert again.examples == {number: first.examples[number] for number in range(6, 18)}


async def test_places_of_an_example_of_which_all_rollouts_are_dropped_are_free():
    task = free(lambda number: [RolloutStatus.ERROR] if number < 2 else [1.0], size=2)
    loop = Loop(task, rollouts_per_step=2, max_offpolicy_steps=0, steps=1)
    loop.fill()
    assert ids(await loop.batch()) == [2, 3]
    await loop.close()


async def test_dropped_rollouts_are_replaced_by_those_of_another_example():
    task = free(lambda number: [RolloutStatus.ERROR] if number in (1, 2) else [1.0])
    loop = Loop(task, rollouts_per_step=4, max_offpolicy_steps=0, steps=1)
    loop.fill()
    batch = await loop.batch()
    assert sorted(ids(batch)) == [0, 3, 4, 5] and task.samples == 2
    loop.step_taken(batch)
    assert loop.ledger.counts() == {
        "stub/dispatched": 6,
        "stub/failed/error": 2,
        "stub/trained": 4,
        "stub/open": 0,
    }
    assert loop.pacer.free_places == 4


async def test_places_of_rollouts_that_are_all_dropped_are_free_for_another_task():
    failing = free(lambda number: [RolloutStatus.ERROR], name="failing")
    loop = Loop(
        failing,
        StubTask(lambda number: [0.0, 1.0], name="good"),
        rollouts_per_step=2,
        max_offpolicy_steps=0,
        steps=3,
    )
    loop.fill()
    for _ in range(3):
        loop.step_taken(await loop.batch())
    await loop.close()
    counts = loop.ledger.counts()
    assert (
        counts["good/trained"] == 6
        and counts["failing/failed/error"] == counts["failing/dispatched"] <= 4 * 4
    )


def test_a_rollout_of_its_own_counts_as_its_share_of_a_group_towards_a_stall():
    detectors = StallDetectors(4, {"free": 8})
    group = rewarded_group(EXAMPLE, 0.5, task="free", group_id="free-0")
    for _ in range(31):
        detectors.group_dropped(["failed/error"], group, signal=False, taken=False)
        detectors.group_scored(group, signal=False)
    with pytest.raises(
        RunError, match="^4 groups in a row gave nothing to train on .rollouts: 32 failed/error; "
    ):
        detectors.group_dropped(["failed/error"], group, signal=False, taken=False)
    with pytest.raises(RunError, match="^none of the first 4 groups teaches anything"):
        detectors.group_scored(group, signal=False)


def test_a_run_without_a_signal_ends_with_one_reply_its_row_its_reward_and_the_share_that_was_cut_off():
    detectors = StallDetectors(4, {"free": 1})
    group = rewarded_group(EXAMPLE, 0.5, 0.5, task="free", group_id="free-0")
    group.data_sample = DataSample(sample_id="17", env_input={"question": "6 * 7?", "answer": 42})
    first, second = group.rollouts
    first.answer = "it is\n42"
    second.status = RolloutStatus.TRUNCATED_LENGTH
    for _ in range(3):
        detectors.group_scored(group, signal=False)
    with pytest.raises(RunError) as error:
        detectors.group_scored(group, signal=False)
    text = str(error.value)
    assert (
        "; 50% of the rollouts were cut off by a limit; " in text and "look at the rubric" in text
    )
    assert (
        "says 'it is 42' to example 17 ({'question': '6 * 7?', 'answer': 42}) and earns 0.5;"
        in text
    )


def test_an_error_of_the_librarys_own_keeps_its_cure_whatever_the_model_said():
    detectors = StallDetectors(1, {"free": 1})
    group = rewarded_group(EXAMPLE, 0.5, 0.5, task="free", group_id="free-0")
    group.data_sample = DataSample(sample_id="17", env_input={"question": "q" * 1000})
    group.rollouts[0].answer = "a" * 1000
    with pytest.raises(RunError) as error:
        detectors.group_scored(group, signal=False)
    reported = RunError(cause_in(error.value))  # as the controller's endpoint raises it
    assert session.cause(reported).endswith(
        "too hard or too easy for this model (max_drops_in_a_row sets how many groups are waited for)"
    )


def test_where_most_rollouts_were_cut_off_the_error_blames_the_limits_and_not_the_rubric():
    detectors = StallDetectors(1, {"free": 1})
    group = rewarded_group(EXAMPLE, 0.5, 0.5, task="free", group_id="free-0")
    for rollout in group.rollouts:
        rollout.status = RolloutStatus.TRUNCATED_LENGTH
    with pytest.raises(
        RunError, match="; 100% of the rollouts were cut off .* raise sampling.max_tokens"
    ) as error:
        detectors.group_scored(group, signal=False)
    assert "look at the rubric" not in str(error.value)


async def test_tasks_with_and_without_a_barrier_share_a_run():
    compared = StubTask(lambda number: [0.0, 1.0], name="compared")
    loop = Loop(
        compared,
        free(name="free"),
        rollouts_per_step=6,
        max_offpolicy_steps=1,
        steps=6,
        filters=[Odd.Config()],
    )
    loop.fill()
    for _ in range(6):
        loop.step_taken(await loop.batch())
    await loop.close()
    counts = loop.ledger.counts()
    for name in ("compared", "free"):
        own = {column: n for column, n in counts.items() if column.startswith(f"{name}/")}
        assert (
            own.pop(f"{name}/dispatched") == sum(own.values())
            and own[f"{name}/open"] == 0 < own[f"{name}/trained"]
        )
    assert counts["compared/filtered/pre/odd"] >= counts["compared/trained"]


async def test_finished_and_running_rollouts_of_one_example_survive_a_checkpoint(tmp_path):
    task = free(kind=lambda **given: DatasetTask(100, **given), held=True)
    loop = Loop(task, rollouts_per_step=4, max_offpolicy_steps=1, steps=3)
    loop.fill()
    await settle()
    task.released = {0, 5}
    await settle()
    state, groups = await saved(loop, tmp_path)
    before = dict(task.examples)
    await loop.close()
    assert sorted(groups) == ["stub-0", "stub-5"] and len(set(before.values())) == 2

    again = free(kind=lambda **given: DatasetTask(100, **given))
    loop = await resumed(
        again, state, groups, 0, steps=3, rollouts_per_step=4, max_offpolicy_steps=1
    )
    seen = []
    for _ in range(3):
        batch = await loop.batch()
        seen += ids(batch)
        loop.step_taken(batch)
    assert set(range(8)) <= set(seen) and len(seen) == len(set(seen)) == 12
    assert {number: again.examples[number] for number in (1, 2, 3, 4, 6, 7)} == {
        number: before[number] for number in (1, 2, 3, 4, 6, 7)
    }
    await loop.close()
    assert loop.ledger.counts()["stub/trained"] == 12 and loop.ledger.counts()["stub/open"] == 0


# ---- which tasks


def longest(rollouts, env_input):
    return [float(len(rollout.turns)) for rollout in rollouts]


class OwnCredit(OPD):
    def score_group(self, group):
        pass


@pytest.mark.parametrize(
    ("algorithm", "changes", "needed"),
    [
        (GRPO.Config(), {}, True),
        (MaxRL.Config(), {}, True),
        (OPD.Config(teacher=TEACHER), {}, False),
        (OPSD.Config(), {}, False),
        (SFT.Config(teacher=TEACHER), {}, False),
        (OwnCredit.Config(teacher=TEACHER), {}, True),
        (
            OPSD.Config(),
            {
                "rubric": Rubric.Config(
                    reward_fns=[RewardFn(longest, group_level=True, takes="rollout")]
                )
            },
            True,
        ),
    ],
)
def test_a_group_is_waited_for_where_something_compares_its_rollouts(
    renderer, algorithm, changes, needed
):
    task = TalkTask.Config(algorithm=algorithm, **changes).build(
        name="talk", context=context_of(renderer)
    )
    assert task.needs_group is needed


# ---- models after filters


class AnyFilter(Filter):
    def matches(self, group):
        return [False] * len(group.scored)


async def trained_with(renderer, tokenizer, filters):
    teacher = Scorer(tokenizer)
    policy = Scorer(
        tokenizer,
        lambda rollout, turn: "x" * 40 if int(rollout.split("-")[1][0]) % 2 else "ok",
        frozen=teacher,
    )
    policy.version = 0
    task = TalkTask.Config(
        algorithm=OPD.Config(teacher=TEACHER),
        group_size=4,
        min_group_size=4,
        sampling=SamplingConfig(max_tokens=8),
    ).build(name="talk", context=context_of(renderer))
    await task.setup(policy)
    teacher.scored.clear()
    sizes = dict(rollouts_per_step=4, max_offpolicy_steps=0, steps=1, row_length=256)
    loop = Loop(task, filters=filters, policy=policy, **sizes)
    loop.fill()
    batch = await loop.batch()
    samples = [
        sample for group in batch.groups for rollout in group.rollouts for sample in rollout.samples
    ]
    loop.step_taken(batch)
    await loop.close()
    assert loop.ledger.counts()["talk/open"] == 0
    return teacher.scored, samples, loop.ledger.counts()


@pytest.mark.parametrize(
    ("filters", "prefills"),
    [
        # Of 7 rollouts the odd ones are cut off, and dropped: 0, 2, 4, 6 are trained on.
        ([Truncated.Config()], 4),
        ([Truncated.Config(), ZeroAdvantage.Config(mode="monitor")], 4),
        # A filter that may read what the teacher said has to wait for it.
        ([Truncated.Config(), AnyFilter.Config(mode="monitor")], 7),
    ],
)
async def test_what_filters_drop_before_the_batch_costs_no_prefill(
    renderer, tokenizer, filters, prefills
):
    scored, samples, counts = await trained_with(renderer, tokenizer, filters)
    assert len(scored) == prefills
    assert counts["talk/trained"] == 4 == len(samples)
    assert counts["talk/filtered/pre/truncated"] == counts["talk/dispatched"] - 4
    for sample in samples:
        assert (
            sample.token_ids.tolist() in scored
            and sample.ref_kl_weights.tolist() == sample.loss_mask.astype(float).tolist()
        )


async def test_without_a_filter_that_drops_the_models_are_asked_at_once(renderer, tokenizer):
    scored, samples, counts = await trained_with(
        renderer, tokenizer, [Truncated.Config(mode="monitor")]
    )
    assert len(scored) == len(samples) == counts["talk/trained"] == counts["talk/dispatched"] == 4
