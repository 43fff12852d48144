"""Difficulty pool: examples go where their rewards say, pools are drawn from by weight, and a resume changes nothing."""

import json
from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.fakes.datasets import Numbers, draw, drawn_ids
from tests.fakes.rollouts import rewarded_group
from torchtitan.experiments.rl.bounds import check_config
from torchtitan.experiments.rl.command.checks import checked_plan
from torchtitan.experiments.rl.config_registry import rl_difficulty_pool_qwen3_debug
from torchtitan.experiments.rl.data.difficulty_pool import DifficultyPool
from torchtitan.experiments.rl.data.replay import ExampleReplay
from torchtitan.experiments.rl.errors import ConfigError
from torchtitan.experiments.rl.rollouts.types import DataSample

UNSEEN_LAST = {"unseen_weight": 0.0}
"""Only drawn from while no other pool has an example."""


def pool(count=5, seed=0, **config) -> DifficultyPool:
    return DifficultyPool.Config(**config).build(
        dataset=Numbers.Config(count=count).build(), seed=seed
    )


def see_all(strategy, reward_of) -> None:
    """Draw and observe every example once; ``reward_of`` maps a sample id to its group's rewards."""
    for sample in draw(strategy, len(strategy.dataset)):
        strategy.observe(rewarded_group(sample, *reward_of(int(sample.sample_id))))


# ---- where an example goes


@pytest.mark.parametrize(
    ("rewards", "where"),
    [
        ([0.0, 0.0], "hard"),
        ([0.0, 0.5], "hard"),  # its mean, 0.25, is still hard
        ([0.0, 0.6], "normal"),
        ([1.0, 0.4], "normal"),
        ([1.0, 0.5], "easy"),  # from 0.75
        ([0.75 - 1e-16] * 3, "easy"),  # rounding moves no example
        ([0.25 + 1e-16] * 3, "hard"),
        ([1.0, None], "easy"),  # a rollout without a reward has no say
        ([None, None], "unseen"),
        ([], "unseen"),
    ],
)
def test_an_example_goes_by_its_groups_mean_reward(rewards, where):
    strategy = pool(count=3, hard_up_to=0.25, easy_from=0.75)
    strategy.observe(rewarded_group(strategy.next(), *rewards))
    sizes = {"unseen": 2, "normal": 0, "hard": 0, "easy": 0}
    sizes[where] += 1
    assert strategy.pool_sizes() == sizes


def test_an_example_moves_with_each_group_and_stays_where_it_was_when_nothing_was_scored():
    strategy = pool(count=1)
    for rewards, where in [
        ([0, 0], "hard"),
        ([None], "hard"),
        ([0, 1], "normal"),
        ([1, 1], "easy"),
        ([], "easy"),
        ([0], "hard"),
    ]:
        sample = strategy.next()
        assert sum(strategy.pool_sizes().values()) == 0  # it is out
        strategy.observe(rewarded_group(sample, *rewards))
        assert [name for name, size in strategy.pool_sizes().items() if size] == [where]


def test_a_second_group_of_an_example_that_is_back_moves_it_too():
    strategy = pool()
    sample = strategy.next()
    strategy.observe(rewarded_group(sample, 1, 1))
    strategy.observe(rewarded_group(sample, 0, 0))
    assert strategy.pool_sizes() == {"unseen": 4, "normal": 0, "hard": 1, "easy": 0}


def test_groups_of_examples_it_never_handed_out_are_ignored():
    strategy = pool()
    strategy.observe(
        rewarded_group(DataSample(sample_id="of another dataset", env_input=None), 1.0)
    )
    assert strategy.pool_sizes() == {"unseen": 5, "normal": 0, "hard": 0, "easy": 0}


# ---- how often, and in which order


def test_pools_are_drawn_from_exactly_by_their_weights():
    weights = {"unseen_weight": 2, "normal_weight": 5, "hard_weight": 1, "easy_weight": 2}
    strategy = pool(count=10_000, **weights)
    rewards = {"unseen": [None], "hard": [0, 0], "normal": [0, 1], "easy": [1, 1]}
    for sample, where in zip(
        draw(strategy, 400), ["hard", "normal", "easy", "unseen"] * 100, strict=True
    ):
        strategy.observe(rewarded_group(sample, *rewards[where]))
    # 1,000 turns of 10 in all, whatever was drawn while only unseen ones were there; none changes its pool.
    drawn = Counter()
    for _ in range(1000):
        sample = strategy.next()
        where = strategy.state_dict()["out"][sample.sample_id][1]
        drawn[where] += 1
        strategy.observe(rewarded_group(sample, *rewards[where]))
    assert drawn == {"unseen": 200, "normal": 500, "hard": 100, "easy": 200}


def test_every_example_of_a_pool_gets_as_many_draws_as_the_others():
    strategy = pool(count=40, **UNSEEN_LAST)
    see_all(strategy, lambda index: [0, 1])
    drawn = Counter()
    for _ in range(40 * 25):
        sample = strategy.next()
        drawn[sample.sample_id] += 1
        strategy.observe(rewarded_group(sample, 0, 1))
    assert set(drawn.values()) == {25}


def test_weights_hold_among_the_pools_that_have_something_to_give():
    strategy = pool(count=100, unseen_weight=0, normal_weight=3, hard_weight=1, easy_weight=4)
    see_all(strategy, lambda index: [0, index % 2])  # 50 normal, 50 hard, none easy
    normal = 0
    for _ in range(400):
        sample = strategy.next()
        normal += int(sample.sample_id) % 2
        strategy.observe(rewarded_group(sample, 0, int(sample.sample_id) % 2))
    assert normal == 300


def test_without_a_weighted_pool_the_fallback_is_unseen_then_normal_then_hard_then_easy():
    strategy = pool(count=3, unseen_weight=0, normal_weight=0, hard_weight=0, easy_weight=1)
    first, second, third = draw(strategy, 3)  # unseen; easy is empty
    for sample, rewards in ((first, [0, 0]), (second, [0, 1]), (third, [0, 0])):
        strategy.observe(rewarded_group(sample, *rewards))
    assert draw(strategy, 3) == [second, first, third]
    for sample, rewards in ((first, [0, 0]), (second, [1, 1])):
        strategy.observe(rewarded_group(sample, *rewards))
    assert draw(strategy, 2) == [second, first]  # now easy is not


def test_most_groups_inform_though_one_example_in_ten_does():
    # Weights 0.6 for the 100 normal examples and 0.05 for the 900 hard ones: 12 of 13 turns, once all have been seen.
    strategy = pool(count=1000)
    informed = []
    for _ in range(5300):
        sample = strategy.next()
        rewards = [0, 1] if int(sample.sample_id) % 10 == 0 else [0, 0]
        informed.append(len(set(rewards)) == 2)
        strategy.observe(rewarded_group(sample, *rewards))
    assert strategy.pool_sizes() == {"unseen": 0, "normal": 100, "hard": 900, "easy": 0}
    assert sum(informed[-1300:]) == 1200


def test_no_example_is_out_twice_while_there_is_another():
    strategy = pool(count=6)
    assert len(set(drawn_ids(strategy, 6))) == 6


@given(count=st.integers(1, 5), draws=st.integers(1, 30))
def test_examples_nobody_observes_come_round_again(count, draws):
    strategy = pool(count=count)
    drawn = drawn_ids(strategy, count + draws)
    for start in range(len(drawn) - count + 1):
        assert len(set(drawn[start : start + count])) == count


def test_unseen_order_follows_the_seed():
    assert drawn_ids(pool(50), 50) == drawn_ids(pool(50), 50) != drawn_ids(pool(50, seed=1), 50)
    assert drawn_ids(pool(50), 50) != [str(index) for index in range(50)]


# ---- state


def play(strategy, script, open_samples):
    """Draw (None) and observe (which of the open ones, with which rewards), and say which examples were drawn."""
    drawn = []
    for step in script:
        if step is None:
            open_samples.append(strategy.next())
            drawn.append(open_samples[-1].sample_id)
        elif open_samples:
            which, rewards = step
            strategy.observe(rewarded_group(open_samples.pop(which % len(open_samples)), *rewards))
    return drawn


STEPS = st.one_of(
    st.none(),
    st.tuples(
        st.integers(0, 9), st.lists(st.sampled_from([None, 0.0, 0.3, 1.0]), min_size=0, max_size=4)
    ),
)
SCRIPTS = st.lists(STEPS, max_size=60)
STRATEGIES = {
    "pool": DifficultyPool.Config(),
    "pool of odd weights": DifficultyPool.Config(
        unseen_weight=0.1, normal_weight=0.7, hard_weight=0.3, easy_weight=0.0
    ),
    "replay": ExampleReplay.Config(fraction=0.5, capacity=3),
    "replay by variance, over a pool": ExampleReplay.Config(
        fraction=0.7, keep="variance", capacity=2, fresh=DifficultyPool.Config()
    ),
}


@pytest.mark.parametrize("config", STRATEGIES.values(), ids=STRATEGIES)
@given(count=st.integers(1, 12), seed=st.integers(0, 9), before=SCRIPTS, after=SCRIPTS)
def test_resumed_strategy_goes_on_as_the_uninterrupted_one(config, count, seed, before, after):
    dataset = Numbers.Config(count=count).build()
    whole, resumed = (config.build(dataset=dataset, seed=seed) for _ in range(2))
    open_samples = []
    play(whole, before, open_samples)
    resumed.load_state_dict(json.loads(json.dumps(whole.state_dict())))
    assert play(resumed, after, list(open_samples)) == play(whole, after, list(open_samples))
    assert resumed.state_dict() == whole.state_dict()


@pytest.mark.parametrize("config", STRATEGIES.values(), ids=STRATEGIES)
@given(count=st.integers(1, 12), script=SCRIPTS)
def test_same_seed_and_observations_give_the_same_examples(config, count, script):
    dataset = Numbers.Config(count=count).build()
    once, again = (config.build(dataset=dataset, seed=3) for _ in range(2))
    assert play(once, script, []) == play(again, script, [])


@given(count=st.integers(1, 12), script=SCRIPTS)
def test_every_example_is_in_one_pool_or_out(count, script):
    strategy = pool(count)
    for step in script:
        play(strategy, [step], [])
        state = strategy.state_dict()
        seen = [sample_id for examples in state["pools"].values() for sample_id in examples] + list(
            state["out"]
        )
        assert len(seen) == len(set(seen)) == state["cursor"]
        assert sum(strategy.pool_sizes().values()) + len(state["out"]) == count


@pytest.mark.parametrize("config", STRATEGIES.values(), ids=STRATEGIES)
def test_state_of_another_dataset_seed_or_strategy_is_refused(config):
    def build(count, seed=0):
        return config.build(dataset=Numbers.Config(count=count).build(), seed=seed)

    state = build(5).state_dict()
    with pytest.raises(ConfigError, match="sampler.examples = 6: the checkpoint has 5"):
        build(6).load_state_dict(state)
    with pytest.raises(ConfigError, match="sampler.seed = 1: the checkpoint has 0"):
        build(5, seed=1).load_state_dict(state)
    with pytest.raises(ConfigError, match="sampler.strategy = .*: the checkpoint has Other"):
        build(5).load_state_dict(state | {"strategy": "Other"})


# ---- configs


@pytest.mark.parametrize(
    ("config", "field"),
    [
        ({"hard_up_to": 0.5, "easy_from": 0.5}, "sampler.easy_from"),
        ({"hard_up_to": float("nan")}, "sampler.hard_up_to"),
        ({"easy_from": float("inf")}, "sampler.easy_from"),
        ({"easy_weight": -0.1}, "sampler.easy_weight"),
        ({"unseen_weight": float("inf")}, "sampler.unseen_weight"),
        (
            {"unseen_weight": 0, "normal_weight": 0, "hard_weight": 0, "easy_weight": 0},
            "sampler.normal_weight",
        ),
    ],
)
def test_pool_that_cannot_be_is_refused(config, field):
    with pytest.raises(ConfigError) as error:
        check_config(DifficultyPool.Config(**config), field="sampler")
    assert error.value.field == field


def test_sampler_is_checked_with_the_run():
    config = rl_difficulty_pool_qwen3_debug()
    config.tasks["sum_digits"].sampler = ExampleReplay.Config(
        fresh=DifficultyPool.Config(easy_from=0.1)
    )
    with pytest.raises(ConfigError) as error:
        checked_plan(config)
    assert error.value.field == "tasks.sum_digits.sampler.fresh.easy_from"
