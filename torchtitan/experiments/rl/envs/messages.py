"""Messages at the boundary between env and renderer: parsed completions become assistant messages, env answers are checked."""

import json
from collections.abc import Iterable, Mapping
from typing import Any, cast

from renderers import Message, ParsedResponse, RenderedTokens, ToolCallParseStatus, ToolSpec

from torchtitan.experiments.rl.printable import printable_line, shown
from torchtitan.experiments.rl.rollouts.streams import finite_float
from torchtitan.experiments.rl.types import ROLES


def assistant_message(parsed: ParsedResponse, *, turn: int) -> Message:
    """The completion as an OpenAI-format assistant message: content, reasoning_content and tool_calls where there are any.

    Arguments are a JSON string, as OpenAI's are. A call whose format gives it no id gets ``call_<turn>_<index>``, so ids stay
    unique over the conversation. A call to a tool that doesn't exist is a call: answering it is the env's business.

    A malformed call is never dropped: its text is added to the content, so the env and a later render have it,
    and ``malformed_tool_calls`` lists its status and text, so the env can tell it from an answer.
    """
    calls: list[dict[str, Any]] = []
    malformed: list[dict[str, Any]] = []
    for call in parsed.tool_calls:
        well_formed = call.status in (ToolCallParseStatus.OK, ToolCallParseStatus.UNKNOWN_TOOL)
        if not (well_formed and isinstance(call.name, str) and call.name):
            malformed.append({"status": str(call.status), "raw": call.raw})
            continue
        arguments = {} if call.arguments is None else call.arguments
        calls.append(
            {
                "id": call.id or f"call_{turn}_{len(calls)}",
                "type": "function",
                "function": {
                    "name": call.name,
                    "arguments": arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False),
                },
            }
        )
    texts = [parsed.content, *(attempt["raw"] for attempt in malformed)]
    message: Message = {"role": "assistant", "content": "\n".join(filter(None, texts))}
    if parsed.reasoning_content:
        if not isinstance(parsed.reasoning_content, str):
            raise TypeError(f"reasoning_content is a {type(parsed.reasoning_content).__name__}, want a text")
        message["reasoning_content"] = parsed.reasoning_content
    if calls:
        message["tool_calls"] = calls
    if malformed:
        message["malformed_tool_calls"] = malformed
    return message


def checked_messages(messages: Any, field: str) -> list[Message]:
    """Copies of the messages, so that an env that keeps and changes its own does not change the record.

    Raises:
        TypeError: not messages of text; names the field, the entry, and the part of its content.
        ValueError: a text that is not valid Unicode.
    """
    if not isinstance(messages, list | tuple):
        raise TypeError(f"{field} is {shown(messages)}, want a list of messages")
    return [_checked_message(message, f"{field}[{index}]") for index, message in enumerate(messages)]


def _checked_message(message: Any, field: str) -> Message:
    if not isinstance(message, Mapping):
        raise TypeError(f"{field} is {shown(message)}, want a dict with role and content")
    role, content = message.get("role"), message.get("content")
    if not isinstance(role, str) or role not in ROLES:
        raise TypeError(f"{field} has role {shown(role)}, want one of {', '.join(ROLES)}")
    copied = dict(message)
    if isinstance(content, list):
        copied["content"] = [_checked_part(part, f"{field}.content[{index}]") for index, part in enumerate(content)]
    elif not isinstance(content, str):
        raise TypeError(f"{field} has content {shown(content)}, want a string or a list of parts")
    if "tool_calls" in copied:
        _check_tool_calls(copied["tool_calls"], f"{field}.tool_calls")
    if not isinstance(copied.get("reasoning_content"), str | None):
        raise TypeError(f"{field} has reasoning_content {shown(copied['reasoning_content'])}, want a string")
    if not all(type(value) is str and value.isascii() for value in copied.values()):
        try:
            check_unicode(copied, field)
        except RecursionError:
            raise TypeError(f"{field} contains itself, or is nested too deep") from None
    return copied


def _check_tool_calls(calls: Any, field: str) -> None:
    """Renderers read them as they are."""
    if calls is None:
        return
    if not isinstance(calls, list | tuple):
        raise TypeError(f"{field} is {shown(calls)}, want a list of tool calls")
    for index, call in enumerate(calls):
        function = call.get("function", call) if isinstance(call, Mapping) else None
        if not isinstance(function, Mapping):
            cure = '{"type": "function", "function": {"name": ..., "arguments": ...}}'
            raise TypeError(f"{field}[{index}] is {shown(call)}, want {cure}")
        if not isinstance(function.get("name"), str) or not function["name"]:
            raise TypeError(f"{field}[{index}] has the name {shown(function.get('name'))}, want a string that is not empty")
        if not isinstance(function.get("arguments"), str | Mapping | None):
            raise TypeError(f"{field}[{index}] has arguments {shown(function['arguments'])}, want JSON or a dict")


def _checked_part(part: Any, field: str) -> dict[str, Any]:
    """Templates skip parts that they do not know, so the model would never see them."""
    if not isinstance(part, Mapping):
        raise TypeError(f'{field} is {shown(part)}, want {{"type": "text", "text": ...}}')
    if part.get("type") != "text":
        cure = (
            "put it into the message's reasoning_content" if part.get("type") == "thinking" else "only text reaches the model"
        )
        raise TypeError(f"{field} is a part of type {_quoted(part.get('type'))}: {cure}")
    if not isinstance(part.get("text"), str):
        raise TypeError(f"{field}.text is {shown(part.get('text'))}, want a string")
    return dict(part)


def checked_tools(tools: Any, field: str) -> list[ToolSpec] | None:
    """Copies of the tools; None where there are none.

    Raises:
        TypeError: not a list of tools, each ``{"type": "function", "function": {"name": ...}}`` or the inner dict alone; names
            the field and the entry.
        ValueError: a text that is not valid Unicode.
    """
    if not isinstance(tools, list | tuple):
        raise TypeError(f"{field} is {shown(tools)}, want a list of tools")
    return [_checked_tool(tool, f"{field}[{index}]") for index, tool in enumerate(tools)] or None


def _checked_tool(tool: Any, field: str) -> ToolSpec:
    if not isinstance(tool, Mapping):
        raise TypeError(f'{field} is {shown(tool)}, want {{"type": "function", "function": {{"name": ...}}}}')
    function = tool.get("function", tool)
    if not isinstance(function, Mapping):
        raise TypeError(f"{field}.function is {shown(function)}, want a dict with name, description and parameters")
    name = function.get("name")
    if not isinstance(name, str) or not name:
        raise TypeError(f"{field} has the name {shown(name)}, want a string that is not empty")
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
    if not isinstance(components, Mapping):
        raise TypeError(f"{field} is {shown(components)}, want a dict of numbers by name")
    floats = {name: finite_float(value) for name, value in components.items()}
    for name, number in floats.items():
        if not isinstance(name, str) or number is None:
            value = components[name]
            raise TypeError(f"{field}[{name!r}] is {shown(value)}, want a finite number that float32 holds")
    return cast(dict[str, float], floats)


def check_all_rendered(rendered: RenderedTokens, messages: Iterable[Message], *, start: int = 0) -> None:
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
            raise ValueError(f"the renderer dropped message {index}: this model's template has no role {message['role']!r}")


def _quoted(text: Any) -> str:
    return f"'{printable_line(str(text))}'"
