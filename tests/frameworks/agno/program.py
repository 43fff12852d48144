"""Answers the question of row.json with agno, in the mode that the first argument names."""

import json
import os
import sys
from pathlib import Path

os.environ["AGNO_TELEMETRY"] = "false"

from agno.agent import Agent
from agno.models.openai import OpenAIChat, OpenAIResponses
from pydantic import BaseModel


class Sum(BaseModel):
    value: int


def calculator(expression: str) -> str:
    """Evaluate a sum of whole numbers and return the result."""
    return str(sum(int(part) for part in expression.split("+")))


def main(mode: str, question: str) -> None:
    kind = OpenAIResponses if mode.startswith("responses") else OpenAIChat
    model = kind(id="policy", base_url=os.environ["OPENAI_BASE_URL"])
    schema = Sum if mode.endswith("output schema") else None
    agent = Agent(model=model, tools=[calculator], output_schema=schema, telemetry=False)
    if mode.endswith("stream"):
        events = list(agent.run(question, stream=True))
        said = [event.content or "" for event in events if event.event == "RunContent"]
        print("".join(said))
    else:
        content = agent.run(question).content
        print(content.value if isinstance(content, Sum) else content)


main(sys.argv[1], json.loads(Path("row.json").read_text())["question"])
