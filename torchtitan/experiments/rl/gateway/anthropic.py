"""The dialect of Anthropic's messages: ``POST /v1/messages``, also to count their tokens."""

import json
from collections.abc import Iterator, Mapping
from typing import Any

from torchtitan.experiments.rl.gateway.request import (
    CONTEXT_EXCEEDED,
    ModelReply,
    ModelRequest,
    Refusal,
    checked_request,
    function_tool,
    json_object,
    listed,
    text,
    texts,
    typed_event,
)

NAME = "anthropic"
KEEP_ALIVE = b'event: ping\ndata: {"type": "ping"}\n\n'


def parse(body: Mapping[str, Any]) -> ModelRequest:
    """Return the request of a body.

    Raises:
        Refusal: the body asks for what the model can't be given.
    """
    output = body.get("output_config")
    wanted = output if isinstance(output, dict) else {}
    messages: list[dict[str, Any]] = []
    if system := text(body.get("system"), "system"):
        messages.append({"role": "system", "content": system})
    for index, message in enumerate(listed(body.get("messages"), "messages")):
        messages += _messages(message, f"messages[{index}]")
    if messages and messages[-1]["role"] == "assistant":
        # In this dialect such a message begins the answer: the model would not have sampled it.
        cure = (
            "end with a message of the user's or with a tool's result: the model begins its answer "
            "itself"
        )
        raise Refusal(f"messages end with the assistant: {cure}", field="messages")
    # A tool without a schema is one that the provider defines. The model is not told of it.
    offered = listed(body.get("tools"), "tools")
    tools = [function_tool(tool, "input_schema") for tool in offered if "input_schema" in tool]
    stops = texts(body.get("stop_sequences"), "stop_sequences")
    body = {**body, "output_config": wanted.get("format"), "effort": wanted.get("effort")}
    body |= _tool_choice(body.get("tool_choice"))
    return checked_request(
        body,
        messages,
        tools,
        other_tools=[str(tool.get("type")) for tool in offered if "input_schema" not in tool],
        max_tokens=body.get("max_tokens"),
        stop=stops,
        stop_field="stop_sequences",
    )


def _tool_choice(choice: object) -> dict[str, Any]:
    """Return a choice of tools as the fields that OpenAI's chat completions have for it."""
    if not isinstance(choice, dict):
        return {"tool_choice": choice}
    match choice.get("type"):
        case "any":
            chosen: Any = "required"
        case "tool":
            chosen = {"type": "function", "function": {"name": choice.get("name")}}
        case kind:
            chosen = kind
    parallel = False if choice.get("disable_parallel_tool_use") is True else None
    return {"tool_choice": chosen, "parallel_tool_calls": parallel}


def _messages(message: Mapping[str, Any], field: str) -> Iterator[dict[str, Any]]:
    """Yield a message of this dialect as messages of OpenAI's chat completions.

    The results of tools are parts of a user's message here, and messages of their own there.

    Raises:
        Refusal: a part is neither text nor a call of a tool, nor the result of one.
    """
    role = message.get("role")
    content = message.get("content")
    if isinstance(content, str):
        content = [{"type": "text", "text": content}]
    blocks = listed(content, f"{field}.content")
    said: list[str] = []
    reasoning: list[str] = []
    calls: list[dict[str, Any]] = []
    for index, block in enumerate(blocks):
        place = f"{field}.content[{index}]"
        match block.get("type"):
            case "text":
                said.append(text([{"type": "text", "text": block.get("text")}], place))
            case "thinking":
                reasoning.append(str(block.get("thinking", "")))
            case "redacted_thinking":
                pass
            case "tool_use":
                calls.append(_call(block))
            case "tool_result":
                result = text(block.get("content"), f"{place}.content")
                yield {"role": "tool", "tool_call_id": block.get("tool_use_id"), "content": result}
            case kind:
                raise Refusal(
                    f"{place} has the type {kind!r}: only text and calls of tools reach the model; "
                    "leave it out",
                    field=place,
                )
    if role == "assistant":
        answer: dict[str, Any] = {"role": role, "content": "\n".join(said)}
        if reasoning:
            answer["reasoning_content"] = "\n".join(reasoning)
        if calls:
            answer["tool_calls"] = calls
        yield answer
    elif said or not blocks or role != "user":
        yield {"role": role, "content": "\n".join(said)}


def _call(block: Mapping[str, Any]) -> dict[str, Any]:
    """Return a call of a tool as OpenAI's chat completions have it."""
    arguments = json.dumps(block.get("input"), ensure_ascii=False)
    function = {"name": block.get("name"), "arguments": arguments}
    return {"id": block.get("id"), "type": "function", "function": function}


FINISH = {"stop": "end_turn", "length": "max_tokens", "tool_calls": "tool_use"}
"""Reasons for the end of an answer, by the word of OpenAI's chat completions."""


def reply(answer: ModelReply) -> dict[str, Any]:
    """Return the body of a response with the reply."""
    blocks: list[dict[str, Any]] = []
    if answer.reasoning:
        blocks.append({"type": "thinking", "thinking": answer.reasoning, "signature": ""})
    if answer.content or not answer.tool_calls:
        blocks.append({"type": "text", "text": answer.content})
    for call in answer.tool_calls:
        function = call["function"]
        blocks.append(
            {
                "type": "tool_use",
                "id": call["id"],
                "name": function["name"],
                "input": json_object(function["arguments"]),
            }
        )
    return {
        "id": f"msg_{answer.id}",
        "type": "message",
        "role": "assistant",
        "model": answer.model,
        "content": blocks,
        "stop_reason": "stop_sequence" if answer.stopped_at is not None else FINISH[answer.finish],
        "stop_sequence": answer.stopped_at,
        "usage": {"input_tokens": answer.prompt_tokens, "output_tokens": answer.completion_tokens},
    }


def stream(answer: ModelReply, request: ModelRequest) -> Iterator[bytes]:
    """Yield the events of a stream with the reply."""
    whole = reply(answer)
    yield typed_event(
        "message_start", message=whole | {"content": [], "stop_reason": None, "stop_sequence": None}
    )
    for index, block in enumerate(whole["content"]):
        kind = block["type"]
        if kind == "tool_use":
            empty: dict[str, Any] = {"input": {}}
            delta: dict[str, Any] = {
                "type": "input_json_delta",
                "partial_json": json.dumps(block["input"]),
            }
        else:
            empty = {kind: ""}
            delta = {"type": f"{kind}_delta", kind: block[kind]}
        yield typed_event("content_block_start", index=index, content_block=block | empty)
        yield typed_event("content_block_delta", index=index, delta=delta)
        yield typed_event("content_block_stop", index=index)
    ended = {name: whole[name] for name in ("stop_reason", "stop_sequence")}
    yield typed_event(
        "message_delta", delta=ended, usage={"output_tokens": answer.completion_tokens}
    )
    yield typed_event("message_stop")


def error(refusal: Refusal) -> dict[str, Any]:
    """Return the body of a response with a refusal."""
    kinds = {401: "authentication_error", 404: "not_found_error", 413: "request_too_large"}
    kind = (
        "api_error" if refusal.status >= 500 else kinds.get(refusal.status, "invalid_request_error")
    )
    # Clients of this API know a prompt that is too long by these words.
    too_long = "prompt is too long: " if refusal.code == CONTEXT_EXCEEDED else ""
    fault: dict[str, Any] = {"type": kind, "message": f"{too_long}{refusal}"}
    if refusal.field == "thread":
        # With these details Anthropic's client goes on, and sends the whole conversation.
        fault["details"] = {"error_code": "thread_unsupported_request", "unsupported": ["thread"]}
    return {"type": "error", "error": fault}


error_event = error
"""Event of a refusal in a stream that has begun: it has the same form."""
