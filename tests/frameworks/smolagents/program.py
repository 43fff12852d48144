"""Answers the question of row.json with smolagents, in the mode that the first argument names."""

import json
import os
import sys
from pathlib import Path

from smolagents import CodeAgent, OpenAIModel, ToolCallingAgent, tool


@tool
def calculator(expression: str) -> str:
    """Evaluate a sum of whole numbers and return the result.

    Args:
        expression: The sum, such as "1 + 2".
    """
    return str(sum(int(part) for part in expression.split("+")))


def main(mode: str, question: str) -> None:
    options = {"tool_choice": "auto"} if mode == 'tools, tool_choice="auto"' else {}
    model = OpenAIModel(
        "policy",
        api_base=os.environ["OPENAI_BASE_URL"],
        api_key=os.environ["OPENAI_API_KEY"],
        **options,
    )
    if mode.startswith("tools"):
        agent = ToolCallingAgent(tools=[calculator], model=model, max_steps=5)
    else:
        agent = CodeAgent(
            tools=[calculator],
            model=model,
            max_steps=5,
            stream_outputs=mode == "code, stream",
            use_structured_outputs_internally=mode == "code, structured",
        )
    print(f"\n{agent.run(question)}")


main(sys.argv[1], json.loads(Path("row.json").read_text())["question"])
