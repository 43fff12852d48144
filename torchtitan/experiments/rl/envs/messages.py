"""Messages at the boundary between an env or an agent and the renderer.

A parsed completion becomes an assistant message, and what an env answers is checked. Both are
read-only from then on, because turns and rollouts share them. What the gateway is sent passes
through the same checks.
"""

import functools
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

from torchtitan.experiments.rl.frozen import read_only, read_only_data
from torchtitan.experiments.rl.printable import printable_line, shown
from torchtitan.experiments.rl.types import ROLES, finite_float


def assistant_message(parsed: ParsedResponse, *, turn: int) -> Message:
    """Return a completion as an assistant message in OpenAI's format, read-only.

    It has content, and reasoning_content and tool_calls if there are any. Arguments of a call are a
    JSON string, as OpenAI's are. A call whose format gives it no id gets ``call_<turn>_<index>``,
    so ids stay unique over the conversation. A call to a tool that doesn't exist is a call:
    answering it is the env's business.

    A malformed call is never dropped. Its text is added to the content, so that the env and a later
    render have it, and ``malformed_tool_calls`` lists its status and text, so that the env can tell
    it from an answer.
    """
    attempts = [call for call in parsed.tool_calls if not _is_call(call)]
    calls = [
        {
            "id": call.id or f"call_{turn}_{index}",
            "type": "function",
            "function": {"name": call.name, "arguments": _arguments(call)},
        }
        for index, call in enumerate(filter(_is_call, parsed.tool_calls))
    ]
    thought = parsed.reasoning_content
    require(isinstance(thought, str | None), "reasoning_content is", thought, "a text")
    texts = [parsed.content, *(call.raw for call in attempts)]
    message: dict[str, Any] = {"role": "assistant", "content": "\n".join(filter(None, texts))}
    if thought:
        message["reasoning_content"] = thought
    if calls:
        message["tool_calls"] = calls
    if attempts:
        message["malformed_tool_calls"] = [
            {"status": str(call.status), "raw": call.raw} for call in attempts
        ]
    return cast(Message, read_only(message))


def _is_call(call: ParsedToolCall) -> bool:
    known = call.status in (ToolCallParseStatus.OK, ToolCallParseStatus.UNKNOWN_TOOL)
    return known and isinstance(call.name, str) and call.name != ""


def _arguments(call: ParsedToolCall) -> str:
    if isinstance(call.arguments, str):
        return call.arguments
    return json.dumps({} if call.arguments is None else call.arguments, ensure_ascii=False)


def checked_messages(messages: object, field: str) -> list[Message]:
    """Return read-only copies of the messages.

    An env may keep its own messages and change them: the record does not follow.

    Args:
        field: path of the messages, for errors.

    Raises:
        TypeError: the value is no list of messages of text. Names the field, the entry, and the
            part of its content.
        ValueError: a text is not valid Unicode.
    """
    require(isinstance(messages, list | tuple), f"{field} is", messages, "a list of messages")
    return [
        _checked_message(message, f"{field}[{index}]")
        for index, message in enumerate(cast(list, messages))
    ]


def require(fits: object, what: str, value: object, wanted: str) -> None:
    """Raise the TypeError ``"{what} {value}, want {wanted}"`` unless ``fits`` is true."""
    if not fits:
        raise TypeError(f"{what} {shown(value)}, want {wanted}")


def _checked_message(message: Any, field: str) -> Message:  # noqa: ANN401 - an env's value
    require(isinstance(message, Mapping), f"{field} is", message, "a dict with role and content")
    role, content, thought = map(message.get, ("role", "content", "reasoning_content"))
    is_role = isinstance(role, str) and role in ROLES
    require(is_role, f"{field} has role", role, f"one of {', '.join(ROLES)}")
    is_content = isinstance(content, str | list)
    require(is_content, f"{field} has content", content, "a string or a list of parts")
    require(isinstance(thought, str | None), f"{field} has reasoning_content", thought, "a string")
    checked = dict(message)
    if isinstance(content, list):
        checked["content"] = [
            _checked_part(part, f"{field}.content[{index}]") for index, part in enumerate(content)
        ]
    _check_tool_calls(checked.get("tool_calls"), f"{field}.tool_calls")
    if not all(type(value) is str and value.isascii() for value in checked.values()):
        try:
            check_unicode(checked, field)
            checked = read_only_data(checked)
        except RecursionError:
            raise TypeError(f"{field} contains itself, or is nested too deep") from None
    return cast(Message, read_only(checked))


def _check_tool_calls(calls: Any, field: str) -> None:  # noqa: ANN401 - an env's value
    """Raise a TypeError unless a renderer can read the calls, which it takes as they are."""
    require(isinstance(calls, list | tuple | None), f"{field} is", calls, "a list of tool calls")
    wanted = '{"type": "function", "function": {"name": ..., "arguments": ...}}'
    for index, call in enumerate(calls or ()):
        of = f"{field}[{index}]"
        require(isinstance(call, Mapping), f"{of} is", call, wanted)
        function = call.get("function", call)
        require(isinstance(function, Mapping), f"{of} is", call, wanted)
        name = function.get("name")
        is_name = isinstance(name, str) and name
        require(is_name, f"{of} has the name", name, "a string that is not empty")
        arguments = function.get("arguments")
        is_arguments = isinstance(arguments, str | Mapping | None)
        require(is_arguments, f"{of} has arguments", arguments, "JSON or a dict")


def _checked_part(part: Any, field: str) -> dict[str, Any]:  # noqa: ANN401 - an env's value
    """Return a copy of a part of text, and raise a TypeError for any other.

    Templates skip parts that they do not know, so the model would never see them.
    """
    require(isinstance(part, Mapping), f"{field} is", part, '{"type": "text", "text": ...}')
    kind = part.get("type")
    if kind != "text":
        cure = "only text reaches the model"
        if kind == "thinking":
            cure = "put it into the message's reasoning_content"
        raise TypeError(f"{field} is a part of type '{printable_line(str(kind))}': {cure}")
    require(isinstance(part.get("text"), str), f"{field}.text is", part.get("text"), "a string")
    return dict(part)


def checked_tools(tools: object, field: str) -> list[ToolSpec] | None:
    """Return read-only copies of the tools; None if there are none.

    Raises:
        TypeError: the value is no list of tools, each
            ``{"type": "function", "function": {"name": ...}}`` or the inner dict alone. Names the
            field and the entry.
        ValueError: a text is not valid Unicode.
    """
    require(isinstance(tools, list | tuple), f"{field} is", tools, "a list of tools")
    checked = [
        _checked_tool(tool, f"{field}[{index}]") for index, tool in enumerate(cast(list, tools))
    ]
    return checked or None


def _checked_tool(tool: Any, field: str) -> ToolSpec:  # noqa: ANN401 - an env's value
    wanted = '{"type": "function", "function": {"name": ...}}'
    require(isinstance(tool, Mapping), f"{field} is", tool, wanted)
    function = tool.get("function", tool)
    wanted = "a dict with name, description and parameters"
    require(isinstance(function, Mapping), f"{field}.function is", function, wanted)
    name = function.get("name")
    is_name = isinstance(name, str) and name
    require(is_name, f"{field} has the name", name, "a string that is not empty")
    try:
        text = json.dumps(dict(tool), ensure_ascii=False)
    except (TypeError, ValueError, RecursionError) as error:
        raise TypeError(f"{field} ({name}) can't be written as JSON: {error}") from error
    check_unicode(text, field)
    return _tool_of(text)


@functools.lru_cache(maxsize=1024)
def _tool_of(text: str) -> ToolSpec:
    """Return the read-only tool of a JSON text. The rollouts of a task share their tools."""
    return cast(ToolSpec, read_only(json.loads(text)))


def check_unicode(value: object, field: str) -> None:
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
                f"{field} has {value[error.start]!a} at character {error.start}: half of a "
                "character (a lone surrogate), which no tokenizer takes"
            ) from None
    elif isinstance(value, Mapping):
        for key, entry in value.items():
            check_unicode(entry, f"{field}.{printable_line(str(key))}")
    elif isinstance(value, list | tuple):
        for index, entry in enumerate(value):
            check_unicode(entry, f"{field}[{index}]")


def checked_rewards(components: object, field: str) -> dict[str, float]:
    """Return the components as floats, read-only.

    Raises:
        TypeError: the value is no dict of numbers by name, or one is not finite within float32.
    """
    require(isinstance(components, Mapping), f"{field} is", components, "a dict of numbers by name")
    rewards: dict[str, float] = {}
    for name, value in cast(Mapping, components).items():
        number = finite_float(value)
        wanted = "a finite number that float32 holds"
        require(
            isinstance(name, str) and number is not None, f"{field}[{name!r}] is", value, wanted
        )
        rewards[name] = cast(float, number)
    return read_only(rewards)


def check_all_rendered(
    rendered: RenderedTokens, messages: Iterable[Message], *, start: int = 0
) -> None:
    """Raise if the renderer left out a message, as templates do with roles that they lack.

    Args:
        start: position of these messages' tokens in the prompt.

    Raises:
        ValueError: a message of the env's with content has no token in the prompt.
    """
    if not rendered.is_content:
        # The tokenizer's own chat template: whose a token is was guessed there from how long the
        # beginnings of the conversation are, which is wrong wherever the template rewrites history.
        return
    present = set(rendered.message_indices[start:])
    for index, message in enumerate(messages):
        if message["content"] and message["role"] != "assistant" and index not in present:
            raise ValueError(
                f"the renderer dropped message {index}: this model's template has no role "
                f"{message['role']!r}"
            )
