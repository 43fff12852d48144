"""Solves arithmetic with a calculator tool: an agent that is a separate program.

It speaks HTTP, and needs nothing but the standard library, so that it starts in 50 ms.
`calculator_agent.py` has the command that runs it, and `calculator.py` imports the calculator.

What the model writes for the tool may be anything. It is parsed and never run, and only whole
numbers and operators count.
"""

import ast
import http.client
import json
import operator
import os
from urllib.parse import urlsplit

MAX_CHARACTERS = 200
"""Maximum length of an expression. It also bounds the value, to 200 digits, and the depth to which
the parser and `value_of` recurse."""
OPERATIONS: dict = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.USub: operator.neg,
}
NAME = "calculator"
ERROR = "Error"
"""Beginning of an answer that is no number."""
CALCULATOR = {
    "type": "function",  # with its wrapping, because that is what models saw in training
    "function": {
        "name": NAME,
        "description": "Evaluate an arithmetic expression and return the result.",
        "parameters": {
            "type": "object",
            "properties": {"expression": {"type": "string"}},
            "required": ["expression"],
        },
    },
}


def prompt_text(expression: str) -> str:
    """Return the user's message."""
    return f"What is {expression}? Use the calculator, then give the final answer as a number."


def evaluate(expression: str) -> int:
    """Return the value of an expression of whole numbers, + - * and parentheses.

    Raises:
        ValueError: the expression is anything else, or too long. The message is for the model.
    """
    if len(expression) > MAX_CHARACTERS:
        raise ValueError("expression too long")
    try:
        return value_of(ast.parse(expression, mode="eval").body)
    except Exception:  # noqa: BLE001 - the parser and `value_of` refuse a text in several ways
        raise ValueError("invalid expression") from None


def value_of(node):
    """Return the value of a parsed expression.

    An expression of anything but whole numbers and operators raises an error of some class.
    """
    if isinstance(node, ast.Constant) and type(node.value) is int:
        return node.value
    operands = (value_of(part) for part in ast.iter_child_nodes(node) if isinstance(part, ast.expr))
    return OPERATIONS[type(node.op)](*operands)


def calculate(function):
    """Return what a well-formed tool call asks for.

    Raises:
        ValueError: as `evaluate` does, or the call is of another tool or has other arguments.
    """
    if function["name"] != NAME:
        raise ValueError("unknown tool")
    try:
        expression = json.loads(function["arguments"])["expression"].strip()
    except Exception:  # noqa: BLE001 - the arguments may be no JSON, or any
        raise ValueError("invalid arguments") from None
    return evaluate(expression)


def tool_message(call):
    """Return the calculator's answer to a well-formed tool call: a number, or what is wrong."""
    try:
        content = str(calculate(call["function"]))
    except ValueError as error:
        content = f"{ERROR}: {error}"
    return {
        "role": "tool",
        "tool_call_id": call["id"],
        "name": call["function"]["name"],
        "content": content,
    }


def main():
    """Answer the calls of the model until it answers without one, and print its answer."""
    with open("row.json") as row:
        expression = json.load(row)["input"]
    messages = [{"role": "user", "content": prompt_text(expression)}]
    url = urlsplit(os.environ["OPENAI_BASE_URL"])
    key = os.environ["OPENAI_API_KEY"]
    connection = http.client.HTTPConnection(url.hostname or "", url.port)
    headers = {"Authorization": f"Bearer {key}", "Content-Type": "application/json"}
    while True:
        body = json.dumps({"model": "policy", "messages": messages, "tools": [CALCULATOR]})
        connection.request("POST", f"{url.path}/chat/completions", body, headers)
        response = json.loads(connection.getresponse().read())
        if "error" in response:  # a limit of the rollout
            return
        choice = response["choices"][0]
        message = choice["message"]
        messages.append(message)
        calls = message.get("tool_calls") or []
        if not calls or choice["finish_reason"] == "length":
            print(message["content"])
            return
        messages += map(tool_message, calls)


if __name__ == "__main__":
    main()
