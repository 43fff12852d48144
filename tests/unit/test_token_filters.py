"""Filters of what was sampled: values by hand, and rollouts they must leave alone."""

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.fakes.contexts import context_of
from tests.fakes.filters import apply_filters
from tests.fakes.rollouts import group_of, rollout_of, turn_of
from torchtitan.experiments.rl.bounds import check_config
from torchtitan.experiments.rl.command.checks import checked_plan
from torchtitan.experiments.rl.config_registry import rl_grpo_qwen3_debug
from torchtitan.experiments.rl.configurable import build_with
from torchtitan.experiments.rl.errors import ConfigError
from torchtitan.experiments.rl.rollouts.filters import (
    Filter,
    Gibberish,
    Repetition,
    Truncated,
    longest_run,
    ngram_hashes,
)
from torchtitan.experiments.rl.rollouts.types import Rollout, RolloutStatus

SURE, UNSURE = -0.001, -0.5  # probabilities 0.999 and 0.607
BLIND = -math.log(151_936)  # -11.93


def sampled(*turns: tuple, **fields) -> Rollout:
    """Return a scored rollout whose turns sampled these (ids, logprobs)."""
    made = [turn_of([1, 2], ids, logprobs=logprobs) for ids, logprobs in turns]
    return rollout_of(*made, reward=0.0, **fields)


def built(config: Filter.Config, *, vocab_size: int = 151_936) -> Filter:
    return build_with(config, context_of(None, vocab_size=vocab_size))


def matches(config: Filter.Config, *rollouts: Rollout, **vocabulary: int) -> list[bool]:
    return built(config, **vocabulary).matches(group_of(*rollouts))


# ---- truncated


def test_truncated_matches_the_limits_of_ours_alone():
    matched = {
        status
        for status in RolloutStatus
        if status.is_terminal() and matches(Truncated.Config(), sampled(status=status))[0]
    }
    assert matched == {
        RolloutStatus.TRUNCATED_LENGTH,
        RolloutStatus.TRUNCATED_PROMPT_OVERFLOW,
        RolloutStatus.TRUNCATED_MAX_TURNS,
    }


# ---- gibberish


@pytest.mark.parametrize(
    ("token", "logprob", "expected"),
    [
        (100_278, BLIND - 2.01, True),
        (100_278, BLIND - 1.99, False),  # rare, and no less likely than the margin allows
        (100_277, BLIND - 2.01, False),  # unlikely, but a common token
        (151_645, SURE, False),  # <|im_end|> where it belongs
    ],
)
def test_gibberish_is_rare_and_unlikelier_than_a_blind_draw(token, logprob, expected):
    rollout = sampled(([5, token, 7], [UNSURE, logprob, UNSURE]))
    assert matches(Gibberish.Config(), rollout) == [expected]


def test_gibberish_tokens_are_counted_over_all_turns():
    rollout = sampled(([150_000, 5], [-20, -20]), ([150_001, 150_002], [-20, -1]))
    assert matches(Gibberish.Config(tokens=2), rollout) == [True]
    assert matches(Gibberish.Config(tokens=3), rollout) == [False]


def test_gibberish_follows_the_vocabulary():
    # Of 1,000 tokens: -6.908 for a blind draw, -7.908 with a margin of 1.
    config = Gibberish.Config(rare_from=0.8, margin=1.0)
    rollouts = [
        sampled(([token], [logprob]))
        for token, logprob in ((800, -7.91), (800, -7.90), (799, -7.91))
    ]
    assert matches(config, *rollouts, vocab_size=1000) == [True, False, False]


def test_gibberish_is_not_built_without_a_vocabulary():
    with pytest.raises(TypeError, match="'context'"):
        Gibberish.Config().build()


# ---- repetition


def test_repetition_is_a_run_of_sure_tokens():
    config = Repetition.Config(window=4)
    sure, broken = [SURE] * 4, [SURE, SURE, UNSURE, SURE, SURE, SURE]
    assert matches(config, sampled((range(4), sure)), sampled((range(6), broken))) == [
        True,
        False,
    ]
    # At the threshold itself is not above it.
    assert matches(
        Repetition.Config(window=2, probability=math.exp(-0.5)), sampled(([1, 2], [-0.5, -0.5]))
    ) == [False]


def test_a_run_of_sure_tokens_ends_with_its_turn():
    halves = (range(3), [SURE] * 3), (range(3), [SURE] * 3)
    assert matches(Repetition.Config(window=4), sampled(*halves)) == [False]
    assert matches(Repetition.Config(window=3), sampled(*halves)) == [True]


def test_repetition_by_default_takes_3000_tokens_as_published():
    assert [
        matches(Repetition.Config(), sampled((range(n), [SURE] * n)))[0] for n in (2999, 3000)
    ] == [False, True]


def test_a_loop_with_an_unsure_token_shows_in_its_ngrams():
    # 10 tokens, 60 times round: 600 tokens, 598 3-grams, 10 of them distinct: 0.0167.
    loop = sampled((list(range(10)) * 60, ([SURE] * 9 + [UNSURE]) * 60))
    assert matches(Repetition.Config(window=20), loop) == [False]
    assert matches(Repetition.Config(window=20, ngram=3, distinct_ngrams=0.0168), loop) == [True]
    assert matches(Repetition.Config(window=20, ngram=3, distinct_ngrams=0.0167), loop) == [False]
    assert matches(
        Repetition.Config(window=20, ngram=3, distinct_ngrams=0.0168, min_ngrams=599), loop
    ) == [False]


def test_the_same_call_turn_after_turn_shows_in_the_ngrams():
    # 5 tokens a turn have 3 3-grams; 4 turns have 12, of which 3 are distinct.
    rollout = sampled(*[(range(5), [UNSURE] * 5)] * 4)
    config = {"ngram": 3, "min_ngrams": 12}
    assert matches(Repetition.Config(distinct_ngrams=0.26, **config), rollout) == [True]
    assert matches(Repetition.Config(distinct_ngrams=0.25, **config), rollout) == [False]


@given(st.lists(st.booleans(), max_size=60))
def test_longest_run_is_the_longest_of_the_runs(flags):
    text = "".join("x" if flag else " " for flag in flags)
    assert longest_run(np.array(flags, bool)) == max(map(len, text.split(" ")))


@given(st.lists(st.integers(0, 3), max_size=40), st.integers(1, 6))
def test_hashes_are_equal_where_the_ngrams_are(token_ids, n):
    ngrams = [tuple(token_ids[start : start + n]) for start in range(len(token_ids) - n + 1)]
    hashes = ngram_hashes(np.array(token_ids, np.int32), n).tolist()
    assert len(hashes) == len(ngrams)
    assert len(set(zip(ngrams, hashes, strict=True))) == len(set(ngrams)) == len(set(hashes))


# ---- any of them

DEFAULTS = [
    Gibberish.Config(),
    Repetition.Config(),
    Repetition.Config(distinct_ngrams=0.1),
    Truncated.Config(),
]
EAGER = [
    Gibberish.Config(rare_from=0.5, margin=0.0),
    Repetition.Config(window=2, probability=0.5),
    Repetition.Config(window=50, ngram=2, min_ngrams=2, distinct_ngrams=0.8),
    Truncated.Config(),
]


@pytest.mark.parametrize("config", DEFAULTS)
def test_rollouts_without_a_token_never_match(config):
    empty = [
        sampled(status=RolloutStatus.COMPLETED),
        sampled(([], []), status=RolloutStatus.COMPLETED),
    ]
    assert matches(config, *empty) == [False, False]
    assert matches(config) == []


@pytest.mark.parametrize("config", DEFAULTS)
@given(seed=st.integers(0, 2**32), length=st.integers(1, 8000))
def test_ordinary_text_never_matches(config, seed, length):
    # Any token of Qwen3's vocabulary, with half a nat of surprise on average and ten where it is most surprising.
    random = np.random.default_rng(seed)
    logprobs = np.maximum(-random.exponential(0.5, length), -10)
    rollout = sampled(
        (random.integers(0, 151_936, length), logprobs), status=RolloutStatus.COMPLETED
    )
    assert matches(config, rollout) == [False]


def random_rollout(seed: int) -> Rollout:
    random = np.random.default_rng(seed)
    lengths = random.integers(0, 20, size=random.integers(0, 4))
    turns = [
        (random.integers(0, 10, length), -random.exponential(1.0, length)) for length in lengths
    ]
    return sampled(
        *turns, status=[RolloutStatus.COMPLETED, RolloutStatus.TRUNCATED_LENGTH][random.integers(2)]
    )


@pytest.mark.parametrize("config", EAGER)
@given(data=st.data(), seeds=st.lists(st.integers(0, 2**32), max_size=4))
def test_a_rollout_matches_by_itself_whatever_its_place_in_the_group(config, data, seeds):
    rollouts = [random_rollout(seed) for seed in seeds]
    order = data.draw(st.permutations(range(len(rollouts))))
    answers = matches(config, *rollouts)
    assert matches(config, *[rollouts[index] for index in order]) == [
        answers[index] for index in order
    ]
    assert answers == [matches(config, rollout)[0] for rollout in rollouts]


def test_each_is_counted_under_its_name():
    looping = sampled((range(4), [SURE] * 4), status=RolloutStatus.TRUNCATED_LENGTH)
    noise = sampled(([150_000], [-20.0]), status=RolloutStatus.COMPLETED)
    filters = [Truncated.Config(mode="monitor"), Gibberish.Config(), Repetition.Config(window=4)]
    result = apply_filters([built(config) for config in filters], group_of(looping, noise))
    assert result.matched == {"truncated": 1, "gibberish": 1, "repetition": 1}
    assert [name for _, name in result.dropped] == ["repetition", "gibberish"]


@pytest.mark.parametrize(
    ("config", "field"),
    [
        (Truncated.Config(mode="off"), "truncated.mode"),
        (Gibberish.Config(mode="off"), "gibberish.mode"),
        (Gibberish.Config(rare_from=1.0), "gibberish.rare_from"),
        (Gibberish.Config(rare_from=-1), "gibberish.rare_from"),
        (Gibberish.Config(margin=-0.1), "gibberish.margin"),
        (Gibberish.Config(margin=math.inf), "gibberish.margin"),
        (Gibberish.Config(tokens=0), "gibberish.tokens"),
        (Repetition.Config(mode="off"), "repetition.mode"),
        (Repetition.Config(window=1), "repetition.window"),
        (Repetition.Config(probability=1.0), "repetition.probability"),
        (Repetition.Config(probability=math.nan), "repetition.probability"),
        (Repetition.Config(distinct_ngrams=1.1), "repetition.distinct_ngrams"),
        (Repetition.Config(ngram=0), "repetition.ngram"),
        (Repetition.Config(min_ngrams=1), "repetition.min_ngrams"),
    ],
)
def test_filter_that_cannot_be_is_refused(config, field):
    with pytest.raises(ConfigError) as error:
        build_with(config, context_of(None))
    assert error.value.field == field


@pytest.mark.parametrize("slot", ["pre_batch_filters", "post_batch_filters"])
def test_filters_are_checked_with_the_run(slot):
    config = rl_grpo_qwen3_debug()
    setattr(config, slot, [Truncated.Config(), Repetition.Config(window=0)])
    with pytest.raises(ConfigError) as error:
        checked_plan(config)
    assert error.value.field == f"{slot}[1].window"


def test_a_filter_of_ones_own_is_checked_by_its_base():
    class Mine(Filter):
        def matches(self, group):
            return [False] * len(group.scored)

    assert matches(Mine.Config(), sampled()) == [False]
    with pytest.raises(ConfigError, match=r"pre_batch_filters\[0\].mode = 'off'"):
        check_config(Mine.Config(mode="off"), field="pre_batch_filters[0]")
