"""A rollout that has ended is changed by nobody: who tries fails by name, or changes a copy."""

import copy
import pickle
from dataclasses import fields, replace

import numpy as np
import pytest

from tests.unit.rollout_stubs import ScriptedPolicy, TalkingEnv
from tests.unit.test_reference_algorithms import TEACHER, Scorer
from tests.unit.test_samples import turn_of
from tests.unit.test_task import ListTask, build, run  # noqa: F401 - build is a fixture
from torchtitan.experiments.rl.algorithms import GRPO, SFT
from torchtitan.experiments.rl.rollouts.records import encode_rollout
from torchtitan.experiments.rl.rollouts.sealed import sealed_group, sealed_rollout
from torchtitan.experiments.rl.rollouts.types import (
    DataSample,
    Rollout,
    RolloutGroup,
    RolloutStatus,
)
from torchtitan.experiments.rl.rubrics.rubric import Reward, RewardFn, Rubric

REFUSED = {
    "a status": (
        lambda rollout: setattr(rollout, "status", RolloutStatus.TRUNCATED_LENGTH),
        "can't change status",
    ),
    "an error": (lambda rollout: setattr(rollout, "error", "because"), "can't change error"),
    "a reward": (lambda rollout: setattr(rollout, "reward", 9.0), "can't change reward"),
    "no turns": (lambda rollout: rollout.turns.clear(), "'clear'"),
    "another list of turns": (
        lambda rollout: setattr(rollout, "turns", rollout.turns[:1]),
        "can't change turns",
    ),
    "turns in another order": (lambda rollout: rollout.turns.reverse(), "'reverse'"),
    "a completion": (
        lambda rollout: setattr(rollout.turns[1], "completion", rollout.turns[0].completion),
        "can't change completion",
    ),
    "other token ids": (
        lambda rollout: setattr(rollout.turns[0].completion, "token_ids", np.zeros(3, np.int32)),
        "can't change token_ids",
    ),
    "token ids made writable": (
        lambda rollout: rollout.turns[0].completion.token_ids.setflags(write=True),
        "WRITEABLE",
    ),
    "no samples": (lambda rollout: rollout.samples.clear(), "'clear'"),
    "nothing left": (lambda rollout: delattr(rollout, "turns"), "can't change turns"),
    "token ids": (lambda rollout: rollout.turns[0].completion.token_ids.fill(0), "read-only"),
    "log-probabilities": (
        lambda rollout: rollout.turns[0].completion.logprobs.fill(0),
        "read-only",
    ),
    "a prompt": (lambda rollout: rollout.turns[0].prompt_token_ids.fill(0), "read-only"),
    "a sample's own tokens": (lambda rollout: rollout.samples[0].token_ids.fill(0), "read-only"),
    "a sample's own loss mask": (
        lambda rollout: rollout.samples[0].loss_mask.fill(True),
        "read-only",
    ),
}
OF_SAMPLES = {
    "a loss mask": (
        lambda rollout: setattr(rollout.samples[0], "loss_mask", ~rollout.samples[0].loss_mask),
        "loss_mask",
    ),
    "a sample's tokens": (
        lambda rollout: setattr(rollout.samples[0], "token_ids", rollout.samples[0].token_ids + 1),
        "token_ids",
    ),
    "a temperature": (
        lambda rollout: setattr(rollout.samples[0], "temperature", 2.0),
        "temperature",
    ),
}
OF_COPIES = {
    "a message": lambda rollout: rollout.turns[0].assistant_message.update(content="better"),
    "an opening message": lambda rollout: rollout.turns[0].prompt_messages[0].clear(),
    "one message less": lambda rollout: rollout.turns[1].prompt_messages.pop(),
    "what the env rewarded": lambda rollout: rollout.turns[0].reward_components.update(steps=9.0),
    "the example": lambda rollout: rollout.data_sample.info.update(seen=True),
}


async def finished_group(build, tokenizer, **changes):  # noqa: F811
    task = build(envs=[TalkingEnv(turns=2) for _ in range(3)], **changes)
    return task, await run(task, ScriptedPolicy(tokenizer))


def line(rollout: Rollout) -> bytes:
    """All there is of a rollout but how it ended, its rewards and its credit."""
    samples = [replace(sample, advantages=None) for sample in rollout.samples]
    ended = dict(
        status=RolloutStatus.COMPLETED, error=None, traceback="", reward=None, reward_components={}
    )
    shown = replace(rollout, **ended, samples=samples)
    return encode_rollout(shown, outcome=None, admitted_version=0, max_bytes=2**20)


@pytest.mark.parametrize("kind", REFUSED | OF_SAMPLES)
async def test_reward_function_that_changes_a_rollout_fails_it_by_name_and_in_place(
    build, tokenizer, kind
):
    change, what = (REFUSED | OF_SAMPLES)[kind]

    def vandal(rollout, env_input):
        if rollout.index_in_group == 1:
            change(rollout)
        return 1.0

    def turns(rollout, env_input):
        return len(rollout.turns)

    rubric = Rubric.Config(
        reward_fns=[RewardFn(vandal, takes="rollout"), RewardFn(turns, takes="rollout")]
    )
    task, group = await finished_group(build, tokenizer, rubric=rubric)
    before = [line(rollout) for rollout in group.rollouts]
    assert await task.score_group(group) is None
    assert [rollout.status for rollout in group.rollouts] == ["completed", "error", "completed"]
    assert [rollout.reward for rollout in group.rollouts] == [1.5, None, 1.5]
    error = group.rollouts[1].error
    assert "reward function 'vandal'" in error and what in error
    assert [line(rollout) for rollout in group.rollouts] == before


@pytest.mark.parametrize("kind", OF_COPIES)
async def test_what_is_done_to_messages_and_the_example_reaches_nobody_else(build, tokenizer, kind):  # noqa: F811
    async def vandal(rollout, env_input):
        OF_COPIES[kind](rollout)
        return 1.0

    async def untouched(rollout, env_input):
        return float(line(rollout) == before[rollout.index_in_group])

    rubric = Rubric.Config(
        reward_fns=[RewardFn(vandal, takes="rollout"), RewardFn(untouched, takes="rollout")]
    )
    task, group = await finished_group(build, tokenizer, rubric=rubric)
    before = [line(rollout) for rollout in group.rollouts]
    assert (
        await task.score_group(group) is None
        and [rollout.reward for rollout in group.rollouts] == [1.0] * 3
    )
    assert [line(rollout) for rollout in group.rollouts] == before


async def test_group_level_function_that_changes_one_rollout_fails_all_that_it_saw(
    build, tokenizer
):
    def vandal(rollouts, env_input):
        rollouts[2].status = RolloutStatus.ABORTED
        return [1.0] * len(rollouts)

    task, group = await finished_group(
        build,
        tokenizer,
        rubric=Rubric.Config(reward_fns=[RewardFn(vandal, group_level=True, takes="rollout")]),
    )
    assert "reward function 'vandal'" in await task.score_group(group)
    assert [rollout.reward for rollout in group.rollouts] == [None] * 3
    assert all(
        "reward function 'vandal': AttributeError: can't change status" in r.error
        for r in group.rollouts
    )
    assert group.rollouts[2].status is not RolloutStatus.ABORTED


async def test_an_example_is_every_functions_own(build, tokenizer):  # noqa: F811
    def clears(rollout, row):
        row["names"].clear()
        return 1.0

    def counts(rollout, row):
        return float(len(row["names"]))

    example, open_file = {"names": ["a", "b"], "file": object()}, None
    task, group = await finished_group(
        build,
        tokenizer,
        rubric=Rubric.Config(
            reward_fns=[RewardFn(clears, takes="rollout"), RewardFn(counts, takes="rollout")]
        ),
    )
    open_file = example["file"]
    group.data_sample.env_input = example
    assert (
        await task.score_group(group) is None
        and [rollout.reward for rollout in group.rollouts] == [1.5] * 3
    )
    assert example == {"names": ["a", "b"], "file": open_file}


# ------------------------------------------------------------------ rubrics that score in their own way


@pytest.mark.parametrize(
    "status", [RolloutStatus.TRUNCATED_LENGTH, RolloutStatus.ONGOING, "done", None]
)
async def test_status_that_a_rubric_sets_is_refused_by_name(build, tokenizer, status):  # noqa: F811
    class Own(Rubric):
        async def score_group(self, rollouts, env_input):
            rollouts[1].status = status
            return [Reward(1.0) for _ in rollouts]

    task, group = await finished_group(build, tokenizer, rubric=Own.Config())
    assert await task.score_group(group) is None
    assert [rollout.status for rollout in group.rollouts] == ["completed", "error", "completed"]
    assert [rollout.reward for rollout in group.rollouts] == [1.0, None, 1.0]
    assert (
        "Own.score_group set the status of a rollout that has ended to" in group.rollouts[1].error
    )


async def test_rollout_that_a_rubric_fails_is_not_trained_on_whatever_its_reward(build, tokenizer):  # noqa: F811
    class Own(Rubric):
        async def score_group(self, rollouts, env_input):
            rollouts.reverse()
            rollouts[0].status, rollouts[0].error = RolloutStatus.ERROR, "no judge"
            return [Reward(float(index)) for index in range(len(rollouts))]

    task, group = await finished_group(build, tokenizer, rubric=Own.Config())
    assert await task.score_group(group) is None
    assert [rollout.rollout_id for rollout in group.rollouts] == ["g/0", "g/1", "g/2"]
    assert [rollout.reward for rollout in group.rollouts] == [0.0, 1.0, None] and group.rollouts[
        2
    ].error == "no judge"


async def test_rubric_of_ones_own_that_changes_turns_fails_the_group_by_name(build, tokenizer):  # noqa: F811
    class Own(Rubric):
        async def score_group(self, rollouts, env_input):
            rollouts[1].turns.pop()
            return [Reward(1.0) for _ in rollouts]

    task, group = await finished_group(build, tokenizer, rubric=Own.Config())
    assert "Own.score_group: AttributeError" in await task.score_group(group)
    assert [len(rollout.turns) for rollout in group.rollouts] == [2, 2, 2] and group.scored == []


# ------------------------------------------------------------------ algorithms


@pytest.mark.parametrize("early", [True, False])
@pytest.mark.parametrize("kind", REFUSED | OF_SAMPLES)
async def test_algorithm_that_changes_a_rollout_fails_by_name_and_changes_nothing(
    build, tokenizer, kind, early
):
    change, what = (REFUSED | OF_SAMPLES)[kind]
    before = []

    class Vandal(GRPO):
        async def score_rollout(self, rollout):
            if rollout.index_in_group == 1:
                before.append(line(rollout))
                if early:
                    change(rollout)

        def score_group(self, group):
            super().score_group(group)
            if not early:
                change(group.rollouts[1])

    task, group = await finished_group(build, tokenizer, algorithm=Vandal.Config())
    failure = await task.score_group(group)
    if early:
        assert failure is None and [rollout.status for rollout in group.rollouts] == [
            "completed",
            "error",
            "completed",
        ]
        cause = group.rollouts[1].error
        assert cause.startswith("task talk: Vandal.score_rollout: ") and what in cause
    else:
        assert failure.startswith("task talk: Vandal.score_group: ") and what in failure
        assert group.scored == []
    assert line(group.rollouts[1]) == before[0]


@pytest.mark.parametrize("kind", OF_COPIES)
async def test_what_an_algorithm_does_to_a_message_has_no_effect(build, tokenizer, kind):  # noqa: F811
    class Vandal(GRPO):
        def score_group(self, group):
            super().score_group(group)
            OF_COPIES[kind](group.rollouts[1])

    task, group = await finished_group(build, tokenizer, algorithm=Vandal.Config())
    before = [line(rollout) for rollout in group.rollouts]
    assert (
        await task.score_group(group) is None
        and [line(rollout) for rollout in group.rollouts] == before
    )
    assert all(rollout.samples[0].advantages is not None for rollout in group.rollouts)


@pytest.mark.parametrize(
    "spoil", [lambda group: group.rollouts.pop(), lambda group: setattr(group, "rollouts", [])]
)
async def test_algorithm_that_takes_rollouts_out_of_their_group_has_no_effect_or_fails(
    build, tokenizer, spoil
):
    class Vandal(GRPO):
        def score_group(self, group):
            super().score_group(group)
            spoil(group)

    task, group = await finished_group(build, tokenizer, algorithm=Vandal.Config())
    failure = await task.score_group(group)
    assert failure is None or "Vandal.score_group: AttributeError: can't change rollouts" in failure
    assert [rollout.rollout_id for rollout in group.rollouts] == ["g/0", "g/1", "g/2"] and len(
        group.scored
    ) == 3 * (not failure)


async def test_algorithm_may_replace_the_fields_it_declares_and_no_others(build, tokenizer):  # noqa: F811
    class Declared(SFT):
        async def score_rollout(self, rollout):
            await super().score_rollout(rollout)
            rollout.samples[0].policy_versions = rollout.samples[0].policy_versions * 0

    policy = Scorer(tokenizer, frozen=Scorer(tokenizer))
    for config, trained in (
        (SFT.Config(teacher=TEACHER), True),
        (Declared.Config(teacher=TEACHER), False),
    ):
        task = build(algorithm=config)
        await task.setup(policy)
        group = await run(task, policy)
        assert (await task.score_group(group) is None) == trained
    assert (
        "Declared.score_rollout: changed samples[0].policy_versions of a rollout that has ended"
        in group.rollouts[0].error
    )


async def test_credit_is_read_only_once_it_was_given(build, tokenizer):  # noqa: F811
    task, group = await finished_group(build, tokenizer)
    assert await task.score_group(group) is None
    with pytest.raises(ValueError, match="read-only"):
        group.rollouts[0].samples[0].advantages[0] = 1.0


# ------------------------------------------------------------------ sealed records


def test_a_copy_of_a_sealed_record_is_a_plain_record_with_the_same_fields():
    turn, example = turn_of([1], [2]), DataSample(sample_id="0", env_input={"a": [1]})
    rollout = Rollout(
        group_id="g", index_in_group=0, task_name="t", turns=[turn], data_sample=example
    )
    group = RolloutGroup(group_id="g", task_name="t", data_sample=example, rollouts=[rollout])
    sealed = sealed_group(group)
    assert isinstance(sealed.rollouts[0].turns[0], type(turn)) and sealed.scored == []
    for made in (
        copy.copy(sealed),
        copy.deepcopy(sealed),
        pickle.loads(pickle.dumps(sealed)),
        replace(sealed),
    ):
        assert type(made) is RolloutGroup
        made.group_id = "other"
    assert sealed.group_id == "g" and type(copy.deepcopy(sealed).rollouts[0].turns[0]) is type(turn)
    seen = sealed_rollout(rollout)
    assert all(
        repr(getattr(seen.turns[0], f.name)) == repr(getattr(turn, f.name))
        for f in fields(turn)
        if f.name != "completion"
    )
