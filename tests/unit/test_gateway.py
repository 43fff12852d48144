"""Calls of agents through the real server: what was sampled is what is trained, and each call has an end with a name."""

import asyncio
import json
import random
import sys
from dataclasses import replace

import numpy as np
import pytest
from anthropic.types import Message, RawMessageStreamEvent
from openai.types.chat import ChatCompletion, ChatCompletionChunk
from openai.types.responses import Response, ResponseStreamEvent
from pydantic import TypeAdapter

from tests.fakes.policy import ScriptedPolicy, ScriptedSession
from tests.unit.agents import ADD, CALL, client_of, config_of, run_agent, run_task
from tests.unit.renderer_families import SETTINGS, family_renderer, family_tokenizer
from torchtitan.experiments.rl.gateway import anthropic as messages
from torchtitan.experiments.rl.gateway import chat, responses, server
from torchtitan.experiments.rl.gateway import rollout as agent_rollout
from torchtitan.experiments.rl.gateway.request import ModelReply, ModelRequest
from torchtitan.experiments.rl.generation.references import FrozenModel
from torchtitan.experiments.rl.rollouts.types import RolloutStatus
from torchtitan.experiments.rl.tasks import EnvTask, MessageEnv, ResetOutput, Rubric, StepOutput
from torchtitan.experiments.rl.tasks.scoring import Drafts
from torchtitan.experiments.rl.types import STREAMS

HELLO = {"role": "user", "content": "hello"}
SCRIPT = [CALL, "the sum is 3", "<think>\nwell\n</think>\n\nagain 3"]


class Policy(ScriptedPolicy):
    def frozen(self, model):
        return ScriptedPolicy(self.tokenizer, "from elsewhere")


def answers_to(message):
    """What the conversation goes on with, in the env and in the agent."""
    calls = message.get("tool_calls") or ()
    results = [
        {"role": "tool", "tool_call_id": call["id"], "name": "add", "content": "3"}
        for call in calls
    ]
    return results or [{"role": "user", "content": "and again?"}]


class ScriptEnv(MessageEnv):
    def __init__(self, row):
        self.turns = 0

    async def reset(self):
        return ResetOutput(messages=[HELLO], tools=[ADD])

    async def step_message(self, message):
        self.turns += 1
        return StepOutput(env_messages=answers_to(message), done=self.turns == len(SCRIPT))


async def append_only(sample, endpoint):
    messages = [HELLO]
    async with client_of(endpoint) as ask:
        for _ in SCRIPT:
            status, reply = await ask(messages, tools=[ADD])
            assert status == 200, reply
            said = reply["choices"][0]["message"]
            messages += [said, *answers_to(said)]


@pytest.mark.parametrize("family", SETTINGS)
async def test_the_gateway_gives_the_samples_of_the_renderer_env_bit_for_bit(
    family, tmp_path_factory
):
    renderer, tokenizer = (
        family_renderer(family, tmp_path_factory.getbasetemp()),
        family_tokenizer(SETTINGS[family]["name"]),
    )
    replies = lambda rollout_id, turn: SCRIPT[turn]  # noqa: E731
    agent = await run_agent(append_only, Policy(tokenizer, replies), renderer)
    in_process = await run_task(
        config_of(EnvTask, message_env=ScriptEnv), Policy(tokenizer, replies), renderer
    )
    env = in_process.rollouts[0]
    assert len(agent.samples) == len(env.samples) and len(agent.turns) == 3
    for ours, theirs in zip(agent.samples, env.samples, strict=True):
        for name in STREAMS:
            assert np.array_equal(getattr(ours, name), getattr(theirs, name)), name


async def test_three_hundred_append_only_conversations_are_a_sample_each(renderer, tokenizer):
    draw = random.Random(0)
    texts = [
        "12",
        "ok, 12",
        "<think>\nlet me see\n</think>\n\n12",
        CALL,
        f"I call it.\n{CALL}",
        f"{CALL}\n{CALL}",
        "12 \u00e9 你",
        "",
    ]
    conversations = [[draw.choice(texts) for _ in range(draw.randint(1, 4))] for _ in range(300)]

    async def agent(sample, endpoint):
        async def converse(said_turns):
            messages = [{"role": "user", "content": f"go {draw.random()}"}]
            for _ in said_turns:
                _, reply = await ask(messages, tools=[ADD])
                said = reply["choices"][0]["message"]
                if draw.random() < 0.3:  # as another client writes it
                    for call in said.get("tool_calls") or ():
                        call["function"]["arguments"] = json.dumps(
                            json.loads(call["function"]["arguments"]), indent=1
                        )
                    said.pop("reasoning_content", None)
                    said["content"] = (
                        [{"type": "text", "text": said["content"]}] if said["content"] else None
                    )
                messages += [said, *answers_to(said)]

        async with client_of(endpoint) as ask:
            for conversation in conversations:
                await converse(conversation)

    script = iter([text for conversation in conversations for text in conversation])
    policy = Policy(tokenizer, lambda rollout_id, turn: next(script))
    rollout = await run_agent(agent, policy, renderer, calls=10_000, tokens=4096, timeout_s=600)
    assert rollout.status is RolloutStatus.COMPLETED, rollout.error
    assert len(rollout.turns) == sum(map(len, conversations))
    assert len(rollout.samples) == 300


async def test_an_answer_is_no_longer_than_its_request_asks(renderer, tokenizer):
    async def agent(sample, endpoint):
        async with client_of(endpoint) as ask:
            for fields in ({"max_tokens": 2}, {}, {"max_tokens": 10_000}):
                await ask([HELLO], **fields)

    rollout = await run_agent(agent, Policy(tokenizer, "an answer of many words"), renderer)
    short, whole, same = [len(turn.completion.token_ids) for turn in rollout.turns]
    assert short == 2 and whole == same > 2


async def test_forks_are_samples_of_one_rollout_and_lose_no_token(renderer, tokenizer):
    async def agent(sample, endpoint):
        async with client_of(endpoint) as ask:
            _, reply = await ask([HELLO])
            history = [HELLO, reply["choices"][0]["message"]]
            await asyncio.gather(
                *(ask([*history, {"role": "user", "content": f"branch {n}"}]) for n in range(3))
            )
            # A compacted history, and a sub-agent with tools of its own.
            await ask([{"role": "user", "content": "summary: hello was said"}])
            await ask([HELLO], tools=[ADD])

    rollout = await run_agent(agent, Policy(tokenizer, "ok"), renderer)
    assert rollout.calls == {"answered": 6} and len(rollout.turns) == 6
    assert len(rollout.samples) == 5  # the first turn and a branch are one
    shared = rollout.turns[0]
    prefix = np.concatenate([shared.prompt_token_ids, shared.completion.token_ids])
    assert sum(np.array_equal(s.token_ids[: len(prefix)], prefix) for s in rollout.samples) == 3
    with Drafts([rollout]):
        rollout.assign_advantages(0.5)
        assert all((s.advantages[s.loss_mask] == 0.5).all() for s in rollout.samples)


async def test_seeds_follow_from_the_chain_and_not_from_the_order_of_arrival(renderer, tokenizer):
    async def seeds_of(order):
        async def agent(sample, endpoint):
            async with client_of(endpoint) as ask:
                _, reply = await ask([HELLO])
                history = [HELLO, reply["choices"][0]["message"]]
                for number in order:
                    await ask([*history, {"role": "user", "content": f"branch {number}"}])
                    await ask([{"role": "user", "content": f"root {number}"}])

        policy = Policy(tokenizer, "ok")
        await run_agent(agent, policy, renderer)
        return {
            tuple(prompt): session.seed for session in policy.sessions for prompt in session.prompts
        }

    some, others = await seeds_of([1, 2, 3]), await seeds_of([1, 3, 2])
    assert (
        some == others and len(set(some.values())) == 6
    )  # the first branch goes on with the session of the first turn


async def test_a_marked_retry_generates_once_and_an_unmarked_repeat_is_a_sibling(
    renderer, tokenizer
):
    async def agent(sample, endpoint):
        async with client_of(endpoint) as ask:
            _, first = await ask([HELLO])
            _, again = await ask([HELLO], headers={"x-stainless-retry-count": "1"})
            _, sibling = await ask([HELLO])
            assert first == again and sibling["id"] != first["id"]
            both = await asyncio.gather(
                ask([HELLO], user="x"),
                *(
                    ask([HELLO], user="x", headers={"x-stainless-retry-count": "2"})
                    for _ in range(5)
                ),
            )
            assert len({reply["id"] for _, reply in both}) == 1

    rollout = await run_agent(agent, Policy(tokenizer, "ok"), renderer)
    assert rollout.calls == {"answered": 3, "retried": 6} and len(rollout.turns) == 3


async def test_a_client_that_goes_away_ends_its_request_and_a_call_at_the_end_is_not_trained(
    renderer, tokenizer, monkeypatch
):
    monkeypatch.setattr(agent_rollout, "KEEP_S", 0.05)
    ended, begun = [], asyncio.Event()

    async def hang(session, prompt_token_ids, *, max_tokens):
        begun.set()
        try:
            await asyncio.sleep(3600)
        finally:
            ended.append(True)

    async def agent(sample, endpoint):
        async with client_of(endpoint) as ask:
            await ask([HELLO])
            monkeypatch.setattr(ScriptedSession, "generate", hang)
            with pytest.raises(TimeoutError):
                await asyncio.wait_for(
                    ask([HELLO, {"role": "assistant", "content": "ok"}, HELLO]), 0.2
                )
            for _ in range(100):
                await asyncio.sleep(0.01)
                if ended:
                    break
            assert ended
            body = {"model": "policy", "messages": [HELLO, HELLO], "stream": True}
            async with ask.session.post(f"{endpoint.url}/chat/completions", json=body) as response:
                assert (
                    await response.content.readany() == b": keep-alive\n\n"
                )  # and the rest is not read
            branches = asyncio.create_task(ask([{"role": "user", "content": "left open"}]))
            await asyncio.sleep(0.05)
            branches.cancel()

    policy = Policy(tokenizer, "ok")
    rollout = await run_agent(agent, policy, renderer)
    assert rollout.status is RolloutStatus.COMPLETED
    assert (
        2 <= rollout.calls["aborted"] <= 3 and rollout.calls["answered"] == 1
    )  # the last may have had no time to begin
    assert all(session.closed == 1 for session in policy.sessions)


async def test_an_agent_none_of_whose_calls_was_answered_has_failed(renderer, tokenizer):
    async def agent(sample, endpoint):
        async with client_of(endpoint) as ask:
            assert (await ask([HELLO]))[0] == 500

    rollout = await run_agent(
        agent, Policy(tokenizer, lambda rollout_id, turn: RuntimeError("no engine")), renderer
    )
    assert (
        rollout.status is RolloutStatus.ERROR
        and "none of its calls" in rollout.error
        and rollout.calls == {"lost": 1}
    )


async def test_an_agent_whose_only_completion_was_aborted_has_failed(renderer, tokenizer):
    class Aborting(Policy):
        def session(self, **options):
            session = super().session(**options)
            generate = session.generate

            async def aborted(*arguments, **options):
                return replace(await generate(*arguments, **options), finish_reason="abort")

            session.generate = aborted
            return session

    async def agent(sample, endpoint):
        async with client_of(endpoint) as ask:
            assert (await ask([HELLO]))[0] == 500

    rollout = await run_agent(agent, Aborting(tokenizer, "ok"), renderer)
    assert rollout.status is RolloutStatus.ERROR and "none of its calls" in rollout.error
    assert [turn.untrained for turn in rollout.turns] == ["lost"] and not rollout.samples


async def test_what_was_not_delivered_is_not_trained(renderer, tokenizer, monkeypatch):
    monkeypatch.setattr(server, "_is_open", lambda request: False)

    async def agent(sample, endpoint):
        async with client_of(endpoint) as ask:
            await ask([HELLO])

    rollout = await run_agent(agent, Policy(tokenizer, "ok"), renderer)
    assert (
        rollout.calls == {"undelivered": 1}
        and rollout.turns[0].untrained == "undelivered"
        and not rollout.samples
    )


async def test_a_delivery_that_is_noted_after_the_rollout_has_closed_trains_nothing(
    renderer, tokenizer, monkeypatch
):
    noted = []
    leave = agent_rollout.AgentRollout.leave
    monkeypatch.setattr(
        agent_rollout.AgentRollout,
        "leave",
        lambda *args, **options: noted.append((args, options)),
    )
    monkeypatch.setattr(agent_rollout, "CLOSE_S", 0.05)

    async def agent(sample, endpoint):
        async with client_of(endpoint) as ask:
            await ask([HELLO])

    rollout = await run_agent(agent, Policy(tokenizer, "ok"), renderer)
    ((args, options),) = noted
    leave(*args, **options)
    assert options["delivered"] and rollout.calls == {"undelivered": 1}
    assert rollout.turns[0].untrained == "undelivered" and not rollout.samples


async def test_a_rollout_waits_for_the_delivery_of_its_last_answer_and_no_longer(
    renderer, tokenizer, monkeypatch
):
    leave, left = agent_rollout.AgentRollout.leave, asyncio.Event()

    def leave_later(*args, **options):
        def leave_now():
            leave(*args, **options)
            left.set()

        asyncio.get_running_loop().call_later(0.1, leave_now)

    monkeypatch.setattr(agent_rollout.AgentRollout, "leave", leave_later)
    monkeypatch.setattr(agent_rollout, "CLOSE_S", 3600)

    async def agent(sample, endpoint):
        async with client_of(endpoint) as ask:
            await ask([HELLO])

    async with asyncio.timeout(60):
        rollout = await run_agent(agent, Policy(tokenizer, "ok"), renderer)
    assert left.is_set() and rollout.calls == {"answered": 1} and rollout.samples


async def test_a_corrected_request_goes_on_from_the_turn_that_a_refused_one_named(
    renderer, tokenizer
):
    async def agent(sample, endpoint):
        async with client_of(endpoint) as ask:
            _, reply = await ask([HELLO])
            history = [HELLO, reply["choices"][0]["message"]]
            for text, expected in (("word " * 200, 400), ("word", 200)):
                status, _ = await ask([*history, {"role": "user", "content": text}])
                assert status == expected

    rollout = await run_agent(agent, Policy(tokenizer, "ok"), renderer, tokens=128)
    assert [turn.call["chain"] for turn in rollout.turns] == [0, 0], rollout.error
    assert len(rollout.samples) == 1


@pytest.mark.parametrize(
    ("answer", "kept", "error"),
    [
        (10**5000, "<int of 16610 bits>", None),
        ([[]] * 2, [[], []], None),
        ("itself", None, "returned a value that contains itself, or is nested too deep"),
        ("deep", None, "returned a value that contains itself, or is nested too deep"),
    ],
    ids=["an int of 5,001 digits", "the same list twice", "a list of itself", "lists too deep"],
)
async def test_an_answer_that_no_record_holds_ends_its_rollout_alone(
    renderer, tokenizer, answer, kept, error
):
    async def agent(sample, endpoint):
        async with client_of(endpoint) as ask:
            await ask([HELLO])
        value: list = []
        if answer == "itself":
            value.append(value)
        elif answer == "deep":
            for _ in range(sys.getrecursionlimit() + 100):  # an import may have raised it
                value = [value]
        else:
            value = answer
        return value

    rollout = await run_agent(agent, Policy(tokenizer, "ok"), renderer)
    assert rollout.answer == kept
    assert rollout.error is None if error is None else error in rollout.error


async def test_a_key_opens_one_rollout_while_it_runs(renderer, tokenizer):
    seen = []

    async def agent(sample, endpoint):
        seen.append(endpoint)
        async with client_of(endpoint) as ask:
            if len(seen) == 2:
                async with client_of(replace(endpoint, key=seen[0].key)) as late:
                    status, reply = await late([HELLO])
                    assert status == 401 and "ended" in reply["error"]["message"]
            await ask([HELLO])

    for _ in range(2):
        rollout = await run_agent(agent, Policy(tokenizer, "ok"), renderer)
        assert rollout.calls == {"answered": 1}, rollout.error
    assert seen[0].key != seen[1].key


BAD = [
    ("chat/completions", {"n": 2}, "n"),
    ("chat/completions", {"logit_bias": {"5": 1}}, "logit_bias"),
    ("chat/completions", {"frequency_penalty": 0.5}, "frequency_penalty"),
    ("chat/completions", {"response_format": {"type": "grammar"}}, "response_format"),
    ("chat/completions", {"tool_choice": "required"}, "tool_choice"),
    ("chat/completions", {"messages": []}, "messages"),
    (
        "chat/completions",
        {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]},
        "messages[0].content",
    ),
    ("chat/completions", {"messages": [{"role": "robot", "content": "x"}]}, "messages"),
    ("chat/completions", {"messages": "hello"}, "messages"),
    ("chat/completions", {"model": None}, "model"),
    ("chat/completions", {"max_tokens": -1}, "max_tokens"),
    ("chat/completions", {"max_completion_tokens": 0, "max_tokens": 5}, "max_tokens"),
    ("chat/completions", {"stop": [1]}, "stop"),
    ("chat/completions", {"model": "\ud800"}, "model"),
    ("responses", {"previous_response_id": "resp_1", "input": "x"}, "previous_response_id"),
    ("responses", {"text": {"format": {"type": "grammar"}}, "input": "x"}, "text"),
    ("responses", {"input": [{"type": "image_generation_call"}]}, "input[0]"),
    ("responses", {"conversation": "conv_1", "input": "x"}, "conversation"),
    ("responses", {"prompt": {"id": "pmpt_1"}}, "prompt"),
    ("responses", {"input": [{"type": "item_reference", "id": "msg_1"}]}, "input[0]"),
    ("chat/completions", {"documents": [{"text": "a fact"}]}, "documents"),
    ("chat/completions", {"web_search_options": {}}, "web_search_options"),
    ("chat/completions", {"modalities": ["text", "audio"]}, "modalities"),
    ("chat/completions", {"audio": {"voice": "alloy", "format": "wav"}}, "audio"),
    ("chat/completions", {"tools": [ADD] * 1025}, "tools"),
    ("messages", {"thread": {"type": "create"}}, "thread"),
    ("messages", {"container": "container_1"}, "container"),
    ("messages", {"compaction": {"type": "auto"}}, "compaction"),
    ("messages", {"mcp_servers": [{"type": "url", "url": "http://x"}]}, "mcp_servers"),
    ("messages", {"tool_choice": {"type": "tool", "name": "add"}}, "tool_choice"),
    ("messages", {"messages": [HELLO, {"role": "assistant", "content": "I"}]}, "messages"),
    (
        "messages",
        {"messages": [{"role": "user", "content": [{"type": "image"}]}]},
        "messages[0].content[0]",
    ),
]


NO_JSON = [b"{", b"[]", b'{"model": ' + b"[" * 100_000, b"\xff", b""]


async def test_what_can_not_be_served_is_refused_by_its_field(renderer, tokenizer):
    async def agent(sample, endpoint):
        async with client_of(endpoint) as ask:
            for path, fields, field in BAD:
                body = {"model": "policy", "messages": [HELLO], "max_tokens": 5, **fields}
                status, reply = await ask.raw(path, body)
                error = reply["error"]
                assert status == 400 and field.partition("[")[0] in error["message"], (
                    path,
                    fields,
                    reply,
                )
                assert path == "messages" or error["param"] == field, (path, fields, reply)
            for raw in NO_JSON:
                status, reply = await ask.raw("chat/completions", raw)
                assert status == 400 and reply["error"]["code"] == "invalid_json"
            status, _ = await ask([HELLO])
            assert status == 200

    rollout = await run_agent(agent, Policy(tokenizer, "ok"), renderer)
    assert rollout.error is None, rollout.error
    assert rollout.calls["answered"] == 1
    assert rollout.calls["refused"] == len(BAD) + len(NO_JSON)


async def test_a_prompt_without_room_is_an_error_that_clients_compact_on(renderer, tokenizer):
    async def agent(sample, endpoint):
        async with client_of(endpoint) as ask:
            for text in ("word " * 200, "x" * 10_000_000):
                long = [{"role": "user", "content": text}]
                status, reply = await ask(long)
                assert status == 400 and reply["error"]["code"] == "context_length_exceeded"
                status, reply = await ask.raw(
                    "messages", {"model": "m", "max_tokens": 9, "messages": long}
                )
                assert status == 400 and reply["error"]["message"].startswith(
                    "prompt is too long: "
                )
            if sample.env_input["input"] == "compacts":
                await ask([HELLO])

    for behaviour, status in (
        ("gives up", RolloutStatus.TRUNCATED_PROMPT_OVERFLOW),
        ("compacts", RolloutStatus.COMPLETED),
    ):
        rollout = await run_agent(
            agent, Policy(tokenizer, "ok"), renderer, tokens=128, rows=[{"input": behaviour}]
        )
        assert rollout.status is status, rollout.error


async def test_budgets_end_in_a_truncation_and_not_in_an_error(renderer, tokenizer):
    async def agent(sample, endpoint):
        async with client_of(endpoint) as ask:
            while True:
                status, reply = await ask([HELLO])
                if status != 200:
                    raise RuntimeError(reply["error"]["message"])

    for limits in ({"calls": 3}, {"max_sampled_tokens": 7}):
        rollout = await run_agent(agent, Policy(tokenizer, "ok"), renderer, **limits)
        assert rollout.status is RolloutStatus.TRUNCATED_MAX_TURNS and len(rollout.turns) == 3


async def test_models_are_the_policy_auxiliary_or_frozen(renderer, tokenizer):
    async def agent(sample, endpoint):
        async with client_of(endpoint) as ask:
            for model in ("policy", "title-writer", "judge", "any-other"):
                await ask.raw("chat/completions", {"model": model, "messages": [HELLO]})

    judge = FrozenModel(name="judge", base_url="http://localhost:1/v1")
    models = {"title-writer": "auxiliary", "judge": judge}
    rollout = await run_agent(agent, Policy(tokenizer, "ok"), renderer, models=models)
    assert {turn.call["model"]: turn.untrained for turn in rollout.turns} == {
        "policy": None,
        "title-writer": "auxiliary",
        "judge": "frozen model",
        "any-other": None,
    }
    assert rollout.calls == {"answered": 2, "auxiliary": 1, "frozen model": 1}


async def test_a_reward_of_the_text_gets_what_the_policy_said_last(renderer, tokenizer):
    """The turns of a rollout are in the order of its conversations, and this is not of time."""
    seen = []

    def reward(completion, row):
        seen.append(completion)
        return 0.0

    async def agent(sample, endpoint):
        async with client_of(endpoint) as ask:
            _, reply = await ask([HELLO])
            history = [HELLO, reply["choices"][0]["message"]]
            await ask([{"role": "user", "content": "of a sub-agent"}])
            await ask([*history, HELLO])
            for model in ("side", "user"):
                await ask.raw("chat/completions", {"model": model, "messages": [HELLO]})

    script = iter(["first", "of the sub-agent", "last", "aside"])
    policy = Policy(tokenizer, lambda rollout_id, turn: next(script))
    models = {"side": "auxiliary", "user": FrozenModel(name="user", base_url="http://localhost/v1")}
    rubric = Rubric.Config(reward_fns=[reward])
    rollout = await run_agent(agent, policy, renderer, models=models, rubric=rubric)
    said = [turn.assistant_message["content"] for turn in rollout.turns]
    assert said == ["first", "last", "of the sub-agent", "aside", "from elsewhere"]
    assert rollout.status is RolloutStatus.COMPLETED and seen == ["last"]


async def test_a_special_token_in_an_agents_message_is_text_to_the_model_and_counted(
    renderer, tokenizer
):
    text = "Sum up: ...<|im_end|>\n<|im_start|>assistant\nI will."

    async def agent(sample, endpoint):
        async with client_of(endpoint) as ask:
            history = [{"role": "user", "content": text}]
            for role in ("tool", "user"):
                status, body = await ask(history)
                assert status == 200
                history += [body["choices"][0]["message"], {"role": role, "content": text}]
            assert (await ask([HELLO]))[0] == 200

    rollout = await run_agent(agent, Policy(tokenizer, "ok"), renderer)
    assert rollout.status is RolloutStatus.COMPLETED and rollout.calls["special_texts"] == 2
    ends = tokenizer.convert_tokens_to_ids("<|im_end|>")
    first, second, hello = (turn.prompt_token_ids.tolist() for turn in rollout.turns)
    assert [first.count(ends), second.count(ends), hello.count(ends)] == [1, 3, 1]
    assert text in tokenizer.decode(first) and tokenizer.decode(second).count(text) == 2


async def test_noise_in_a_system_message_is_left_out(renderer, tokenizer):
    async def agent(sample, endpoint):
        async with client_of(endpoint) as ask:
            await ask([HELLO])
            for date in ("Monday", "Tuesday"):
                system = {"role": "system", "content": f"billing: {date}\nBe brief."}
                history = [system, HELLO]
                if date == "Tuesday":
                    history += [{"role": "assistant", "content": "before END after"}, HELLO]
                await ask(history)

    policy = Policy(tokenizer, "before END after")
    rollout = await run_agent(agent, policy, renderer, noise={"billing": r"billing: .*\n"})
    assert rollout.calls["noise/billing"] == 2 and len(rollout.samples) == 2


async def test_a_question_for_the_number_of_tokens_counts_no_noise(renderer, tokenizer):
    """No model is asked, so nothing is left out of a prompt."""

    async def agent(sample, endpoint):
        system = "billing: Monday\nBe brief."
        fields = {"model": "policy", "system": system, "messages": [HELLO]}
        async with client_of(endpoint) as ask:
            status, reply = await ask.raw("messages/count_tokens", fields)
            assert status == 200
            status, answer = await ask.raw("messages", {"max_tokens": 8, **fields})
            assert status == 200 and answer["usage"]["input_tokens"] == reply["input_tokens"]

    noise = {"billing": r"billing: .*\n"}
    rollout = await run_agent(agent, Policy(tokenizer, "ok"), renderer, noise=noise)
    assert rollout.status is RolloutStatus.COMPLETED, rollout.error
    assert rollout.calls["noise/billing"] == 1


async def test_a_stream_lives_while_its_turn_is_sampled(renderer, tokenizer, monkeypatch):
    monkeypatch.setattr(server, "KEEP_ALIVE_S", 0.02)

    async def slow(prompt_token_ids, *, max_tokens):
        await asyncio.sleep(0.1)
        return await original(prompt_token_ids, max_tokens=max_tokens)

    async def agent(sample, endpoint):
        nonlocal original
        original, policy.sessions[0].generate = policy.sessions[0].generate, slow
        async with client_of(endpoint) as ask:
            body = {
                "model": "policy",
                "messages": [HELLO],
                "stream": True,
                "stream_options": {"include_usage": True},
            }
            async with ask.session.post(f"{endpoint.url}/chat/completions", json=body) as response:
                text = (await response.read()).decode()
            assert (
                text.startswith(": keep-alive")
                and text.endswith("data: [DONE]\n\n")
                and '"total_tokens"' in text
            )

    original, policy = None, Policy(tokenizer, "ok")
    rollout = await run_agent(agent, policy, renderer)
    assert rollout.calls == {"answered": 1}, rollout.error


VALUES = [
    None,
    True,
    -1,
    2**70,
    1.5,
    "",
    "x",
    "\ud800",
    [],
    [None],
    [[]],
    {},
    {"type": []},
    [{"type": "text"}],
    [{"role": {}}],
]
VALUES += [
    [{"role": "assistant", "tool_calls": [{}]}],
    [{"role": "tool", "content": "x", "tool_call_id": [1]}],
]
SPOILT = {
    "chat/completions": {
        "messages": [
            HELLO,
            {
                "role": "assistant",
                "content": "x",
                "tool_calls": [{"id": "c", "function": {"name": "add", "arguments": "{}"}}],
            },
            {"role": "tool", "tool_call_id": "c", "content": "3"},
        ],
        "tools": [ADD],
        "stop": ["a"],
    },
    "responses": {
        "input": [
            HELLO,
            {
                "type": "reasoning",
                "content": [{"type": "reasoning_text", "text": "r"}],
                "summary": [],
            },
            {"type": "function_call", "name": "add", "arguments": "{}", "call_id": "c"},
            {"type": "function_call_output", "call_id": "c", "output": "3"},
        ],
        "tools": [{"type": "function", **ADD["function"]}],
    },
    "messages": {
        "messages": [
            HELLO,
            {
                "role": "assistant",
                "content": [{"type": "tool_use", "id": "c", "name": "add", "input": {}}],
            },
            {
                "role": "user",
                "content": [{"type": "tool_result", "tool_use_id": "c", "content": "3"}],
            },
        ],
        "tools": [{"name": "add", "input_schema": {}}],
        "tool_choice": {"type": "auto"},
    },
}


async def test_a_spoilt_request_is_answered_or_refused_and_never_fails_the_server(
    renderer, tokenizer
):
    draw = random.Random(0)

    def places(value):
        for key in (
            list(value)
            if isinstance(value, dict)
            else range(len(value))
            if isinstance(value, list)
            else ()
        ):
            yield value, key
            yield from places(value[key])

    async def agent(sample, endpoint):
        async with client_of(endpoint) as ask:
            for number in range(400):
                path = draw.choice(list(SPOILT))
                body = json.loads(
                    json.dumps(
                        {
                            "model": "policy",
                            "max_tokens": 9,
                            "stream": number % 3 == 0,
                            **SPOILT[path],
                        }
                    )
                )
                inside, key = draw.choice(list(places(body)))
                inside[key] = draw.choice(VALUES)
                async with ask.session.post(f"{endpoint.url}/{path}", json=body) as response:
                    said = await response.text()
                    assert response.status in (200, 400), (path, body, said)
                    assert response.status == 200 or json.loads(said)["error"]["message"]
            assert (await ask.raw("chat", b"{}"))[1]["error"]["code"] == "not_found"

    rollout = await run_agent(agent, Policy(tokenizer, "ok"), renderer, calls=1_000)
    assert (
        not {"lost", "aborted", "undelivered"} & set(rollout.calls)
        and rollout.calls["answered"] == len(rollout.turns) > 50
    )


async def test_what_was_sampled_is_in_the_record_where_parsing_it_fails(renderer, tokenizer):
    class Fails:
        def __getattr__(self, name):
            return getattr(renderer, name)

        def parse_response(self, ids, **options):
            if len(ids) > 5:
                raise ValueError("no such form")
            return renderer.parse_response(ids, **options)

    async def agent(sample, endpoint):
        async with client_of(endpoint) as ask:
            assert (await ask([HELLO]))[0] == 200
            status, reply = await ask([HELLO, {"role": "assistant", "content": "ok"}, HELLO])
            assert status == 500 and "no such form" in reply["error"]["message"]

    policy = Policy(tokenizer, lambda rollout_id, turn: ["ok", "a longer answer than that"][turn])
    rollout = await run_agent(agent, policy, Fails())
    assert rollout.calls == {"answered": 1, "lost": 1} and [
        turn.untrained for turn in rollout.turns
    ] == [None, "lost"]


CALLED = {"id": "c", "type": "function", "function": {"name": "add", "arguments": '{"a": 1}'}}
REPLIES = [
    {"content": "3", "finish": "stop"},
    {"content": "before ", "finish": "stop", "stopped_at": "END"},
    {"content": "", "reasoning": "well", "finish": "length"},
    {
        "content": "I call é.",
        "reasoning": "well",
        "finish": "tool_calls",
        "tool_calls": [CALLED, {**CALLED, "id": "d"}],
    },
]


@pytest.mark.parametrize("fields", REPLIES)
def test_replies_and_the_events_of_streams_are_what_the_clients_own_types_hold(fields):
    whole = {"reasoning": "", "tool_calls": [], "stopped_at": None, **fields}
    answer = ModelReply(
        id="1", created=5, model="policy", prompt_tokens=3, completion_tokens=4, **whole
    )
    request = ModelRequest(messages=[HELLO], tools=None, model="policy", stream_usage=True)
    for dialect, kind, events in (
        (chat, ChatCompletion, ChatCompletionChunk),
        (responses, Response, ResponseStreamEvent),
        (messages, Message, RawMessageStreamEvent),
    ):
        said = (
            TypeAdapter(kind)
            .validate_python(dialect.reply(answer))
            .model_dump_json(exclude_unset=True)
        )
        assert json.loads(said) == dialect.reply(answer)
        for event in dialect.stream(answer, request):
            head, _, data = event.decode().strip().rpartition("data: ")
            if data != "[DONE]":
                held = TypeAdapter(events).validate_json(data)
                assert json.loads(held.model_dump_json(exclude_unset=True)) == json.loads(data)
                assert head == ("" if dialect is chat else f"event: {json.loads(data)['type']}\n")
