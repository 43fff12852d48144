"""Rubrics: weighted means, short circuits, and failures that are never a silent 0."""

import asyncio
import functools
import json
import math
import os
import re
import signal
import sys
import threading
import time

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.fakes.rollouts import rollout_of, turn_of
from torchtitan.experiments.rl.errors import ConfigError
from torchtitan.experiments.rl.rollouts.types import DataSample, Rollout, RolloutStatus
from torchtitan.experiments.rl.rubrics.rubric import (
    RewardFn,
    Rubric,
    env_component,
    last_assistant_text,
    scored_at,
)


def answered(
    text: str = "", *, status: RolloutStatus = RolloutStatus.COMPLETED, env_rewards=()
) -> Rollout:
    """Return a rollout whose last answer is this text. ``env_rewards`` has one entry a turn."""
    turns = [turn_of([1], [2]) for _ in range(max(1, len(env_rewards)))]
    turns[-1].assistant_message["content"] = text
    for turn, components in zip(turns, env_rewards, strict=False):
        turn.reward_components = components
    return rollout_of(*turns, status=status)


async def rewards_of(rollouts, *fns, env_input=None, **config):
    return (
        await Rubric.Config(reward_fns=list(fns), **config).build().score_group(rollouts, env_input)
    )


def length(rollout, env_input):
    return len(last_assistant_text(rollout))


async def doubled(rollout, env_input):
    return 2 * len(last_assistant_text(rollout))


def rank(rollouts, env_input):
    order = sorted(len(last_assistant_text(rollout)) for rollout in rollouts)
    return [order.index(len(last_assistant_text(rollout))) for rollout in rollouts]


# ---- scoring


async def test_reward_is_the_weighted_mean_and_components_are_raw():
    rollouts = [answered("a"), answered("bbb")]
    first, second = await rewards_of(
        rollouts,
        RewardFn(length, weight=1, takes="rollout"),
        RewardFn(doubled, weight=2, takes="rollout"),
        RewardFn(rank, weight=1, group_level=True, takes="rollout"),
    )
    assert first.reward == pytest.approx((1 * 1 + 2 * 2 + 1 * 0) / 4)
    assert second.reward == pytest.approx((1 * 3 + 2 * 6 + 1 * 1) / 4)
    assert second.components == {"length": 3.0, "doubled": 6.0, "rank": 1.0}


ROUNDED_WEIGHTS = [
    (1.0, 0.3),
    (0.1, 0.3),
    (0.2, 0.6),
    (0.4, 0.7),
    (0.05, 0.15),
    (0.1, 3.0),
    (0.6, 2.0),
]


def reward_where_every_function_gives(value, weights):
    functions = [
        RewardFn(lambda completion, example: value, weight=weight, name=f"f{number}")
        for number, weight in enumerate(weights)
    ]
    (reward,) = asyncio.run(rewards_of([answered()], *functions))
    return reward.reward


@pytest.mark.parametrize("weights", ROUNDED_WEIGHTS)
def test_a_rollout_that_is_right_in_everything_has_reward_1_where_the_shares_do_not_sum_to_1(
    weights,
):
    shares = [weight / math.fsum(weights) for weight in weights]
    assert math.fsum(shares) != 1
    assert reward_where_every_function_gives(1.0, weights) == 1


@given(st.lists(st.floats(0, 1e6), min_size=1, max_size=6).filter(any))
def test_a_rollout_that_is_right_in_everything_has_reward_1_whatever_the_weights(weights):
    assert reward_where_every_function_gives(1.0, weights) == 1
    assert reward_where_every_function_gives(0.0, weights) == 0


async def test_functions_get_the_rollout_and_the_env_input():
    rollout, seen = answered("a"), []
    await rewards_of(
        [rollout],
        RewardFn(lambda *args: seen.append(args) or 1, name="f", takes="rollout"),
        env_input={"answer": 7},
    )
    ((given, example),) = seen
    assert given.rollout_id == rollout.rollout_id and example == {"answer": 7}


async def test_sync_functions_run_off_the_event_loop_and_async_ones_on_it():
    async def where(rollout, env_input):
        return threading.current_thread() is threading.main_thread()

    def blocking(rollout, env_input):
        all_four.wait(60)
        return threading.current_thread() is threading.main_thread()

    all_four = threading.Barrier(4)  # passed by four calls that run side by side, and by none alone
    (reward, *_) = await rewards_of(
        [answered()] * 4, RewardFn(where, takes="rollout"), RewardFn(blocking, takes="rollout")
    )
    assert reward.components == {"where": 1.0, "blocking": 0.0}


async def test_numpy_and_bool_values_are_numbers():
    (reward,) = await rewards_of(
        [answered()],
        RewardFn(lambda r, e: np.float32(0.5), name="a", takes="rollout"),
        RewardFn(lambda r, e: True, name="b", takes="rollout"),
        RewardFn(lambda rs, e: np.ones(1), name="c", group_level=True, takes="rollout"),
    )
    assert reward.reward == pytest.approx(2.5 / 3)


async def test_weight_zero_is_only_logged():
    (reward,) = await rewards_of(
        [answered("abc")],
        RewardFn(length, weight=0, takes="rollout"),
        RewardFn(lambda r, e: 1, name="one", takes="rollout"),
    )
    assert reward.reward == 1.0 and reward.components["length"] == 3.0


async def test_no_functions_give_reward_zero():
    (reward,) = await rewards_of([answered()])
    assert reward.reward == 0.0


async def test_subclass_registers_its_own_functions():
    class Mine(Rubric):
        def register_funcs(self):
            return [*super().register_funcs(), RewardFn(length, takes="rollout")]

    rubric = Mine.Config(reward_fns=[RewardFn(doubled, takes="rollout")]).build()
    assert isinstance(rubric, Mine)
    (reward,) = await rubric.score_group([answered("ab")], None)
    assert reward.reward == 3.0


# ---- env components


async def test_env_component_is_summed_over_turns():
    rollout = answered(env_rewards=[{"steps": 0.25}, {"steps": 0.5, "correct": 1.0}])
    (reward,) = await rewards_of(
        [rollout], env_component("correct", weight=3), env_component("steps")
    )
    assert reward.reward == pytest.approx((3 * 1.0 + 0.75) / 4)


async def test_env_components_nobody_weighs_are_logged_apart():
    (reward,) = await rewards_of(
        [answered("ab", env_rewards=[{"correct": 1.0}])], RewardFn(length, takes="rollout")
    )
    assert reward.reward == 2.0 and reward.components == {"length": 2.0, "env/correct": 1.0}


def test_env_component_takes_the_name_that_records_and_metrics_have():
    assert env_component("env/good_calls").name == "good_calls"


async def test_misspelt_env_component_is_an_error_and_an_unearned_one_is_zero():
    done = answered(env_rewards=[{"correct": 1.0}])
    cut = answered(status=RolloutStatus.TRUNCATED_MAX_TURNS)
    first, second = await rewards_of([done, cut], env_component("corect"))
    assert (
        first.reward is None and done.status is RolloutStatus.ERROR and "['correct']" in done.error
    )
    assert second.reward == 0.0
    (reward,) = await rewards_of([answered()], env_component("rare", default=0.25))
    assert reward.reward == 0.25


async def test_env_rewards_without_any_function_are_warned_of(caplog):
    await rewards_of([answered(env_rewards=[{"correct": 1.0}])])
    assert "add env_component('correct')" in caplog.text


# ---- rollouts that did not complete

TRUNCATED = [status for status in RolloutStatus if status.is_truncated()]
FAILED = [status for status in RolloutStatus if status.is_error()]


@pytest.mark.parametrize("status", TRUNCATED)
async def test_truncated_rollouts_are_scored_or_given_the_truncation_reward(status):
    (scored,) = await rewards_of(
        [answered("abc", status=status)], RewardFn(length, takes="rollout")
    )
    assert scored.reward == 3.0
    (fixed,) = await rewards_of(
        [answered("abc", status=status)],
        RewardFn(length, takes="rollout"),
        truncation_reward=-0.5,
    )
    assert fixed.reward == -0.5 and fixed.components == {}


@pytest.mark.parametrize("status", FAILED)
async def test_failed_rollouts_are_excluded_or_given_the_error_reward(status):
    seen = []
    fn = RewardFn(lambda r, e: seen.append(r) or 1, name="f", takes="rollout")
    (excluded,) = await rewards_of([answered(status=status)], fn)
    (fixed,) = await rewards_of([answered(status=status)], fn, error_reward=-1.0)
    assert excluded.reward is None and fixed.reward == -1.0 and seen == []


async def test_group_functions_see_only_what_is_to_be_scored():
    rollouts = [answered("a"), answered(status=RolloutStatus.ERROR), answered("bbb")]
    first, excluded, third = await rewards_of(
        rollouts, RewardFn(rank, group_level=True, takes="rollout")
    )
    assert (first.reward, excluded.reward, third.reward) == (0.0, None, 1.0)


# ---- failures


def raises(rollout, env_input):
    raise ValueError("boom")


async def raises_async(rollout, env_input):
    raise ValueError("boom")


def exits(rollout, env_input):
    sys.exit(1)


async def hangs_async(rollout, env_input):
    await asyncio.sleep(3600)


def forgets_to_return(completion, row):
    float(completion == row)


BAD_FUNCTIONS = [
    (raises, "ValueError: boom"),
    (raises_async, "ValueError: boom"),
    (exits, "SystemExit: 1"),
    (hangs_async, "no answer within 0.2 s; it waits in hangs_async (test_rubric.py:"),
    (lambda r, e: time.sleep(1), "no answer within 0.2 s"),
    (forgets_to_return, "returned None, and has no return with a value"),
    (lambda r, e: float("nan"), "nan"),
    (lambda r, e: math.inf, "inf"),
    (lambda r, e: 1e39, "returned 1e+39 (float), want a finite number that float32 holds"),
    (lambda r, e: "1.0", "str"),
    (lambda r, e: [1.0], "list"),
]


def test_rubric_may_fail_a_rollout_with_an_exception_and_the_text_of_a_status():
    rollout = answered("ab")
    rollout.fail(ValueError("no such file"), status="timeout")
    assert rollout.status is RolloutStatus.TIMEOUT and rollout.error == "ValueError: no such file"
    with pytest.raises(ValueError, match="'lost' is not a valid RolloutStatus"):
        rollout.fail("gone", status="lost")


@pytest.mark.parametrize(("fn", "cause"), BAD_FUNCTIONS)
async def test_failed_function_is_an_error_with_its_name_and_no_zero(fn, cause):
    rollout = answered("ab")
    (reward,) = await rewards_of(
        [rollout],
        RewardFn(length, takes="rollout"),
        RewardFn(fn, name="judge", takes="rollout"),
        timeout_s=0.2,
        error_reward=0.0,
    )
    assert reward.reward is None and reward.components == {"length": 2.0}
    assert (
        rollout.status is RolloutStatus.ERROR
        and "reward function 'judge'" in rollout.error
        and cause in rollout.error
    )


async def test_function_that_fails_on_one_rollout_leaves_the_others():
    def picky(rollout, env_input):
        return 1 / len(last_assistant_text(rollout))

    rollouts = [answered("ab"), answered(""), answered("abcd")]
    rewards = await rewards_of(rollouts, RewardFn(picky, takes="rollout"))
    assert [reward.reward for reward in rewards] == [0.5, None, 0.25]
    assert [rollout.status.is_error() for rollout in rollouts] == [False, True, False]


@pytest.mark.parametrize(
    "answer",
    [
        [1.0],
        [1.0, 2.0, 3.0],
        1.0,
        "ab",
        b"ab",
        None,
        {"a": 1, "b": 2},
        {1.0, 2.0},
        {0: 1.0, 1: 2.0}.values(),
        iter([1.0, 2.0]),
        np.ones((2, 1)),
        np.float32(1.0),
    ],
    ids=lambda answer: type(answer).__name__,
)
async def test_group_function_with_a_wrong_answer_fails_every_rollout(answer):
    rollouts = [answered("a"), answered("b")]
    rewards = await rewards_of(
        rollouts, RewardFn(lambda rs, e: answer, name="all", group_level=True, takes="rollout")
    )
    assert [reward.reward for reward in rewards] == [None, None]
    assert all(
        "'all'" in rollout.error and "want a list of 2 numbers" in rollout.error
        for rollout in rollouts
    )


@pytest.mark.parametrize(
    "spoil", [list.reverse, list.clear, lambda rollouts: rollouts.sort(key=lambda r: -len(r.turns))]
)
async def test_group_function_that_changes_its_list_changes_no_others(spoil):
    def spoils(rollouts, env_input):
        answer = [0.0] * len(rollouts)
        spoil(rollouts)
        return answer

    async def lengths(rollouts, env_input):
        await asyncio.sleep(0.05)  # until the other has spoilt its list
        return [len(last_assistant_text(rollout)) for rollout in rollouts]

    rollouts = [answered("a"), answered("bbb")]
    rewards = await rewards_of(
        rollouts,
        RewardFn(spoils, group_level=True, weight=0, takes="rollout"),
        RewardFn(lengths, group_level=True, takes="rollout"),
        RewardFn(rank, group_level=True, weight=0, takes="rollout"),
    )
    assert [reward.reward for reward in rewards] == [1.0, 3.0]
    assert [reward.components["rank"] for reward in rewards] == [0.0, 1.0]


@pytest.mark.parametrize("answer", [(1.0, 2.0), np.array([1.0, 2.0]), np.array([1, 2])])
async def test_group_function_may_answer_with_a_list_a_tuple_or_an_array(answer):
    rewards = await rewards_of(
        [answered(), answered()],
        RewardFn(lambda rs, e: answer, name="all", group_level=True, takes="rollout"),
    )
    assert [reward.reward for reward in rewards] == [1.0, 2.0]


def test_what_is_no_function_is_refused_when_the_rubric_is_built():
    class Own(Rubric):
        def register_funcs(self):
            return [RewardFn(0.5, name="half", takes="rollout")]

    with pytest.raises(ConfigError, match=r"reward_fns\[0\].fn = 0.5: must be a Callable"):
        Rubric.Config(reward_fns=[RewardFn(0.5, takes="rollout")]).build()
    with pytest.raises(ConfigError, match="'half'.fn = 0.5: must be a Callable"):
        Own.Config().build()


async def test_group_function_with_one_bad_number_fails_that_rollout():
    rollouts = [answered("a"), answered("b")]
    rewards = await rewards_of(
        rollouts,
        RewardFn(lambda rs, e: [1.0, math.nan], name="all", group_level=True, takes="rollout"),
    )
    assert [reward.reward for reward in rewards] == [1.0, None]


# ---- isolated functions


def alarmed(rollout, env_input):
    """Works only in a main thread, as math-verify's timeout does."""
    signal.signal(signal.SIGALRM, signal.SIG_IGN)
    signal.alarm(0)
    print("this must not reach the protocol")
    return len(last_assistant_text(rollout)) + env_input


def crashes(rollout, env_input):
    os.kill(os.getpid(), signal.SIGSEGV)


def spins(rollout, env_input):
    while True:
        pass


async def test_isolated_functions_run_hang_and_crash_in_a_process_that_is_replaced():
    rubric = Rubric.Config(
        reward_fns=[
            RewardFn(alarmed, isolate=True, takes="rollout"),
            RewardFn(spins, isolate=True, timeout_s=0.5, takes="rollout"),
            RewardFn(crashes, isolate=True, takes="rollout"),
        ],
        isolated_workers=1,
    ).build()
    rollout = answered("abc")
    (reward,) = await rubric.score_group([rollout], 4)
    assert reward.reward is None and reward.components == {"alarmed": 7.0}
    assert "'spins': no answer within 0.5 s; its process was killed" in rollout.error
    assert "'crashes': its process died (SIGSEGV)" in rollout.error


async def test_isolated_functions_may_be_lambdas_and_closures_over_values():
    limit = 3

    def long(completion, example):
        return float(len(completion) > limit)

    rubric = Rubric.Config(
        reward_fns=[
            RewardFn(long, isolate=True),
            RewardFn(lambda completion, example: len(completion), name="length", isolate=True),
        ],
        isolated_workers=1,
    ).build()
    (reward,) = await rubric.score_group([answered("abcd")], None)
    assert reward.components == {"long": 1.0, "length": 4.0}


class OwnMethod(Rubric):
    def score(self, completion, example):
        return 1.0

    def register_funcs(self):
        return [RewardFn(self.score, isolate=True)]


LOCK = threading.Lock()


def guarded(completion, example, *, lock):
    return 1.0


@pytest.mark.parametrize(
    ("config", "field", "name"),
    [
        (OwnMethod.Config(), "register_funcs", "score"),
        (
            Rubric.Config(
                reward_fns=[
                    RewardFn(functools.partial(guarded, lock=LOCK), name="holder", isolate=True)
                ]
            ),
            "reward_fns",
            "holder",
        ),
        (
            Rubric.Config(
                reward_fns=[RewardFn(lambda text, row, lock=LOCK: 1.0, name="lambda", isolate=True)]
            ),
            "reward_fns",
            "lambda",
        ),
    ],
    ids=["a method of the rubric", "a partial of a lock", "a lambda with a lock"],
)
def test_isolated_function_that_can_not_be_sent_to_a_process_is_refused_with_the_cure(
    config, field, name
):
    with pytest.raises(ConfigError) as refused:
        config.build()
    text = str(refused.value)
    assert text.startswith(f"rubric.{field} = {name!r}: isolate=True: it can't be sent to ")
    assert "want a function outside of the class, with the values that it needs" in text


# ---- configs


def test_saved_config_names_its_functions():
    config = Rubric.Config(
        reward_fns=[RewardFn(length, weight=2, takes="rollout"), env_component("correct")]
    ).to_dict()
    assert (
        config["reward_fns"][0]["fn"] == f"{__name__}.length"
        and config["reward_fns"][0]["weight"] == 2
    )
    assert json.loads(json.dumps(config)) == config


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (
            Rubric.Config(
                reward_fns=[RewardFn(length, takes="rollout"), RewardFn(length, takes="rollout")]
            ),
            "two functions named 'length'",
        ),
        (
            Rubric.Config(reward_fns=[RewardFn(length, weight=-1, takes="rollout")]),
            r"rubric.reward_fns\[0\].weight = -1: must be at least 0; a penalty",
        ),
        (
            Rubric.Config(reward_fns=[RewardFn(length, weight=math.nan, takes="rollout")]),
            "must be a finite number and at least 0; a penalty",
        ),
        (
            Rubric.Config(reward_fns=[RewardFn(length, weight=0, takes="rollout")]),
            "every weight is 0",
        ),
        (Rubric.Config(truncation_reward=math.inf), "finite"),
        (Rubric.Config(isolated_workers=0), "at least 1"),
        (Rubric.Config(isolated_workers=10**20), "at most 1024"),
    ],
)
def test_config_errors_name_the_cure(config, message):
    with pytest.raises(ConfigError, match=message):
        config.build()


# ---- one convention of arguments


def holds_42(completion, example):
    return float("42" in str(completion))


@pytest.mark.parametrize(
    "entry",
    [
        holds_42,
        RewardFn(holds_42),
        RewardFn(holds_42, name="other"),
        RewardFn(holds_42, weight=2.0),
    ],
    ids=["bare", "wrapped", "named", "weighed"],
)
async def test_a_wrapper_does_not_change_what_a_reward_function_is_given(entry):
    wrong, right = answered("I say seven"), answered("it is 42")
    for rollout in (wrong, right):
        rollout.data_sample = DataSample(sample_id="0", env_input={"answer": "42"})
    rewards = await rewards_of([wrong, right], entry, env_input={"answer": "42"})
    assert [reward.reward for reward in rewards] == [0.0, 1.0]


async def test_a_group_level_function_of_completions_gets_their_texts():
    def longest(completions, example):
        return [float(len(text) == max(map(len, completions))) for text in completions]

    rewards = await rewards_of(
        [answered("abc"), answered("a")], RewardFn(longest, group_level=True)
    )
    assert [reward.reward for reward in rewards] == [1.0, 0.0]


@pytest.mark.parametrize("first", ["rollout", "rollouts"])
def test_a_function_whose_argument_is_named_a_rollout_is_refused_where_it_would_get_a_text(first):
    functions = {
        "rollout": lambda rollout, example: 1.0,
        "rollouts": lambda rollouts, example: [1.0],
    }
    cure = re.escape(
        'would be given the text of the completion: write RewardFn(fn, takes="rollout")'
    )
    for entry in (
        functions[first],
        RewardFn(functions[first], group_level=first == "rollouts", name="named"),
    ):
        with pytest.raises(ConfigError, match=cure):
            Rubric.Config(reward_fns=[entry]).build()


def test_an_unknown_argument_of_reward_functions_is_refused_by_its_field():
    with pytest.raises(ConfigError, match="takes = 'text'"):
        Rubric.Config(reward_fns=[RewardFn(holds_42, takes="text")]).build()


def test_the_text_of_a_rollout_holds_neither_its_answer_nor_what_was_said():
    rollout = answered("no, forty-two")
    rollout.data_sample = DataSample(sample_id="0", env_input={"answer": "forty-two"})
    rollout.metadata = {"solution": "forty-two"}
    rollout.answer = "forty-two"
    assert "forty-two" not in f"{rollout} {rollout!r}"


# ---- functions that do not judge a rollout, and functions that know the policy version


def of_math(completion, row):
    return float(completion == row["answer"]) if row["kind"] == "math" else None


def of_code(completion, row):
    return float("def" in completion) if row["kind"] == "code" else None


def short(completion, row):
    return float(len(completion) < 5)


def ranks_of_answered(completions, row):
    return [None if text == "" else float(len(text)) for text in completions]


async def test_a_function_that_returns_none_leaves_the_rollout_to_the_others():
    functions = [RewardFn(of_math, weight=3), RewardFn(of_code, weight=3), RewardFn(short)]
    row = {"kind": "math", "answer": "4"}
    right, wrong = await rewards_of([answered("4"), answered("no, 5")], *functions, env_input=row)
    # (3 * 1 + 1 * 1) / 4 and (3 * 0 + 1 * 0) / 4: the weight of of_code counts for nothing.
    assert (right.reward, wrong.reward) == (1.0, 0.0)
    assert right.components == {"of_math": 1.0, "short": 1.0}
    (long,) = await rewards_of([answered("4 " * 9)], *functions, env_input={"kind": "code"})
    assert (long.reward, long.components) == (0.0, {"of_code": 0.0, "short": 0.0})


async def test_a_group_level_function_judges_some_of_the_group():
    ranked = RewardFn(ranks_of_answered, group_level=True)
    first, second = await rewards_of([answered(""), answered("abc")], ranked, short)
    assert (first.reward, first.components) == (1.0, {"short": 1.0})
    assert (second.reward, second.components) == (2.0, {"ranks_of_answered": 3.0, "short": 1.0})


async def test_a_rollout_that_no_function_judges_fails_by_their_names():
    rollout = answered("4")
    logged = RewardFn(short, weight=0)
    (reward,) = await rewards_of([rollout], of_math, of_code, logged, env_input={"kind": "poem"})
    assert reward.reward is None and rollout.status is RolloutStatus.ERROR
    assert rollout.error == (
        "reward function 'of_math', 'of_code': returned None, so that none judged the rollout; "
        "return a number for such a row, or leave the row out"
    )


async def test_a_function_that_never_returns_a_value_fails_and_is_not_left_out():
    rollout = answered("x")
    (reward,) = await rewards_of([rollout], short, forgets_to_return)
    assert reward.reward is None and rollout.error == (
        "reward function 'forgets_to_return': returned None, and has no return with a value: "
        "return a number"
    )


def annealed(completion, row, policy_version):
    return 1 / (1 + policy_version)


async def annealed_by_name(completion, row, *, policy_version):
    return float(policy_version)


@pytest.mark.parametrize("isolate", [False, True])
async def test_a_function_that_names_the_policy_version_is_given_it(isolate):
    functions = [RewardFn(annealed, isolate=isolate), RewardFn(annealed_by_name)]
    with scored_at(3):
        (reward,) = await rewards_of([answered("x")], *functions)
    assert reward.components == {"annealed": 0.25, "annealed_by_name": 3.0}
    (outside,) = await rewards_of([answered("x")], *functions)
    assert outside.components == {"annealed": 1.0, "annealed_by_name": 0.0}
    given = functools.partial(annealed, policy_version=9)
    with scored_at(3):
        (bound,) = await rewards_of([answered("x")], RewardFn(given, name="given"))
    assert bound.components == {"given": 0.25}
