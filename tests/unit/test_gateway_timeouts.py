"""Clients that stop waiting: their call goes on for a while, and what they ask again joins it."""

import asyncio
import logging

import aiohttp
import pytest
from openai import AsyncOpenAI, InternalServerError

from tests.fakes.policy import HeldPolicy, ScriptedPolicy
from tests.fakes.waiting import until
from tests.unit.agents import client_of, run_agent
from torchtitan.experiments.rl.errors import RunError
from torchtitan.experiments.rl.gateway import rollout as agent_rollout
from torchtitan.experiments.rl.gateway import server
from torchtitan.experiments.rl.generation.references import FrozenModel
from torchtitan.experiments.rl.rollouts.types import RolloutStatus

HELLO = {"role": "user", "content": "hello"}
BODY = {"model": "policy", "messages": [HELLO]}
BRIEF = aiohttp.ClientTimeout(total=0.05)


class SlowPolicy(HeldPolicy):
    """Policy that takes ``seconds`` for a completion."""

    def __init__(self, tokenizer, seconds):
        super().__init__(tokenizer)
        self.seconds = seconds

    async def wait(self, rollout_id):
        await asyncio.sleep(self.seconds)


async def give_up(ask, body=BODY):
    with pytest.raises(TimeoutError):
        await ask.raw("chat/completions", body, timeout=BRIEF)


@pytest.mark.parametrize("stream", [False, True])
async def test_openais_client_gets_the_answer_of_a_turn_that_takes_longer_than_its_time_out(
    stream, renderer, tokenizer
):
    async def agent(sample, endpoint):
        async with AsyncOpenAI(
            base_url=endpoint.url, api_key=endpoint.key, timeout=0.8, max_retries=8
        ) as client:
            if stream:
                chunks = await client.chat.completions.create(**BODY, stream=True)
                return "".join([chunk.choices[0].delta.content or "" async for chunk in chunks])
            return (await client.chat.completions.create(**BODY)).choices[0].message.content

    policy = SlowPolicy(tokenizer, seconds=2.0)
    rollout = await run_agent(agent, policy, renderer, calls=1)
    assert rollout.status is RolloutStatus.COMPLETED, rollout.error
    assert rollout.answer == "ok" and rollout.calls["answered"] == 1 and len(rollout.samples) == 1
    assert policy.begun == policy.ended == 1
    assert stream or rollout.calls["retried"] >= 1


@pytest.mark.parametrize("headers", [None, {"x-stainless-retry-count": "1"}])
async def test_a_repeat_joins_the_call_that_its_client_has_left_marked_or_not(
    headers, renderer, tokenizer
):
    async def agent(sample, endpoint):
        async with client_of(endpoint) as ask:
            await give_up(ask)
            again = asyncio.create_task(ask.raw("chat/completions", BODY, headers=headers))
            await asyncio.sleep(0.1)
            policy.released.set()
            assert (await again)[0] == 200

    policy = HeldPolicy(tokenizer)
    rollout = await run_agent(agent, policy, renderer, calls=1)
    assert rollout.status is RolloutStatus.COMPLETED, rollout.error
    assert rollout.calls == {"answered": 1, "retried": 1} and policy.begun == 1


async def test_a_repeat_gets_the_answer_that_nobody_was_there_for(renderer, tokenizer):
    async def agent(sample, endpoint):
        async with client_of(endpoint) as ask:
            await give_up(ask)
            policy.released.set()
            await until(lambda: policy.ended == 1)
            assert (await ask.raw("chat/completions", BODY))[0] == 200
            assert (await ask.raw("chat/completions", BODY))[
                0
            ] == 200  # the first was delivered: a sibling

    policy = HeldPolicy(tokenizer)
    rollout = await run_agent(agent, policy, renderer)
    assert (
        rollout.calls == {"answered": 2, "retried": 1}
        and policy.begun == 2
        and len(rollout.samples) == 2
    )


async def test_a_call_ends_in_the_engine_a_while_after_its_last_reader_and_is_no_turn(
    renderer, tokenizer, monkeypatch
):
    monkeypatch.setattr(agent_rollout, "KEEP_S", 0.1)

    async def agent(sample, endpoint):
        async with client_of(endpoint) as ask:
            for number in range(3):
                other = {"role": "user", "content": f"question {number}"}
                await give_up(ask, {"model": "policy", "messages": [other]})
                await asyncio.sleep(0.2)
            policy.released.set()
            assert (await ask.raw("chat/completions", BODY))[0] == 200

    policy = HeldPolicy(tokenizer)
    rollout = await run_agent(agent, policy, renderer, calls=2)
    assert rollout.status is RolloutStatus.COMPLETED, rollout.error
    assert (
        rollout.calls == {"answered": 1, "aborted": 3} and policy.begun == 4 and policy.ended == 1
    )


async def test_a_reader_that_comes_back_keeps_the_call(renderer, tokenizer, monkeypatch):
    monkeypatch.setattr(agent_rollout, "KEEP_S", 0.3)

    async def agent(sample, endpoint):
        async with client_of(endpoint) as ask:
            await give_up(ask)
            again = asyncio.create_task(ask.raw("chat/completions", BODY))
            await asyncio.sleep(0.5)  # the timer of the first reader is over
            policy.released.set()
            assert (await again)[0] == 200

    rollout = await run_agent(agent, policy := HeldPolicy(tokenizer), renderer)
    assert rollout.calls == {"answered": 1, "retried": 1} and policy.begun == 1


async def test_calls_that_wait_are_bounded_and_end_with_the_rollout(renderer, tokenizer):
    async def agent(sample, endpoint):
        async with client_of(endpoint) as ask:
            for number in range(2):
                await give_up(ask, {"model": "policy", "messages": [HELLO], "user": str(number)})
            status, reply = await ask.raw("chat/completions", BODY)
            assert status == 400 and reply["error"]["code"] == "call_budget_exceeded"

    policy = HeldPolicy(tokenizer)
    rollout = await run_agent(agent, policy, renderer, calls=2)
    assert rollout.calls == {"aborted": 2, "refused": 1} and policy.begun == 2 and not rollout.turns


async def test_a_cut_answer_that_came_after_its_client_had_gone_truncates_nothing(
    renderer, tokenizer
):
    async def agent(sample, endpoint):
        async with client_of(endpoint) as ask:
            await give_up(ask)
            policy.released.set()
            await until(lambda: policy.ended == 1)
            if sample.env_input["input"] == "comes back":
                await ask.raw("chat/completions", BODY)
            await ask.raw("chat/completions", {"model": "small", "messages": [HELLO]})

    for behaviour, status in (
        ("goes", RolloutStatus.COMPLETED),
        ("comes back", RolloutStatus.TRUNCATED_LENGTH),
    ):
        policy = HeldPolicy(tokenizer)
        policy.reply = lambda rollout_id, turn: "one two three four"
        rows = [{"input": behaviour}]
        rollout = await run_agent(
            agent, policy, renderer, sampled=2, rows=rows, models={"small": "auxiliary"}
        )
        assert rollout.status is status, rollout.error


async def test_a_stream_lives_from_the_moment_the_model_is_asked(renderer, tokenizer, monkeypatch):
    monkeypatch.setattr(server, "KEEP_ALIVE_S", 3600.0)

    async def agent(sample, endpoint):
        async with client_of(endpoint) as ask:
            for path, fields in (
                ("chat/completions", {"messages": [HELLO]}),
                ("messages", {"messages": [HELLO]}),
            ):
                body = {"model": "policy", "stream": True, "max_tokens": 9, **fields}
                async with ask.session.post(f"{endpoint.url}/{path}", json=body) as response:
                    assert await response.content.readany() in (
                        b": keep-alive\n\n",
                        server.anthropic.KEEP_ALIVE,
                    )
                    policy.released.set()
                    assert b"ok" in await response.read()
                policy.released.clear()

    policy = HeldPolicy(tokenizer)
    rollout = await run_agent(agent, policy, renderer)
    assert rollout.status is RolloutStatus.COMPLETED and rollout.calls == {"answered": 2}, (
        rollout.error
    )


async def test_a_stream_is_refused_with_a_status_before_the_model_is_asked(renderer, tokenizer):
    async def agent(sample, endpoint):
        async with client_of(endpoint) as ask:
            for fields in ({"messages": [{"role": "user", "content": "word " * 400}]}, {"seed": 3}):
                status, reply = await ask.raw(
                    "chat/completions", {**BODY, "stream": True, **fields}
                )
                assert status == 400 and reply["error"]["message"]

    rollout = await run_agent(agent, ScriptedPolicy(tokenizer, "ok"), renderer, tokens=128)
    assert rollout.calls == {"refused": 2}


async def test_a_frozen_model_that_fails_is_named_once_and_leaves_no_traceback(
    renderer, tokenizer, caplog
):
    caplog.set_level(logging.INFO)

    async def agent(sample, endpoint):
        body = {"model": "user", "messages": [HELLO]}
        async with (
            client_of(endpoint) as ask,
            AsyncOpenAI(base_url=endpoint.url, api_key=endpoint.key) as client,
        ):
            with pytest.raises(
                InternalServerError,
                match="frozen model 'user' at http://localhost:1/v1 failed 6 times",
            ):
                await client.chat.completions.create(**body)
            async with ask.session.post(
                f"{endpoint.url}/chat/completions", json={**body, "stream": True}
            ) as response:
                assert '"code": "model_failed"' in (await response.read()).decode()
            await ask([HELLO])

    models = {"user": FrozenModel(name="user", base_url="http://localhost:1/v1")}
    cause = "frozen model 'user' at http://localhost:1/v1 failed 6 times, last with ConnectError"
    failing = ScriptedPolicy(tokenizer, lambda rollout_id, turn: RunError(cause))
    policy = ScriptedPolicy(tokenizer, frozen=failing)
    rollout = await run_agent(agent, policy, renderer, models=models)
    assert rollout.status is RolloutStatus.COMPLETED, rollout.error
    assert rollout.calls == {"answered": 1, "lost": 2}  # the client did not ask again
    assert not [record for record in caplog.records if record.exc_info]


class WrongModel(ScriptedPolicy):
    """Policy whose frozen model returns log-probabilities above 0 from the second turn on."""

    def frozen(self, model):
        wrong = ScriptedPolicy(self.tokenizer, "from elsewhere")
        sessions = wrong.session

        def session(**options):
            opened = sessions(**options)
            generate = opened.generate

            async def spoilt(prompt, **settings):
                completion = await generate(prompt, **settings)
                if len(opened.prompts) > 1:
                    completion.logprobs = -completion.logprobs
                return completion

            opened.generate = spoilt
            return opened

        wrong.session = session
        return wrong


async def test_a_completion_of_a_frozen_model_that_is_none_loses_its_own_call_alone(
    renderer, tokenizer, caplog
):
    caplog.set_level(logging.INFO)

    async def agent(sample, endpoint):
        async with client_of(endpoint) as ask:
            body = {"model": "user", "messages": [HELLO]}
            status, reply = await ask.raw("chat/completions", body)
            assert status == 200
            messages = [HELLO, reply["choices"][0]["message"], HELLO]
            status, reply = await ask.raw("chat/completions", {**body, "messages": messages})
            assert status == 502 and "model 'user'" in reply["error"]["message"]
            await ask([HELLO])

    models = {"user": FrozenModel(name="user", base_url="http://localhost:1/v1")}
    rollout = await run_agent(agent, WrongModel(tokenizer, "ok"), renderer, models=models)
    assert rollout.status is RolloutStatus.COMPLETED, rollout.error
    assert rollout.calls == {"answered": 1, "frozen model": 1, "lost": 1}
    assert [turn.untrained for turn in rollout.turns] == ["frozen model", None]
    assert not [record for record in caplog.records if record.exc_info]
