"""Replay: which groups are stored, how often their examples come again, and when they leave."""

import json
import math
from collections import Counter

import pytest

from tests.fakes.datasets import Numbers, draw, drawn_ids
from tests.fakes.rollouts import rewarded_group
from torchtitan.experiments.rl.bounds import check_config
from torchtitan.experiments.rl.data.difficulty_pool import DifficultyPool
from torchtitan.experiments.rl.data.replay import ExampleReplay
from torchtitan.experiments.rl.errors import ConfigError


def replay(count=100, seed=0, **config) -> ExampleReplay:
    return ExampleReplay.Config(**config).build(
        dataset=Numbers.Config(count=count).build(), seed=seed
    )


def stored(strategy) -> set[str]:
    return {sample_id for sample_id, _ in strategy.state_dict()["stored"]}


@pytest.mark.parametrize(
    ("bounds", "rewards", "kept"),
    [
        ({}, [0.0, 1.0], True),
        ({}, [-5.0, 3.0], True),
        ({}, [0.4, 0.4, 0.4], False),  # ties: every advantage is 0
        ({}, [0.1 + 0.2 + 0.3, 0.3 + 0.2 + 0.1], False),  # a tie but for rounding
        ({}, [0.4, 0.4 + 1e-6], True),
        ({}, [0.4, None], False),
        ({}, [None, None], False),
        ({}, [], False),
        ({"mean_above": 0.25}, [0.0, 0.5], False),  # the mean has to be above
        ({"mean_above": 0.3}, [0.3, 0.1, 0.5 + 1e-16], False),  # their sum is 0.9 but for rounding
        ({"mean_above": 0.25}, [0.0, 0.6], True),
        ({"mean_below": 0.75}, [0.5, 1.0], False),
        ({"mean_above": 0.25, "mean_below": 0.75}, [0.0, 1.0], True),
    ],
)
def test_informative_groups_are_stored(bounds, rewards, kept):
    strategy = replay(**bounds)
    sample = strategy.next()
    strategy.observe(rewarded_group(sample, *rewards))
    assert stored(strategy) == ({sample.sample_id} if kept else set())


def test_without_informative_groups_it_is_the_fresh_sampler():
    strategy = replay(count=10, fraction=1.0)
    fresh = strategy.config.fresh.build(dataset=strategy.dataset, seed=0)
    for _ in range(25):
        sample = strategy.next()
        assert sample == fresh.next()
        strategy.observe(rewarded_group(sample, 1, 1))


def test_a_replayed_example_comes_from_the_dataset_and_leaves_until_it_informs_again():
    strategy = replay(fraction=1.0)
    sample = strategy.next()
    strategy.observe(rewarded_group(sample, 0, 1))
    assert strategy.next() == sample
    assert stored(strategy) == set()
    strategy.observe(rewarded_group(sample, 0, 0, 1))
    assert strategy.next() == sample
    strategy.observe(rewarded_group(sample, 1, 1, 1))  # mastered
    assert stored(strategy) == set() and strategy.next() != sample


def test_replays_are_the_fraction_asked_for_and_each_stored_example_is_as_likely():
    strategy = replay(count=100_000, fraction=0.3, capacity=4)
    kept = draw(strategy, 4)
    for sample in kept:
        strategy.observe(rewarded_group(sample, 0, 1))
    replays = Counter()
    for _ in range(10_000):
        sample = strategy.next()
        if sample in kept:
            replays[sample.sample_id] += 1
            strategy.observe(rewarded_group(sample, 0, 1))
        else:
            strategy.observe(rewarded_group(sample, 0, 0))
    total = replays.total()
    assert abs(total - 3000) < 4 * math.sqrt(10_000 * 0.3 * 0.7)
    # 16.27: what chi-square with 3 degrees of freedom exceeds once in a thousand; the draws are fixed by the seed.
    assert sum((count - total / 4) ** 2 / (total / 4) for count in replays.values()) < 16.27


def test_the_latest_groups_are_kept():
    strategy = replay(capacity=2, fraction=0.01)
    first, second, third = draw(strategy, 3)
    for sample in (first, second, first, third):  # first is stored anew after second
        strategy.observe(rewarded_group(sample, 0, 1))
    assert stored(strategy) == {first.sample_id, third.sample_id}


def test_or_those_whose_rewards_vary_most():
    strategy = replay(capacity=2, fraction=0.01, keep="variance")
    samples = draw(strategy, 4)
    for sample, rewards in zip(samples, ([0, 1], [0, 0.2], [0, 0.6], [0, 0.6]), strict=True):
        strategy.observe(rewarded_group(sample, *rewards))
    # Variances 0.25, 0.01, 0.09, 0.09: of equals the later stays.
    assert stored(strategy) == {samples[0].sample_id, samples[3].sample_id}


def test_fresh_sampler_sees_every_group():
    strategy = replay(fraction=0.5, fresh=DifficultyPool.Config())
    for index, sample in enumerate(draw(strategy, 4)):
        strategy.observe(rewarded_group(sample, index % 2, 1))
    assert strategy.fresh.pool_sizes() == {"unseen": 96, "normal": 2, "hard": 0, "easy": 2}


def test_resume_hands_out_the_stored_examples_of_the_dataset():
    strategy = replay(fraction=1.0)
    samples = draw(strategy, 3)
    for sample in samples:
        strategy.observe(rewarded_group(sample, 0, 1))
    resumed = replay(fraction=1.0)
    resumed.load_state_dict(json.loads(json.dumps(strategy.state_dict())))
    assert drawn_ids(resumed, 3) == drawn_ids(strategy, 3)
    assert sorted(sample.env_input for sample in samples) == sorted(
        resumed.dataset[int(s.sample_id)].env_input for s in samples
    )


def test_a_stored_example_the_dataset_lost_is_named():
    strategy = replay()
    state = strategy.state_dict() | {"stored": [["gone", 0.25]]}
    with pytest.raises(ConfigError, match="no example 'gone'"):
        strategy.load_state_dict(state)


@pytest.mark.parametrize(
    ("config", "field"),
    [
        ({"fraction": 0}, "sampler.fraction"),
        ({"fraction": 1.1}, "sampler.fraction"),
        ({"fraction": float("nan")}, "sampler.fraction"),
        ({"capacity": 0}, "sampler.capacity"),
        ({"keep": "oldest"}, "sampler.keep"),
        ({"mean_above": float("inf")}, "sampler.mean_above"),
        ({"mean_above": 0.5, "mean_below": 0.5}, "sampler.mean_below"),
        ({"fresh": DifficultyPool.Config(easy_from=-1)}, "sampler.fresh.easy_from"),
    ],
)
def test_replay_that_cannot_be_is_refused(config, field):
    with pytest.raises(ConfigError) as error:
        check_config(ExampleReplay.Config(**config), field="sampler")
    assert error.value.field == field
