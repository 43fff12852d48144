"""The distribution of advantages, by hand."""

import numpy as np
import pytest

from tests.fakes.rollouts import group_of, rewarded_rollout
from torchtitan.experiments.rl.loops.groups import StepGroups
from torchtitan.experiments.rl.loops.step_metrics import (
    _rollout_metrics,
    advantage_metrics,
    credit_seconds,
)
from torchtitan.experiments.rl.rollouts.types import RolloutGroup


def credited(*advantages: float, weights=None):
    """A rollout of one sample; its last three tokens are sampled."""
    scored = rewarded_rollout(1.0)
    scored.assign_advantages(list(advantages))
    if weights is not None:
        scored.samples[0].rl_weights = np.array(weights, np.float32)
    return scored


def test_each_rollout_counts_once_in_mean_and_zero_and_each_token_in_the_extremes():
    rollouts = [credited(1, 2, 3), credited(0, 0, 0), credited(-4, 0, 1)]
    found = advantage_metrics(rollouts, "t")
    assert found == pytest.approx(
        {
            "advantage/t/mean": (2 + 0 - 1) / 3,
            "advantage/t/zero": 1 / 3,
            "advantage/t/min": -4,
            "advantage/t/max": 3,
        }
    )


def test_tokens_without_an_rl_weight_and_rollouts_without_credit_count_for_nothing():
    rollouts = [
        credited(1, 2, 9, weights=[1, 1, 1, 1, 0]),
        credited(5, 5, 5, weights=[0] * 5),
        rewarded_rollout(1.0),
    ]
    assert advantage_metrics(rollouts, "t") == {
        "advantage/t/mean": 1.5,
        "advantage/t/zero": 0.0,
        "advantage/t/min": 1.0,
        "advantage/t/max": 2.0,
    }
    assert advantage_metrics([rewarded_rollout(1.0)], "t") == {} == advantage_metrics([], "t")


def test_seconds_of_credit_are_a_rollouts_by_task():
    def group(task: str, credit_s: float, count: int) -> RolloutGroup:
        return group_of(*[rewarded_rollout(1.0)] * count, task_name=task, credit_s=credit_s)

    found = credit_seconds([group("a", 3.0, 4), group("b", 0.5, 2), group("a", 1.0, 1)])
    assert found == {"time/credit_s/a": 4.0 / 5, "time/credit_s/b": 0.25}


def test_rewards_that_are_equal_are_counted_so_whatever_their_mean_is_rounded_to():
    def group(*rewards: float) -> RolloutGroup:
        return group_of(*map(rewarded_rollout, rewards))

    rounded = group(0.1 + 0.2 + 0.3, 0.3 + 0.2 + 0.1)
    assert _rollout_metrics(StepGroups(sampled=[rounded]))["rollout/groups_all_equal"] == 1
    assert np.std([0.1] * 3) > 0  # the mean of three 0.1 is rounded to another number
    taken = StepGroups(sampled=[group(0.1, 0.1, 0.1), group(1.0, 1.0), group(0.0, 1.0), group(0.5)])
    # A rollout that is compared with no other is in no spread.
    found = _rollout_metrics(taken)
    assert found["rollout/groups_all_equal"] == 2 / 3
    assert found["rollout/reward_std_in_group"] == pytest.approx(0.5 / 3)
    alone = _rollout_metrics(StepGroups(sampled=[group(0.5)]))
    # Groups of one say nothing of a spread: the report would take a 1 for "they teach nothing".
    assert not {"rollout/groups_all_equal", "rollout/reward_std_in_group"} & alone.keys()


def test_what_an_env_did_not_reward_counts_as_0_and_what_a_function_did_not_score_is_left_out():
    """One of 8 rollouts made a good call; a limit cut another off, and no function scored it."""
    rollouts = [rewarded_rollout(1.0) for _ in range(8)]
    for rollout in rollouts[1:]:
        rollout.reward_components = {"right": 0.5}
    rollouts[7].reward_components |= {"env/good_calls": 1.0}
    found = _rollout_metrics(StepGroups(sampled=[group_of(*rollouts)]))
    of_task = {name: found[name] for name in found if "component" in name}
    task = rollouts[0].task_name
    assert of_task == {
        f"rollout/{task}/component/env/good_calls": 1 / 8,
        f"rollout/{task}/component/right": 0.5,
        f"rollout/{task}/component_share/right": 7 / 8,
    }
