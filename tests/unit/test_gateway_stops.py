"""Stop texts of a client: the model ends there, and what is trained is what the client was shown, and the stop text."""

import numpy as np
import pytest

from tests.fakes.policy import ScriptedPolicy, ScriptedSession
from tests.unit.agents import client_of, run_agent
from tests.unit.renderer_families import SETTINGS, family_renderer, family_tokenizer
from torchtitan.experiments.rl.gateway.request import cut_at_stop
from torchtitan.experiments.rl.generation.client import GeneratorSession
from torchtitan.experiments.rl.rollouts.policy import SamplingConfig
from torchtitan.experiments.rl.rollouts.types import RolloutStatus

TASK = {"role": "user", "content": "What is 6 times 7?"}
STOP = "Observation:"
THOUGHT = "Thought: I count. Action: calc "
MADE_UP = " 41. Thought: so it is. Final Answer: 41"
TURNS = 4


def says(rollout_id, turn):
    return f"{THOUGHT}{STOP}{MADE_UP}"


def react(*, puts_back=""):
    """A ReAct agent of four turns. Some clients put the stop text back behind what they got."""

    async def agent(sample, endpoint):
        messages = [TASK]
        async with client_of(endpoint) as ask:
            for turn in range(TURNS):
                status, reply = await ask(messages, stop=[STOP, "never said"])
                assert status == 200, reply
                choice = reply["choices"][0]
                assert choice["message"]["content"] == THOUGHT and choice["finish_reason"] == "stop"
                said = choice["message"] | {"content": THOUGHT + puts_back}
                messages += [said, {"role": "user", "content": f"{STOP} {turn}"}]

    return agent


@pytest.mark.parametrize("puts_back", ["", STOP])
@pytest.mark.parametrize("family", ["qwen3, no thinking", "llama-3", "default"])
async def test_an_agent_that_stops_at_a_text_gives_one_sample_of_what_it_was_shown(
    family, puts_back, tmp_path_factory
):
    renderer = family_renderer(family, tmp_path_factory.getbasetemp())
    tokenizer = family_tokenizer(SETTINGS[family]["name"])
    rollout = await run_agent(react(puts_back=puts_back), ScriptedPolicy(tokenizer, says), renderer)
    assert rollout.status is RolloutStatus.COMPLETED, rollout.error
    assert len(rollout.turns) == TURNS and len(rollout.samples) == 1
    (sample,) = rollout.samples
    trained = tokenizer.decode(sample.token_ids[sample.loss_mask])
    assert trained == (THOUGHT + STOP) * TURNS
    assert rollout.completion_tokens == np.count_nonzero(sample.loss_mask)


async def test_anthropics_clients_are_told_at_which_text_it_stopped_and_what_was_sampled(
    renderer, tokenizer
):
    async def agent(sample, endpoint):
        async with client_of(endpoint) as ask:
            body = {
                "model": "policy",
                "messages": [TASK],
                "max_tokens": 99,
                "stop_sequences": [STOP],
            }
            status, reply = await ask.raw("messages", body)
            assert status == 200, reply
            assert reply["content"] == [{"type": "text", "text": THOUGHT}]
            assert (reply["stop_reason"], reply["stop_sequence"]) == ("stop_sequence", STOP)
            kept = tokenizer.encode(THOUGHT + STOP, add_special_tokens=False)
            assert reply["usage"]["output_tokens"] == len(kept)

    rollout = await run_agent(agent, ScriptedPolicy(tokenizer, says), renderer)
    assert rollout.status is RolloutStatus.COMPLETED, rollout.error


async def test_stop_texts_of_responses_end_the_answer_too(renderer, tokenizer):
    async def agent(sample, endpoint):
        async with client_of(endpoint) as ask:
            status, reply = await ask.raw(
                "responses", {"model": "policy", "input": [TASK], "stop": STOP}
            )
            assert status == 200 and reply["output"][0]["content"][0]["text"] == THOUGHT, reply

    rollout = await run_agent(agent, ScriptedPolicy(tokenizer, says), renderer)
    assert rollout.status is RolloutStatus.COMPLETED, rollout.error


async def test_a_call_of_a_tool_before_the_stop_text_is_delivered(renderer, tokenizer):
    call = '<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>'

    async def agent(sample, endpoint):
        async with client_of(endpoint) as ask:
            tool = {
                "type": "function",
                "function": {"name": "add", "parameters": {"type": "object"}},
            }
            _, reply = await ask([TASK], tools=[tool], stop=["</tool_call>"])
            choice = reply["choices"][0]
            assert (
                choice["finish_reason"] == "tool_calls"
                and len(choice["message"]["tool_calls"]) == 1
            )

    rollout = await run_agent(agent, ScriptedPolicy(tokenizer, call), renderer)
    assert rollout.status is RolloutStatus.COMPLETED, rollout.error


async def test_an_engine_that_does_not_look_for_texts_refuses_the_field_by_name(
    renderer, tokenizer, monkeypatch
):
    monkeypatch.setattr(ScriptedSession, "stops_at_texts", False)

    async def agent(sample, endpoint):
        async with client_of(endpoint) as ask:
            status, reply = await ask([TASK], stop=[STOP])
            assert status == 400 and reply["error"]["param"] == "stop", reply
            assert "does not look for texts" in reply["error"]["message"]
            body = {
                "model": "policy",
                "messages": [TASK],
                "max_tokens": 9,
                "stop_sequences": [STOP],
            }
            status, reply = await ask.raw("messages", body)
            assert status == 400 and "stop_sequences = " in reply["error"]["message"]
            assert (await ask([TASK], stop=[]))[0] == 200

    rollout = await run_agent(agent, ScriptedPolicy(tokenizer, "ok"), renderer)
    assert rollout.calls == {"answered": 1, "refused": 2}


class Sent(Exception):
    """The request that a session sends."""


class Client:
    lockstep = False
    stops_at_texts = True

    def next_id(self):
        return 1

    async def send(self, request, **options):
        raise Sent(request)


async def test_a_session_of_the_engine_sends_the_tasks_stop_texts_and_the_clients():
    sampling = SamplingConfig(stop=["END"], max_tokens=8)
    session = GeneratorSession(
        Client(), rollout_id="g/0", seed=1, sampling=sampling, stop_token_ids=[2]
    )
    for own, sent in (([STOP], ["END", STOP]), ((), ["END"])):
        with pytest.raises(Sent) as error:
            await session.generate(np.array([1], np.int32), max_tokens=4, stop=own)
        assert error.value.args[0].sampling.stop == sent
    assert sampling.stop == ["END"]


@pytest.mark.parametrize(
    ("content", "stops", "at_text", "seen"),
    [
        ("a Observation: b", ["b", "Observation:"], True, ("a ", "Observation:")),
        ("a", ["\n\n"], True, ("a", "\n\n")),  # the renderer has stripped it
        ("a\nObservation:", ["Observation:\n"], True, ("a\n", "Observation:\n")),
        ("a\nObservation:", ["Observation:\n"], False, ("a\nObservation:", None)),
        ("a", ["b"], True, ("a", None)),  # another text ended it, of the task's
    ],
)
def test_what_a_client_sees_ends_before_the_first_stop_text(content, stops, at_text, seen):
    assert cut_at_stop(content, stops, at_text=at_text) == seen
