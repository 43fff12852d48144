"""An agent as a separate program: arithmetic with a calculator tool, over HTTP, with nothing but the standard library.

`tasks/examples/calculator_agent.py` runs it. It imports no library, so that it starts in 50 ms. `tasks/examples/calculator.py` has the calculator
from here.

What the model writes for the tool may be anything. It is parsed and never run, and only whole numbers and operators count.
"""

import ast
import http.client
import json
import operator
import os
from urllib.parse import urlsplit

MAX_CHARACTERS = 200
"""Of an expression. Bounds its value too, to 200 digits, and how deep the parser and `value_of` recurse."""
OPERATIONS: dict = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.USub: operator.neg,
}
NAME, ERROR = "calculator", "Error"
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
    """The user's message."""
    return f"What is {expression}? Use the calculator, then give the final answer as a number."


def evaluate(expression: str) -> int:
    """The value of an expression of whole numbers, + - * and parentheses.

    Raises:
        ValueError: it is anything else, or too long. The message is for the model.
    """
    if len(expression) > MAX_CHARACTERS:
        raise ValueError("expression too long")
    try:
        return value_of(ast.parse(expression, mode="eval").body)
    except (
        Exception
    ):  # the parser has several ways to refuse a text, and `value_of` to refuse what it says
        raise ValueError("invalid expression") from None


def value_of(node):
    if isinstance(node, ast.Constant) and type(node.value) is int:
        return node.value
    operands = (value_of(part) for part in ast.iter_child_nodes(node) if isinstance(part, ast.expr))
    return OPERATIONS[type(node.op)](*operands)


def calculate(function):
    """What a well-formed tool call asks for. Raises as `evaluate` does, also for another tool or other arguments."""
    if function["name"] != NAME:
        raise ValueError("unknown tool")
    try:
        expression = json.loads(function["arguments"])["expression"].strip()
    except Exception:  # it may be no JSON, or any
        raise ValueError("invalid arguments") from None
    return evaluate(expression)


def tool_message(call):
    """The calculator's answer to a well-formed tool call: a number, or what is wrong, so that the model can try again."""
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
    with open("row.json") as row:
        expression = json.load(row)["input"]
    messages = [{"role": "user", "content": prompt_text(expression)}]
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
        messages += map(tool_message, calls)


if __name__ == "__main__":
    main()
