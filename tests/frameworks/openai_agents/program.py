"""Answers the question of row.json with openai-agents, in the mode that the first argument names."""

import asyncio
import json
import sys
from pathlib import Path

from agents import (
    Agent,
    ModelSettings,
    Runner,
    function_tool,
    set_default_openai_api,
    set_tracing_disabled,
)
from pydantic import BaseModel


class Sum(BaseModel):
    value: int


@function_tool
def calculator(expression: str) -> str:
    """Evaluate a sum of whole numbers and return the result."""
    return str(sum(int(part) for part in expression.split("+")))


async def main(mode: str, question: str) -> None:
    set_tracing_disabled(True)
    if mode.startswith("chat"):
        set_default_openai_api("chat_completions")
    agent = Agent(
        "solver",
        model="policy",
        tools=[calculator],
        output_type=Sum if mode.endswith("output type") else None,
        model_settings=ModelSettings(
            tool_choice="required" if mode.endswith("required tool") else None
        ),
    )
    if mode.endswith("stream"):
        run = Runner.run_streamed(agent, question)
        async for _ in run.stream_events():
            pass
    else:
        run = await Runner.run(agent, question)
    output = run.final_output
    print(output.value if isinstance(output, Sum) else output)


asyncio.run(main(sys.argv[1], json.loads(Path("row.json").read_text())["question"]))
