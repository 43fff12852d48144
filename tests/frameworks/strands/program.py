"""Answers the question of row.json with Strands, in the mode that the first argument names."""

import json
import os
import sys
from pathlib import Path

from pydantic import BaseModel
from strands import Agent, tool
from strands.models.openai import OpenAIModel
from strands.models.openai_responses import OpenAIResponsesModel


class Sum(BaseModel):
    """The sum."""

    value: int


@tool
def calculator(expression: str) -> str:
    """Evaluate a sum of whole numbers and return the result."""
    return str(sum(int(part) for part in expression.split("+")))


def main(mode: str, question: str) -> None:
    address = {"base_url": os.environ["OPENAI_BASE_URL"], "api_key": os.environ["OPENAI_API_KEY"]}
    kind = OpenAIResponsesModel if mode == "responses" else OpenAIModel
    model = kind(client_args=address, model_id="policy")
    agent = Agent(model=model, tools=[calculator], callback_handler=None)
    if mode == "output model":
        print(agent(question, structured_output_model=Sum).structured_output.value)
    else:
        print(agent(question))


main(sys.argv[1], json.loads(Path("row.json").read_text())["question"])
