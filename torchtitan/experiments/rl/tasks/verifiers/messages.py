"""Messages of verifiers and of the renderers package, each made from the other. Imports verifiers with this module."""

from collections.abc import Iterable
from typing import Any

from renderers import Message, ToolSpec
from verifiers.types import Message as VerifiersMessage
from verifiers.types import Response, ResponseMessage, Tool, ToolCall


def to_messages(messages: Iterable[VerifiersMessage]) -> list[Message]:
    """As the renderers package has them. A tool's answer gets the tool's name, which verifiers leaves out and some templates
    show."""
    converted: list[Message] = []
    called: dict[str, str] = {}
    for message in messages:
        # Messages of the old text-completion API stand for the user's.
        role = "user" if message.role == "text" else message.role
        content = message.content or ""
        made: Message = {"role": role, "content": content if isinstance(content, str) else [_part(part) for part in content]}
        if reasoning := getattr(message, "reasoning_content", None):
            made["reasoning_content"] = reasoning
        if calls := getattr(message, "tool_calls", None):
            made["tool_calls"] = [
                {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}
                for call in calls
            ]
            called |= {call.id: call.name for call in calls}
        if role == "tool":
            made["tool_call_id"] = message.tool_call_id
            if message.tool_call_id in called:
                made["name"] = called[message.tool_call_id]
        converted.append(made)
    return converted


def to_tool(tool: Tool) -> ToolSpec:
    function = {"name": tool.name, "description": tool.description, "parameters": tool.parameters}
    if tool.strict is not None:
        function["strict"] = tool.strict
    return {"type": "function", "function": function}


def to_response(message: Message) -> Response:
    """An assistant message as a model's response. Malformed tool calls stay in its content, as text."""
    calls = [
        ToolCall(id=call["id"], name=call["function"]["name"], arguments=call["function"]["arguments"])
        for call in message.get("tool_calls", [])
    ]
    said = ResponseMessage(
        content=message["content"],
        reasoning_content=message.get("reasoning_content"),
        tool_calls=calls or None,
        finish_reason="tool_calls" if calls else "stop",
        is_truncated=False,
    )
    return Response(id="", created=0, model="policy", message=said)


def _part(part: Any) -> dict:
    return dict(part) if isinstance(part, dict) else part.model_dump()
