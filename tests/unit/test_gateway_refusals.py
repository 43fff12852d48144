"""Refusals: clients know them and go on as they do with a provider, and the run says why."""

import logging

import anthropic
import pytest

from tests.fakes.policy import ScriptedPolicy
from tests.unit.agents import ADD, CALL, client_of, run_agent
from torchtitan.experiments.rl.observability.rollouts import calls_of
from torchtitan.experiments.rl.rollouts.types import RolloutStatus

HELLO = {"role": "user", "content": "hello"}
TOO_LONG = {"role": "user", "content": "word " * 400}
IMAGE = {"role": "user", "content": [{"type": "image_url", "image_url": {"url": "data:,"}}]}
BODIES = {
    "chat/completions": {"messages": [HELLO]},
    "responses": {"input": [HELLO]},
    "messages": {"messages": [HELLO], "max_tokens": 9},
}


async def test_anthropics_tool_runner_sends_the_whole_conversation_and_is_one_sample(
    renderer, tokenizer
):
    """It begins with a thread, whose later requests would have the new messages alone."""

    async def agent(sample, endpoint):
        @anthropic.beta_async_tool
        async def add(a: int) -> str:
            """Adds."""
            return str(a + 2)

        async with anthropic.AsyncAnthropic(
            base_url=endpoint.anthropic_url, api_key=endpoint.key
        ) as client:
            runner = client.beta.messages.tool_runner(
                model="policy", max_tokens=64, system="Be brief.", tools=[add], messages=[HELLO]
            )
            return (await runner.until_done()).content[0].text

    replies = [CALL, CALL, "it is 3"]
    policy = ScriptedPolicy(tokenizer, lambda rollout_id, turn: replies[turn])
    rollout = await run_agent(agent, policy, renderer)
    assert rollout.status is RolloutStatus.COMPLETED and rollout.answer == "it is 3", rollout.error
    assert rollout.calls == {"answered": 3, "refused": 1}
    (sample,) = rollout.samples
    assert int(sample.loss_mask.sum()) == rollout.completion_tokens
    roles = [message["role"] for message in rollout.turns[-1].prompt_messages]
    assert roles == ["system", "user", "assistant", "tool", "assistant", "tool"]
    assert all(turn.tools for turn in rollout.turns)
    (refused,) = rollout.refusals
    assert refused.startswith("thread = ") and "send the whole conversation" in refused


@pytest.mark.parametrize("path", BODIES)
async def test_a_field_that_nothing_reads_is_counted_and_logged_once(
    path, renderer, tokenizer, caplog
):
    async def agent(sample, endpoint):
        async with client_of(endpoint) as ask:
            body = {"model": "policy", **BODIES[path], "user": "me", "metadata": {}}
            for _ in range(2):
                assert (await ask.raw(path, body | {"memory": {"id": "m_1"}, "x" * 65: 1}))[
                    0
                ] == 200

    rollout = await run_agent(agent, ScriptedPolicy(tokenizer, "ok"), renderer)
    assert rollout.calls == {"answered": 2, "ignored/memory": 2, "ignored/other": 2}
    (line,) = [record.getMessage() for record in caplog.records if "reads" in record.getMessage()]
    assert line.startswith("task agent: an agent sends memory, which nothing here reads")


@pytest.mark.parametrize(
    ("path", "tool", "name"),
    [
        ("chat/completions", {"type": "custom", "custom": {"name": "patch"}}, "custom"),
        ("responses", {"type": "custom", "name": "patch"}, "custom"),
        ("responses", {"type": "web_search"}, "web_search"),
        ("messages", {"type": "bash_20250124", "name": "bash"}, "bash_20250124"),
    ],
)
async def test_a_tool_that_is_no_function_is_left_out_and_counted(
    path, tool, name, renderer, tokenizer
):
    async def agent(sample, endpoint):
        async with client_of(endpoint) as ask:
            status, reply = await ask.raw(
                path, {"model": "policy", **BODIES[path], "tools": [tool]}
            )
            assert status == 200, reply

    rollout = await run_agent(agent, ScriptedPolicy(tokenizer, "ok"), renderer)
    assert rollout.calls == {"answered": 1, f"ignored/tool {name}": 1}
    assert rollout.turns[0].tools is None


async def test_a_prompt_that_is_too_long_has_the_words_of_each_provider(renderer, tokenizer):
    """litellm, and what stands on it, knows it by OpenAI's sentence and not by the code."""

    async def agent(sample, endpoint):
        async with client_of(endpoint) as ask:
            for path, known in BODIES.items():
                name = "input" if path == "responses" else "messages"
                body = {"model": "policy", **known, name: [TOO_LONG]}
                status, reply = await ask.raw(path, body)
                assert status == 400
                said.append(reply["error"]["message"])
                assert path == "messages" or reply["error"]["code"] == "context_length_exceeded"

    said: list[str] = []
    rollout = await run_agent(agent, ScriptedPolicy(tokenizer, "ok"), renderer, tokens=128)
    tokens = said[2].split()[4]
    cure = "compact the conversation, or begin a new one"
    theirs = (
        "This model's maximum context length is 128 tokens. However, your messages resulted in "
        f"{tokens} tokens, which leaves no room for an answer (env.max_rollout_tokens): {cure}"
    )
    own = f"{tokens} tokens > 127 maximum (env.max_rollout_tokens): {cure}"
    assert int(tokens) > 127 and said == [theirs, theirs, f"prompt is too long: {own}"]
    assert rollout.refusals == {own: 3}


async def test_an_agent_whose_calls_were_all_refused_fails_by_the_reason(
    renderer, tokenizer, caplog
):
    caplog.set_level(logging.INFO)

    async def agent(sample, endpoint):
        async with client_of(endpoint) as ask:
            for messages, fields in (([IMAGE], {}), ([HELLO], {"seed": 3}), ([IMAGE], {})):
                assert (await ask(messages, **fields))[0] == 400

    rollout = await run_agent(agent, ScriptedPolicy(tokenizer, "ok"), renderer)
    image = "messages[0].content has a part of type str 'image_url': only text reaches the model"
    assert rollout.status is RolloutStatus.ERROR
    assert rollout.error == (
        f"the agent ended, and all of its 3 calls were refused: {image}; leave it out"
    )
    seed = "seed = 3: leave it out: the seeds of the policy follow from the run's"
    assert rollout.refusals == {f"{image}; leave it out": 2, seed: 1}
    assert calls_of(rollout) == [f"2 refused: {image}; leave it out", f"1 refused: {seed}"]
    logged = [record.getMessage() for record in caplog.records if "refused" in record.getMessage()]
    assert [line.split(" (others")[0] for line in logged] == [
        f"task agent: a call of an agent was refused: {image}; leave it out",
        f"task agent: a call of an agent was refused: {seed}",
    ]


async def test_an_agent_whose_calls_were_refused_or_lost_fails_by_the_first_refusal(
    renderer, tokenizer
):
    async def agent(sample, endpoint):
        async with client_of(endpoint) as ask:
            assert (await ask([HELLO]))[0] == 500
            assert (await ask([HELLO], n=2))[0] == 400

    failing = ScriptedPolicy(tokenizer, lambda rollout_id, turn: RuntimeError("no engine"))
    rollout = await run_agent(agent, failing, renderer)
    assert rollout.error is not None and rollout.error.startswith(
        "the agent ended, and none of its calls had been answered; 1 of 2 were refused: n = int '2'"
    )


async def test_an_agent_that_asked_nothing_is_told_of_caches(renderer, tokenizer):
    async def agent(sample, endpoint):
        return "an answer of an earlier rollout"

    rollout = await run_agent(agent, ScriptedPolicy(tokenizer, "ok"), renderer)
    assert rollout.error == (
        "the agent ended and had not asked the model anything; if its framework keeps answers, "
        "switch this cache off (dspy: cache=False)"
    )


@pytest.mark.parametrize("path", BODIES)
async def test_what_is_nested_too_deep_or_compressed_is_refused_and_not_a_fault(
    path, renderer, tokenizer, caplog
):
    deep: dict = {"type": "object"}
    for _ in range(400):
        deep = {"properties": {"a": deep}}
    forms = {"responses": {"type": "function", "name": "add", "parameters": deep}}
    forms["messages"] = {"name": "add", "input_schema": deep}
    tool = forms.get(path, {"type": "function", "function": {"name": "add", "parameters": deep}})

    async def agent(sample, endpoint):
        async with client_of(endpoint) as ask:
            body = {"model": "policy", **BODIES[path]}
            status, reply = await ask.raw(path, body | {"tools": [tool]})
            assert status == 400
            assert reply["error"]["message"] == "tools is nested too deep, want at most 100 levels"
            status, reply = await ask.raw(path, body, headers={"Content-Encoding": "gzip"})
            assert status == 400 and "send the request as it is" in reply["error"]["message"]
            assert (await ask.raw(path, body))[0] == 200

    rollout = await run_agent(agent, ScriptedPolicy(tokenizer, "ok"), renderer)
    assert rollout.calls == {"answered": 1, "refused": 2}
    assert not [record for record in caplog.records if record.exc_info]


async def test_a_key_is_found_in_either_header_and_in_any_spelling_of_bearer(renderer, tokenizer):
    async def agent(sample, endpoint):
        key = endpoint.key
        for headers, status in (
            ({"Authorization": f"bearer {key}"}, 200),
            ({"Authorization": f"Bearer {key}", "x-api-key": "of-another-provider"}, 200),
            ({"Authorization": "Bearer other", "x-api-key": key}, 200),
            ({"Authorization": key}, 401),
            ({"Authorization": f"Basic {key}"}, 401),
        ):
            async with client_of(endpoint, **headers) as ask:
                assert (await ask([HELLO]))[0] == status, headers

    rollout = await run_agent(agent, ScriptedPolicy(tokenizer, "ok"), renderer)
    assert rollout.calls == {"answered": 3}, rollout.error


async def test_a_refusal_in_the_history_is_what_the_assistant_said(renderer, tokenizer):
    part = {"type": "refusal", "refusal": "I will not."}
    history = [HELLO, {"role": "assistant", "content": [part]}, HELLO]

    async def agent(sample, endpoint):
        async with client_of(endpoint) as ask:
            for path, name in (("chat/completions", "messages"), ("responses", "input")):
                status, reply = await ask.raw(path, {"model": "policy", name: history})
                assert status == 200, reply

    rollout = await run_agent(agent, ScriptedPolicy(tokenizer, "ok"), renderer)
    for turn in rollout.turns:
        assert [message["content"] for message in turn.prompt_messages] == [
            "hello",
            "I will not.",
            "hello",
        ]


async def test_a_request_for_context_management_is_answered_with_the_whole_conversation(
    renderer, tokenizer
):
    async def agent(sample, endpoint):
        async with client_of(endpoint) as ask:
            edits = {"edits": [{"type": "clear_tool_uses_20250919"}]}
            body = {"model": "policy", **BODIES["messages"], "context_management": edits}
            assert (await ask.raw("messages", body))[0] == 200
            body = {"model": "policy", **BODIES["responses"], "truncation": "auto"}
            assert (await ask.raw("responses", body))[0] == 200
            tools = {"tools": [ADD], "truncation": "disabled"}
            assert (await ask([HELLO], **tools))[0] == 200

    rollout = await run_agent(agent, ScriptedPolicy(tokenizer, "ok"), renderer)
    assert rollout.calls == {"answered": 3, "wish/context_management": 1, "wish/truncation": 1}
