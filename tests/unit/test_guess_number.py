"""The guessing game: fair splits, what the env says to each guess, and a reward at the end alone."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.fakes.contexts import context_of
from tests.fakes.policy import ScriptedPolicy
from torchtitan.experiments.rl.algorithms.grpo import GRPO
from torchtitan.experiments.rl.errors import ConfigError
from torchtitan.experiments.rl.rollouts.types import DataSample, RolloutStatus
from torchtitan.experiments.rl.tasks.examples.guess_number import (
    Game,
    GuessNumberDataset,
    GuessNumberEnv,
    GuessNumberRubric,
    GuessNumberTask,
    guess_in,
    make_examples,
    split_of,
)

GAME = Game(low=41, high=47, secret=46, guesses=3)


def config(**changes):
    return GuessNumberTask.Config(**{"algorithm": GRPO.Config(), "group_size": 2} | changes)


async def play(renderer, tokenizer, *replies, **changes):
    """One rollout of GAME with these replies."""
    task = config(**changes).build(name="guess", context=context_of(renderer))
    policy = ScriptedPolicy(tokenizer, lambda rollout_id, turn: replies[turn])
    sample = DataSample(sample_id="0", env_input=GAME)
    group = await task.run_group(sample, policy, group_id="g", seed=0, group_size=1)
    assert await task.score_group(group) is None
    return group.rollouts[0]


# ---- data


@given(
    seed=st.integers(0, 5),
    numbers=st.integers(2, 30),
    split=st.sampled_from(["train", "validation"]),
)
def test_games_keep_their_bounds_and_their_split(seed, numbers, split):
    arguments = {"split": split, "seed": seed, "numbers": numbers, "max_number": 99, "guesses": 4}
    games = make_examples(12, **arguments)
    assert games == make_examples(20, **arguments)[:12]
    for game in games:
        assert (
            1 <= game.low <= game.secret <= game.high <= 99 and game.high - game.low == numbers - 1
        )
        assert game.guesses == 4 and split_of(game.low, game.high) == split


def test_splits_share_no_range_and_each_number_of_a_range_comes_up():
    train, validation = (
        make_examples(5000, split=split, numbers=7, max_number=99)
        for split in ("train", "validation")
    )
    assert not {game.low for game in train} & {game.low for game in validation}
    for games in (train, validation):
        secrets = [game.secret - game.low for game in games]
        assert all(5000 / 7 - 150 < secrets.count(offset) < 5000 / 7 + 150 for offset in range(7))


# ---- a game


@pytest.mark.parametrize(
    ("text", "number"),
    [
        ("44", 44),
        (" I guess 44.\n", 44),
        ("-3", -3),
        ("44 or 45", None),
        ("4.5", None),
        ("", None),
        ("forty", None),
        ("9" * 10_000, None),
    ],
)
def test_a_guess_is_the_integer_that_the_reply_gives(text, number):
    assert guess_in(text) == number
    assert guess_in(text, exact=True) == number


def test_only_the_exact_form_wants_no_other_integer():
    assert [guess_in("From 1 to 100: **50**", exact=exact) for exact in (False, True)] == [50, None]


async def test_halving_finds_every_one_of_seven_numbers_in_three_guesses():
    for secret in range(41, 48):
        env = GuessNumberEnv(Game(low=41, high=47, secret=secret, guesses=3))
        await env.reset()
        low, high, done = 41, 47, False
        while not done:
            guess = (low + high) // 2
            step = await env.step_message({"role": "assistant", "content": str(guess)})
            done = step.done
            low, high = (
                (guess + 1, high)
                if "higher" in step.env_messages[0]["content"]
                else (low, guess - 1)
            )
        assert step.reward_components == {"found": 1.0} and guess == secret


async def test_hints_lead_to_the_number_and_the_game_is_one_training_sample(renderer, tokenizer):
    rollout = await play(renderer, tokenizer, "44", "47", "46")
    assert [turn.env_messages[0]["content"] for turn in rollout.turns] == [
        "Wrong: the number is higher than 44. You have 2 guesses left.",
        "Wrong: the number is lower than 47. You have 1 guess left.",
        "Correct! The number was 46. Game over.",
    ]
    assert [turn.reward_components for turn in rollout.turns] == [{}, {}, {"found": 1.0}]
    assert (rollout.status, rollout.reward) == (RolloutStatus.COMPLETED, 1.0)
    assert rollout.turns[0].prompt_messages[0]["content"] == (
        "I am thinking of a number between 41 and 47. You have 3 guesses. Reply with one number per turn."
    )
    (sample,) = rollout.samples
    assert (
        tokenizer.decode(sample.token_ids[sample.loss_mask])
        == "44<|im_end|>47<|im_end|>46<|im_end|>"
    )


async def test_every_reply_costs_a_guess_and_the_last_ends_the_game(renderer, tokenizer):
    rollout = await play(renderer, tokenizer, "what?", "1000", "45")
    assert [turn.env_messages[0]["content"] for turn in rollout.turns] == [
        "Wrong: reply with one number. You have 2 guesses left.",
        "Wrong: the number is lower than 1000. You have 1 guess left.",
        "Wrong: the number was 46. Game over.",
    ]
    assert (rollout.status, rollout.reward) == (RolloutStatus.COMPLETED, 0.0)


@pytest.mark.parametrize(
    ("guesses", "reward"), [(["46"], 1.0), (["44", "46"], 0.5), (["44", "45", "46"], 0.25)]
)
async def test_discount_makes_a_late_find_worth_less(renderer, tokenizer, guesses, reward):
    rollout = await play(
        renderer, tokenizer, *guesses, rubric=GuessNumberRubric.Config(discount=0.5)
    )
    assert rollout.reward == reward and rollout.reward_components["found"] == 1.0


async def test_a_game_cut_short_found_nothing(renderer, tokenizer):
    rollout = await play(renderer, tokenizer, "44", "46 " * 200)
    assert (rollout.status, rollout.reward) == (RolloutStatus.TRUNCATED_LENGTH, 0.0)


# ---- config


@pytest.mark.parametrize(
    ("dataset", "message"),
    [
        ({"numbers": 1}, "tasks.g.dataset.numbers = 1: must be at least 2"),
        ({"guesses": 0}, "tasks.g.dataset.guesses = 0: must be at least 1"),
        (
            {"max_number": 99},
            "tasks.g.dataset.max_number = 99: leaves no range of 100 numbers to train: raise it",
        ),
        (
            {"guesses": 9},
            "tasks.g.env.max_turns = 8: an example of tasks.g.dataset may take 9 turns: raise this",
        ),
    ],
)
def test_a_dataset_that_cannot_work_says_what_to_change(dataset, message):
    config().validate(field="tasks.g")
    with pytest.raises(ConfigError) as error:
        config(dataset=GuessNumberDataset.Config(**dataset)).validate(field="tasks.g")
    assert str(error.value) == message


@pytest.mark.parametrize("discount", [0.0, -1.0, 1.1])
def test_a_discount_outside_its_range_is_refused(discount):
    with pytest.raises(ConfigError, match=f"tasks.g.rubric.discount = {discount}"):
        config(rubric=GuessNumberRubric.Config(discount=discount)).validate(field="tasks.g")
