"""Envs that block the event loop: the rollout ends as TIMEOUT by the env's name, and the call is counted."""

import time

import pytest

from tests.fakes.contexts import context_of
from tests.fakes.datasets import Numbers
from tests.fakes.envs import TalkingEnv
from tests.fakes.policy import ScriptedPolicy
from tests.unit.blocked import blocked_s
from torchtitan.experiments.rl.algorithms.grpo import GRPO
from torchtitan.experiments.rl.ask.lag import TICK_S, clock_of_running_loop
from torchtitan.experiments.rl.envs.renderer_env import RendererEnvConfig
from torchtitan.experiments.rl.rollouts.types import DataSample, RolloutStatus
from torchtitan.experiments.rl.tasks.task import Task


class BlockingEnv(TalkingEnv):
    """Blocks for ``seconds`` in its ``where`` method, and then answers as if nothing had been."""

    def __init__(self, where, seconds):
        super().__init__()
        self.where, self.seconds = where, seconds

    async def reset(self):
        if self.where == "reset":
            time.sleep(self.seconds)
        return await super().reset()

    async def step_message(self, message):
        if self.where == "step_message":
            time.sleep(self.seconds)
        return await super().step_message(message)


class BlockingTask(Task):
    async def make_envs(self, sample, n):
        self.made = [BlockingEnv(self.where, 0.3 if index == 0 else 0.0) for index in range(n)]
        return self.made


@pytest.mark.parametrize("where", ["reset", "step_message"])
async def test_rollout_whose_env_blocks_beyond_its_limit_is_a_timeout_by_name_and_counted(
    renderer, tokenizer, where
):
    task = BlockingTask.Config(
        algorithm=GRPO.Config(),
        dataset=Numbers.Config(),
        env=RendererEnvConfig(step_timeout_s=0.2),
        group_size=2,
        max_retries=0,
    ).build(name="blocks", context=context_of(renderer))
    task.where = where
    group = await task.run_group(
        DataSample(sample_id="0", env_input=None), ScriptedPolicy(tokenizer), group_id="g-0", seed=0
    )
    blocked, other = group.rollouts
    assert blocked.status is RolloutStatus.TIMEOUT
    assert blocked.error.startswith(
        f"BlockingEnv.{where}: no answer within 0.2 s: BlockingEnv.{where} (test_blocking_envs.py:"
    )
    assert blocked_s(blocked.error) >= 0.3 - 2 * TICK_S
    assert other.status is RolloutStatus.COMPLETED
    longest_s, steps = clock_of_running_loop().lap()
    assert longest_s > 0.2 and steps == 1
    assert [env.closed for env in task.made] == [1, 1]
