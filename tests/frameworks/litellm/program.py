"""Answers the question of row.json with litellm, in the mode that the first argument names."""

import json
import os
import sys
from pathlib import Path

import litellm

TOOL = {
    "type": "function",
    "function": {
        "name": "calculator",
        "description": "Evaluate a sum of whole numbers and return the result.",
        "parameters": {"type": "object", "properties": {"expression": {"type": "string"}}},
    },
}
TOO_LONG = "x" * 30_000_000


def evaluate(expression: str) -> str:
    return str(sum(int(part) for part in expression.split("+")))


def answer_of(model: str, question: str, *, stream: bool, **options: str) -> str:
    messages = [{"role": "user", "content": question}]
    while True:
        reply = litellm.completion(model, messages=messages, tools=[TOOL], stream=stream, **options)
        if stream:
            reply = litellm.stream_chunk_builder(list(reply), messages=messages)
        message = reply.choices[0].message
        messages.append(message)
        if not message.tool_calls:
            return message.content
        for call in message.tool_calls:
            result = evaluate(json.loads(call.function.arguments)["expression"])
            messages.append({"role": "tool", "tool_call_id": call.id, "content": result})


def main(mode: str, question: str) -> None:
    stream = mode.endswith("stream")
    if mode.startswith("messages"):
        base = os.environ["ANTHROPIC_BASE_URL"]
        print(answer_of("anthropic/policy", question, stream=stream, api_base=base))
        return
    if mode.startswith("too long"):
        model = "anthropic/policy" if mode.endswith("messages") else "openai/policy"
        base = os.environ["ANTHROPIC_BASE_URL" if mode.endswith("messages") else "OPENAI_BASE_URL"]
        try:
            litellm.completion(
                model, messages=[{"role": "user", "content": TOO_LONG}], api_base=base
            )
        except litellm.ContextWindowExceededError:
            print(answer_of(model, question, stream=False, api_base=base))
        return
    model = "openai/responses/policy" if mode.startswith("responses") else "openai/policy"
    print(answer_of(model, question, stream=stream))


main(sys.argv[1], json.loads(Path("row.json").read_text())["question"])
