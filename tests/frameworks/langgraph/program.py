"""Answers the question of row.json with LangGraph and langchain-openai, in the mode that the first argument names."""

import json
import sys
from pathlib import Path

from langchain_openai import ChatOpenAI
from langgraph.prebuilt import create_react_agent
from pydantic import BaseModel


class Sum(BaseModel):
    """The sum."""

    value: int


def calculator(expression: str) -> str:
    """Evaluate a sum of whole numbers and return the result."""
    return str(sum(int(part) for part in expression.split("+")))


METHODS = {
    "json schema": "json_schema",
    "json mode": "json_mode",
    "function calling": "function_calling",
}


def main(mode: str, question: str) -> None:
    model = ChatOpenAI(
        model="policy", use_responses_api=mode == "responses", streaming=mode == "stream"
    )
    if mode in METHODS:
        print(model.with_structured_output(Sum, method=METHODS[mode]).invoke(question).value)
        return
    if mode == "any tool":
        (call,) = model.bind_tools([calculator], tool_choice="any").invoke(question).tool_calls
        print(calculator(**call["args"]))
        return
    agent = create_react_agent(
        model, [calculator], response_format=Sum if mode == "response format" else None
    )
    state = agent.invoke({"messages": [("user", question)]})
    print(
        state["structured_response"].value
        if mode == "response format"
        else state["messages"][-1].text
    )


main(sys.argv[1], json.loads(Path("row.json").read_text())["question"])
