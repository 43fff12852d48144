"""Digit sums in several turns: what the env says, and what it pays."""

import pytest

from tests.fakes.contexts import context_of
from tests.fakes.policy import ScriptedPolicy
from torchtitan.experiments.rl.algorithms import Echo
from torchtitan.experiments.rl.errors import ConfigError
from torchtitan.experiments.rl.rollouts.types import RolloutStatus
from torchtitan.experiments.rl.tasks.examples.sum_digits import (
    SumDigitsRoundsDataset,
    SumDigitsRoundsTask,
)


def test_rounds_use_each_list_once():
    plain = SumDigitsRoundsDataset.Config(count=7, rounds=1).build()
    paired = SumDigitsRoundsDataset.Config(count=7, rounds=2).build()
    assert len(paired) == 3
    assert [digits for sample in paired for digits in sample.env_input] == [
        sample.env_input[0] for sample in plain
    ][:6]
    with pytest.raises(IndexError):
        paired[3]


def test_a_limit_of_turns_that_no_example_fits_in_is_refused():
    config = SumDigitsRoundsTask.Config(algorithm=Echo.Config())
    config.validate(field="tasks.rounds")
    config.dataset = SumDigitsRoundsDataset.Config(rounds=3)
    with pytest.raises(ConfigError, match="tasks.rounds.env.max_turns = 2: .* may take 3 turns"):
        config.validate(field="tasks.rounds")


@pytest.mark.parametrize("right", [(True, True), (True, False), (False, True), (False, False)])
async def test_env_names_the_sum_whatever_was_answered_and_pays_for_each_right_round(
    renderer, tokenizer, right
):
    task = SumDigitsRoundsTask.Config(algorithm=Echo.Config(alpha={"user": 0.5})).build(
        name="rounds", context=context_of(renderer)
    )
    data = task.dataset[0]
    sums = [str(sum(digits)) for digits in data.env_input]
    policy = ScriptedPolicy(tokenizer, lambda rollout_id, turn: sums[turn] if right[turn] else "no")
    group = await task.run_group(data, policy, group_id="g", seed=0, group_size=2)
    assert await task.score_group(group) is None
    for rollout in group.rollouts:
        assert rollout.status == RolloutStatus.COMPLETED and rollout.reward == sum(right) / 2
        (sample,) = rollout.samples
        foreseen = tokenizer.decode(sample.token_ids[sample.ce_weights != 0])
        assert foreseen == f"The sum is {sums[0]}. Sum of the digits: " + " ".join(
            map(str, data.env_input[1])
        )
