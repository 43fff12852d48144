"""Relatives of GRPO: values worked out by hand, and each formula again in plain Python floats, on random groups."""

import math
import statistics

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.fakes.rollouts import blank_turn, group_of, rewarded_rollout
from tests.unit.advantages import advantages, of_rewards
from torchtitan.experiments.rl.algorithms import DAPO, GRPO, RLOO, Echo, TurnCredit
from torchtitan.experiments.rl.bounds import check_config
from torchtitan.experiments.rl.config.recipes import dapo
from torchtitan.experiments.rl.config_registry import rl_mixed_qwen3_debug
from torchtitan.experiments.rl.errors import ConfigError
from torchtitan.experiments.rl.rollouts.filters import Truncated, ZeroAdvantage
from torchtitan.experiments.rl.rollouts.samples import samples_from_turns

some_rewards = st.lists(st.floats(-3, 3, width=32), min_size=2, max_size=9)

# ------------------------------------------------------------------ RLOO


def test_rloo_is_the_reward_less_the_mean_of_the_others():
    assert of_rewards(RLOO.Config(), 1.0, 0.0, 0.0, 0.0) == pytest.approx(
        [1, -1 / 3, -1 / 3, -1 / 3]
    )
    assert of_rewards(RLOO.Config(), 2.0, -1.0) == [3.0, -3.0]


def test_rloo_leaves_unscored_rollouts_out_and_gives_a_lone_one_nothing():
    assert of_rewards(RLOO.Config(), 1.0, None, 0.0) == [1.0, None, -1.0]
    assert of_rewards(RLOO.Config(), None, 1.0) == [None, 0.0]
    assert of_rewards(RLOO.Config(), 0.1, 0.1, 0.1) == [0.0, 0.0, 0.0]


@given(some_rewards)
def test_rloo_is_its_formula(rewards):
    expected = [r - statistics.fmean(rewards[:i] + rewards[i + 1 :]) for i, r in enumerate(rewards)]
    assert of_rewards(RLOO.Config(), *rewards) == pytest.approx(expected, rel=1e-5, abs=1e-5)


# ------------------------------------------------------------------ DAPO


def test_dapo_penalises_answers_in_the_last_tokens_before_the_limit():
    # L = 10, B = 4: no penalty up to 6 tokens, 1/4 a token from there, 1 from the limit on.
    config = DAPO.Config(overlong_limit=10, overlong_buffer=4, normalize_std=False)
    found = advantages(
        config, *(rewarded_rollout(1.0, [blank_turn(tokens)]) for tokens in (6, 7, 10, 30))
    )
    mean = (1 + 0.75 + 0 + 0) / 4
    assert found == pytest.approx([1 - mean, 0.75 - mean, -mean, -mean])


@given(some_rewards, st.integers(1, 12), st.data())
def test_dapo_is_its_formula(rewards, buffer, data):
    limit = data.draw(st.integers(buffer, 20))
    lengths = [data.draw(st.integers(0, 25)) for _ in rewards]
    shaped = []
    for reward, length in zip(rewards, lengths, strict=True):
        if length <= limit - buffer:
            shaped.append(reward)
        elif length <= limit:
            shaped.append(reward + ((limit - buffer) - length) / buffer)
        else:
            shaped.append(reward - 1)
    deviation = statistics.pstdev(shaped)
    expected = [(r - statistics.fmean(shaped)) / (deviation + 1e-6) for r in shaped]
    config = DAPO.Config(overlong_limit=limit, overlong_buffer=buffer)
    found = advantages(
        config,
        *(rewarded_rollout(r, [blank_turn(n)]) for r, n in zip(rewards, lengths, strict=True)),
    )
    assert found == pytest.approx(expected, rel=1e-4, abs=1e-4)


def test_dapo_without_a_limit_is_grpo_with_the_standard_deviation():
    assert of_rewards(DAPO.Config(), 1.0, 0.0, 0.5) == of_rewards(
        GRPO.Config(normalize_std=True), 1.0, 0.0, 0.5
    )
    whole = DAPO.Config(overlong_limit=8, overlong_buffer=8)
    check_config(whole, field="a", group_size=2, temperature=1.0)
    with pytest.raises(
        ConfigError, match="a.overlong_buffer = 9: must be at most overlong_limit = 8"
    ):
        check_config(
            DAPO.Config(overlong_limit=8, overlong_buffer=9),
            field="a",
            group_size=2,
            temperature=1.0,
        )
    with pytest.raises(ConfigError, match="a.overlong_limit = 0: must be at least 1"):
        check_config(DAPO.Config(overlong_limit=0), field="a", group_size=2, temperature=1.0)


def test_the_dapo_recipe_sets_credit_clip_and_dynamic_sampling_and_leaves_other_algorithms():
    config = rl_mixed_qwen3_debug()
    config.pre_batch_filters = [Truncated.Config(), ZeroAdvantage.Config(mode="monitor")]
    config = dapo(config)
    kinds = {name: type(task.algorithm) for name, task in config.tasks.items()}
    assert kinds["sum_digits"] is DAPO.Config and kinds["sum_digits_rounds"] is Echo.Config
    assert (config.trainer.loss.rl.clip_low, config.trainer.loss.rl.clip_high) == (0.2, 0.28)
    assert config.pre_batch_filters == [ZeroAdvantage.Config(mode="enforce"), Truncated.Config()]


# ------------------------------------------------------------------ turn-level credit


def talk(*turns: tuple[int, float | None], reward: float = 0.0):
    """A rollout of turns, each (tokens sampled, what the env rewarded); a turn of no tokens was aborted."""
    made = []
    for tokens, earned in turns:
        made.append(blank_turn(tokens))
        made[-1].reward_components = (
            {} if earned is None else {"earned": earned / 2, "more": earned / 2}
        )
    scored = rewarded_rollout(reward, made)
    scored.samples = samples_from_turns(
        made, task_name="task", rollout_id="group/0", temperature=1.0
    )
    return scored


def by_turn(config: TurnCredit.Config, *rollouts) -> list[list[list[float]]]:
    """Advantages of the sampled tokens: of each rollout, of each sample."""
    config.build().score_group(group_of(*rollouts))
    return [
        [sample.advantages[sample.loss_mask].tolist() for sample in scored.samples]
        for scored in rollouts
    ]


def test_a_turn_is_credited_with_the_rewards_from_it_on_less_the_groups_mean_at_that_turn():
    # γ = 1/2. Returns: 1 + 1/2·2 = 2 and 2 in the first, 0 + 1/2·0 = 0 and 0 in the second, 4 in the third, which ends.
    found = by_turn(
        TurnCredit.Config(gamma=0.5),
        talk((1, 1.0), (2, 2.0)),
        talk((2, 0.0), (1, 0.0)),
        talk((1, 4.0)),
    )
    # Means: (2 + 0 + 4)/3 at the first turn, (2 + 0)/2 at the second.
    flat = [[value for sample in samples for value in sample] for samples in found]
    assert flat == [[0.0, 1.0, 1.0], [-2.0, -2.0, -1.0], [2.0]]


def test_the_last_turn_also_has_the_outcome_and_only_named_components_count():
    config = TurnCredit.Config(outcome_weight=10.0, components=["earned"])
    found = by_turn(
        config, talk((1, 2.0), (1, 4.0), reward=1.0), talk((1, 0.0), (1, 0.0), reward=0.0)
    )
    assert [sum(samples, []) for samples in found] == [
        [6.5, 6.0],
        [-6.5, -6.0],
    ]  # returns 1 + 2 + 10 and 2 + 10, against 0


def test_a_failed_rollout_without_turns_takes_no_part():
    failed = talk((1, 1.0), reward=-1.0)
    failed.turns, failed.samples = [], []
    assert by_turn(TurnCredit.Config(), failed, talk((1, 1.0)), talk((1, 0.0))) == [
        [],
        [[0.5]],
        [[-0.5]],
    ]


def test_turn_credit_of_an_env_that_rewards_nothing_fails_by_name():
    with pytest.raises(
        ValueError, match="the env rewarded no turn of the group.*return reward_components"
    ):
        by_turn(TurnCredit.Config(), talk((1, None)), talk((1, None)))
    with pytest.raises(ValueError, match=r"among \['typo'\]"):
        by_turn(TurnCredit.Config(components=["typo"]), talk((1, 1.0)), talk((1, 0.0)))
    assert by_turn(
        TurnCredit.Config(outcome_weight=1.0), talk((1, None), reward=1.0), talk((1, None))
    )[0] == [[0.5]]


conversations = st.lists(
    st.lists(st.tuples(st.integers(0, 3), st.floats(-2, 2, width=32)), min_size=1, max_size=4),
    min_size=2,
    max_size=5,
)


@given(conversations, st.floats(0, 1), st.booleans())
def test_turn_credit_is_its_formula(turns, gamma, normalize):
    found = by_turn(
        TurnCredit.Config(gamma=gamma, normalize_std=normalize), *(talk(*own) for own in turns)
    )
    for own, samples in zip(turns, found, strict=True):
        expected = []
        for k, (tokens, _) in enumerate(own):
            peers = [[r for _, r in other] for other in turns if len(other) > k]
            returns = [
                math.fsum(gamma ** (n - k) * other[n] for n in range(k, len(other)))
                for other in peers
            ]
            mine = math.fsum(gamma ** (n - k) * own[n][1] for n in range(k, len(own)))
            scale = statistics.pstdev(returns) + 1e-6 if normalize else 1
            expected += [(mine - statistics.fmean(returns)) / scale] * tokens
        flat = np.array([value for sample in samples for value in sample])
        # A standard deviation of rounding alone is no signal, and both are at most that small then.
        assert flat == pytest.approx(expected, rel=1e-4, abs=1e-4)
