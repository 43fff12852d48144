"""The dialect of OpenAI's chat completions: ``POST /v1/chat/completions``."""

from collections.abc import Iterator, Mapping
from typing import Any

from torchtitan.experiments.rl.gateway.request import (
    ModelReply,
    ModelRequest,
    checked_request,
    event,
    is_function,
    listed,
    openai_error,
    text,
    texts,
)

NAME = "chat"
error = error_event = openai_error
KEEP_ALIVE = b": keep-alive\n\n"


def parse(body: Mapping[str, Any]) -> ModelRequest:
    """Return the request of a body.

    Raises:
        Refusal: the body asks for what the model can't be given.
    """
    messages = []
    for index, message in enumerate(listed(body.get("messages"), "messages")):
        kept = {
            name: value
            for name, value in message.items()
            if value is not None and name not in ("refusal", "audio")
        }
        kept["content"] = text(message.get("content"), f"messages[{index}].content")
        if "reasoning" in kept:  # vLLM's name of the field
            kept.setdefault("reasoning_content", kept.pop("reasoning"))
        messages.append(kept)
    offered = listed(body.get("tools"), "tools")
    options = body.get("stream_options")
    limit = body.get("max_completion_tokens")
    return checked_request(
        body,
        messages,
        [tool for tool in offered if is_function(tool)],
        other_tools=[str(tool["type"]) for tool in offered if not is_function(tool)],
        max_tokens=body.get("max_tokens") if limit is None else limit,
        stop=texts(body.get("stop"), "stop"),
        stream_usage=isinstance(options, dict) and bool(options.get("include_usage")),
    )


def reply(answer: ModelReply) -> dict[str, Any]:
    """Return the body of a response with the reply."""
    content: str | None = answer.content
    if answer.tool_calls and not answer.content:
        content = None
    message: dict[str, Any] = {"role": "assistant", "content": content}
    if answer.reasoning:
        message["reasoning_content"] = answer.reasoning
    if answer.tool_calls:
        message["tool_calls"] = answer.tool_calls
    choice = {"index": 0, "message": message, "finish_reason": answer.finish, "logprobs": None}
    return _head(answer, "chat.completion") | {"choices": [choice], "usage": _usage(answer)}


def stream(answer: ModelReply, request: ModelRequest) -> Iterator[bytes]:
    """Yield the events of a stream with the reply."""
    deltas: list[dict[str, Any]] = [{"role": "assistant", "content": ""}]
    if answer.reasoning:
        deltas.append({"reasoning_content": answer.reasoning})
    if answer.content:
        deltas.append({"content": answer.content})
    deltas += [
        {"tool_calls": [{"index": index, **call}]} for index, call in enumerate(answer.tool_calls)
    ]
    chunks: list[dict[str, Any]] = [
        {"choices": [{"index": 0, "delta": delta, "finish_reason": None}]} for delta in deltas
    ]
    chunks.append({"choices": [{"index": 0, "delta": {}, "finish_reason": answer.finish}]})
    if request.stream_usage:
        chunks.append({"choices": [], "usage": _usage(answer)})
    head = _head(answer, "chat.completion.chunk")
    for chunk in chunks:
        yield event(head | chunk)
    yield b"data: [DONE]\n\n"


def _head(answer: ModelReply, kind: str) -> dict[str, Any]:
    return {
        "id": f"chatcmpl-{answer.id}",
        "created": answer.created,
        "model": answer.model,
        "object": kind,
    }


def _usage(answer: ModelReply) -> dict[str, int]:
    total = answer.prompt_tokens + answer.completion_tokens
    return {
        "prompt_tokens": answer.prompt_tokens,
        "completion_tokens": answer.completion_tokens,
        "total_tokens": total,
    }
