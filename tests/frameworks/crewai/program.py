"""Answers the question of row.json with crewai, in the mode that the first argument names."""

import json
import os
import sys
from pathlib import Path

os.environ |= {"CREWAI_DISABLE_TELEMETRY": "true", "OTEL_SDK_DISABLED": "true"}

from crewai import LLM, Agent, Crew, Task
from crewai.tools import tool
from pydantic import BaseModel


class Sum(BaseModel):
    value: int


@tool("calculator")
def calculator(expression: str) -> str:
    """Evaluate a sum of whole numbers and return the result."""
    return str(sum(int(part) for part in expression.split("+")))


def main(mode: str, question: str) -> None:
    llm = LLM(
        model="openai/policy",
        base_url=os.environ["OPENAI_BASE_URL"],
        api_key=os.environ["OPENAI_API_KEY"],
        stream=mode.endswith("stream"),
    )
    solver = Agent(
        role="Solver", goal="Answer.", backstory="You add.", llm=llm, tools=[calculator], max_iter=5
    )
    has_type = mode == "output type"
    task = Task(
        description=question,
        expected_output="A number.",
        agent=solver,
        output_pydantic=Sum if has_type else None,
    )
    output = Crew(agents=[solver], tasks=[task]).kickoff()
    print(f"\n{output.pydantic.value if has_type else output.raw}")


main(sys.argv[1], json.loads(Path("row.json").read_text())["question"])
