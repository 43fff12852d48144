"""Answers the question of row.json with pydantic-ai, in the mode that the first argument names."""

import asyncio
import json
import sys
from pathlib import Path

from pydantic import BaseModel
from pydantic_ai import Agent, NativeOutput, PromptedOutput
from pydantic_ai.models.openai import OpenAIChatModel, OpenAIResponsesModel


class Sum(BaseModel):
    value: int


OUTPUTS = {
    "tool output": Sum,
    "native output": NativeOutput(Sum),
    "prompted output": PromptedOutput(Sum),
}


def calculator(expression: str) -> str:
    """Evaluate a sum of whole numbers and return the result."""
    return str(sum(int(part) for part in expression.split("+")))


async def main(mode: str, question: str) -> None:
    model = OpenAIResponsesModel("policy") if mode == "responses" else OpenAIChatModel("policy")
    agent = Agent(model, tools=[calculator], output_type=OUTPUTS.get(mode, str))
    if mode == "stream":
        async with agent.run_stream(question) as run:
            print(await run.get_output())
    else:
        output = (await agent.run(question)).output
        print(output.value if isinstance(output, Sum) else output)


asyncio.run(main(sys.argv[1], json.loads(Path("row.json").read_text())["question"]))
