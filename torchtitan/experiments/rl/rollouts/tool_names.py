"""Which tool each message of a conversation is the answer of."""

from collections.abc import Mapping, Sequence

from renderers import Message


def tool_names(messages: Sequence[Message]) -> list[str | None]:
    """For each message the name of the tool that it is the answer of; None where it is no tool's, or that is not known.

    A tool's message says it itself (``name``), or names the call that it answers (``tool_call_id``). One that does neither is
    taken for the answer to the first call of the last assistant message that nothing has answered.
    """
    names: list[str | None] = []
    open_calls: dict[str, str] = {}
    for message in messages:
        fields: Mapping = message
        if fields["role"] == "assistant":
            open_calls = {}
            for index, call in enumerate(fields.get("tool_calls") or ()):
                open_calls[str(call.get("id") or index)] = call.get("function", call)["name"]
        names.append(_answering(fields, open_calls) if fields["role"] == "tool" else None)
    return names


def _answering(message: Mapping, open_calls: dict[str, str]) -> str | None:
    """The tool's name; the call that the message answers is taken from ``open_calls``."""
    own, call = message.get("name"), message.get("tool_call_id")
    if call is None:  # the first of that name, where the message has one
        call = next((key for key, name in open_calls.items() if own is None or name == own), None)
    called = open_calls.pop(str(call), None)
    return own if isinstance(own, str) else called
