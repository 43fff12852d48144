"""Answers the question of row.json with the tool runner of Anthropic's SDK, in the mode that the first argument names."""

import json
import sys
from pathlib import Path

from anthropic import Anthropic, beta_tool


@beta_tool
def calculator(expression: str) -> str:
    """Evaluate a sum of whole numbers and return the result."""
    return str(sum(int(part) for part in expression.split("+")))


def main(mode: str, question: str) -> None:
    runner = Anthropic().beta.messages.tool_runner(
        model="policy",
        max_tokens=1024,
        system="Answer with the number alone.",
        tools=[calculator],
        messages=[{"role": "user", "content": question}],
        **({"stream": True} if mode.endswith("stream") else {}),
        **({"thread": False} if "no thread" in mode else {}),
    )
    print(runner.until_done().content[-1].text)


main(sys.argv[1], json.loads(Path("row.json").read_text())["question"])
