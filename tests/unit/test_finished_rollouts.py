"""A rollout that has ended is changed by nobody: who tries fails by name, in the line that tries."""

import asyncio
import copy
import json
import pickle
from collections import OrderedDict, UserDict
from dataclasses import dataclass, replace
from typing import ClassVar

import cloudpickle
import numpy as np
import pytest
import torch

from tests.fakes.envs import TalkingEnv
from tests.fakes.policy import TEACHER, Scorer, ScriptedPolicy
from tests.fakes.rollouts import group_of, rollout_of, turn_of
from tests.fakes.tasks import ListTask, run_group
from tests.unit.records import assert_same
from torchtitan.experiments.rl.algorithms import GRPO, SFT
from torchtitan.experiments.rl.envs.messages import checked_messages
from torchtitan.experiments.rl.frozen import read_only
from torchtitan.experiments.rl.rollouts.costs import add_cost
from torchtitan.experiments.rl.rollouts.records import decode_rollout, encode_rollout
from torchtitan.experiments.rl.rollouts.samples import checked_completion
from torchtitan.experiments.rl.rollouts.types import (
    DataSample,
    Rollout,
    RolloutGroup,
    RolloutStatus,
)
from torchtitan.experiments.rl.rubrics.rubric import Reward, RewardFn, Rubric
from torchtitan.experiments.rl.tasks.task import Task, frozen_sample

REFUSED = {
    "a status": (
        lambda rollout: setattr(rollout, "status", RolloutStatus.TRUNCATED_LENGTH),
        "can't change status",
    ),
    "an error": (lambda rollout: setattr(rollout, "error", "because"), "can't change error"),
    "a reward": (lambda rollout: setattr(rollout, "reward", 9.0), "can't change reward"),
    "no turns": (lambda rollout: rollout.turns.clear(), "read-only"),
    "another list of turns": (
        lambda rollout: setattr(rollout, "turns", rollout.turns[:1]),
        "can't change turns",
    ),
    "turns in another order": (lambda rollout: rollout.turns.reverse(), "read-only"),
    "a completion": (
        lambda rollout: setattr(rollout.turns[1], "completion", rollout.turns[0].completion),
        "can't change completion",
    ),
    "other token ids": (
        lambda rollout: setattr(rollout.turns[0].completion, "token_ids", np.zeros(3, np.int32)),
        "can't change token_ids",
    ),
    "no samples": (lambda rollout: rollout.samples.clear(), "read-only"),
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
OF_MESSAGES = {
    "a message": lambda rollout: rollout.turns[0].assistant_message.update(content="better"),
    "an opening message": lambda rollout: rollout.turns[0].prompt_messages[0].clear(),
    "one message less": lambda rollout: rollout.turns[1].prompt_messages.pop(),
    "what the env rewarded": lambda rollout: rollout.turns[0].reward_components.update(steps=9.0),
    "the example": lambda rollout: rollout.data_sample.info.update(seen=True),
    "another example": lambda rollout: setattr(rollout.data_sample, "env_input", "easy"),
}


async def finished_group(build, tokenizer, **changes):  # noqa: F811
    task = build(envs=[TalkingEnv(turns=2) for _ in range(3)], **changes)
    return task, await run_group(task, ScriptedPolicy(tokenizer))


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


@pytest.mark.parametrize("kind", OF_MESSAGES)
async def test_reward_function_that_edits_a_message_or_the_example_fails_by_name(
    build, tokenizer, kind
):
    async def vandal(rollout, env_input):
        if rollout.index_in_group == 1:
            OF_MESSAGES[kind](rollout)
        return 1.0

    async def untouched(rollout, env_input):
        return float(line(rollout) == before[rollout.index_in_group])

    rubric = Rubric.Config(
        reward_fns=[RewardFn(vandal, takes="rollout"), RewardFn(untouched, takes="rollout")]
    )
    task, group = await finished_group(build, tokenizer, rubric=rubric)
    before = [line(rollout) for rollout in group.rollouts]
    assert await task.score_group(group) is None
    assert [rollout.reward for rollout in group.rollouts] == [1.0, None, 1.0]
    assert "reward function 'vandal'" in group.rollouts[1].error
    assert "read-only" in group.rollouts[1].error
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


async def test_function_that_edits_the_row_fails_by_name_and_others_see_it_whole(build, tokenizer):  # noqa: F811
    row = {"names": ["a", "b"], "file": object()}

    def clears(rollout, row):
        row["names"].clear()
        return 1.0

    def counts(rollout, row):
        seen.append((row["names"], row["file"]))
        return float(len(row["names"]))

    seen = []
    task, group = await finished_group(
        build,
        tokenizer,
        rubric=Rubric.Config(
            reward_fns=[RewardFn(clears, takes="rollout"), RewardFn(counts, takes="rollout")]
        ),
    )
    group.data_sample = DataSample(sample_id="0", env_input=row)
    assert "reward function 'clears': TypeError: this dict or list is read-only" in (
        await task.score_group(group)
    )
    # Objects that JSON does not have are shared, and the dataset's own row is left as it is.
    assert seen == [(["a", "b"], row["file"])] * 3
    row["names"].append("c")


async def test_env_is_given_a_read_only_example_and_the_datasets_stays_its_own(build, tokenizer):  # noqa: F811
    class Careless(TalkingEnv):
        async def reset(self):
            self.row["board"][0] = "x"
            return await super().reset()

    class BoardTask(ListTask):
        make_envs = Task.make_envs

        def make_env(self, sample):
            env = Careless(turns=1)
            env.row = sample.env_input
            return env

    task = build(kind=BoardTask)
    sample = DataSample(sample_id="0", env_input={"board": ["", ""]})
    group = await task.run_group(sample, ScriptedPolicy(tokenizer), group_id="g", seed=0)
    assert all(
        rollout.error.startswith("Careless.reset: TypeError: this dict or list is read-only")
        for rollout in group.rollouts
    )
    sample.env_input["board"][0] = "o"


# ------------------------------------------------------------------ rubrics that score in their own way


@pytest.mark.parametrize("status", [RolloutStatus.TRUNCATED_LENGTH, "done", None])
async def test_rubric_that_sets_a_status_fails_the_group_by_name(build, tokenizer, status):  # noqa: F811
    class Own(Rubric):
        async def score_group(self, rollouts, env_input):
            rollouts[1].status = status
            return [Reward(1.0) for _ in rollouts]

    task, group = await finished_group(build, tokenizer, rubric=Own.Config())
    failure = await task.score_group(group)
    assert "Own.score_group: AttributeError: can't change status of this Rollout" in failure
    assert [rollout.status for rollout in group.rollouts] == ["error"] * 3
    assert group.scored == []


async def test_rollout_that_a_rubric_fails_is_not_trained_on_whatever_its_reward(build, tokenizer):  # noqa: F811
    class Own(Rubric):
        async def score_group(self, rollouts, env_input):
            rollouts.reverse()
            rollouts[0].fail("no judge")
            return [Reward(float(index)) for index in range(len(rollouts))]

    task, group = await finished_group(build, tokenizer, rubric=Own.Config())
    assert await task.score_group(group) is None
    assert [rollout.rollout_id for rollout in group.rollouts] == ["g/0", "g/1", "g/2"]
    assert [rollout.reward for rollout in group.rollouts] == [0.0, 1.0, None]
    assert (group.rollouts[2].status, group.rollouts[2].error) == ("error", "no judge")


async def test_rubric_of_ones_own_that_changes_turns_fails_the_group_by_name(build, tokenizer):  # noqa: F811
    class Own(Rubric):
        async def score_group(self, rollouts, env_input):
            rollouts[1].turns.pop()
            return [Reward(1.0) for _ in rollouts]

    task, group = await finished_group(build, tokenizer, rubric=Own.Config())
    assert "Own.score_group: TypeError: this dict or list is read-only" in (
        await task.score_group(group)
    )
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


@pytest.mark.parametrize("kind", OF_MESSAGES)
async def test_algorithm_that_edits_a_message_fails_by_name(build, tokenizer, kind):  # noqa: F811
    class Vandal(GRPO):
        def score_group(self, group):
            super().score_group(group)
            OF_MESSAGES[kind](group.rollouts[1])

    task, group = await finished_group(build, tokenizer, algorithm=Vandal.Config())
    before = [line(rollout) for rollout in group.rollouts]
    failure = await task.score_group(group)
    assert failure.startswith("task talk: Vandal.score_group: ") and "read-only" in failure
    assert [line(rollout) for rollout in group.rollouts] == before
    # It had given credit before it failed: nothing of that is kept.
    assert all(rollout.samples[0].advantages is None for rollout in group.rollouts)


@pytest.mark.parametrize(
    "spoil", [lambda group: group.rollouts.pop(), lambda group: setattr(group, "rollouts", [])]
)
async def test_algorithm_that_takes_rollouts_out_of_their_group_fails_by_name(
    build, tokenizer, spoil
):
    class Vandal(GRPO):
        def score_group(self, group):
            super().score_group(group)
            spoil(group)

    task, group = await finished_group(build, tokenizer, algorithm=Vandal.Config())
    failure = await task.score_group(group)
    assert "Vandal.score_group: " in failure and "read-only" in failure
    assert [rollout.rollout_id for rollout in group.rollouts] == ["g/0", "g/1", "g/2"]


async def test_score_group_may_change_in_place_what_score_rollout_gave(build, tokenizer):  # noqa: F811
    class InPlace(GRPO):
        async def score_rollout(self, rollout):
            for sample in rollout.samples:
                sample.ce_weights = 0.25 * sample.loss_mask.astype(np.float32)

        def score_group(self, group):
            super().score_group(group)
            for rollout in group.rollouts:
                for sample in rollout.samples:
                    sample.ce_weights *= 2

    task, group = await finished_group(build, tokenizer, algorithm=InPlace.Config())
    first = [rollout.samples[0].ce_weights for rollout in group.rollouts]
    assert await task.score_group(group) is None
    assert {rollout.samples[0].ce_weights.max() for rollout in group.rollouts} == {0.5}
    assert {weights.max() for weights in first} == {0.25}


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
        group = await run_group(task, policy)
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
    with pytest.raises(AttributeError, match="can't change advantages of this TrainingSample"):
        group.rollouts[0].samples[0].advantages = None


async def test_async_score_group_is_awaited(build, tokenizer):  # noqa: F811
    class Async(GRPO):
        async def score_group(self, group):
            await asyncio.sleep(0)
            super().score_group(group)

    task, group = await finished_group(build, tokenizer, algorithm=Async.Config())
    assert await task.score_group(group) is None
    assert all(rollout.samples[0].advantages is not None for rollout in group.rollouts)


@pytest.mark.parametrize(
    "rubbish",
    [
        lambda sample: setattr(sample, "ref_kl_weights", torch.zeros(len(sample))),
        lambda sample: setattr(sample, "rl_weights", torch.ones(len(sample), requires_grad=True)),
        lambda sample: setattr(sample, "reference_ids", 5),
    ],
)
async def test_credit_of_another_kind_fails_the_algorithm_by_name_and_nothing_is_taken(
    build, tokenizer, rubbish
):
    class Odd(GRPO):
        def score_group(self, group):
            super().score_group(group)
            rubbish(group.rollouts[2].samples[0])

    task, group = await finished_group(build, tokenizer, algorithm=Odd.Config())
    failure = await task.score_group(group)
    # torch's tensors without a gradient are arrays to numpy: those are taken.
    if failure is None:
        assert type(group.rollouts[2].samples[0].ref_kl_weights) is np.ndarray
        return
    assert failure.startswith("task talk: Odd.score_group: ")
    assert all(rollout.samples[0].advantages is None for rollout in group.rollouts)


@pytest.mark.parametrize("whole", [False, True])
async def test_credit_in_an_array_of_the_algorithms_is_not_changed_by_the_next_group(
    build, tokenizer, whole
):
    scratch = np.zeros(4096, np.float32)
    kept = []

    class Frugal(GRPO):
        def score_group(self, group):
            super().score_group(group)
            for rollout in group.rollouts:
                length = len(rollout.samples[0])
                part = np.zeros(length, np.float32) if whole else scratch[:length]
                kept.append(part)
                part[:] = rollout.samples[0].advantages
                rollout.samples[0].advantages = part

    task, group = await finished_group(build, tokenizer, algorithm=Frugal.Config())
    assert await task.score_group(group) is None
    for array in kept:
        array[:] = 9.0
    assert all(rollout.samples[0].advantages.max() < 9.0 for rollout in group.rollouts)


def test_engine_that_uses_a_buffer_again_does_not_change_what_it_gave():
    buffer = np.array([5, 6], np.int32)
    given = replace(turn_of([1], [2, 3]).completion, token_ids=buffer)
    completion = checked_completion(given)
    buffer[:] = 0
    assert completion.token_ids.tolist() == [5, 6]
    assert checked_completion(completion) is completion


def test_array_of_a_dataset_stays_its_own():
    board = np.zeros(3)
    seen = read_only({"board": board})["board"]
    with pytest.raises(ValueError, match="read-only"):
        seen[0] = 1.0
    board[0] = 2.0


async def test_costs_of_a_sync_reward_function_are_counted(build, tokenizer):  # noqa: F811
    def dear(completion, row):
        add_cost("dear", 1.0)
        return 1.0

    task, group = await finished_group(
        build, tokenizer, rubric=Rubric.Config(reward_fns=[RewardFn(dear)])
    )
    assert await task.score_group(group) is None
    assert group.costs["dear"] == 3.0


async def test_task_that_scores_its_own_rollouts_amends_them(build, tokenizer):  # noqa: F811
    class Bonus(ListTask):
        async def score_rewards(self, group):
            await super().score_rewards(group)
            for rollout in group.rollouts:
                rollout.amend(reward=rollout.reward + rollout.index_in_group)

    task, group = await finished_group(build, tokenizer, kind=Bonus)
    assert await task.score_group(group) is None
    assert [rollout.reward for rollout in group.rollouts] == [2.0, 3.0, 4.0]


# ------------------------------------------------------------------ read-only records


def frozen_group() -> RolloutGroup:
    example = DataSample(sample_id="0", env_input={"a": [1]})
    return group_of(rollout_of(turn_of([1], [2]), data_sample=example)).freeze()


def test_a_message_is_read_only_whatever_mappings_and_lists_it_has():
    class Part(UserDict):
        pass

    arguments = OrderedDict(steps=[{"x": 1}])
    function = Part(name="move", arguments=arguments)
    (message,) = checked_messages(
        [{"role": "assistant", "content": "é", "tool_calls": [{"function": function}]}], "messages"
    )
    seen = message["tool_calls"][0]["function"]
    assert seen == {"name": "move", "arguments": {"steps": [{"x": 1}]}}
    for changed in (
        lambda: seen.update(name="other"),
        lambda: seen["arguments"].pop("steps"),
        lambda: seen["arguments"]["steps"].append(2),
        lambda: seen["arguments"]["steps"][0].clear(),
    ):
        with pytest.raises(TypeError, match="read-only"):
            changed()
    arguments["steps"].append("the env's own")
    assert seen["arguments"] == {"steps": [{"x": 1}]}


def test_a_copy_of_a_read_only_record_can_be_changed():
    group = frozen_group()
    assert replace(group) == group and not replace(group).frozen
    for made in (copy.deepcopy(group), pickle.loads(pickle.dumps(group))):
        assert type(made) is RolloutGroup and repr(made) == repr(group)
        made.group_id = "other"
        made.rollouts[0].turns.append(None)
        made.rollouts[0].turns[0].assistant_message["content"] = "other"
        made.data_sample.env_input["a"].append(2)
    assert group.group_id == "g" and len(group.rollouts[0].turns) == 1
    assert group.data_sample.env_input == {"a": [1]}


async def test_a_rollout_that_was_read_from_a_file_can_be_frozen(build, tokenizer):
    """A run that goes on scores rollouts that its checkpoint holds; the decoder calls no ``__init__``."""
    _, group = await finished_group(build, tokenizer)
    line = encode_rollout(group.rollouts[0], outcome=None, admitted_version=0, max_bytes=2**20)
    read = decode_rollout(line).rollout
    assert not read.frozen
    read.reward = 0.5
    read.freeze()
    assert read.turns[0].completion.frozen
    with pytest.raises(AttributeError, match="can't change reward"):
        read.reward = 1.0


def test_what_an_owner_amends_is_read_only_too():
    group = frozen_group()
    group.amend(failure="no", costs={"judge": 1.0})
    assert (group.failure, group.costs) == ("no", {"judge": 1.0})
    with pytest.raises(TypeError, match="read-only"):
        group.costs["judge"] = 2.0
    with pytest.raises(AttributeError, match="can't change failure of this RolloutGroup"):
        group.failure = None
    with pytest.raises(AttributeError, match="can't change failure"):
        del group.failure


EDITS_OF_DICTS = {
    "set": lambda value: value.__setitem__("a", 0),
    "delete": lambda value: value.__delitem__("a"),
    "update": lambda value: value.update(a=0),
    "or": lambda value: value.__ior__({"a": 0}),
    "pop": lambda value: value.pop("a"),
    "popitem": lambda value: value.popitem(),
    "setdefault": lambda value: value.setdefault("b", 0),
    "clear": lambda value: value.clear(),
}
EDITS_OF_LISTS = {
    "set": lambda value: value.__setitem__(0, 0),
    "slice": lambda value: value.__setitem__(slice(0, 1), []),
    "delete": lambda value: value.__delitem__(0),
    "append": lambda value: value.append(0),
    "extend": lambda value: value.extend([0]),
    "add": lambda value: value.__iadd__([0]),
    "multiply": lambda value: value.__imul__(2),
    "insert": lambda value: value.insert(0, 0),
    "pop": lambda value: value.pop(),
    "remove": lambda value: value.remove(1),
    "reverse": lambda value: value.reverse(),
    "sort": lambda value: value.sort(),
    "clear": lambda value: value.clear(),
}


@pytest.mark.parametrize("edit", EDITS_OF_DICTS)
def test_read_only_dict_refuses(edit):
    value = read_only({"a": 1})
    with pytest.raises(TypeError, match="read-only"):
        EDITS_OF_DICTS[edit](value)
    assert value == {"a": 1} and json.dumps(value) == '{"a": 1}'


@pytest.mark.parametrize("edit", EDITS_OF_LISTS)
def test_read_only_list_refuses(edit):
    value = read_only([1, 2])
    with pytest.raises(TypeError, match="read-only"):
        EDITS_OF_LISTS[edit](value)
    assert value == [1, 2] and json.dumps(value) == "[1, 2]"


def test_copies_and_sums_of_read_only_values_are_plain():
    value = read_only({"a": [1, ({"b": 2},)]})
    for made in (
        value.copy(),
        value | {},
        {**value},
        copy.copy(value),
        copy.deepcopy(value),
        pickle.loads(pickle.dumps(value)),
    ):
        assert type(made) is dict and made == value
    for made in (value["a"][:1], value["a"] + [3], list(value["a"]), copy.copy(value["a"])):
        assert type(made) is list
    plain = copy.deepcopy(value)
    plain["a"][1][0]["b"] = 3
    assert value["a"][1][0]["b"] == 2


def test_class_of_ones_own_is_left_as_it_is():
    class Own(dict):
        pass

    value = {"own": Own(a=1)}
    read_only(value)["own"]["a"] = 2
    assert value["own"]["a"] == 2


def test_example_of_a_class_of_ones_own_is_frozen_with_all_that_it_has():
    @dataclass(kw_only=True)
    class Puzzle(DataSample):
        kind: ClassVar[str]
        level: int = 1

        def __post_init__(self):
            self.solution = [self.level]

    frozen = frozen_sample(puzzle := Puzzle(sample_id="p", env_input={"a": [1]}))
    assert frozen.solution == [1] and type(frozen.env_input["a"]).__name__ == "ReadOnlyList"
    puzzle.env_input["a"].append(2)
    assert frozen.env_input == {"a": [1]}


@pytest.mark.parametrize("protocol", range(2, pickle.HIGHEST_PROTOCOL + 1))
def test_a_pickle_of_a_read_only_record_is_one_that_can_be_changed(protocol):
    group = frozen_group()
    for dumps in (pickle.dumps, cloudpickle.dumps):
        read = pickle.loads(dumps(group, protocol=protocol))
        assert type(read) is RolloutGroup and type(read.rollouts[0]) is Rollout
        assert not read.frozen
        assert_same(read, group)
        read.rollouts[0].reward = 1.0
