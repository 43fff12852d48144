"""Answers the question of row.json with dspy, in the mode that the first argument names."""

import json
import sys
from pathlib import Path

import dspy


def calculator(expression: str) -> str:
    """Evaluate a sum of whole numbers and return the result."""
    return str(sum(int(part) for part in expression.split("+")))


def main(mode: str, question: str) -> None:
    kind = "responses" if mode.endswith("responses") else "chat"
    adapter = dspy.JSONAdapter() if "json" in mode else dspy.ChatAdapter()
    dspy.configure(lm=dspy.LM("openai/policy", model_type=kind, cache=False), adapter=adapter)
    if mode.startswith("react"):
        program = dspy.ReAct("question -> answer", tools=[calculator], max_iters=5)
    else:
        program = dspy.ChainOfThought("question -> answer")
    print(program(question=question).answer)


main(sys.argv[1], json.loads(Path("row.json").read_text())["question"])
