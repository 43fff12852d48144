"""Sorting names over several user turns: the data, what the env says, what a reply is worth."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.fakes.contexts import context_of
from tests.fakes.policy import ScriptedPolicy
from torchtitan.experiments.rl.algorithms.grpo import GRPO
from torchtitan.experiments.rl.errors import ConfigError
from torchtitan.experiments.rl.rollouts.types import DataSample, RolloutStatus
from torchtitan.experiments.rl.tasks.examples.alphabet_sort import (
    NAMES,
    AlphabetSortDataset,
    AlphabetSortRubric,
    AlphabetSortTask,
    make_examples,
    sorted_lists,
    split_of,
)

ROUNDS = [["Nora", "Alice"], ["Bob"], ["Zoe", "Emma"]]
RIGHT = ["Alice\nNora", "Alice\nBob\nNora", "Alice\nBob\nEmma\nNora\nZoe"]


def config(**changes):
    return AlphabetSortTask.Config(**{"algorithm": GRPO.Config(), "group_size": 2} | changes)


async def play(renderer, tokenizer, replies, **changes):
    """One rollout on ROUNDS with these replies."""
    task = config(**changes).build(name="sort", context=context_of(renderer))
    policy = ScriptedPolicy(tokenizer, lambda rollout_id, turn: replies[turn])
    sample = DataSample(sample_id="0", env_input=ROUNDS)
    group = await task.run_group(sample, policy, group_id="g", seed=0, group_size=1)
    assert await task.score_group(group) is None
    return group.rollouts[0], policy.sessions[0]


# ---- data


def test_wanted_lists_grow_and_stay_sorted():
    assert sorted_lists(ROUNDS) == [reply.split("\n") for reply in RIGHT]


@given(
    seed=st.integers(0, 5),
    rounds=st.integers(1, 4),
    names=st.integers(2, 9),
    split=st.sampled_from(["train", "validation"]),
)
def test_examples_keep_their_bounds_and_their_split(seed, rounds, names, split):
    arguments = {
        "split": split,
        "seed": seed,
        "max_rounds": rounds,
        "min_rounds": 1,
        "max_names": names,
    }
    examples = make_examples(12, **arguments)
    assert examples == make_examples(20, **arguments)[:12]
    for example in examples:
        assert 1 <= len(example) <= rounds and all(2 <= len(group) <= names for group in example)
        said = sum(example, [])
        assert len(set(said)) == len(said) and set(said) <= set(NAMES)
        assert split_of(example[0]) == split_of(example[0][::-1]) == split


def test_splits_share_no_opening_names_in_any_order():
    train, validation = (
        {frozenset(example[0]) for example in make_examples(2000, split=split)}
        for split in ("train", "validation")
    )
    assert len(train) > 1500 and len(validation) > 500 and not train & validation


# ---- a conversation


async def test_right_replies_earn_all_and_the_conversation_is_one_training_sample(
    renderer, tokenizer
):
    rollout, session = await play(renderer, tokenizer, RIGHT)
    assert (rollout.status, rollout.reward) == (RolloutStatus.COMPLETED, 1.0)
    (sample,) = rollout.samples
    assert sample.loss_mask.sum() == rollout.completion_tokens
    assert tokenizer.decode(sample.token_ids[sample.loss_mask]) == "".join(
        reply + "<|im_end|>" for reply in RIGHT
    )
    assert tokenizer.decode(session.prompts[-1]) == (
        "<|im_start|>system\nYou are a helpful assistant. Answer with the sorted list only.<|im_end|>\n"
        "<|im_start|>user\nSort these names in alphabetical order, one per line:\nNora\nAlice<|im_end|>\n"
        "<|im_start|>assistant\n<think>\n\n</think>\n\nAlice\nNora<|im_end|>\n"
        "<|im_start|>user\nNow add these names to the list and sort again:\nBob<|im_end|>\n"
        "<|im_start|>assistant\n<think>\n\n</think>\n\nAlice\nBob\nNora<|im_end|>\n"
        "<|im_start|>user\nNow add these names to the list and sort again:\nZoe\nEmma<|im_end|>\n"
        "<|im_start|>assistant\n<think>\n\n</think>\n\n"
    )


@pytest.mark.parametrize(
    ("replies", "exact", "similarity"),
    [
        (["Alice\nNora", "no", RIGHT[2]], 2 / 3, 2 / 3),  # a wrong list costs its own round alone
        (["  Alice \n Nora\n", RIGHT[1], RIGHT[2]], 1.0, 1.0),
        (
            ["Alice, Nora", "Alice\n\nBob\nNora", "Sure!\n" + RIGHT[2]],
            0.0,
            (0 + 6 / 7 + 10 / 11) / 3,
        ),
        (["Nora\nAlice", "Bob\nNora\nAlice", ""], 0.0, (2 / 4 + 4 / 6 + 0) / 3),
    ],
)
async def test_exact_reward_is_the_share_of_rounds_with_the_list_alone(
    renderer, tokenizer, replies, exact, similarity
):
    rollout, _ = await play(
        renderer, tokenizer, replies, rubric=AlphabetSortRubric.Config(exact=True)
    )
    assert rollout.reward_components == pytest.approx({"exact": exact, "similarity": similarity})
    assert rollout.reward == pytest.approx(exact)


async def test_similarity_counts_as_much_as_its_weight(renderer, tokenizer):
    rubric = AlphabetSortRubric.Config(similarity_weight=3.0)
    rollout, _ = await play(renderer, tokenizer, ["Alice\nNora", "no", "no"], rubric=rubric)
    assert rollout.reward == pytest.approx((1 / 3 + 3 * 1 / 3) / 4)
    rollout, _ = await play(renderer, tokenizer, ["Nora\nAlice", "no", "no"], rubric=rubric)
    assert rollout.reward == pytest.approx((0 + 3 * (1 / 2) / 3) / 4)


async def test_rounds_never_reached_count_nothing(renderer, tokenizer):
    rollout, _ = await play(renderer, tokenizer, ["Alice\nNora", "Bob\n" * 200])
    assert (rollout.status, rollout.reward) == (
        RolloutStatus.TRUNCATED_LENGTH,
        pytest.approx(1 / 3),
    )


# ---- config


def test_a_config_that_works_is_let_through():
    config().validate(field="tasks.sort")
    config(validation=None).validate(field="tasks.sort")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"min_rounds": 0}, "tasks.sort.dataset.min_rounds = 0: must be at least 1"),
        ({"min_rounds": 4}, "tasks.sort.dataset.min_rounds = 4: must be at most max_rounds = 3"),
        ({"min_names": 1}, "tasks.sort.dataset.min_names = 1: must be at least 2"),
        (
            {"max_names": 16},
            "tasks.sort.dataset.max_names = 16: with max_rounds = 3 more than the 46 names there are",
        ),
        (
            {"max_rounds": 9},
            "tasks.sort.env.max_turns = 8: an example of tasks.sort.dataset may take 9 turns: raise this",
        ),
    ],
)
def test_a_config_that_cannot_work_says_what_to_change(changes, message):
    with pytest.raises(ConfigError) as error:
        config(dataset=AlphabetSortDataset.Config(**changes)).validate(field="tasks.sort")
    assert str(error.value).startswith(message)
