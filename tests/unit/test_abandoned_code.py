"""Code that is late, or blocks, beside others: who is charged, what is closed, and that nothing spins."""

import asyncio
import copy
import pickle
import time

import pytest

from tests.fakes.contexts import context_of
from tests.fakes.datasets import Numbers
from tests.fakes.envs import TalkingEnv
from tests.fakes.policy import ScriptedPolicy
from torchtitan.experiments.rl.algorithms.grpo import GRPO
from torchtitan.experiments.rl.ask import scopes
from torchtitan.experiments.rl.ask.call import ask
from torchtitan.experiments.rl.envs.renderer_env import RendererEnvConfig
from torchtitan.experiments.rl.errors import UserCodeError
from torchtitan.experiments.rl.rollouts.types import DataSample, RolloutStatus
from torchtitan.experiments.rl.tasks.task import Task


class Stubborn(Task):
    """Task of turn loops that go on whatever happens to them, until their rollout is over."""

    loops_ended = 0

    async def make_envs(self, sample, n):
        return [TalkingEnv() for _ in range(n)]

    async def run_rollout(self, env, policy):
        await env.initial_prompt()
        while not env.status.is_terminal():
            try:
                await asyncio.sleep(0.01)
            except asyncio.CancelledError:
                pass
        Stubborn.loops_ended += 1


class SlowToMake(Task):
    """Task whose envs come long after their limit."""

    async def make_envs(self, sample, n):
        starting = asyncio.ensure_future(asyncio.sleep(0.8))
        while not starting.done():
            try:
                await asyncio.shield(starting)
            except asyncio.CancelledError:
                pass
        self.made = [TalkingEnv() for _ in range(n)]
        return self.made


def built(kind: type[Task], renderer) -> Task:
    config = kind.Config(
        algorithm=GRPO.Config(),
        dataset=Numbers.Config(),
        env=RendererEnvConfig(rollout_timeout_s=0.2),
        group_size=2,
        max_retries=0,
    )
    return config.build(name="task", context=context_of(renderer))


async def run(task: Task, tokenizer):
    sample = DataSample(sample_id="0", env_input=None)
    return await task.run_group(sample, ScriptedPolicy(tokenizer), group_id="g-0", seed=0)


@pytest.fixture(autouse=True)
def short_grace(monkeypatch):
    monkeypatch.setattr(scopes, "CANCEL_GRACE_S", 0.1)


async def test_an_abandoned_turn_loop_finds_that_its_rollout_is_over(renderer, tokenizer):
    Stubborn.loops_ended = 0
    group = await run(built(Stubborn, renderer), tokenizer)
    assert {rollout.status for rollout in group.rollouts} == {RolloutStatus.TIMEOUT}
    assert "Stubborn.run_rollout: the rollout took longer than 0.2 s" in group.rollouts[0].error
    await asyncio.sleep(0.1)
    assert Stubborn.loops_ended == 2


async def test_envs_that_are_made_after_their_group_has_ended_are_closed(renderer, tokenizer):
    task = built(SlowToMake, renderer)
    group = await run(task, tokenizer)
    assert {rollout.status for rollout in group.rollouts} == {RolloutStatus.TIMEOUT}
    await asyncio.sleep(1.0)
    assert [env.closed for env in task.made] == [1, 1]


async def test_a_timeout_around_a_call_ends_the_code_even_if_the_call_is_late_at_the_same_moment():
    late = 0

    async def asks_again_and_again():
        nonlocal late
        async with asyncio.timeout(0.2):
            for _ in range(9):
                try:
                    await ask(asyncio.sleep, 3600, timeout_s=0.2)
                except UserCodeError:
                    late += 1

    with pytest.raises(UserCodeError, match="TimeoutError"):
        await ask(asks_again_and_again, timeout_s=60)
    assert late <= 1


async def test_code_is_not_charged_with_the_time_that_another_step_held_up_the_loop_before_it():
    async def computes():
        await asyncio.sleep(0.05)
        time.sleep(0.3)
        return 1

    async def library():
        await asyncio.sleep(0.05)
        time.sleep(1.0)

    other = asyncio.create_task(library())
    assert await ask(computes, timeout_s=0.8) == 1
    await other


async def test_a_new_call_keeps_its_limit_though_an_older_deadline_was_moved():
    async def waits():
        await asyncio.sleep(3600)

    older = asyncio.create_task(ask(waits, timeout_s=0.2))
    await asyncio.sleep(0.02)
    time.sleep(1.5)
    await asyncio.sleep(0.03)
    with pytest.raises(UserCodeError):
        await ask(waits, timeout_s=0.2)
    assert not older.done()
    with pytest.raises(UserCodeError):
        await older


class Mine(DataSample):
    """Example of a user's class that pickles in its own way, and can be a key."""

    def __reduce__(self):
        return Mine._made, (self.sample_id,)

    @staticmethod
    def _made(sample_id: str) -> "Mine":
        return Mine(sample_id=sample_id, env_input=None)

    def __hash__(self):
        return hash(self.sample_id)


def test_a_read_only_record_keeps_the_ways_of_its_users_class():
    example = Mine(sample_id="7", env_input=None).freeze()
    for made in (copy.deepcopy(example), pickle.loads(pickle.dumps(example))):
        assert type(made) is Mine and made.sample_id == "7" and not made.frozen
    assert hash(example) == hash("7")
