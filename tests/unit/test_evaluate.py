"""Figures of an evaluation: intervals, slices, the paired test; and what the command takes from a config."""

import json

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from torchtitan.experiments.rl.config.placement import place
from torchtitan.experiments.rl.config_registry import rl_grpo_qwen3_14b, rl_grpo_qwen3_debug
from torchtitan.experiments.rl.errors import ConfigError
from torchtitan.experiments.rl.evaluate import parse_options
from torchtitan.experiments.rl.rollouts.types import DataSample, Rollout, RolloutGroup
from torchtitan.experiments.rl.tools.evaluate import (
    Example,
    evaluated_config,
    example_of,
    interval,
    paired,
    result_lines,
    sign_flip_p,
    student,
    task_figures,
    without_trainer,
)


def example(number: int, *rewards: float, attempts: int = 0, **facts) -> Example:
    return Example(
        example=f"validation-t-{number}",
        rewards=list(rewards),
        attempts=attempts or len(rewards),
        facts=facts,
    )


def test_intervals_of_right_and_wrong_are_wilsons():
    # Newcombe (1998), method 3: 81 of 263 is 0.2553 to 0.3662; 0 of 20 is 0 to 0.1611.
    assert interval([1.0] * 81 + [0.0] * 182) == pytest.approx((0.2553, 0.3662), abs=5e-5)
    assert interval([0.0] * 20) == pytest.approx((0, 0.1611), abs=5e-5)
    assert interval([1.0] * 20) == pytest.approx((1 - 0.1611, 1), abs=5e-5)


def test_an_interval_of_shares_is_narrower_than_that_of_right_and_wrong():
    # 20 values of 0.4 and 0.6: their variance is 0.2 / 19 and not 0.25, as many as 475 observations; Student's factor for 19 is
    # 2.09302, its square over 475 is s = 0.0092226, and the half width sqrt(0.25 s + s * s / 4) / (1 + s) = 0.047797.
    shares, coins = interval([0.4, 0.6] * 10), interval([0.0, 1.0] * 10)
    assert shares == pytest.approx((0.5 - 0.047797, 0.5 + 0.047797), abs=1e-5)
    assert shares[1] - shares[0] < (coins[1] - coins[0]) / 4


def test_attempts_at_an_example_that_are_all_alike_count_once():
    # 3 of 10 examples always right, 7 never, at 8 attempts each: Wilson's interval of 3 in 10, 0.1078 to 0.6032.
    always = [example(i, *[float(i < 3)] * 8) for i in range(10)]
    figures = task_figures(always, attempts=8, pass_reward=1.0)
    for name in ("avg@8", "pass@1", "pass@8"):
        assert tuple(figures[name].values()) == pytest.approx((0.3, 0.1078, 0.6032), abs=5e-5)


def test_one_example_says_almost_nothing():
    # Wilson's of 1 in 1, with s = 3.841459: lower end 1 / (1 + s).
    assert interval([1.0]) == pytest.approx((1 / 4.841459, 1), abs=1e-6)
    assert interval([0.0]) == pytest.approx((0, 3.841459 / 4.841459), abs=1e-6)
    low, high = interval([0.5])
    assert low < 0.06 and high > 0.94
    assert interval([7.0]) == (None, None)


def test_two_examples_that_happen_to_be_near_each_other_do_not_make_it_certain():
    # Student's factor for one degree of freedom is 12.706: the mean of 0.5 and 0.6 is anything.
    low, high = interval([0.5, 0.6])
    assert high - low > 0.75
    two = [example(0, 0.5), example(1, 0.6)]
    compared = paired([example(0, 0.0), example(1, 0.0)], two)
    assert (
        compared["high"] - compared["low"] == pytest.approx(2 * 12.7062 * 0.05)
        and compared["p_value"] == 0.5
    )


def test_intervals_hold_the_truth_in_95_of_100_evaluations():
    """Examples differ in how often they are solved, attempts at one are correlated: over 2,000 evaluations of each size."""
    random = np.random.default_rng(0)
    for examples in (3, 5, 20):
        held = 0
        for _ in range(2000):
            chance = random.beta(2, 2, examples)  # mean 0.5
            low, high = interval(list(random.binomial(8, chance) / 8))
            held += low <= 0.5 <= high
        assert 0.93 < held / 2000 < 0.98, examples


def test_students_factors_are_those_of_the_tables():
    table = {1: 12.7062, 4: 2.7764, 10: 2.2281, 11: 2.2010, 30: 2.0423, 60: 2.0003, 1000: 1.9623}
    assert {freedom: round(student(freedom), 4) for freedom in table} == pytest.approx(
        table, abs=2e-4
    )


def test_an_interval_of_other_rewards_is_of_standard_errors():
    # 1, 2, 3, 4, 5: standard deviation 1.5811, error 0.70711, times 2.7764.
    assert interval([1, 2, 3, 4, 5]) == pytest.approx((3 - 1.963243, 3 + 1.963243), abs=1e-4)


@given(st.lists(st.floats(0, 1), min_size=1, max_size=50))
def test_an_interval_of_shares_holds_their_mean_and_stays_in_0_to_1(values):
    low, high = interval(values)
    assert 0 <= low <= np.mean(values) + 1e-9 and np.mean(values) - 1e-9 <= high <= 1


def test_figures_count_an_example_once_and_leave_out_attempts_that_failed():
    examples = [example(0, 1.0, 0.0), example(1, 1.0, attempts=2), example(2, attempts=2)]
    figures = task_figures(examples, attempts=2, pass_reward=1.0)
    assert figures["examples"] == 3 and figures["failed"] == 3
    assert figures["avg@2"]["value"] == 0.75  # of 0.5 and 1
    assert figures["pass@1"]["value"] == 0.75
    assert figures["pass@2"]["value"] == 1.0
    nothing = task_figures([example(0, attempts=1)], attempts=1, pass_reward=1.0)
    assert nothing["avg@1"] == {"value": None, "low": None, "high": None}


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


def test_sign_flips_of_wins_and_losses_are_the_exact_binomial_test():
    assert sign_flip_p(np.ones(5)) == 2 / 32
    # 8 better, 2 worse: 2 * (1 + 10 + 45) / 1024.
    assert sign_flip_p(np.array([1.0] * 8 + [-1.0] * 2)) == pytest.approx(112 / 1024)
    assert sign_flip_p(np.array([1.0, -1.0])) == 1.0 and sign_flip_p(np.zeros(4)) == 1.0


def test_sign_flips_of_many_examples_are_drawn_and_near_the_exact_share():
    # 13 better and 7 worse: 2 * sum of C(20, i) for i < 8, over 2**20.
    assert sign_flip_p(np.array([1.0] * 13 + [-1.0] * 7)) == pytest.approx(0.263176, abs=0.015)
    assert sign_flip_p(np.ones(40)) < 1e-4


def test_models_are_compared_on_the_examples_that_both_were_scored_on():
    first = [example(0, 0.0), example(1, 1.0), example(2, 0.5, 0.5), example(3, 0.0)]
    second = [example(0, 1.0), example(1, 0.0), example(2, 1.0, 1.0), example(3, attempts=1)]
    found = paired(first, second)
    assert found["examples"] == 3 and found["difference"] == pytest.approx(0.5 / 3)
    assert found["won"] == ["validation-t-0", "validation-t-2"] and found["lost"] == [
        "validation-t-1"
    ]
    assert paired([], second)["p_value"] is None


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


def test_a_result_is_printed_with_its_intervals_and_the_comparison():
    examples = [example(i, float(i < 3), digits=i % 2) for i in range(4)]
    figures = {"attempts": 1, "temperature": 0.0} | task_figures(
        examples, attempts=1, pass_reward=1.0
    )
    model = {"model": "m", "folder": "f", "metrics": {}, "tasks": {"sums": figures}}
    lines = result_lines({"models": [model], "comparison": {"sums": paired(examples, examples)}})
    text = "\n".join(lines)
    assert "avg@1    0.750  (0.301 to 0.954)" in text and "digits = 0 (2)" in text
    assert (
        "second less first +0.000 (+0.000 to +0.000), p = 1; 0 of 4 examples better, 0 worse"
        in text
    )
