"""Messages at the boundary between env and renderer: parsed completions become assistant messages, env answers are checked."""

import json
from collections.abc import Iterable, Mapping
from typing import Any

from renderers import Message, ParsedResponse, RenderedTokens, ToolCallParseStatus

from torchtitan.experiments.rl.types import ROLES
from torchtitan.experiments.rl.user_code.calls import is_finite_number


def assistant_message(parsed: ParsedResponse, *, turn: int) -> Message:
    """The completion as an OpenAI-format assistant message: content, reasoning_content and tool_calls where there are any.

    Arguments are a JSON string, as OpenAI's are. A call whose format gives it no id gets ``call_<turn>_<index>``, so ids stay
    unique over the conversation. A call to a tool that doesn't exist is a call: answering it is the env's business.

    A malformed call is never dropped: its text is added to the content, so the env and a later render see what the model said,
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
    said = [parsed.content, *(attempt["raw"] for attempt in malformed)]
    message: Message = {"role": "assistant", "content": "\n".join(filter(None, said))}
    if parsed.reasoning_content:
        message["reasoning_content"] = parsed.reasoning_content
    if calls:
        message["tool_calls"] = calls
    if malformed:
        message["malformed_tool_calls"] = malformed
    return message


def checked_messages(messages: Any, field: str) -> list[Message]:
    """Copies of the messages, so an env that keeps and changes its own can't change the record.

    Raises:
        TypeError: not messages; names the field, and the entry.
    """
    if not isinstance(messages, list | tuple):
        raise TypeError(f"{field} is {_shown(messages)}, want a list of messages")
    for index, message in enumerate(messages):
        if not isinstance(message, Mapping):
            raise TypeError(f"{field}[{index}] is {_shown(message)}, want a dict with role and content")
        if message.get("role") not in ROLES:
            raise TypeError(f"{field}[{index}] has role {message.get('role')!r}, want one of {', '.join(ROLES)}")
        if not isinstance(message.get("content"), str | list):
            raise TypeError(f"{field}[{index}] has content {_shown(message.get('content'))}, want a string or a list of parts")
    return [dict(message) for message in messages]


def checked_rewards(components: Any, field: str) -> dict[str, float]:
    """The components as floats.

    Raises:
        TypeError: not a dict of finite numbers by name.
    """
    if not isinstance(components, Mapping):
        raise TypeError(f"{field} is {_shown(components)}, want a dict of numbers by name")
    for name, value in components.items():
        if not isinstance(name, str) or not is_finite_number(value):
            raise TypeError(f"{field}[{name!r}] is {_shown(value)}, want a finite number")
    return {name: float(value) for name, value in components.items()}


def check_all_rendered(rendered: RenderedTokens, messages: Iterable[Message]) -> None:
    """Some templates skip roles they don't know without a word.

    Raises:
        ValueError: a message of the env's with content has no token in the prompt.
    """
    if not rendered.is_content:
        # The tokenizer's own chat template: whose a token is was guessed there from how long the beginnings of the conversation
        # are, which is wrong wherever the template rewrites history.
        return
    present = set(rendered.message_indices)
    for index, message in enumerate(messages):
        if message["content"] and message["role"] != "assistant" and index not in present:
            raise ValueError(f"the renderer dropped message {index}: this model's template has no role {message['role']!r}")


def _shown(value: Any) -> str:
    return f"{type(value).__name__} {str(value)[:60]!r}"
