"""Answers the question of row.json with the tool runner of OpenAI's SDK, in the mode that the first argument names."""

import json
import sys
from pathlib import Path

from openai import OpenAI, pydantic_function_tool
from openai.lib.responses_tool_runner import RegisteredFunction, ResponsesToolRunner
from pydantic import BaseModel

CALCULATOR = {
    "type": "function",
    "name": "calculator",
    "description": "Evaluate a sum of whole numbers and return the result.",
    "parameters": {"type": "object", "properties": {"expression": {"type": "string"}}},
    "strict": False,
}


class calculator(BaseModel):
    """Evaluate a sum of whole numbers and return the result."""

    expression: str


class Sum(BaseModel):
    value: int


def evaluate(expression: str) -> str:
    return str(sum(int(part) for part in expression.split("+")))


def run(client: OpenAI, question: str, *, stream: bool) -> str:
    function = RegisteredFunction(CALCULATOR, lambda arguments: evaluate(arguments["expression"]))
    params = {"model": "policy", "input": question}
    return ResponsesToolRunner(functions=[function]).run(client, params, stream=stream).output_text


def parse(client: OpenAI, question: str) -> int:
    messages = [{"role": "user", "content": question}]
    tools = [pydantic_function_tool(calculator)]
    while True:
        reply = client.chat.completions.parse(
            model="policy", messages=messages, tools=tools, response_format=Sum
        )
        message = reply.choices[0].message
        messages.append(message)
        if not message.tool_calls:
            return message.parsed.value
        for call in message.tool_calls:
            result = evaluate(call.function.parsed_arguments.expression)
            messages.append({"role": "tool", "tool_call_id": call.id, "content": result})


def main(mode: str, question: str) -> None:
    client = OpenAI()
    if mode == "chat, parse":
        print(parse(client, question))
    else:
        print(run(client, question, stream=mode.endswith("stream")))


main(sys.argv[1], json.loads(Path("row.json").read_text())["question"])
