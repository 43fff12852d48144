"""Figures of an evaluation: intervals, slices, the paired comparison; and what the command takes from a config."""

import itertools
import json
import math
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from torchtitan.experiments.rl.config_registry import rl_grpo_qwen3_14b, rl_grpo_qwen3_debug
from torchtitan.experiments.rl.errors import ConfigError
from torchtitan.experiments.rl.evaluate import parse_options
from torchtitan.experiments.rl.plan.placement import place
from torchtitan.experiments.rl.rollouts.types import DataSample, Rollout, RolloutGroup
from torchtitan.experiments.rl.tasks.task import ValidationConfig
from torchtitan.experiments.rl.tools.evaluate import (
    ExampleRewards,
    evaluated_config,
    example_of,
    interval,
    paired,
    parts_measured,
    result_lines,
    task_figures,
    without_trainer,
)


def example(number: int, *rewards: float, attempts: int = 0, **facts) -> ExampleRewards:
    return ExampleRewards(
        example=f"validation-t-{number}",
        rewards=list(rewards),
        attempts=attempts or len(rewards),
        facts=facts,
    )


def binomial_quantile(n: int, chance: float, share: float) -> int:
    """Return the smallest count whose cumulative probability reaches ``share``."""
    below = 0.0
    for count in range(n + 1):
        below += math.comb(n, count) * chance**count * (1 - chance) ** (n - count)
        if below >= share:
            return count
    return n


@pytest.mark.parametrize(("right", "of"), [(6, 12), (2, 7), (81, 263), (190, 200)])
def test_an_interval_of_right_and_wrong_has_the_quantiles_of_the_binomial(right, of):
    # Drawing n answers again, of which k are right, is n tosses of a coin with k / n.
    found = interval([1.0] * right + [0.0] * (of - right))
    ends = [binomial_quantile(of, right / of, share) / of for share in (0.025, 0.975)]
    assert found == pytest.approx(ends, abs=1.01 / of)
    if (right, of) == (6, 12):  # at most 2 right: 79 / 4096 = 0.019; at most 3: 0.073
        assert found == (0.25, 0.75)


def test_an_interval_of_other_rewards_is_that_of_all_resamples():
    values = [1.0, 2.0, 4.0, 8.0, 16.0]
    means = [np.mean(drawn) for drawn in itertools.product(values, repeat=5)]
    assert interval(values) == pytest.approx(np.quantile(means, (0.025, 0.975)), abs=0.3)


def test_the_same_values_have_the_same_interval_and_a_large_set_a_narrow_one():
    values = list(np.random.default_rng(1).normal(0, 1, 4000))
    assert interval(values) == interval(values)
    low, high = interval(values)  # two standard errors of 1 / sqrt(4000) to each side
    assert high - low == pytest.approx(2 * 1.96 * np.std(values) / 4000**0.5, rel=0.05)


@pytest.mark.parametrize("values", [[], [1.0], [1.0] * 20, [0.5, 0.5]])
def test_where_all_examples_are_alike_the_interval_is_unknown(values):
    assert interval(values) == (None, None)


def test_attempts_at_an_example_that_are_all_alike_count_once():
    once = [example(i, float(i < 3)) for i in range(10)]
    always = [example(i, *[float(i < 3)] * 8) for i in range(10)]
    figures = task_figures(always, attempts=8, pass_reward=1.0)
    expected = task_figures(once, attempts=1, pass_reward=1.0)["avg@1"]
    for name in ("avg@8", "pass@1", "pass@8"):
        assert figures[name] == expected


def test_intervals_hold_the_truth_in_about_95_of_100_evaluations():
    """Examples differ in how often they are solved, attempts at one are correlated."""
    random = np.random.default_rng(0)
    for examples in (20, 50):
        held = 0
        for _ in range(400):
            chance = random.beta(2, 2, examples)  # mean 0.5
            low, high = interval(list(random.binomial(8, chance) / 8))
            held += low <= 0.5 <= high
        assert 0.90 < held / 400 < 0.98, examples


@given(st.lists(st.floats(-5, 5), min_size=1, max_size=50))
def test_an_interval_stays_within_the_values(values):
    low, high = interval(values)
    if low is not None:
        assert min(values) - 1e-9 <= low <= high <= max(values) + 1e-9


def test_figures_count_an_example_once_and_leave_out_attempts_that_failed():
    examples = [example(0, 1.0, 0.0), example(1, 1.0, attempts=2), example(2, attempts=2)]
    figures = task_figures(examples, attempts=2, pass_reward=1.0)
    assert figures["examples"] == 3 and figures["failed"] == 3
    assert figures["avg@2"]["value"] == 0.75  # of 0.5 and 1
    assert figures["pass@1"]["value"] == 0.75
    assert figures["pass@2"]["value"] == 1.0
    nothing = task_figures([example(0, attempts=1)], attempts=1, pass_reward=1.0)
    assert nothing["avg@1"] == {"value": None, "low": None, "high": None}


def test_rewards_that_differ_by_rounding_alone_pass_together_and_are_neither_won_nor_lost():
    below = [example(0, 0.9999999999999999), example(1, 0.1 + 0.2 + 0.3)]
    above = [example(0, 1.0), example(1, 0.3 + 0.2 + 0.1)]
    assert task_figures(below, attempts=1, pass_reward=1.0)["pass@1"]["value"] == 0.5
    assert task_figures(above, attempts=1, pass_reward=0.6)["pass@1"]["value"] == 1.0
    assert (paired(below, above)["won"], paired(below, above)["lost"]) == ([], [])


def test_slices_are_of_fields_that_divide_the_examples():
    examples = [
        example(i, float(i % 2), digits=i % 2, name=f"n{i}", source="all") for i in range(8)
    ]
    slices = task_figures(examples, attempts=1, pass_reward=1.0)["slices"]
    assert {
        field: {value: part["avg@1"]["value"] for value, part in parts.items()}
        for field, parts in slices.items()
    } == {"digits": {"0": 0.0, "1": 1.0}}


def test_facts_of_an_example_are_plain_values():
    sample = DataSample(
        sample_id="7", env_input=object(), info={"level": 3, "made_by": object(), 4: "four"}
    )
    group = RolloutGroup(group_id="validation-t-0", task_name="t", data_sample=sample, rollouts=[])
    group.rollouts.append(
        Rollout(group_id="validation-t-0", index_in_group=0, task_name="t", reward=np.float32(0.5))
    )
    found = example_of(group)
    assert (
        found.facts == {"level": 3, "4": "four"}
        and found.rewards == [0.5]
        and json.dumps(found.rewards)
    )


def test_models_are_compared_on_the_examples_that_both_were_scored_on():
    first = [example(0, 0.0), example(1, 1.0), example(2, 0.5, 0.5), example(3, 0.0)]
    second = [example(0, 1.0), example(1, 0.0), example(2, 1.0, 1.0), example(3, attempts=1)]
    found = paired(first, second)
    assert found["examples"] == 3 and found["difference"] == pytest.approx(0.5 / 3)
    assert found["won"] == ["validation-t-0", "validation-t-2"] and found["lost"] == [
        "validation-t-1"
    ]
    nothing = paired([], second)
    assert nothing["difference"] is None and nothing["low"] is None


def test_a_comparison_pairs_the_examples_and_does_not_resample_the_models_apart():
    # The second model is better by 0.1 or 0.2 at each example, whose rewards are far apart.
    first = [example(i, float(i)) for i in range(12)]
    second = [example(i, i + 0.1 + 0.1 * (i % 2)) for i in range(12)]
    found = paired(first, second)
    # Twelve draws of 0.1 or 0.2: their mean is 0.1 + 0.1 * k / 12, with k of Binomial(12, 1/2).
    assert found["difference"] == pytest.approx(0.15)
    assert (found["low"], found["high"]) == pytest.approx((0.125, 0.175))


def test_the_config_of_an_evaluation_has_the_chosen_tasks_and_attempts():
    config = evaluated_config(rl_grpo_qwen3_debug(), tasks=["sum_digits"], attempts=4)
    schedule = config.tasks["sum_digits"].validation_schedule
    assert (schedule.attempts, schedule.temperature, schedule.examples) == (4, 1.0, 256)
    assert (
        evaluated_config(rl_grpo_qwen3_debug(), tasks=[], attempts=None)
        .tasks["sum_digits"]
        .validation_schedule.attempts
        == 1
    )
    best = rl_grpo_qwen3_debug()
    best.checkpoint.keep_best = "validation/another_task/reward"
    best.stop_at.value = 1.0
    measured = evaluated_config(best, tasks=["sum_digits"], attempts=None)
    assert measured.checkpoint.keep_best is None and not measured.stop_at.is_set
    with pytest.raises(ConfigError, match="no such task; the config has sum_digits"):
        evaluated_config(rl_grpo_qwen3_debug(), tasks=["sums"], attempts=None)
    config = rl_grpo_qwen3_debug()
    config.tasks["sum_digits"].validation = None
    for tasks in ([], ["sum_digits"]):
        with pytest.raises(ConfigError, match="no.* validation set"):
            evaluated_config(config, tasks=tasks, attempts=None)


def test_without_a_trainer_gpus_are_counted_from_0():
    config = rl_grpo_qwen3_14b()  # four trainer ranks, two generators of two
    placement = place(config, "cuda", parameters=1, hosts=[without_trainer(config)])
    assert [place.devices for place in placement.generators] == [(0, 1), (2, 3)]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("--json", "--config"),
        ("--config x --model a --endpoint http://b", "leave this or --model out"),
        ("--config x --resume auto", "means nothing here"),
        ("--config x --attempts many", "--attempts"),
    ],
)
def test_options_that_make_no_evaluation_are_refused(words, message):
    with pytest.raises(ConfigError, match=message):
        parse_options(words.split())


@pytest.mark.parametrize(
    "schedule, size, words",
    [
        ({"examples": 256}, 1_000, "sums (the first 256 of 1,000 examples)"),
        ({"examples": 256}, 256, "sums (all 256 examples)"),
        ({"examples": 256}, 20, "sums (all 20 examples)"),
        (
            {"examples": 2, "attempts": 4, "temperature": 1.0},
            3,
            "sums (the first 2 of 3 examples, 4 attempts each)",
        ),
    ],
)
def test_an_evaluation_says_which_examples_it_measures(schedule, size, words):
    model = SimpleNamespace(schedules={"sums": ValidationConfig(**schedule)}, sizes={"sums": size})
    assert parts_measured(model) == [words]


def test_a_result_is_printed_with_its_intervals_and_the_comparison():
    examples = [example(i, float(i < 3), digits=i % 2) for i in range(4)]
    figures = {"attempts": 1, "temperature": 0.0} | task_figures(
        examples, attempts=1, pass_reward=1.0
    )
    model = {"model": "m", "folder": "f", "metrics": {}, "tasks": {"sums": figures}}
    lines = result_lines({"models": [model], "comparison": {"sums": paired(examples, examples)}})
    text = "\n".join(lines)
    assert "avg@1    0.750  (0.250 to 1.000)" in text and "digits = 0 (2)" in text
    assert "second less first +0.000; 0 of 4 examples better, 0 worse" in text
