"""The dialect of OpenAI's responses: ``POST /v1/responses``.

Nothing is stored: a client sends the whole input with each request.
"""

from collections.abc import Iterator, Mapping
from typing import Any

from torchtitan.experiments.rl.gateway.request import (
    ModelReply,
    ModelRequest,
    Refusal,
    checked_request,
    function_tool,
    is_function,
    listed,
    openai_error,
    text,
    texts,
    typed_event,
)

NAME = "responses"
error = openai_error
KEEP_ALIVE = b": keep-alive\n\n"
PARTS = ("input_text", "output_text", "text")
REASONING = ("reasoning_text", "summary_text")


def parse(body: Mapping[str, Any]) -> ModelRequest:
    """Return the request of a body.

    Raises:
        Refusal: the body asks for what the model can't be given.
    """
    options = body.get("text")
    if not isinstance(options, dict):
        options = {}
    messages: list[dict[str, Any]] = []
    if instructions := text(body.get("instructions"), "instructions"):
        messages.append({"role": "system", "content": instructions})
    items = body.get("input")
    if isinstance(items, str):
        items = [{"role": "user", "content": items}]
    items = listed(items, "input")
    for index, item in enumerate(items):
        _add(messages, item, f"input[{index}]")
    offered = listed(body.get("tools"), "tools")
    tools = [function_tool(tool, "parameters") for tool in offered if is_function(tool)]
    # OpenAI's API has no stop texts here; vLLM's has.
    stops = texts(body.get("stop"), "stop")
    body = {**body, "text": options.get("format"), "verbosity": options.get("verbosity")}
    return checked_request(
        body,
        messages,
        tools,
        other_tools=[str(tool["type"]) for tool in offered if not is_function(tool)],
        max_tokens=body.get("max_output_tokens"),
        stop=stops,
    )


def _add(messages: list[dict[str, Any]], item: Mapping[str, Any], field: str) -> None:
    """Add an item of the input to the messages.

    What the model said in one turn is several items here: reasoning, text and calls in this order.
    They become one message.

    Raises:
        Refusal: the item is of another kind.
    """
    kind = item.get("type", "message")
    said = messages[-1] if messages and messages[-1]["role"] == "assistant" else None
    if kind == "message":
        role = item.get("role")
        content = text(item.get("content"), f"{field}.content", PARTS)
        has_reasoning_alone = said is not None and not said["content"] and "tool_calls" not in said
        if said is not None and role == "assistant" and has_reasoning_alone:
            said["content"] = content
        else:
            messages.append({"role": role, "content": content})
    elif kind == "reasoning":
        reasoning = text(item.get("content") or item.get("summary"), f"{field}.content", REASONING)
        messages.append({"role": "assistant", "content": "", "reasoning_content": reasoning})
    elif kind == "function_call":
        if said is None:
            said = {"role": "assistant", "content": ""}
            messages.append(said)
        function = {"name": item.get("name"), "arguments": item.get("arguments")}
        said.setdefault("tool_calls", []).append(
            {"id": item.get("call_id"), "type": "function", "function": function}
        )
    elif kind == "function_call_output":
        content = text(item.get("output"), f"{field}.output", PARTS)
        messages.append({"role": "tool", "tool_call_id": item.get("call_id"), "content": content})
    else:
        raise Refusal(
            f"{field} has the type {kind!r}: leave it out; messages, reasoning and function calls "
            "are known",
            field=field,
        )


def reply(answer: ModelReply) -> dict[str, Any]:
    """Return the body of a response with the reply."""
    cut = answer.finish == "length"
    usage = {
        "input_tokens": answer.prompt_tokens,
        "input_tokens_details": {"cached_tokens": 0, "cache_write_tokens": 0},
        "output_tokens": answer.completion_tokens,
        "output_tokens_details": {"reasoning_tokens": 0},
        "total_tokens": answer.prompt_tokens + answer.completion_tokens,
    }
    return {
        "id": f"resp_{answer.id}",
        "created_at": answer.created,
        "model": answer.model,
        "object": "response",
        "status": "incomplete" if cut else "completed",
        "incomplete_details": {"reason": "max_output_tokens"} if cut else None,
        "error": None,
        "instructions": None,
        "metadata": {},
        "output": _items(answer),
        "parallel_tool_calls": True,
        "temperature": None,
        "tool_choice": "auto",
        "tools": [],
        "top_p": None,
        "usage": usage,
    }


def _items(answer: ModelReply) -> list[dict[str, Any]]:
    """Return the items of the reply's output: reasoning, text and calls."""
    status = "incomplete" if answer.finish == "length" else "completed"
    items: list[dict[str, Any]] = []
    if answer.reasoning:
        parts = [{"type": "reasoning_text", "text": answer.reasoning}]
        items.append(
            {
                "type": "reasoning",
                "id": f"rs_{answer.id}",
                "summary": [],
                "content": parts,
                "status": status,
            }
        )
    if answer.content or not answer.tool_calls:
        said: dict[str, Any] = {"type": "output_text", "text": answer.content, "annotations": []}
        items.append(
            {
                "type": "message",
                "id": f"msg_{answer.id}",
                "role": "assistant",
                "status": status,
                "content": [said],
            }
        )
    for index, call in enumerate(answer.tool_calls):
        function = call["function"]
        ids = {"id": f"fc_{answer.id}_{index}", "call_id": call["id"]}
        items.append({"type": "function_call", **ids, **function, "status": "completed"})
    return items


def stream(answer: ModelReply, request: ModelRequest) -> Iterator[bytes]:
    """Yield the events of a stream with the reply."""
    for sequence_number, (kind, fields) in enumerate(_events(reply(answer))):
        yield typed_event(f"response.{kind}", sequence_number=sequence_number, **fields)


def _events(whole: dict[str, Any]) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield kind and fields of each event of a response."""
    begun = {
        "response": whole
        | {"status": "in_progress", "incomplete_details": None, "output": [], "usage": None}
    }
    yield "created", begun
    yield "in_progress", begun
    for index, item in enumerate(whole["output"]):
        place: dict[str, Any] = {"output_index": index, "item_id": item["id"]}
        if item["type"] == "function_call":
            yield "output_item.added", place | {"item": item | {"arguments": ""}}
            yield "function_call_arguments.delta", place | {"delta": item["arguments"]}
            yield (
                "function_call_arguments.done",
                place | {"arguments": item["arguments"], "name": item["name"]},
            )
        else:
            (part,) = item["content"]
            part_place = place | {"content_index": 0}
            yield "output_item.added", place | {"item": item | {"content": []}}
            if item["type"] == "reasoning":
                yield "reasoning_text.delta", part_place | {"delta": part["text"]}
                yield "reasoning_text.done", part_place | {"text": part["text"]}
            else:
                yield "content_part.added", part_place | {"part": part | {"text": ""}}
                yield "output_text.delta", part_place | {"delta": part["text"], "logprobs": []}
                yield "output_text.done", part_place | {"text": part["text"], "logprobs": []}
                yield "content_part.done", part_place | {"part": part}
        yield "output_item.done", place | {"item": item}
    yield whole["status"], {"response": whole}


def error_event(refusal: Refusal) -> dict[str, Any]:
    """Return the event of a refusal in a stream that has begun."""
    return {
        "type": "error",
        "sequence_number": 0,
        "code": refusal.code,
        "message": refusal.openai_message,
        "param": refusal.field,
    }
