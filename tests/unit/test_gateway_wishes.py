"""Fields that ask for what only a grammar would give: the policy answers as it does, and the rollout counts them."""

import numpy as np
import pytest

from tests.fakes.policy import ScriptedPolicy
from tests.unit.agents import ADD, CALL, client_of, config_of, run_agent, run_task
from tests.unit.renderer_families import SETTINGS, family_renderer, family_tokenizer
from torchtitan.experiments.rl.errors import ConfigError
from torchtitan.experiments.rl.rollouts.types import RolloutStatus
from torchtitan.experiments.rl.tasks import AgentTask

ASK = {"role": "user", "content": "What is 1 + 2?"}
SCHEMA = {"type": "object", "properties": {"sum": {"type": "integer"}}}
JSON_SCHEMA = {
    "type": "json_schema",
    "json_schema": {"name": "Sum", "schema": SCHEMA, "strict": True},
}
JSON_OBJECT = {"type": "json_object"}
NAMED = {"type": "function", "function": {"name": "add"}}
TOOL = {"chat/completions": ADD}
TOOL["responses"] = {"type": "function", **ADD["function"]}
TOOL["messages"] = {"name": "add", "input_schema": ADD["function"]["parameters"]}
BODIES = {
    "chat/completions": {"messages": [ASK]},
    "responses": {"input": [ASK]},
    "messages": {"messages": [ASK], "max_tokens": 99},
}
TEXT, OBJECT, TWO_CALLS = "the sum is 3", '{"sum": 3}', f"{CALL}\n{CALL}"
FORCED = [
    ("chat/completions", {"tool_choice": "required"}, "tool_choice"),
    ("chat/completions", {"tool_choice": NAMED}, "tool_choice"),
    ("responses", {"tool_choice": "required"}, "tool_choice"),
    ("responses", {"tool_choice": {"type": "function", "name": "add"}}, "tool_choice"),
    ("messages", {"tool_choice": {"type": "any"}}, "tool_choice"),
    ("messages", {"tool_choice": {"type": "tool", "name": "add"}}, "tool_choice"),
]
FORMED = [
    ("chat/completions", {"response_format": JSON_SCHEMA}, "response_format"),
    ("chat/completions", {"response_format": JSON_OBJECT}, "response_format"),
    (
        "responses",
        {"text": {"format": {"type": "json_schema", "name": "Sum", "schema": SCHEMA}}},
        "text",
    ),
    (
        "messages",
        {"output_config": {"format": {"type": "json_schema", "schema": SCHEMA}}},
        "output_config",
    ),
    ("messages", {"output_format": {"type": "json_schema", "schema": SCHEMA}}, "output_format"),
]
ONE_CALL = [
    ("chat/completions", {"parallel_tool_calls": False}, "parallel_tool_calls"),
    ("responses", {"parallel_tool_calls": False}, "parallel_tool_calls"),
    (
        "messages",
        {"tool_choice": {"type": "auto", "disable_parallel_tool_use": True}},
        "parallel_tool_calls",
    ),
]
OTHERS = [
    ("chat/completions", {"temperature": 0.2}, "temperature"),
    ("chat/completions", {"reasoning_effort": "high"}, "reasoning_effort"),
    ("chat/completions", {"verbosity": "low"}, "verbosity"),
    ("responses", {"reasoning": {"effort": "low", "summary": "auto"}}, "reasoning"),
    ("responses", {"text": {"verbosity": "low"}}, "verbosity"),
    ("messages", {"thinking": {"type": "enabled", "budget_tokens": 1024}}, "thinking"),
    ("messages", {"output_config": {"effort": "high"}}, "effort"),
]
CASES = [(*wish, said, bad) for wish in FORCED for said, bad in ((CALL, False), (TEXT, True))]
CASES += [
    (*wish, said, bad)
    for wish in FORMED
    for said, bad in ((OBJECT, False), (TEXT, True), ("[3]", True))
]
CASES += [
    (*wish, said, bad)
    for wish in ONE_CALL
    for said, bad in ((CALL, False), (TEXT, False), (TWO_CALLS, True))
]
CASES += [(*wish, TEXT, False) for wish in OTHERS]


async def calls_of(path, fields, said, renderer, tokenizer, **options):
    """Return the rollout of one call with tools, and its answer."""
    replies = []

    async def agent(sample, endpoint):
        async with client_of(endpoint) as ask:
            replies.append(
                await ask.raw(
                    path, {"model": "policy", "tools": [TOOL[path]], **BODIES[path], **fields}
                )
            )

    rollout = await run_agent(agent, ScriptedPolicy(tokenizer, said), renderer, **options)
    return rollout, replies[0]


@pytest.mark.parametrize(("path", "fields", "name", "said", "is_unmet"), CASES)
async def test_a_form_is_a_wish_that_is_counted_and_the_text_is_the_policys(
    path, fields, name, said, is_unmet, renderer, tokenizer
):
    rollout, (status, reply) = await calls_of(path, fields, said, renderer, tokenizer)
    assert status == 200, reply
    unmet = {f"unmet/{name}": 1} if is_unmet else {}
    assert rollout.calls == {"answered": 1, f"wish/{name}": 1, **unmet}
    (turn,) = rollout.turns
    assert turn.tools == [ADD] or path == "messages"
    assert (
        tokenizer.decode(rollout.samples[0].token_ids[rollout.samples[0].loss_mask])
        == f"{said}<|im_end|>"
    )


async def test_a_wish_does_not_part_a_conversation(renderer, tokenizer):
    async def agent(sample, endpoint):
        async with client_of(endpoint) as ask:
            _, reply = await ask(
                [ASK], tools=[ADD], tool_choice="required", parallel_tool_calls=False
            )
            said = reply["choices"][0]["message"]
            result = {"role": "tool", "tool_call_id": said["tool_calls"][0]["id"], "content": "3"}
            status, reply = await ask([ASK, said, result], tools=[ADD], response_format=JSON_SCHEMA)
            assert status == 200, reply

    policy = ScriptedPolicy(tokenizer, lambda rollout_id, turn: [CALL, OBJECT][turn])
    rollout = await run_agent(agent, policy, renderer)
    assert len(rollout.turns) == 2 and len(rollout.samples) == 1


SAME = {
    "tool_choice": "auto",
    "response_format": {"type": "text"},
    "parallel_tool_calls": True,
    "temperature": 1,
}


async def test_what_the_rollout_does_anyway_is_no_wish(renderer, tokenizer):
    rollout, (status, _) = await calls_of("chat/completions", SAME, TEXT, renderer, tokenizer)
    assert status == 200 and rollout.calls == {"answered": 1}


REFUSED = [
    ({"tool_choice": {"type": "function", "function": {"name": "subtract"}}}, "tool_choice"),
    ({"tool_choice": "required", "tools": []}, "tool_choice"),
    (
        {
            "tool_choice": {
                "type": "allowed_tools",
                "allowed_tools": {"mode": "auto", "tools": [NAMED]},
            }
        },
        "tool_choice",
    ),
    ({"tool_choice": {"type": "function"}}, "tool_choice"),
    ({"tool_choice": 3}, "tool_choice"),
    ({"response_format": {"type": "structural_tag"}}, "response_format"),
    ({"response_format": "json_object"}, "response_format"),
]


@pytest.mark.parametrize(("fields", "name"), REFUSED)
async def test_a_wish_for_what_is_not_there_is_refused(fields, name, renderer, tokenizer):
    rollout, (status, reply) = await calls_of("chat/completions", fields, TEXT, renderer, tokenizer)
    assert status == 400 and reply["error"]["param"] == name, reply
    assert rollout.calls == {"refused": 1}


@pytest.mark.parametrize(("path", "fields", "name"), [FORCED[0], FORMED[0], ONE_CALL[0], OTHERS[0]])
async def test_a_task_may_refuse_wishes_by_field(path, fields, name, renderer, tokenizer):
    rollout, (status, reply) = await calls_of(
        path, fields, TEXT, renderer, tokenizer, refused_fields=[name]
    )
    assert status == 400 and reply["error"]["param"] == name and rollout.calls == {"refused": 1}, (
        reply
    )
    rollout, (status, _) = await calls_of(
        path, SAME, TEXT, renderer, tokenizer, refused_fields=[name]
    )
    assert status == 200


def test_a_field_that_is_no_wish_is_refused_before_a_run():
    class Agent(AgentTask):
        async def run_agent(self, sample, endpoint): ...

    with pytest.raises(ConfigError, match="want some of tool_choice, response_format"):
        config_of(Agent, group_size=2, refused_fields=["n"]).validate(field="tasks.mine")


async def test_the_metrics_have_the_wishes(renderer, tokenizer):
    class Agent(AgentTask):
        async def run_agent(self, sample, endpoint):
            async with client_of(endpoint) as ask:
                await ask([ASK], response_format=JSON_OBJECT)

    group = await run_task(
        config_of(Agent, group_size=2), ScriptedPolicy(tokenizer, TEXT), renderer
    )
    assert (
        group.costs["agent/agent/wish/response_format"]
        == group.costs["agent/agent/unmet/response_format"]
        == 2
    )


@pytest.mark.parametrize("family", SETTINGS)
async def test_a_history_that_ends_with_the_assistant_is_answered_by_another_message(
    family, tmp_path_factory
):
    """LangGraph's agents ask so for a structured answer, once they have the answer in words."""

    async def agent(sample, endpoint):
        async with client_of(endpoint) as ask:
            _, reply = await ask([ASK])
            history = [ASK, reply["choices"][0]["message"]]
            status, reply = await ask(history, response_format=JSON_SCHEMA)
            assert status == 200, reply
            history += [reply["choices"][0]["message"], {"role": "user", "content": "and again?"}]
            assert (await ask(history))[0] == 200
            written_by_the_client = [ASK, {"role": "assistant", "content": "3"}]
            status, reply = await ask.raw(
                "responses", {"model": "policy", "input": written_by_the_client}
            )
            assert status == 200, reply

    renderer = family_renderer(family, tmp_path_factory.getbasetemp())
    tokenizer = family_tokenizer(SETTINGS[family]["name"])
    policy = ScriptedPolicy(tokenizer, lambda rollout_id, turn: [TEXT, OBJECT, TEXT][turn])
    rollout = await run_agent(agent, policy, renderer)
    assert rollout.status is RolloutStatus.COMPLETED, rollout.error
    second = next(turn for turn in rollout.turns if turn.call["depth"] == 1)
    again = renderer.render(
        second.prompt_messages, tools=None, add_generation_prompt=True
    ).token_ids
    first = rollout.turns[0]
    sampled = np.concatenate([first.prompt_token_ids, first.completion.token_ids])
    prompt = second.prompt_token_ids
    assert np.array_equal(prompt, again) or np.array_equal(prompt[: len(sampled)], sampled)


async def test_calls_without_results_and_anthropics_prefill_are_refused_in_words(
    renderer, tokenizer
):
    async def agent(sample, endpoint):
        async with client_of(endpoint) as ask:
            call = {"id": "c", "type": "function", "function": {"name": "add", "arguments": "{}"}}
            status, reply = await ask(
                [ASK, {"role": "assistant", "content": "", "tool_calls": [call]}]
            )
            assert status == 400 and "the result of each" in reply["error"]["message"]
            prefill = {"role": "assistant", "content": "It is"}
            status, reply = await ask.raw(
                "messages", {"model": "policy", "max_tokens": 9, "messages": [ASK, prefill]}
            )
            assert status == 400 and "messages end with the assistant" in reply["error"]["message"]

    rollout = await run_agent(agent, ScriptedPolicy(tokenizer, TEXT), renderer)
    assert rollout.calls == {"refused": 2}
