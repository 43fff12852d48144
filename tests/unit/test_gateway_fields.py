"""Fields of a request that would change what is sampled: refused by name, in every spelling, unless they change nothing."""

import pytest

from tests.fakes.contexts import context_of
from tests.fakes.policy import ScriptedPolicy
from tests.unit.agents import client_of, config_of
from torchtitan.experiments.rl.tasks import AgentTask, SamplingConfig

ASK = {"role": "user", "content": "hello"}
REFUSED = {
    "top_p": [0.1, "x"],
    "top_k": [1, 20],
    "stop_token_ids": [[5], 5],
    "min_p": [0.1],
    "typical_p": [0.5],
    "repetition_penalty": [1.5],
    "length_penalty": [2],
    "min_tokens": [4],
    "ignore_eos": [True],
    "bad_words": [["no"]],
    "allowed_token_ids": [[1]],
    "logits_processors": [["x"]],
    "use_beam_search": [True],
    "best_of": [2],
    "include_stop_str_in_output": [True],
    "thinking_token_budget": [9],
    "structured_outputs": [{"json": {}}],
    "guided_json": [{"type": "object"}],
    "guided_regex": ["[0-9]+"],
    "guided_choice": [["yes", "no"]],
    "guided_grammar": ["root ::= x"],
    "structural_tag": ["{}"],
    "json_schema": ["{}"],
    "regex": ["[0-9]+"],
    "ebnf": ["root ::= x"],
    "prompt_logprobs": [0],
    "echo": [True],
    "chat_template": ["{{ messages }}"],
    "chat_template_kwargs": [{"enable_thinking": True}, {"no_such_setting": 1}, "x"],
    "add_generation_prompt": [False],
    "continue_final_message": [True],
    "truncate_prompt_tokens": [9],
}
NEUTRAL = {
    "top_p": 1.0,
    "top_k": -1,
    "stop_token_ids": [],
    "min_p": 0.0,
    "typical_p": 1.0,
    "repetition_penalty": 1.0,
    "length_penalty": 1.0,
    "min_tokens": 0,
    "ignore_eos": False,
    "bad_words": [],
    "logits_processors": [],
    "use_beam_search": False,
    "best_of": 1,
    "include_stop_str_in_output": False,
    "structured_outputs": {},
    "echo": False,
    "chat_template_kwargs": {},
    "add_generation_prompt": True,
    "continue_final_message": False,
}
BODIES = {
    "chat/completions": {"messages": [ASK]},
    "responses": {"input": [ASK]},
    "messages": {"messages": [ASK], "max_tokens": 9},
}


async def rollout_of(agent, renderer, tokenizer, **options):
    class Agent(AgentTask):
        async def run_agent(self, sample, endpoint):
            async with client_of(endpoint) as ask:
                await agent(ask)

    policy = ScriptedPolicy(tokenizer, "ok")
    task = config_of(Agent, calls=1_000).build(name="agent", context=context_of(renderer))
    await task.setup(policy)
    try:
        group = await task.run_group(task.dataset[0], policy, group_id="g", seed=0, **options)
    finally:
        await task.close()
    (rollout,) = group.rollouts
    assert rollout.error is None, rollout.error
    return rollout


@pytest.mark.parametrize("path", BODIES)
async def test_what_would_change_the_distribution_is_refused_by_its_field(
    path, renderer, tokenizer
):
    async def agent(ask):
        for name, values in REFUSED.items():
            for value in values:
                status, reply = await ask.raw(
                    path, {"model": "policy", **BODIES[path], name: value}
                )
                message = reply["error"]["message"]
                assert status == 400 and message.startswith(f"{name} = ") and "; " in message, (
                    name,
                    reply,
                )
        everything = {"model": "policy", **BODIES[path], **NEUTRAL}
        for fields in (everything, everything | dict.fromkeys(REFUSED), everything | {"top_k": 0}):
            status, reply = await ask.raw(path, fields)
            assert status == 200, reply

    rollout = await rollout_of(agent, renderer, tokenizer)
    assert rollout.calls == {"answered": 3, "refused": sum(map(len, REFUSED.values()))}


async def test_a_client_may_send_what_the_rollout_is_sampled_with(renderer, tokenizer):
    async def agent(ask):
        own = {"top_p": 0.9, "top_k": 20, "stop_token_ids": [5]}
        own["chat_template_kwargs"] = {"enable_thinking": renderer.config.enable_thinking}
        assert (await ask([ASK], **own))[0] == 200
        for name, value in {"top_p": 0.8, "top_k": 19, "stop_token_ids": [5, 6]}.items():
            status, reply = await ask([ASK], **own | {name: value})
            assert status == 400 and reply["error"]["param"] == name

    validation = SamplingConfig(top_p=0.9, top_k=20, stop_token_ids=[5])
    await rollout_of(agent, renderer, tokenizer, sampling=validation)
