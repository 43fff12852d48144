"""Validation: the same held-out examples each time, and a mean of what was scored."""

from dataclasses import dataclass, field

import pytest

from tests.unit.rollout_stubs import BrokenEnv, ScriptedPolicy, TalkingEnv, raise_value_error
from torchtitan.experiments.rl.algorithms.base import Algorithm
from torchtitan.experiments.rl.algorithms.grpo import GRPO
from torchtitan.experiments.rl.data.dataset import Dataset
from torchtitan.experiments.rl.rollouts.policy import SamplingConfig
from torchtitan.experiments.rl.rollouts.types import DataSample
from torchtitan.experiments.rl.rubrics.rubric import RewardFn, Rubric, last_assistant_text
from torchtitan.experiments.rl.tasks.group_run import derive_seed
from torchtitan.experiments.rl.tasks.task import Task
from torchtitan.experiments.rl.validation import ValidationConfig, validate


class Numbers(Dataset):
    @dataclass(kw_only=True, slots=True)
    class Config(Dataset.Config):
        count: int = 4

    def __init__(self, config):
        self.config = config

    def __len__(self):
        return self.config.count

    def __getitem__(self, index):
        return DataSample(sample_id=str(index), env_input=index)


def length(rollout, env_input):
    return len(last_assistant_text(rollout))


class NoCredit(GRPO):
    async def score_rollout(self, rollout):
        raise AssertionError("the algorithm must not see validation")

    def score_group(self, group):
        raise AssertionError("the algorithm must not see validation")


class AskTask(Task):
    @dataclass(kw_only=True, slots=True)
    class Config(Task.Config):
        algorithm: Algorithm.Config = field(default_factory=NoCredit.Config)
        dataset: Dataset.Config = field(default_factory=Numbers.Config)
        validation: Dataset.Config | None = field(default_factory=Numbers.Config)
        rubric: Rubric.Config = field(default_factory=lambda: Rubric.Config(reward_fns=[RewardFn(length)]))
        sampling: SamplingConfig = field(default_factory=lambda: SamplingConfig(temperature=0.7, max_tokens=9))
        max_retries: int = 0

    broken: tuple[int, ...] = ()

    def make_env(self, sample):
        self.asked = [*getattr(self, "asked", []), sample.env_input]
        return BrokenEnv("reset", raise_value_error) if sample.env_input in self.broken else TalkingEnv()


@pytest.fixture
def build(renderer):
    def make(name="ask", *, broken=(), **changes):
        task = AskTask.Config(**changes).build(name=name, renderer=renderer)
        task.broken = broken
        return task

    return make


def answers(*lengths: int):
    """Example i is answered with this many letters."""
    return lambda rollout_id, turn: "x" * lengths[int(rollout_id.split("/")[0].rsplit("-", 1)[1])]


async def run(policy, *tasks, seed=0, **config):
    return await validate({task.name: task for task in tasks}, policy, ValidationConfig(**config), seed=seed)


async def test_reward_is_the_mean_over_the_examples(build, tokenizer):
    report = await run(ScriptedPolicy(tokenizer, answers(1, 2, 3, 4)), build())
    assert report.reward == report.metrics["validation/reward"] == report.metrics["validation/ask/reward"] == 2.5
    assert report.metrics["validation/ask/failed"] == 0
    # Letters are one token each, or fewer; the closing token counts too.
    assert 2 <= report.metrics["validation/ask/completion_tokens"] <= 3.5


async def test_only_the_first_examples_are_asked_each_once(build, tokenizer):
    task, policy = build(), ScriptedPolicy(tokenizer, answers(1, 3, 9, 9))
    report = await run(policy, task, samples=2)
    assert sorted(task.asked) == [0, 1] and report.reward == 2.0
    assert [session.rollout_id for session in policy.sessions] == ["validation-ask-0/0", "validation-ask-1/0"]
    assert all(session.closed == 1 for session in policy.sessions)


async def test_decoding_is_greedy_by_default_with_the_tasks_other_settings(build, tokenizer):
    policy = ScriptedPolicy(tokenizer, answers(1, 1, 1, 1))
    task = build()
    await run(policy, task)
    assert {(s.sampling.temperature, s.sampling.max_tokens) for s in policy.sessions} == {(0.0, 9)}
    await run(policy, task, temperature=0.5)
    assert policy.sessions[-1].sampling.temperature == 0.5 and task.config.sampling.temperature == 0.7


async def test_every_validation_of_a_run_uses_the_same_seeds(build, tokenizer):
    policy, task = ScriptedPolicy(tokenizer, answers(1, 1, 1, 1)), build()
    await run(policy, task, seed=5)
    await run(policy, task, seed=5)
    first, second = policy.sessions[:4], policy.sessions[4:]
    assert [session.seed for session in first] == [session.seed for session in second]
    assert first[0].seed == derive_seed(5, "validation-ask-0", 0, 0)


async def test_failed_rollout_is_left_out_of_the_mean_and_counted(build, tokenizer):
    report = await run(ScriptedPolicy(tokenizer, answers(1, 2, 3, 4)), build(broken=(3,)))
    assert report.reward == 2.0 and report.metrics["validation/ask/failed"] == 1


async def test_no_reward_is_made_up_when_every_rollout_failed(build, tokenizer):
    report = await run(ScriptedPolicy(tokenizer), build(broken=(0, 1, 2, 3)))
    assert report.reward is None and "validation/reward" not in report.metrics
    assert report.metrics["validation/ask/failed"] == 4


async def test_tasks_count_alike_whatever_their_number_of_examples(build, tokenizer):
    tasks = build("a", validation=Numbers.Config(count=1)), build("b")
    report = await run(ScriptedPolicy(tokenizer, answers(8, 4, 4, 4)), *tasks)
    # a: 8. b: (8 + 4 + 4 + 4) / 4 = 5.
    assert (report.metrics["validation/a/reward"], report.metrics["validation/b/reward"], report.reward) == (8.0, 5.0, 6.5)


async def test_task_without_held_out_examples_takes_no_part(build, tokenizer):
    report = await run(ScriptedPolicy(tokenizer), build(validation=None))
    assert (report.reward, report.metrics) == (None, {})


async def test_validation_leaves_the_training_examples_alone(build, tokenizer):
    task = build()
    before = task.sampler.state_dict()
    await run(ScriptedPolicy(tokenizer), task)
    assert task.sampler.state_dict() == before
