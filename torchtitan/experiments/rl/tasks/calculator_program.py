"""An agent as a separate program: arithmetic with a calculator tool, over HTTP, with nothing but the standard library.

`tasks/calculator_agent.py` runs it. It imports no library, so that it starts in 50 ms.
"""

import ast
import http.client
import json
import operator
import os
from urllib.parse import urlsplit

OPERATIONS = {ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul}
CALCULATOR = {
    "type": "function",
    "function": {
        "name": "calculator",
        "description": "Evaluate an arithmetic expression and return the result.",
        "parameters": {"type": "object", "properties": {"expression": {"type": "string"}}, "required": ["expression"]},
    },
}


def value_of(node):
    """Of an expression of numbers, + - * and parentheses."""
    if isinstance(node, ast.Constant) and type(node.value) is int:
        return node.value
    if isinstance(node, ast.BinOp) and type(node.op) in OPERATIONS:
        return OPERATIONS[type(node.op)](value_of(node.left), value_of(node.right))
    raise ValueError("invalid expression")


def calculate(call):
    """What the tool answers to a call."""
    try:
        return str(value_of(ast.parse(json.loads(call["function"]["arguments"])["expression"].strip(), mode="eval").body))
    except (ValueError, SyntaxError, KeyError, TypeError, AttributeError, RecursionError, MemoryError):
        return "Error: invalid expression"


def main():
    with open("row.json") as row:
        expression = json.load(row)["input"]
    question = f"What is {expression}? Use the calculator, then give the final answer as a number."
    messages = [{"role": "user", "content": question}]
    url, key = urlsplit(os.environ["OPENAI_BASE_URL"]), os.environ["OPENAI_API_KEY"]
    connection = http.client.HTTPConnection(url.hostname or "", url.port)
    while True:
        body = json.dumps({"model": "policy", "messages": messages, "tools": [CALCULATOR]})
        headers = {"Authorization": f"Bearer {key}", "Content-Type": "application/json"}
        connection.request("POST", f"{url.path}/chat/completions", body, headers)
        answer = json.loads(connection.getresponse().read())
        if "error" in answer:  # a limit of the run's: it ends here
            return
        choice = answer["choices"][0]
        messages.append(choice["message"])
        calls = choice["message"].get("tool_calls") or []
        if not calls or choice["finish_reason"] == "length":
            print(choice["message"]["content"])
            return
        messages += [{"role": "tool", "tool_call_id": call["id"], "content": calculate(call)} for call in calls]


if __name__ == "__main__":
    main()
