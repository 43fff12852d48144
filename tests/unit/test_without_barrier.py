"""Rollouts that are not compared: each is scored and trained on as it ends, and models see only what the filters keep."""

from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.unit.test_reference_algorithms import TEACHER, Scorer, Talk
from tests.unit.test_resumed_rollout_loop import DatasetTask, resumed, saved
from tests.unit.test_rollout_loop import Half, Loop, StubTask, ids, settle
from tests.unit.test_saved_state import group_of
from torchtitan.experiments.rl.algorithms import GRPO, OPD, OPSD, SFT, MaxRL
from torchtitan.experiments.rl.controller.pacing import Pacer
from torchtitan.experiments.rl.errors import RunError
from torchtitan.experiments.rl.operations import session
from torchtitan.experiments.rl.operations.alarms import StallDetectors
from torchtitan.experiments.rl.rollouts.filters import Filter, Truncated, ZeroAdvantage
from torchtitan.experiments.rl.rollouts.policy import SamplingConfig
from torchtitan.experiments.rl.rollouts.types import DataSample, RolloutStatus
from torchtitan.experiments.rl.rubrics.rubric import RewardFn, Rubric
from torchtitan.experiments.rl.user_code.endpoint import cause_in


def free(outcome=lambda number: [1.0], *, kind=StubTask, size=4, **options):
    """A task whose rollouts are groups of their own, ``size`` of them of one example."""
    task = kind(outcome=outcome, group_size=size, **options)
    task.needs_group = False
    return task


# ---- pacing


@settings(max_examples=60)
@given(
    seed=st.integers(0, 2**32),
    per_step=st.integers(1, 3),
    bound=st.integers(0, 3),
    parts=st.lists(st.sampled_from([1, 2, 3, 8]), min_size=1, max_size=3),
)
def test_parts_of_slots_keep_the_age_bound_and_a_run_always_ends(seed, per_step, bound, parts):
    random, pacer = Random(seed), Pacer(groups_per_step=per_step, max_offpolicy_steps=bound)
    born, share, running = {}, {}, []
    trainer = generators = 0

    def admit(of, groups):
        for _ in range(groups):
            name = f"g{len(born)}"
            pacer.admit(name, generators, parts=of)
            born[name], share[name] = generators, of
            running.append(name)

    def fill():
        while pacer.has_slot:
            of = random.choice(parts)
            admit(of, of)

    fill()
    while trainer < 6:
        batch = pacer.take_groups(trainer)
        if batch is not None:
            assert all(trainer - born[name] <= bound for name in batch)
            held = sum(1 / share[name] for name in batch)
            assert per_step - 1e-9 <= held < per_step + 1
            trainer += 1
        elif not running:
            assert generators < trainer, "the trainer waits, and nothing is left to wait for"
            generators += 1
            pacer.live(generators)
        else:
            name = running.pop(random.randrange(len(running)))
            if random.random() < 0.2:
                pacer.drop(name)
                admit(share[name], 1)  # in its place
            else:
                pacer.finish(name)
        if generators < trainer and random.random() < 0.5:
            generators += 1
            pacer.live(generators)
        if bound or generators == trainer:
            fill()


def test_a_resumed_run_that_lost_parts_of_slots_fills_them_up():
    pacer = Pacer(groups_per_step=1, max_offpolicy_steps=0)
    state = Pacer(groups_per_step=1, max_offpolicy_steps=0)
    for number in range(4):
        state.admit(f"g{number}", 0, parts=4)
    pacer.restore(state.state()[:3], 0)
    assert pacer.free_slots < 1 and pacer.has_slot
    pacer.admit("new", 0)
    for group in ("g0", "g1", "g2", "new"):
        pacer.finish(group)
    assert pacer.take_groups(0) == ["g0", "g1", "g2", "new"], "all are due"


# ---- the loop


async def test_a_step_takes_the_rollouts_that_have_ended_of_whatever_example():
    task = free(held=True)
    loop = Loop(task, groups_per_step=1, max_offpolicy_steps=1, steps=4)
    loop.fill()
    await settle()
    assert sorted(task.started) == list(range(8)) and task.samples == 2, (
        "two slots, four rollouts of each example"
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


async def test_places_of_dropped_rollouts_go_to_no_other_example_before_their_slot_is_decided():
    """Else a place is given twice: to a new slot at once, and to a replacement once the slot is kept."""
    task = free(
        lambda number: [RolloutStatus.ERROR] if number in (0, 2) else [1.0], size=2, held=True
    )
    loop = Loop(task, groups_per_step=2, max_offpolicy_steps=1, steps=6)
    loop.fill()
    task.released = {0, 2}
    await settle()
    assert sorted(task.started) == list(range(8)), "a new slot was opened in two halves of others"
    task.released |= set(range(99))
    for _ in range(6):
        loop.step_taken(await loop.batch())
    await loop.close()
    assert loop.ledger.counts()["stub/trained"] == 24


async def test_places_of_a_slot_of_which_all_are_dropped_are_free():
    task = free(lambda number: [RolloutStatus.ERROR] if number < 2 else [1.0], size=2)
    loop = Loop(task, groups_per_step=1, max_offpolicy_steps=0, steps=1)
    loop.fill()
    assert ids(await loop.batch()) == [2, 3]
    await loop.close()


async def test_a_dropped_rollout_is_replaced_by_one_of_its_task():
    task = free(lambda number: [RolloutStatus.ERROR] if number in (1, 2) else [1.0])
    loop = Loop(task, groups_per_step=1, max_offpolicy_steps=0, steps=1)
    loop.fill()
    batch = await loop.batch()
    assert sorted(ids(batch)) == [0, 3, 4, 5] and task.samples == 3
    loop.step_taken(batch)
    assert loop.ledger.counts() == {
        "stub/dispatched": 6,
        "stub/failed/error": 2,
        "stub/trained": 4,
        "stub/open": 0,
    }
    assert loop.pacer.free_slots == 1


async def test_a_slot_of_which_every_rollout_is_dropped_is_free_for_another_task():
    failing = free(lambda number: [RolloutStatus.ERROR], name="failing")
    loop = Loop(
        failing,
        StubTask(lambda number: [0.0, 1.0], name="good"),
        groups_per_step=1,
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
    group = group_of(0.5, task="free")
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
    group = group_of(0.5, 0.5, task="free")
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
    group = group_of(0.5, 0.5, task="free")
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
    group = group_of(0.5, 0.5, task="free")
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
        groups_per_step=2,
        max_offpolicy_steps=1,
        steps=6,
        filters=[Half.Config()],
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
    assert counts["compared/filtered/pre/half"] >= counts["compared/trained"]


async def test_finished_and_running_rollouts_of_one_example_survive_a_checkpoint(tmp_path):
    task = free(kind=lambda **given: DatasetTask(100, **given), held=True)
    loop = Loop(task, groups_per_step=1, max_offpolicy_steps=1, steps=3)
    loop.fill()
    await settle()
    task.released = {0, 5}
    await settle()
    state, groups = await saved(loop, tmp_path)
    before = dict(task.examples)
    await loop.close()
    assert sorted(groups) == ["stub-0", "stub-5"] and len(set(before.values())) == 2

    again = free(kind=lambda **given: DatasetTask(100, **given))
    loop = await resumed(again, state, groups, 0, steps=3, groups_per_step=1, max_offpolicy_steps=1)
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
    task = Talk.Config(algorithm=algorithm, **changes).build(name="talk", renderer=renderer)
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
    task = Talk.Config(
        algorithm=OPD.Config(teacher=TEACHER),
        group_size=4,
        min_group_size=4,
        sampling=SamplingConfig(max_tokens=8),
    ).build(name="talk", renderer=renderer)
    await task.setup(policy)
    teacher.scored.clear()
    sizes = dict(groups_per_step=1, max_offpolicy_steps=0, steps=1, row_length=256)
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
