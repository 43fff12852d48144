"""Advantages worked out by hand, and what each algorithm refuses at config time."""

import math
import pickle
from dataclasses import dataclass

import numpy as np
import pytest

from tests.fakes.rollouts import blank_turn, group_of, rewarded_rollout
from tests.unit.advantages import advantages, of_rewards
from torchtitan.experiments.rl.algorithms.base import Algorithm, shorten
from torchtitan.experiments.rl.algorithms.dapo import DAPO
from torchtitan.experiments.rl.algorithms.grpo import GRPO
from torchtitan.experiments.rl.algorithms.max_rl import MaxRL
from torchtitan.experiments.rl.algorithms.reinforce_pp import ReinforcePPBaseline
from torchtitan.experiments.rl.algorithms.rloo import RLOO
from torchtitan.experiments.rl.bounds import check_config
from torchtitan.experiments.rl.errors import ConfigError
from torchtitan.experiments.rl.generation.references import FrozenModel

# ------------------------------------------------------------------ GRPO


def test_grpo_is_the_reward_less_the_groups_mean():
    assert of_rewards(GRPO.Config(), 1.0, 0.0, 0.0, 0.0) == [0.75, -0.25, -0.25, -0.25]
    assert of_rewards(GRPO.Config(), -2.0, 0.5) == [-1.25, 1.25]


def test_grpo_divides_by_the_standard_deviation_only_when_asked():
    # Mean 1/4; deviation sqrt(3)/4.
    expected = [math.sqrt(3)] + [-1 / math.sqrt(3)] * 3
    assert of_rewards(GRPO.Config(normalize_std=True), 1.0, 0.0, 0.0, 0.0) == pytest.approx(
        expected, rel=1e-5
    )


@pytest.mark.parametrize("config", [GRPO.Config(), GRPO.Config(normalize_std=True), MaxRL.Config()])
@pytest.mark.parametrize("reward", [0.0, 0.1, 1.0, 1 / 3])
def test_equal_rewards_give_advantages_of_exactly_zero(config, reward):
    assert of_rewards(config, *[reward] * 7) == [0.0] * 7


CENTERED = [
    GRPO.Config(),
    GRPO.Config(normalize_std=True),
    MaxRL.Config(),
    RLOO.Config(),
    DAPO.Config(),
    ReinforcePPBaseline.Config(),
    GRPO.Config(length_penalty="turns"),
]


@pytest.mark.parametrize("config", CENTERED)
@pytest.mark.parametrize(
    "rewards",
    [(0.1 + 0.2 + 0.3, 0.3 + 0.2 + 0.1, 0.6), (1e3 + 0.1 - 1e3, 0.1), (0.3 - 0.2 - 0.1, 0)],
)
def test_rewards_that_rounding_alone_tells_apart_give_advantages_of_exactly_zero(config, rewards):
    assert len(set(rewards)) > 1
    assert of_rewards(config, *rewards) == [0.0] * len(rewards)


@pytest.mark.parametrize("config", CENTERED)
def test_any_larger_difference_of_rewards_is_a_signal(config):
    first, second = of_rewards(config, 1.0, 1.0 + 1e-8)
    assert first < 0 < second


def test_right_answers_that_rounding_alone_tells_apart_share_the_length_penalty():
    # Both are right. They cost 2 and 6: their mean is 4. Either order of the sum gives the same.
    costs = np.array([2.0, 6.0, 4.0])
    for right in ((0.1 + 0.2 + 0.3, 0.6), (0.6, 0.1 + 0.2 + 0.3)):
        assert shorten(np.array([*right, 0.0]), costs) == pytest.approx([0.9, 0.6, 0.0])


@pytest.mark.parametrize("config", [GRPO.Config(), MaxRL.Config()])
def test_a_rollout_without_reward_counts_for_nothing_and_is_left_as_it_is(config):
    assert (
        of_rewards(config, 1.0, None, 0.0)
        == of_rewards(config, 1.0, 0.0)[:1] + [None] + of_rewards(config, 1.0, 0.0)[1:]
    )
    assert of_rewards(config, None, None) == [None, None]
    assert of_rewards(config, None, 1.0) == [
        None,
        0.0,
    ]  # one survivor has nothing to be compared with


# ------------------------------------------------------------------ length penalties


def test_tokens_penalty_rewards_right_answers_shorter_than_the_mean_right_one():
    # Right ones cost 2 and 6: their mean is 4. The shorter gets 1 * (1 + 1/2), the longer keeps 1; the wrong one stays at 0.
    found = advantages(
        GRPO.Config(length_penalty="tokens"),
        rewarded_rollout(1.0, [blank_turn(2)]),
        rewarded_rollout(1.0, [blank_turn(6)]),
        rewarded_rollout(0.0, [blank_turn(1)]),
    )
    mean = 2.5 / 3
    assert found == pytest.approx([1.5 - mean, 1 - mean, -mean], rel=1e-6)


def test_tokens_penalty_weighs_completion_and_tool_response_tokens():
    # Bodies of tool messages count; their template, other roles and tokens of no role don't.
    tool_turn = blank_turn(
        4, ["user", "tool", "tool", "tool", None], [True, False, True, True, False]
    )
    config = GRPO.Config(
        length_penalty="tokens", completion_token_weight=1.0, tool_token_weight=3.0
    )
    # Costs: (1 + 4) + 3 * 2 = 11 and 5; c = 8. The second gets 2 * (1 + 3/8).
    found = advantages(
        config,
        rewarded_rollout(2.0, [blank_turn(1), tool_turn]),
        rewarded_rollout(2.0, [blank_turn(5)]),
    )
    assert found == pytest.approx([-0.375, 0.375], rel=1e-6)


def test_turns_penalty_counts_turns():
    # Right ones take 1 and 3 turns: c = 2, bonuses 1/2 and 0.
    config = GRPO.Config(length_penalty="turns")
    found = advantages(
        config,
        rewarded_rollout(1.0, [blank_turn(9)]),
        rewarded_rollout(1.0, [blank_turn(1)] * 3),
        rewarded_rollout(0.5, [blank_turn(1)]),
    )
    assert found == pytest.approx([0.5, 0.0, -0.5], rel=1e-6)


@pytest.mark.parametrize("penalty", ["tokens", "turns"])
def test_length_penalty_needs_a_reward_above_zero_and_never_lowers_one(penalty):
    config = GRPO.Config(length_penalty=penalty)
    wrong = [
        rewarded_rollout(0.0, [blank_turn(1)]),
        rewarded_rollout(0.0, [blank_turn(9)] * 2),
        rewarded_rollout(-1.0, [blank_turn(1)]),
    ]
    assert advantages(config, *wrong) == pytest.approx([1 / 3, 1 / 3, -2 / 3])
    alone = [
        rewarded_rollout(1.0, [blank_turn(9)]),
        rewarded_rollout(0.0, [blank_turn(1)]),
    ]  # the only right one is its own mean: no bonus
    assert advantages(config, *alone) == [0.5, -0.5]


def test_a_cost_in_tokens_needs_a_weight_and_no_other_cost_does():
    task = {"field": "a", "group_size": 2, "temperature": 1.0}
    GRPO.Config(length_penalty="tokens").validate(**task)
    for weight in ("completion_token_weight", "tool_token_weight"):
        GRPO.Config(length_penalty="tokens", **{weight: 0.0}).validate(**task)
    none = {"completion_token_weight": 0.0, "tool_token_weight": 0.0}
    GRPO.Config(length_penalty="turns", **none).validate(**task)
    with pytest.raises(ConfigError, match="a.length_penalty = 'tokens': both token weights are 0"):
        GRPO.Config(length_penalty="tokens", **none).validate(**task)


def test_a_length_penalty_ignores_unscored_rollouts():
    config = GRPO.Config(length_penalty="tokens")
    scored = [rewarded_rollout(1.0, [blank_turn(2)]), rewarded_rollout(1.0, [blank_turn(6)])]
    assert advantages(config, *scored, rewarded_rollout(None, [blank_turn(1)])) == [
        0.25,
        -0.25,
        None,
    ]


def test_nothing_sampled_costs_nothing():
    config = GRPO.Config(length_penalty="tokens", completion_token_weight=0.0)
    assert of_rewards(config, 1.0, 0.0) == [0.5, -0.5]


# ------------------------------------------------------------------ MaxRL


def test_max_rl_divides_by_the_mean_so_rare_successes_weigh_more():
    assert of_rewards(MaxRL.Config(), 1.0, 0.0, 0.0, 0.0) == [3.0, -1.0, -1.0, -1.0]
    assert of_rewards(MaxRL.Config(), 1.0, 1.0, 0.0, 0.0) == [1.0, 1.0, -1.0, -1.0]


def test_max_rl_is_zero_where_all_fail_all_succeed_or_the_mean_is_not_positive():
    assert of_rewards(MaxRL.Config(), 0.0, 0.0) == [0.0, 0.0]
    assert of_rewards(MaxRL.Config(), 1.0, 1.0) == [0.0, 0.0]
    assert of_rewards(MaxRL.Config(), -1.0, 0.5) == [0.0, 0.0]
    assert np.mean([0.1, 0.2, -0.3]) > 0  # by rounding alone
    assert of_rewards(MaxRL.Config(), 0.1, 0.2, -0.3) == [0.0, 0.0, 0.0]


# ------------------------------------------------------------------ configs


@pytest.mark.parametrize("config", [GRPO.Config(), MaxRL.Config()])
def test_a_group_of_one_is_refused(config):
    config.validate(field="tasks.sort.algorithm", group_size=2, temperature=0.7)
    with pytest.raises(ConfigError, match="tasks.sort.algorithm: group_size = 1: .*use 2 or more"):
        config.validate(field="tasks.sort.algorithm", group_size=1, temperature=1.0)


class Distill(Algorithm):
    action_component = "ref_kl"


class Imitate(Algorithm):
    action_component = "ce"

    @dataclass(kw_only=True, slots=True)
    class Config(Algorithm.Config):
        def frozen_source(self):
            return FrozenModel(name="teacher", base_url="http://localhost:1/v1")


class FromAFrozenModel(Imitate):
    action_component = "rl"


class ComparedWithAFrozenModelsOwn(Imitate):
    action_component = "ref_kl"


@pytest.mark.parametrize("algorithm", [FromAFrozenModel, ComparedWithAFrozenModelsOwn])
def test_a_frozen_source_is_refused_where_a_ratio_is_needed(algorithm):
    with pytest.raises(
        ConfigError,
        match=f"a: frozen source.*{algorithm.__name__} needs an importance ratio.*such as SFT",
    ):
        algorithm.Config().validate(field="a", group_size=2, temperature=1.0)


def test_reference_logprobs_at_another_temperature_are_refused():
    Distill.Config().validate(field="a", group_size=1, temperature=1.0)
    Imitate.Config().validate(field="a", group_size=1, temperature=0.7)
    with pytest.raises(ConfigError, match="a: temperature = 0.7: .*sample at 1"):
        Distill.Config().validate(field="a", group_size=1, temperature=0.7)


@pytest.mark.parametrize(
    "config, message",
    [
        (
            GRPO.Config(tool_token_weight=-1.0),
            "a.tool_token_weight = -1.0: must be at least 0; a negative cost rewards length",
        ),
        (
            GRPO.Config(length_penalty="tokens", completion_token_weight=0, tool_token_weight=0),
            "a.length_penalty = 'tokens': .*raise one",
        ),
    ],
)
def test_token_weights_that_make_no_cost_are_refused(config, message):
    with pytest.raises(ConfigError, match=message):
        check_config(config, field="a", group_size=2, temperature=1.0)


# ------------------------------------------------------------------ a user's own


class Half(GRPO):
    """As a user would write it: no Config, so it takes GRPO's settings."""

    def score_group(self, group):
        super().score_group(group)
        for scored in group.scored:
            for sample in scored.samples:
                sample.advantages /= 2


class Constant(Algorithm):
    @dataclass(kw_only=True, slots=True)
    class Config(Algorithm.Config):
        value: float

    async def score_rollout(self, rollout):
        rollout.assign_advantages(self.config.value)


def test_a_subclass_without_a_config_builds_itself_and_its_config_travels():
    config = pickle.loads(pickle.dumps(Half.Config(length_penalty="turns")))
    assert type(config.build()) is Half and config.length_penalty == "turns"
    assert of_rewards(Half.Config(), 1.0, 0.0) == [0.25, -0.25]
    with pytest.raises(ConfigError, match="Half compares"):
        Half.Config().validate(field="a", group_size=1, temperature=1.0)


async def test_the_base_gives_no_credit_so_an_algorithm_overrides_only_what_it_needs():
    algorithm = Constant.Config(value=2.0).build()
    scored = rewarded_rollout(1.0)
    await algorithm.setup(None)
    await algorithm.score_rollout(scored)
    algorithm.score_group(group_of(scored))
    assert scored.samples[0].advantages.tolist() == [0, 0, 2, 2, 2]
