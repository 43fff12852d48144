"""Examples and tasks come in turn: every one, the same by seed, and the same again after a resume."""

import json
from collections import Counter
from dataclasses import dataclass

import pytest
from hypothesis import given
from hypothesis import strategies as st
from torchtitan.config import Configurable

from tests.fakes.contexts import context_of
from tests.fakes.datasets import Numbers, drawn_ids
from torchtitan.experiments.rl.algorithms.grpo import GRPO
from torchtitan.experiments.rl.bounds import check_fields
from torchtitan.experiments.rl.command.command_line import load_config, parse_command
from torchtitan.experiments.rl.config_registry import rl_grpo_qwen3_debug
from torchtitan.experiments.rl.configurable import UserConfigurable
from torchtitan.experiments.rl.data.dataset import read_example
from torchtitan.experiments.rl.data.difficulty_pool import DifficultyPool
from torchtitan.experiments.rl.data.replay import ExampleReplay
from torchtitan.experiments.rl.data.sampler import (
    InOrder,
    SampleStrategy,
    ShuffledCursor,
    sampler_seed,
)
from torchtitan.experiments.rl.data.task_mix import TaskMix, WeightedRoundRobin
from torchtitan.experiments.rl.errors import ConfigError, UserCodeError
from torchtitan.experiments.rl.rollouts.types import DataSample
from torchtitan.experiments.rl.tasks.task import Task


def cursor(count=5, seed=0):
    return ShuffledCursor.Config().build(dataset=Numbers.Config(count=count).build(), seed=seed)


def picks(mix, n):
    return [mix.next() for _ in range(n)]


def round_robin(**weights):
    return WeightedRoundRobin.Config().build(weights=weights)


# ---- configs


def test_subclass_without_a_config_is_built_by_its_own():
    class Mine(ShuffledCursor):
        pass

    built = Mine.Config().build(dataset=Numbers.Config().build(), seed=0)
    assert type(built) is Mine and issubclass(Mine.Config, SampleStrategy.Config)
    assert type(cursor()) is ShuffledCursor and type(round_robin(a=1)) is WeightedRoundRobin


def test_subclass_with_a_config_adds_its_fields():
    class Base(UserConfigurable):
        @dataclass(kw_only=True, slots=True)
        class Config(Configurable.Config):
            x: int = 1

        def __init__(self, config):
            self.config = config

    class Sub(Base):
        @dataclass(kw_only=True, slots=True)
        class Config(Base.Config):
            y: int = 2

    built = Sub.Config(y=3).build()
    assert type(built) is Sub and (built.config.x, built.config.y) == (1, 3)


def test_dataset_is_a_sequence():
    assert [sample.env_input for sample in Numbers.Config(count=3).build()] == [0, 1, 2]


# ---- samplers


@given(count=st.integers(1, 40), seed=st.integers(0, 2**31), epochs=st.integers(1, 3))
def test_every_epoch_has_every_example_once(count, seed, epochs):
    strategy = cursor(count, seed)
    for _ in range(epochs):
        assert sorted(map(int, drawn_ids(strategy, count))) == list(range(count))


def test_epochs_are_shuffled_anew_and_seeds_differ():
    strategy = cursor(50)
    first, second = drawn_ids(strategy, 50), drawn_ids(strategy, 50)
    assert first != second and first != sorted(first, key=int)
    assert drawn_ids(cursor(50), 100) == first + second
    assert drawn_ids(cursor(50, seed=1), 50) != first


@given(count=st.integers(1, 20), before=st.integers(0, 50), after=st.integers(1, 50))
def test_resumed_cursor_goes_on_where_it_was(count, before, after):
    whole, resumed = cursor(count), cursor(count)
    drawn_ids(whole, before)
    resumed.load_state_dict(json.loads(json.dumps(whole.state_dict())))
    assert drawn_ids(resumed, after) == drawn_ids(whole, after)


def in_order(count):
    return InOrder.Config().build(dataset=Numbers.Config(count=count).build(), seed=0)


def test_a_sampler_takes_the_examples_in_their_order_and_begins_again_at_the_end():
    assert drawn_ids(in_order(3), 7) == ["0", "1", "2", "0", "1", "2", "0"]


@given(count=st.integers(1, 20), before=st.integers(0, 50), after=st.integers(1, 50))
def test_a_resumed_sampler_of_the_order_goes_on_where_it_was(count, before, after):
    whole, resumed = in_order(count), in_order(count)
    drawn_ids(whole, before)
    resumed.load_state_dict(json.loads(json.dumps(whole.state_dict())))
    expected = [str(index % count) for index in range(before, before + after)]
    assert drawn_ids(resumed, after) == expected


def test_the_state_of_another_order_is_refused():
    with pytest.raises(ConfigError, match="sampler.strategy = 'InOrder': the checkpoint has"):
        in_order(5).load_state_dict(cursor(5).state_dict())


def test_an_option_takes_the_rows_in_their_order():
    words = "--config rl_grpo_qwen3_debug --tasks.sum-digits.sampler in_order"
    config = load_config(parse_command(words.split()))
    assert type(config.tasks["sum_digits"].sampler) is InOrder.Config


@pytest.mark.parametrize(
    "config", [ShuffledCursor.Config, InOrder.Config, DifficultyPool.Config, ExampleReplay.Config]
)
def test_example_that_could_not_be_read_comes_first_when_the_run_goes_on(config):
    class Flaky(Numbers):
        fails = False

        def __getitem__(self, index):
            if self.fails:
                raise OSError("the disk is away")
            return super().__getitem__(index)

    whole = config().build(dataset=Flaky.Config(count=5).build(), seed=3)
    expected = drawn_ids(whole, 5)
    dataset = Flaky.Config(count=5).build()
    sampler = config().build(dataset=dataset, seed=3)
    assert drawn_ids(sampler, 2) == expected[:2]
    dataset.fails = True
    with pytest.raises(UserCodeError, match="the disk is away"):
        sampler.next()
    dataset.fails = False
    assert drawn_ids(sampler, 3) == expected[2:]


def test_state_of_another_dataset_or_seed_is_refused():
    state = cursor(5).state_dict()
    with pytest.raises(ConfigError, match="sampler.examples = 6: the checkpoint has 5"):
        cursor(6).load_state_dict(state)
    with pytest.raises(ConfigError, match="sampler.seed = 1: the checkpoint has 0"):
        cursor(5, seed=1).load_state_dict(state)


def test_empty_dataset_is_refused():
    with pytest.raises(ConfigError, match="no examples"):
        cursor(0)


def test_sampler_of_ones_own_needs_next_alone():
    class First(SampleStrategy):
        def next(self):
            return self.dataset[0]

    strategy = First.Config().build(dataset=Numbers.Config().build(), seed=0)
    strategy.observe(None)
    strategy.load_state_dict(strategy.state_dict())
    assert drawn_ids(strategy, 2) == ["0", "0"]
    with pytest.raises(TypeError):
        SampleStrategy.Config().build(dataset=[1], seed=0)


# ---- task mix


def test_round_robin_is_smooth():
    # nginx's own example: 5, 1, 1.
    assert "".join(picks(round_robin(a=5, b=1, c=1), 7)) == "aabacaa"
    assert "".join(picks(round_robin(a=1, b=1), 4)) == "abab"


@given(st.lists(st.integers(1, 9), min_size=1, max_size=6), st.integers(1, 120))
def test_share_is_never_off_by_more_than_a_pick_per_other_task(weights, n):
    named = {f"t{index}": weight for index, weight in enumerate(weights)}
    counts = Counter(picks(round_robin(**named), n))
    for name, weight in named.items():
        assert abs(counts[name] - n * weight / sum(weights)) <= max(1, len(weights) - 1)


@given(st.lists(st.floats(0.01, 10), min_size=1, max_size=5), st.integers(0, 40))
def test_resumed_mix_goes_on_where_it_was(weights, before):
    named = {f"t{index}": weight for index, weight in enumerate(weights)}
    whole, resumed = round_robin(**named), round_robin(**named)
    picks(whole, before)
    resumed.load_state_dict(json.loads(json.dumps(whole.state_dict())))
    assert picks(resumed, 30) == picks(whole, 30)


def test_resume_with_another_set_of_tasks():
    mix = round_robin(a=1, b=1)
    picks(mix, 3)
    changed = round_robin(b=1, c=1)
    changed.load_state_dict(mix.state_dict())
    assert set(picks(changed, 2)) == {"b", "c"}


@pytest.mark.parametrize("weight", [0.0, -1.0, float("nan"), float("inf")])
def test_weights_that_cannot_be_are_refused(weight):
    config = rl_grpo_qwen3_debug()
    config.tasks["sum_digits"].weight = weight
    with pytest.raises(ConfigError, match="tasks.sum_digits.weight"):
        check_fields(config)
    config.tasks = {}
    with pytest.raises(ConfigError, match="tasks.*name at least one task"):
        check_fields(config)


def test_mix_of_ones_own_needs_next_alone():
    class Last(TaskMix):
        def next(self):
            return list(self.weights)[-1]

    assert picks(Last.Config().build(weights={"a": 1, "b": 1}), 2) == ["b", "b"]


# ---- seeds of tasks


def test_seed_of_a_tasks_sampler_is_a_stable_hash_of_run_and_name():
    # printf 0/a | b2sum -l 64
    assert sampler_seed(0, "a") == 0xB78B2EF3C704F401 >> 1
    assert len({sampler_seed(0, "a"), sampler_seed(0, "b"), sampler_seed(1, "a")}) == 3


def test_tasks_with_equal_datasets_walk_them_in_different_orders(renderer):
    class LettersTask(Task):
        def make_env(self, sample):
            return None

    def walk(name, seed=0):
        config = LettersTask.Config(algorithm=GRPO.Config(), dataset=Numbers.Config(count=20))
        return drawn_ids(
            config.build(name=name, context=context_of(renderer, seed=seed)).sampler, 20
        )

    assert walk("a") != walk("b") and walk("a") == walk("a") and walk("a") != walk("a", seed=1)


def test_an_item_that_is_no_sample_or_has_no_text_for_an_id_is_named_by_its_index():
    for item, fault in [
        ({"id": 1}, "item 0 is a dict, want a DataSample"),
        (DataSample(sample_id=1, env_input=""), "item 0: its sample_id is a int, want a text"),
    ]:
        with pytest.raises(UserCodeError, match=f"dataset list: {fault}"):
            read_example([item], 0)
