"""Messages at the boundary between env and renderer: parsed completions become assistant messages, env answers are checked."""

import json
from collections.abc import Iterable, Mapping
from typing import Any, cast

from renderers import (
    Message,
    ParsedResponse,
    ParsedToolCall,
    RenderedTokens,
    ToolCallParseStatus,
    ToolSpec,
)

from torchtitan.experiments.rl.batching.sample_checks import finite_float
from torchtitan.experiments.rl.printable import printable_line, shown
from torchtitan.experiments.rl.types import ROLES


def assistant_message(parsed: ParsedResponse, *, turn: int) -> Message:
    """The completion as an OpenAI-format assistant message: content, reasoning_content and tool_calls where there are any.

    Arguments are a JSON string, as OpenAI's are. A call whose format gives it no id gets ``call_<turn>_<index>``, so ids stay
    unique over the conversation. A call to a tool that doesn't exist is a call: answering it is the env's business.

    A malformed call is never dropped: its text is added to the content, so the env and a later render have it,
    and ``malformed_tool_calls`` lists its status and text, so the env can tell it from an answer.
    """

    def is_call(call: ParsedToolCall) -> bool:
        known = call.status in (ToolCallParseStatus.OK, ToolCallParseStatus.UNKNOWN_TOOL)
        return known and isinstance(call.name, str) and call.name != ""

    calls = [
        {
            "id": call.id or f"call_{turn}_{index}",
            "type": "function",
            "function": {"name": call.name, "arguments": _json(call)},
        }
        for index, call in enumerate(filter(is_call, parsed.tool_calls))
    ]
    malformed = [
        {"status": str(call.status), "raw": call.raw}
        for call in parsed.tool_calls
        if not is_call(call)
    ]
    texts = [parsed.content, *(attempt["raw"] for attempt in malformed)]
    message: dict[str, Any] = {"role": "assistant", "content": "\n".join(filter(None, texts))}
    thought = parsed.reasoning_content
    require(isinstance(thought, str | None), "reasoning_content is", thought, "a text")
    others = {"reasoning_content": thought, "tool_calls": calls, "malformed_tool_calls": malformed}
    return cast(Message, message | {name: value for name, value in others.items() if value})


def _json(call: ParsedToolCall) -> str:
    given = {} if call.arguments is None else call.arguments
    return given if isinstance(given, str) else json.dumps(given, ensure_ascii=False)


def checked_messages(messages: Any, field: str) -> list[Message]:
    """Copies of the messages, so that an env that keeps and changes its own does not change the record.

    Raises:
        TypeError: not messages of text; names the field, the entry, and the part of its content.
        ValueError: a text that is not valid Unicode.
    """
    require(isinstance(messages, list | tuple), f"{field} is", messages, "a list of messages")
    return [
        _checked_message(message, f"{field}[{index}]") for index, message in enumerate(messages)
    ]


def require(fits: object, what: str, value: Any, wanted: str) -> None:
    """Raise the TypeError ``"{what} {the value}, want {wanted}"`` unless it fits."""
    if not fits:
        raise TypeError(f"{what} {shown(value)}, want {wanted}")


def _checked_message(message: Any, field: str) -> Message:
    require(isinstance(message, Mapping), f"{field} is", message, "a dict with role and content")
    role, content, thought = map(message.get, ("role", "content", "reasoning_content"))
    require(
        isinstance(role, str) and role in ROLES,
        f"{field} has role",
        role,
        f"one of {', '.join(ROLES)}",
    )
    require(
        isinstance(content, str | list),
        f"{field} has content",
        content,
        "a string or a list of parts",
    )
    require(isinstance(thought, str | None), f"{field} has reasoning_content", thought, "a string")
    copied = dict(message)
    if isinstance(content, list):
        copied["content"] = [
            _checked_part(part, f"{field}.content[{index}]") for index, part in enumerate(content)
        ]
    _check_tool_calls(copied.get("tool_calls"), f"{field}.tool_calls")
    if not all(type(value) is str and value.isascii() for value in copied.values()):
        try:
            check_unicode(copied, field)
        except RecursionError:
            raise TypeError(f"{field} contains itself, or is nested too deep") from None
    return copied


def _check_tool_calls(calls: Any, field: str) -> None:
    """Renderers read them as they are."""
    require(isinstance(calls, list | tuple | None), f"{field} is", calls, "a list of tool calls")
    for index, call in enumerate(calls or ()):
        of, function = (
            f"{field}[{index}]",
            call.get("function", call) if isinstance(call, Mapping) else cast(Any, None),
        )
        wanted = '{"type": "function", "function": {"name": ..., "arguments": ...}}'
        require(isinstance(function, Mapping), f"{of} is", call, wanted)
        name, arguments = function.get("name"), function.get("arguments")
        require(
            isinstance(name, str) and name, f"{of} has the name", name, "a string that is not empty"
        )
        require(
            isinstance(arguments, str | Mapping | None),
            f"{of} has arguments",
            arguments,
            "JSON or a dict",
        )


def _checked_part(part: Any, field: str) -> dict[str, Any]:
    """Templates skip parts that they do not know, so the model would never see them."""
    require(isinstance(part, Mapping), f"{field} is", part, '{"type": "text", "text": ...}')
    if (kind := part.get("type")) != "text":
        cure = (
            "put it into the message's reasoning_content"
            if kind == "thinking"
            else "only text reaches the model"
        )
        raise TypeError(f"{field} is a part of type '{printable_line(str(kind))}': {cure}")
    require(isinstance(part.get("text"), str), f"{field}.text is", part.get("text"), "a string")
    return dict(part)


def checked_tools(tools: Any, field: str) -> list[ToolSpec] | None:
    """Copies of the tools; None where there are none.

    Raises:
        TypeError: not a list of tools, each ``{"type": "function", "function": {"name": ...}}`` or the inner dict alone; names
            the field and the entry.
        ValueError: a text that is not valid Unicode.
    """
    require(isinstance(tools, list | tuple), f"{field} is", tools, "a list of tools")
    return [_checked_tool(tool, f"{field}[{index}]") for index, tool in enumerate(tools)] or None


def _checked_tool(tool: Any, field: str) -> ToolSpec:
    require(
        isinstance(tool, Mapping),
        f"{field} is",
        tool,
        '{"type": "function", "function": {"name": ...}}',
    )
    function = tool.get("function", tool)
    wanted = "a dict with name, description and parameters"
    require(isinstance(function, Mapping), f"{field}.function is", function, wanted)
    name = function.get("name")
    require(
        isinstance(name, str) and name, f"{field} has the name", name, "a string that is not empty"
    )
    try:
        text = json.dumps(dict(tool), ensure_ascii=False)
    except (TypeError, ValueError, RecursionError) as error:
        raise TypeError(f"{field} ({name}) can't be written as JSON: {error}") from error
    check_unicode(text, field)
    return json.loads(text)


def check_unicode(value: Any, field: str) -> None:
    """Refuse a text with half of a character (a lone surrogate): no tokenizer takes it.

    Args:
        value: a text, or dicts and lists of texts.

    Raises:
        ValueError: names the field, the character and its place.
    """
    if isinstance(value, str):
        if value.isascii():
            return
        try:
            value.encode()
        except UnicodeEncodeError as error:
            raise ValueError(
                f"{field} has {value[error.start]!a} at character {error.start}: half of a character (a lone surrogate), which "
                "no tokenizer takes"
            ) from None
    elif isinstance(value, Mapping):
        for key, entry in value.items():
            check_unicode(entry, f"{field}.{printable_line(str(key))}")
    elif isinstance(value, list | tuple):
        for index, entry in enumerate(value):
            check_unicode(entry, f"{field}[{index}]")


def checked_rewards(components: Any, field: str) -> dict[str, float]:
    """The components as floats.

    Raises:
        TypeError: not a dict of finite numbers, within float32, by name.
    """
    require(isinstance(components, Mapping), f"{field} is", components, "a dict of numbers by name")
    floats: dict[str, Any] = {name: finite_float(value) for name, value in components.items()}
    for name, number in floats.items():
        fits = isinstance(name, str) and number is not None
        require(
            fits, f"{field}[{name!r}] is", components[name], "a finite number that float32 holds"
        )
    return floats


def check_all_rendered(
    rendered: RenderedTokens, messages: Iterable[Message], *, start: int = 0
) -> None:
    """Some templates leave out messages of roles that they do not have.

    Args:
        start: of these messages' tokens in the prompt.

    Raises:
        ValueError: a message of the env's with content has no token in the prompt.
    """
    if not rendered.is_content:
        # The tokenizer's own chat template: whose a token is was guessed there from how long the beginnings of the conversation
        # are, which is wrong wherever the template rewrites history.
        return
    present = set(rendered.message_indices[start:])
    for index, message in enumerate(messages):
        if message["content"] and message["role"] != "assistant" and index not in present:
            raise ValueError(
                f"the renderer dropped message {index}: this model's template has no role {message['role']!r}"
            )
