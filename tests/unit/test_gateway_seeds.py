"""Seeds of what agents ask: they follow from the run, the rollout and the dialogue, and a client may name its own."""

import asyncio

from tests.fakes.contexts import context_of
from tests.fakes.policy import ScriptedPolicy, ScriptedSession
from tests.unit.agents import client_of, config_of
from torchtitan.experiments.rl.generation.references import FrozenModel
from torchtitan.experiments.rl.tasks import AgentTask

MODELS = {"user": FrozenModel(name="user", base_url="http://localhost:1/v1"), "small": "auxiliary"}
ASK = {"role": "user", "content": "What do you want?"}


class Simulator(ScriptedPolicy):
    """A frozen model that notes the seed of each request, as an endpoint would send it."""

    def __init__(self, tokenizer):
        super().__init__(tokenizer, "a flight")
        self.seeds = []

    def session(self, **options):
        return SeededSession(self, **options)


class SeededSession(ScriptedSession):
    async def generate(self, prompt_token_ids, *, max_tokens, seed=None):
        self.policy.seeds.append(self.seed + len(self.prompts) + 1 if seed is None else seed)
        return await super().generate(prompt_token_ids, max_tokens=max_tokens)


async def seeds_of(agent, renderer, tokenizer, *, epochs=1, rollouts=1, run_seed=0):
    class Agent(AgentTask):
        async def run_agent(self, sample, endpoint):
            async with client_of(endpoint) as ask:
                await agent(ask)

    simulator = Simulator(tokenizer)
    policy = ScriptedPolicy(tokenizer, frozen=simulator)
    task = config_of(Agent, models=MODELS, group_size=rollouts).build(
        name="agent", context=context_of(renderer)
    )
    await task.setup(policy)
    try:
        for epoch in range(epochs):
            await task.run_group(task.dataset[0], policy, group_id=f"row@{epoch}", seed=run_seed)
    finally:
        await task.close()
    return simulator.seeds


async def ask_the_user(ask, messages, **fields):
    body = {"model": "user", "messages": messages, **fields}
    status, reply = await ask.raw("chat/completions", body)
    assert status == 200, reply
    return reply["choices"][0]["message"]


async def two_dialogues_of_two_turns(ask):
    async def dialogue():
        said = await ask_the_user(ask, [ASK])
        await ask_the_user(ask, [ASK, said, {"role": "user", "content": "Where to?"}])

    await asyncio.gather(dialogue(), dialogue())


async def test_equal_requests_of_a_frozen_model_have_a_seed_each_and_a_repeated_run_the_same(
    renderer, tokenizer
):
    many = {"epochs": 2, "rollouts": 8}
    first = await seeds_of(two_dialogues_of_two_turns, renderer, tokenizer, **many)
    assert len(first) == 2 * 8 * 2 * 2 and len(set(first)) == 64
    again = await seeds_of(two_dialogues_of_two_turns, renderer, tokenizer, **many)
    assert set(again) == set(first)
    other_run = await seeds_of(two_dialogues_of_two_turns, renderer, tokenizer, **many, run_seed=1)
    assert not set(other_run) & set(first)


async def test_a_clients_own_seed_is_used_for_a_frozen_model_and_refused_for_the_policy(
    renderer, tokenizer
):
    async def agent(ask):
        said = await ask_the_user(ask, [ASK], seed=7)
        await ask_the_user(ask, [ASK, said, ASK], seed=0)
        for model in ("policy", "small"):
            status, reply = await ask.raw(
                "chat/completions", {"model": model, "messages": [ASK], "seed": 7}
            )
            assert status == 400 and reply["error"]["param"] == "seed", reply
            assert "leave it out" in reply["error"]["message"]
        for wrong in (True, 1.5, "7"):
            status, reply = await ask.raw(
                "chat/completions", {"model": "user", "messages": [ASK], "seed": wrong}
            )
            assert status == 400 and reply["error"]["param"] == "seed", reply

    assert await seeds_of(agent, renderer, tokenizer) == [7, 0]
