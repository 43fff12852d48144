"""Anthropic's messages: ``POST /v1/messages`` and ``POST /v1/messages/count_tokens``."""

import json
from collections.abc import Iterator, Mapping
from typing import Any

from torchtitan.experiments.rl.gateway.request import (
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
    """Raises Refusal."""
    output = body.get("output_config")
    wanted = output if isinstance(output, dict) else {}
    messages: list[dict[str, Any]] = []
    if system := text(body.get("system"), "system"):
        messages.append({"role": "system", "content": system})
    for index, message in enumerate(listed(body.get("messages"), "messages")):
        messages += _messages(message, f"messages[{index}]")
    if messages and messages[-1]["role"] == "assistant":
        # Here such a message is the beginning of the answer, whose tokens the model would not have sampled.
        cure = "end with a message of the user's or with a tool's result: the model begins its answer itself"
        raise Refusal(f"messages end with the assistant: {cure}", field="messages")
    # A tool without a schema is one that the provider would run itself: the model is not told of it.
    tools = [
        function_tool(tool, "input_schema")
        for tool in listed(body.get("tools"), "tools")
        if "input_schema" in tool
    ]
    stops = texts(body.get("stop_sequences"), "stop_sequences")
    body = {**body, "output_config": wanted.get("format"), "effort": wanted.get("effort")}
    body |= _tool_choice(body.get("tool_choice"))
    return checked_request(
        body,
        messages,
        tools,
        max_tokens=body.get("max_tokens"),
        stop=stops,
        stop_field="stop_sequences",
    )


def _tool_choice(choice: Any) -> dict[str, Any]:
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
    """The messages that one is elsewhere: results of tools are a tool's there, and a user's here."""
    role, content = message.get("role"), message.get("content")
    blocks = (
        [{"type": "text", "text": content}]
        if isinstance(content, str)
        else listed(content, f"{field}.content")
    )
    texts_, reasoning, calls = [], [], []
    for index, block in enumerate(blocks):
        at = f"{field}.content[{index}]"
        match block.get("type"):
            case "text":
                texts_.append(text([{"type": "text", "text": block.get("text")}], at))
            case "thinking":
                reasoning.append(str(block.get("thinking", "")))
            case "redacted_thinking":
                pass
            case "tool_use":
                function = {
                    "name": block.get("name"),
                    "arguments": json.dumps(block.get("input"), ensure_ascii=False),
                }
                calls.append({"id": block.get("id"), "type": "function", "function": function})
            case "tool_result":
                said = text(block.get("content"), f"{at}.content")
                yield {"role": "tool", "tool_call_id": block.get("tool_use_id"), "content": said}
            case kind:
                raise Refusal(
                    f"{at} has the type {kind!r}: only text and calls of tools reach the model; leave it out",
                    field=at,
                )
    if role == "assistant":
        said_: dict[str, Any] = {"role": role, "content": "\n".join(texts_)}
        yield (
            said_
            | ({"reasoning_content": "\n".join(reasoning)} if reasoning else {})
            | ({"tool_calls": calls} if calls else {})
        )
    elif texts_ or not blocks or role != "user":
        yield {"role": role, "content": "\n".join(texts_)}


FINISH = {"stop": "end_turn", "length": "max_tokens", "tool_calls": "tool_use"}


def reply(answer: ModelReply) -> dict[str, Any]:
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
    """The reply as the events of a stream."""
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
            empty, delta = {kind: ""}, {"type": f"{kind}_delta", kind: block[kind]}
        yield typed_event("content_block_start", index=index, content_block=block | empty)
        yield typed_event("content_block_delta", index=index, delta=delta)
        yield typed_event("content_block_stop", index=index)
    ended = {name: whole[name] for name in ("stop_reason", "stop_sequence")}
    yield typed_event(
        "message_delta", delta=ended, usage={"output_tokens": answer.completion_tokens}
    )
    yield typed_event("message_stop")


def error(refusal: Refusal) -> dict[str, Any]:
    kinds = {401: "authentication_error", 404: "not_found_error", 413: "request_too_large"}
    kind = (
        "api_error" if refusal.status >= 500 else kinds.get(refusal.status, "invalid_request_error")
    )
    # Clients of this API know a prompt that is too long by these words.
    too_long = "prompt is too long: " if refusal.code == "context_length_exceeded" else ""
    return {"type": "error", "error": {"type": kind, "message": f"{too_long}{refusal}"}}


error_event = error
"""The same in a stream that has begun."""
