"""A run whose agents are the clients that people have: each rollout asks by another of them."""

import itertools
import threading

from torchtitan.experiments.rl.config_registry import rl_calculator_qwen3_debug
from torchtitan.experiments.rl.config_registry.debug import _fields_of
from torchtitan.experiments.rl.tasks import AgentTask, Rubric
from torchtitan.experiments.rl.tasks.examples.calculator import CALCULATOR, prompt_text

FUNCTION = CALCULATOR["function"]
TURNS = 2
COUNT = itertools.count()


async def chat(endpoint, question, *, stream):
    client, messages = endpoint.client(), [{"role": "user", "content": question}]
    for _ in range(TURNS):
        asked = {"model": endpoint.model, "messages": messages, "tools": [CALCULATOR]}
        if stream:
            async with client.chat.completions.stream(**asked) as events:
                said = (await events.get_final_completion()).choices[0].message
        else:
            said = (await client.chat.completions.create(**asked)).choices[0].message
        messages.append(said.model_dump(exclude_none=True, exclude={"parsed"}))
        for call in said.tool_calls or ():
            messages.append({"role": "tool", "tool_call_id": call.id, "content": "7"})
        if not said.tool_calls:
            messages.append({"role": "user", "content": "again"})


async def responses(endpoint, question, *, stream):
    client, items = endpoint.client(), [{"role": "user", "content": question}]
    for _ in range(TURNS):
        asked = {
            "model": endpoint.model,
            "input": items,
            "tools": [{"type": "function", "strict": False, **FUNCTION}],
        }
        if stream:
            async with client.responses.stream(**asked) as events:
                said = await events.get_final_response()
        else:
            said = await client.responses.create(**asked)
        items += [
            item.model_dump(exclude_none=True, exclude={"parsed_arguments"}) for item in said.output
        ]
        calls = [item for item in said.output if item.type == "function_call"]
        items += [
            {"type": "function_call_output", "call_id": call.call_id, "output": "7"}
            for call in calls
        ]
        if not calls:
            items.append({"role": "user", "content": "again"})


async def messages(endpoint, question, *, stream):
    from anthropic import AsyncAnthropic

    client, said_so_far = AsyncAnthropic(base_url=endpoint.anthropic_url, api_key=endpoint.key), []
    said_so_far.append({"role": "user", "content": question})
    tool = {
        "name": FUNCTION["name"],
        "description": FUNCTION["description"],
        "input_schema": FUNCTION["parameters"],
    }
    for _ in range(TURNS):
        asked = {
            "model": endpoint.model,
            "max_tokens": 40,
            "messages": said_so_far,
            "tools": [tool],
        }
        counted = (
            await client.messages.count_tokens(
                **{k: v for k, v in asked.items() if k != "max_tokens"}
            )
        ).input_tokens
        if stream:
            async with client.messages.stream(**asked) as events:
                said = await events.get_final_message()
        else:
            said = await client.messages.create(**asked)
        assert said_so_far[1:] or said.usage.input_tokens == counted
        said_so_far.append(
            {"role": "assistant", "content": [block.model_dump() for block in said.content]}
        )
        calls = [block for block in said.content if block.type == "tool_use"]
        results = [
            {"type": "tool_result", "tool_use_id": call.id, "content": "7"} for call in calls
        ]
        said_so_far.append({"role": "user", "content": results or "again"})


async def openai_agents(endpoint, question, *, stream):
    from agents import Agent, OpenAIResponsesModel, Runner, function_tool, set_tracing_disabled
    from agents.exceptions import MaxTurnsExceeded

    @function_tool
    def calculator(expression: str) -> str:
        """Evaluate an arithmetic expression and return the result."""
        return "7"

    set_tracing_disabled(True)
    model = OpenAIResponsesModel(endpoint.model, endpoint.client())
    agent = Agent("solver", model=model, tools=[calculator])
    try:
        if stream:
            running = Runner.run_streamed(agent, question, max_turns=TURNS)
            async for _ in running.stream_events():
                pass
        else:
            await Runner.run(agent, question, max_turns=TURNS)
    except MaxTurnsExceeded:
        pass


WAYS = [
    (ask, stream) for ask in (chat, responses, messages, openai_agents) for stream in (False, True)
]


class ClientsTask(AgentTask):
    async def run_agent(self, sample, endpoint):
        ask, stream = WAYS[next(COUNT) % len(WAYS)]
        await ask(endpoint, prompt_text(sample.env_input), stream=stream)
        return {
            "way": f"{ask.__name__} {'stream' if stream else 'plain'}",
            "lock": threading.Lock(),
        }  # no pickle holds it


def length(answer, expression):
    return float(len(answer["way"]))


def rl_clients():
    """Eight ways to ask, in each group of eight."""
    config = rl_calculator_qwen3_debug()
    same = _fields_of(config.tasks["calculator"], rubric=Rubric.Config(reward_fns=[length]))
    config.tasks = {"clients": ClientsTask.Config(**same)}
    config.tasks["clients"].max_retries = 0
    config.tasks["clients"].validation = None
    return config
