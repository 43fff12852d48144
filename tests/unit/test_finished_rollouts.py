"""A rollout that has ended is changed by nobody: a change is undone, and an error that names whoever made it."""

import asyncio
import time

import numpy as np
import pytest

from tests.unit.rollout_stubs import ScriptedPolicy, TalkingEnv
from tests.unit.test_reference_algorithms import TEACHER, Scorer
from tests.unit.test_samples import turn_of
from tests.unit.test_task import ListTask, build, run  # noqa: F401 - build is a fixture
from torchtitan.experiments.rl.algorithms import GRPO, SFT
from torchtitan.experiments.rl.rollouts.finished import FinishedRollout
from torchtitan.experiments.rl.rollouts.records import encode_rollout
from torchtitan.experiments.rl.rollouts.types import Rollout, RolloutStatus
from torchtitan.experiments.rl.rubrics.rubric import Reward, RewardFn, Rubric

CHANGES = {
    "a status": (lambda rollout: setattr(rollout, "status", RolloutStatus.TRUNCATED_LENGTH), "status"),
    "an error": (lambda rollout: setattr(rollout, "error", "because"), "error"),
    "no turns": (lambda rollout: rollout.turns.clear(), "turns"),
    "another list of turns": (lambda rollout: setattr(rollout, "turns", rollout.turns[:1]), "turns"),
    "turns in another order": (lambda rollout: rollout.turns.reverse(), "turns"),
    "a completion": (
        lambda rollout: setattr(rollout.turns[1], "completion", rollout.turns[0].completion),
        "turns[1].completion",
    ),
    "token ids": (
        lambda rollout: setattr(rollout.turns[0].completion, "token_ids", np.zeros(3, np.int32)),
        "turns[0].completion.token_ids",
    ),
    "token ids made writable": (
        lambda rollout: rollout.turns[0].completion.token_ids.setflags(write=True),
        "a read-only array",
    ),
    "a message": (lambda rollout: rollout.turns[0].assistant_message.update(content="better"), "a message"),
    "an opening message": (lambda rollout: rollout.turns[0].prompt_messages[0].clear(), "a message"),
    "one message less": (lambda rollout: rollout.turns[1].prompt_messages.pop(), "the messages or tools of a turn"),
    "what the env rewarded": (lambda rollout: rollout.turns[0].reward_components.update(steps=9.0), "a message or a reward"),
    "no samples": (lambda rollout: rollout.samples.clear(), "samples"),
    "a loss mask": (
        lambda rollout: setattr(rollout.samples[0], "loss_mask", ~rollout.samples[0].loss_mask),
        "samples[0].loss_mask",
    ),
    "a sample's tokens": (
        lambda rollout: setattr(rollout.samples[0], "token_ids", rollout.samples[0].token_ids + 1),
        "samples[0].token_ids",
    ),
    "a temperature": (lambda rollout: setattr(rollout.samples[0], "temperature", 2.0), "samples[0].temperature"),
    "nothing left": (lambda rollout: delattr(rollout, "turns"), "its fields"),
}
WRITES = {
    "token ids": lambda rollout: rollout.turns[0].completion.token_ids.fill(0),
    "log-probabilities": lambda rollout: rollout.turns[0].completion.logprobs.fill(0),
    "a prompt": lambda rollout: rollout.turns[0].prompt_token_ids.fill(0),
    "a sample's tokens": lambda rollout: rollout.samples[0].token_ids.fill(0),
    "a loss mask": lambda rollout: rollout.samples[0].loss_mask.fill(True),
}


async def finished_group(build, tokenizer, **changes):  # noqa: F811
    task = build(envs=[TalkingEnv(turns=2) for _ in range(3)], **changes)
    return task, await run(task, ScriptedPolicy(tokenizer))


def line(rollout: Rollout) -> bytes:
    """All there is of a rollout but how it ended and its rewards."""
    shown = FinishedRollout(rollout)
    status, error, reward, components = rollout.status, rollout.error, rollout.reward, rollout.reward_components
    rollout.status, rollout.error, rollout.reward, rollout.reward_components = RolloutStatus.COMPLETED, None, None, {}
    encoded = encode_rollout(rollout, outcome=None, admitted_version=0, max_bytes=2**20)
    shown.restore()
    assert (rollout.status, rollout.error, rollout.reward, rollout.reward_components) == (status, error, reward, components)
    return encoded


@pytest.mark.parametrize("kind", CHANGES)
async def test_reward_function_that_changes_a_rollout_fails_it_by_name_and_the_change_is_undone(build, tokenizer, kind):  # noqa: F811
    change, what = CHANGES[kind]

    def vandal(rollout, env_input):
        if rollout.index_in_group == 1:
            change(rollout)
        return 1.0

    def turns(rollout, env_input):
        return len(rollout.turns)

    rubric = Rubric.Config(reward_fns=[RewardFn(vandal), RewardFn(turns)])
    task, group = await finished_group(build, tokenizer, rubric=rubric)
    before = [line(rollout) for rollout in group.rollouts]
    assert await task.score_group(group) is None
    assert [rollout.status for rollout in group.rollouts] == ["completed", "error", "completed"]
    assert [rollout.reward for rollout in group.rollouts] == [1.5, None, 1.5]
    error = group.rollouts[1].error
    assert "'vandal'" in error and f"changed {what}" in error and "of a rollout that has ended" in error
    assert line(group.rollouts[1]) == before[1]


@pytest.mark.parametrize("kind", WRITES)
async def test_reward_function_that_writes_to_an_array_fails_by_name(build, tokenizer, kind):  # noqa: F811
    def vandal(rollout, env_input):
        WRITES[kind](rollout)
        return 1.0

    task, group = await finished_group(build, tokenizer, rubric=Rubric.Config(reward_fns=[RewardFn(vandal)]))
    before = [line(rollout) for rollout in group.rollouts]
    failure = await task.score_group(group)
    assert "reward function 'vandal': ValueError: assignment destination is read-only" in failure or "read-only" in failure
    assert [line(rollout) for rollout in group.rollouts] == before


@pytest.mark.parametrize("asynchronous", [True, False])
async def test_the_function_that_made_the_change_is_named_alone_unless_another_ran_meanwhile(build, tokenizer, asynchronous):  # noqa: F811
    async def vandal(rollout, env_input):
        rollout.turns.clear()
        return 1.0

    class Vandal:
        """Not an async function, but one that returns an awaitable."""

        def __call__(self, rollout, env_input):
            return vandal(rollout, env_input)

    async def quick(rollout, env_input):
        return 0.0

    reward_fns = [RewardFn(quick), RewardFn(vandal if asynchronous else Vandal(), name="vandal")]
    task, group = await finished_group(build, tokenizer, rubric=Rubric.Config(reward_fns=reward_fns))
    failure = await task.score_group(group)
    assert "reward function 'vandal' changed turns of a rollout" in failure and "quick" not in failure

    async def slow(rollout, env_input):
        await asyncio.sleep(0.1)
        return 0.0

    rubric = Rubric.Config(reward_fns=[RewardFn(slow), RewardFn(vandal)])
    task, group = await finished_group(build, tokenizer, rubric=rubric)
    assert "one of the reward functions 'slow' or 'vandal' changed turns" in await task.score_group(group)


async def test_group_level_function_that_changes_one_rollout_fails_all_that_it_saw(build, tokenizer):  # noqa: F811
    def vandal(rollouts, env_input):
        rollouts[2].status = RolloutStatus.ABORTED
        return [1.0] * len(rollouts)

    task, group = await finished_group(build, tokenizer, rubric=Rubric.Config(reward_fns=[RewardFn(vandal, group_level=True)]))
    assert "reward function 'vandal' changed status" in await task.score_group(group)
    assert [rollout.reward for rollout in group.rollouts] == [None] * 3
    assert all("reward function 'vandal' changed status of a rollout that has ended" in r.error for r in group.rollouts)
    assert group.rollouts[2].status is not RolloutStatus.ABORTED


async def test_threads_of_reward_functions_do_not_disturb_each_others_look(build, tokenizer):  # noqa: F811
    def honest(rollout, env_input):
        time.sleep(0.001)
        return float(len(rollout.turns))

    rubric = Rubric.Config(reward_fns=[RewardFn(honest, name=f"f{index}") for index in range(8)])
    task, group = await finished_group(build, tokenizer, rubric=rubric)
    assert await task.score_group(group) is None and [rollout.reward for rollout in group.rollouts] == [2.0] * 3


# ------------------------------------------------------------------ rubrics that score in their own way


@pytest.mark.parametrize("status", [RolloutStatus.TRUNCATED_LENGTH, RolloutStatus.ONGOING, "done", None])
async def test_status_that_a_rubric_sets_is_refused_by_name(build, tokenizer, status):  # noqa: F811
    class Own(Rubric):
        async def score_group(self, rollouts, env_input):
            rollouts[1].status = status
            return [Reward(1.0) for _ in rollouts]

    task, group = await finished_group(build, tokenizer, rubric=Own.Config())
    assert await task.score_group(group) is None
    assert [rollout.status for rollout in group.rollouts] == ["completed", "error", "completed"]
    assert [rollout.reward for rollout in group.rollouts] == [1.0, None, 1.0]
    assert "Own.score_group set the status of a rollout that has ended to" in group.rollouts[1].error


async def test_rollout_that_a_rubric_fails_is_not_trained_on_whatever_its_reward(build, tokenizer):  # noqa: F811
    class Own(Rubric):
        async def score_group(self, rollouts, env_input):
            rollouts.reverse()
            rollouts[0].status, rollouts[0].error = RolloutStatus.ERROR, "no judge"
            return [Reward(float(index)) for index in range(len(rollouts))]

    task, group = await finished_group(build, tokenizer, rubric=Own.Config())
    assert await task.score_group(group) is None
    assert [rollout.rollout_id for rollout in group.rollouts] == ["g/0", "g/1", "g/2"]
    assert [rollout.reward for rollout in group.rollouts] == [0.0, 1.0, None] and group.rollouts[2].error == "no judge"


async def test_rubric_of_ones_own_that_changes_turns_fails_the_group_by_name(build, tokenizer):  # noqa: F811
    class Own(Rubric):
        async def score_group(self, rollouts, env_input):
            rollouts[1].turns.pop()
            return [Reward(1.0) for _ in rollouts]

    task, group = await finished_group(build, tokenizer, rubric=Own.Config())
    assert "Own.score_group: changed turns of rollout g/1, which has ended" in await task.score_group(group)
    assert [len(rollout.turns) for rollout in group.rollouts] == [2, 2, 2] and group.scored == []


# ------------------------------------------------------------------ algorithms


@pytest.mark.parametrize("early", [True, False])
@pytest.mark.parametrize("kind", CHANGES)
async def test_algorithm_that_changes_a_rollout_fails_by_name_and_the_change_is_undone(build, tokenizer, kind, early):  # noqa: F811
    change, what = CHANGES[kind]
    before: list[bytes] = []

    class Vandal(GRPO):
        async def score_rollout(self, rollout):
            if early and rollout.index_in_group == 1:
                before.append(line(rollout))
                change(rollout)

        def score_group(self, group):
            super().score_group(group)
            if not early:
                for rollout in group.rollouts:
                    rollout.samples[0].advantages = None
                before.append(line(group.rollouts[1]))
                GRPO.score_group(self, group)
                change(group.rollouts[1])

    task, group = await finished_group(build, tokenizer, algorithm=Vandal.Config())
    failure = await task.score_group(group)
    if early:
        assert failure is None and [rollout.status for rollout in group.rollouts] == ["completed", "error", "completed"]
        cause = group.rollouts[1].error
        assert cause.startswith(f"task talk: Vandal.score_rollout: changed {what}")
    else:
        assert failure.startswith(f"task talk: Vandal.score_group: changed {what}") and "rollout g/1" in failure
        assert group.scored == []
    group.rollouts[1].samples[0].advantages = None
    assert line(group.rollouts[1]) == before[0]


@pytest.mark.parametrize("spoil", [lambda group: group.rollouts.pop(), lambda group: setattr(group, "rollouts", [])])
async def test_algorithm_that_takes_rollouts_out_of_their_group_fails_it_and_they_stay(build, tokenizer, spoil):  # noqa: F811
    class Vandal(GRPO):
        def score_group(self, group):
            super().score_group(group)
            spoil(group)

    task, group = await finished_group(build, tokenizer, algorithm=Vandal.Config())
    assert "Vandal.score_group: changed " in await task.score_group(group)
    assert [rollout.rollout_id for rollout in group.rollouts] == ["g/0", "g/1", "g/2"] and group.scored == []


async def test_reward_that_an_algorithm_sets_is_refused_by_name(build, tokenizer):  # noqa: F811
    class Vandal(GRPO):
        def score_group(self, group):
            super().score_group(group)
            group.rollouts[1].reward = 7.0

    task, group = await finished_group(build, tokenizer, algorithm=Vandal.Config())
    assert "Vandal.score_group: changed reward of rollout g/1" in await task.score_group(group)


async def test_algorithm_may_replace_the_fields_it_declares_and_no_others(build, tokenizer):  # noqa: F811
    class Declared(SFT):
        async def score_rollout(self, rollout):
            await super().score_rollout(rollout)
            rollout.samples[0].policy_versions = rollout.samples[0].policy_versions * 0

    policy = Scorer(tokenizer, frozen=Scorer(tokenizer))
    for config, trained in ((SFT.Config(teacher=TEACHER), True), (Declared.Config(teacher=TEACHER), False)):
        task = build(algorithm=config)
        await task.setup(policy)
        group = await run(task, policy)
        assert (await task.score_group(group) is None) == trained
    assert "Declared.score_rollout: changed samples[0].policy_versions of a rollout that has ended" in group.rollouts[0].error


async def test_credit_is_read_only_once_it_was_given(build, tokenizer):  # noqa: F811
    task, group = await finished_group(build, tokenizer)
    assert await task.score_group(group) is None
    with pytest.raises(ValueError, match="read-only"):
        group.rollouts[0].samples[0].advantages[0] = 1.0


# ------------------------------------------------------------------ what is remembered


def test_messages_that_hold_more_than_json_does_are_compared_too():
    note = object()
    turn = turn_of([1], [2])
    turn.env_messages = [{"role": "user", "content": "x", "notes": [note, {"a": 1}]}]
    rollout = Rollout(group_id="g", index_in_group=0, task_name="t", turns=[turn])
    finished = FinishedRollout(rollout)
    assert finished.change() is None
    turn.env_messages[0]["notes"][1]["a"] = 2
    assert finished.change() == "a message or a reward component of the env"
