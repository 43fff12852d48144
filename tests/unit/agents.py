"""Rollouts of agents without a run: a scripted policy behind the real server."""

import contextlib
import json

import aiohttp
import numpy as np

from tests.fakes.contexts import context_of
from torchtitan.experiments.rl.tasks import (
    AgentTask,
    MemoryRows,
    RendererEnvConfig,
    RowDataset,
    Rubric,
    SamplingConfig,
)

ADD = {
    "type": "function",
    "function": {
        "name": "add",
        "description": "Adds.",
        "parameters": {"type": "object", "properties": {"a": {"type": "integer"}}},
    },
}
CALL = '<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>'


def row_dataset(*rows):
    return RowDataset.Config(rows=MemoryRows(list(rows) or [{"input": "x"}]))


def no_reward(answer, row):
    return 0.0


def config_of(task_class, *, rows=(), tokens=2048, calls=64, sampled=256, timeout_s=30.0, **fields):
    env = RendererEnvConfig(max_turns=calls, max_rollout_tokens=tokens, rollout_timeout_s=timeout_s)
    fields.setdefault("rubric", Rubric.Config(reward_fns=[no_reward]))
    fields.setdefault("max_retries", 0)
    fields.setdefault("group_size", 1)
    return task_class.Config(
        dataset=row_dataset(*rows), env=env, sampling=SamplingConfig(max_tokens=sampled), **fields
    )


async def run_task(config, policy, renderer, *, seed=0):
    """One group of the first example, scored; the task is closed."""
    task = config.build(name="agent", context=context_of(renderer))
    await task.setup(policy)
    try:
        group = await task.run_group(task.dataset[0], policy, group_id="g", seed=seed)
        await task.score_group(group)
    finally:
        await task.close()
    for rollout in group.rollouts:
        assert_accounted(rollout)
    return group


async def run_agent(agent, policy, renderer, **fields):
    """One rollout of ``agent(sample, endpoint)``."""

    class Agent(AgentTask):
        async def run_agent(self, sample, endpoint):
            return await agent(sample, endpoint)

    group = await run_task(config_of(Agent, **fields), policy, renderer)
    return group.rollouts[0]


def assert_accounted(rollout):
    """Every sampled token is trained once, or has the name of the reason why not."""
    trained = sum(int(np.count_nonzero(sample.loss_mask)) for sample in rollout.samples)
    others: dict[str, int] = {}
    for turn in rollout.turns:
        if turn.untrained is not None:
            others[turn.untrained] = others.get(turn.untrained, 0) + len(turn.completion.token_ids)
    assert set(others) <= {"undelivered", "auxiliary", "frozen model", "aborted", "lost"}
    assert trained + sum(others.values()) == rollout.completion_tokens
    told = [tuple(turn.completion.logprobs) for turn in rollout.turns if turn.untrained is None]
    assert sorted(value for logprobs in told for value in logprobs) == sorted(
        value for sample in rollout.samples for value in sample.generator_logprobs[sample.loss_mask]
    )


@contextlib.asynccontextmanager
async def client_of(endpoint, **headers):
    """``ask(messages, **fields)`` gives status and body; ``ask.raw`` posts anything."""
    given = {"Authorization": f"Bearer {endpoint.key}", **headers}
    async with aiohttp.ClientSession(headers=given) as session:

        async def raw(path, body, **options):
            data = body if isinstance(body, bytes) else json.dumps(body).encode()
            async with session.post(f"{endpoint.url}/{path}", data=data, **options) as response:
                return response.status, json.loads(await response.read())

        async def ask(messages, *, headers=None, **fields):
            return await raw(
                "chat/completions",
                {"model": "policy", "messages": messages, **fields},
                headers=headers,
            )

        ask.raw, ask.session = raw, session
        yield ask
