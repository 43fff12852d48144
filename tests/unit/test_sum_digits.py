"""The worked task, from dataset to reward."""

import pytest

from tests.fakes.contexts import context_of
from tests.fakes.policy import ScriptedPolicy
from torchtitan.experiments.rl.algorithms.grpo import GRPO
from torchtitan.experiments.rl.tasks.examples.sum_digits import (
    SumDigitsDataset,
    SumDigitsRubric,
    SumDigitsTask,
)


@pytest.fixture
def task(renderer):
    config = SumDigitsTask.Config(algorithm=GRPO.Config(), group_size=2)
    config.instruction, config.rubric = (
        "",
        SumDigitsRubric.Config(exact=True),
    )  # the tiny models' form
    config.validate(field="tasks.sum_digits")
    return config.build(name="sum_digits", context=context_of(renderer))


@pytest.mark.parametrize(
    ("answer", "reward"),
    [("{}", 1.0), ("  {}\n", 1.0), ("{}.", 0.0), ("The sum is {}", 0.0), ("0{}", 0.0), ("", 0.0)],
)
async def test_exact_reward_is_for_the_sum_and_nothing_else(task, tokenizer, answer, reward):
    sample = task.sampler.next()
    policy = ScriptedPolicy(tokenizer, answer.format(sum(sample.env_input)))
    group = await task.run_group(sample, policy, group_id="g", seed=0)
    assert await task.score_group(group) is None
    assert [rollout.reward for rollout in group.rollouts] == [reward] * 2
    assert group.rollouts[0].reward_components == {"correct": reward}


async def test_prompt_lists_the_digits(task, tokenizer):
    sample = task.dataset[0]
    policy = ScriptedPolicy(tokenizer)
    await task.run_group(sample, policy, group_id="g", seed=0)
    prompt = tokenizer.decode(policy.sessions[0].prompts[0])
    assert "Sum of the digits: " + " ".join(map(str, sample.env_input)) + "<|im_end|>" in prompt


async def test_right_answer_has_the_better_advantage(task, tokenizer):
    sample = task.dataset[0]
    policy = ScriptedPolicy(
        tokenizer,
        lambda rollout_id, turn: str(sum(sample.env_input)) if rollout_id == "g/0" else "no",
    )
    group = await task.run_group(sample, policy, group_id="g", seed=0)
    await task.score_group(group)
    right, wrong = (rollout.samples[0] for rollout in group.rollouts)
    assert set(right.advantages[right.loss_mask]) == {0.5} and set(
        wrong.advantages[wrong.loss_mask]
    ) == {-0.5}


def test_train_and_validation_share_no_example(task):
    train = {tuple(sample.env_input) for sample in task.dataset}
    validation = {tuple(sample.env_input) for sample in task.validation}
    assert len(task.dataset) == 10_000 and len(task.validation) == 64 and not train & validation


def test_dataset_is_the_same_every_time_and_follows_its_config():
    config = SumDigitsDataset.Config(count=30, seed=3, min_digits=4, max_digits=4)
    first, second = config.build(), config.build()
    assert list(first) == list(second) and {len(sample.env_input) for sample in first} == {4}
    assert len({sample.sample_id for sample in first}) == 30
