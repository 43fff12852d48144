"""Answers the question of row.json with AutoGen's AssistantAgent, in the mode that the first argument names."""

import asyncio
import json
import sys
from pathlib import Path

from autogen_agentchat.agents import AssistantAgent
from autogen_core.tools import FunctionTool
from autogen_ext.models.openai import OpenAIChatCompletionClient
from pydantic import BaseModel

MODEL = {
    "vision": False,
    "function_calling": True,
    "json_output": True,
    "structured_output": True,
    "family": "unknown",
}


class Sum(BaseModel):
    value: int


def calculator(expression: str) -> str:
    """Evaluate a sum of whole numbers and return the result."""
    return str(sum(int(part) for part in expression.split("+")))


async def main(mode: str, question: str) -> None:
    tool = FunctionTool(calculator, calculator.__doc__, strict=True)
    agent = AssistantAgent(
        "solver",
        OpenAIChatCompletionClient(model="policy", model_info=MODEL),
        tools=[tool],
        max_tool_iterations=5,
        model_client_stream=mode == "stream",
        output_content_type=Sum if mode == "output type" else None,
    )
    content = (await agent.run(task=question)).messages[-1].content
    print(content.value if isinstance(content, Sum) else content)


asyncio.run(main(sys.argv[1], json.loads(Path("row.json").read_text())["question"]))
