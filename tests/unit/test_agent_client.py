"""The client that an endpoint hands out: made once for all rollouts, and past the proxies of a cluster."""

import asyncio
import contextlib
import time

import pytest
from aiohttp import web
from openai import APIConnectionError, AsyncOpenAI

from tests.fakes.policy import ScriptedPolicy
from tests.unit.agents import config_of, run_agent, run_task
from torchtitan.experiments.rl.gateway import server
from torchtitan.experiments.rl.generation.endpoint import EndpointClient, _ask
from torchtitan.experiments.rl.generation.references import FrozenModel
from torchtitan.experiments.rl.rollouts.types import RolloutStatus
from torchtitan.experiments.rl.tasks import AgentTask

HELLO = {"role": "user", "content": "hello"}
NO_PROXY_THERE = "http://127.0.0.1:9"


@pytest.fixture
def proxy(monkeypatch):
    for name in ("http_proxy", "all_proxy", "no_proxy", "HTTP_PROXY", "ALL_PROXY", "NO_PROXY"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HTTP_PROXY", NO_PROXY_THERE)


async def say_hello(client):
    reply = await client.chat.completions.create(model="policy", messages=[HELLO])
    return reply.choices[0].message.content


class Agent(AgentTask):
    async def run_agent(self, sample, endpoint):
        async with endpoint.client() as client:  # which closes no connection of another's
            await say_hello(client)
        return await say_hello(endpoint.client())


async def test_many_rollouts_share_the_connections_of_one_client(renderer, tokenizer):
    seconds = []

    class Timed(Agent):
        async def run_agent(self, sample, endpoint):
            begun = time.process_time()
            endpoint.client()
            seconds.append(time.process_time() - begun)
            return await super().run_agent(sample, endpoint)

    group = await run_task(
        config_of(Timed, group_size=64), ScriptedPolicy(tokenizer, "ok"), renderer
    )
    assert all(rollout.calls == {"answered": 2} for rollout in group.rollouts)
    # The first client makes the connections' TLS context, which takes 0.03 to 0.1 s.
    assert sum(sorted(seconds)[:-1]) < 0.3
    assert asyncio.get_running_loop() not in server._CONNECTIONS  # closed with the last task


async def test_the_endpoints_client_asks_no_proxy(renderer, tokenizer, proxy):
    group = await run_task(config_of(Agent), ScriptedPolicy(tokenizer, "ok"), renderer)
    (rollout,) = group.rollouts
    assert rollout.status is RolloutStatus.COMPLETED and rollout.answer == "ok", rollout.error


async def with_a_client_of_its_own(sample, endpoint):
    async with AsyncOpenAI(base_url=endpoint.url, api_key=endpoint.key, max_retries=0) as client:
        return await say_hello(client)


async def with_failures_caught(sample, endpoint):
    with contextlib.suppress(APIConnectionError):
        await with_a_client_of_its_own(sample, endpoint)


@pytest.mark.parametrize("agent", [with_a_client_of_its_own, with_failures_caught])
async def test_an_agent_whose_calls_go_to_a_proxy_is_told(
    agent, renderer, tokenizer, proxy, monkeypatch
):
    rollout = await run_agent(agent, ScriptedPolicy(tokenizer, "ok"), renderer)
    assert rollout.status is RolloutStatus.ERROR
    assert rollout.error.endswith(
        "the proxy of HTTP_PROXY: use endpoint.client(), or add 127.0.0.1 to NO_PROXY"
    ), rollout.error
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    rollout = await run_agent(agent, ScriptedPolicy(tokenizer, "ok"), renderer)
    assert rollout.status is RolloutStatus.COMPLETED, rollout.error


async def test_no_proxy_is_named_where_the_agent_reached_the_model(renderer, tokenizer, proxy):
    async def agent(sample, endpoint):
        await say_hello(endpoint.client())
        raise ValueError("of its own")

    rollout = await run_agent(agent, ScriptedPolicy(tokenizer, "ok"), renderer)
    assert "of its own" in rollout.error and "proxy" not in rollout.error


async def test_a_plain_function_is_told_how_to_share_a_client(renderer, tokenizer):
    class Plain(AgentTask):
        def run_agent(self, sample, endpoint):
            endpoint.client()

    (rollout,) = (
        await run_task(config_of(Plain), ScriptedPolicy(tokenizer, "ok"), renderer)
    ).rollouts
    assert rollout.status is RolloutStatus.ERROR and "make one openai.OpenAI" in rollout.error


async def test_frozen_models_of_this_host_are_asked_past_the_proxy(proxy):
    async def completions(request):
        return web.json_response({"choices": [{"message": {"role": "assistant", "content": "ok"}}]})

    app = web.Application()
    app.router.add_post("/v1/chat/completions", completions)
    runner = web.AppRunner(app)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    url = f"http://127.0.0.1:{runner.addresses[0][1]}/v1"
    model = FrozenModel(name="judge", base_url=url, max_retries=0)
    client = EndpointClient(model)
    try:
        answer = await client.complete({"messages": [HELLO]}, "/chat/completions")
        assert answer.choice["message"]["content"] == "ok"
        asked = await asyncio.to_thread(_ask, model, "POST", f"{url}/chat/completions", json={})
        assert asked.status_code == 200
    finally:
        await client.close()
        await runner.cleanup()
