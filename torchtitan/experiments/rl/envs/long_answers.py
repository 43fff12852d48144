"""Cuts long messages of an env in the middle, such as a web page that a tool returns.

The beginning and the end of a page or of a log say most of it, and the model is told how much is
missing, so that it may ask for less.
"""

from collections.abc import Sequence
from typing import cast

from renderers import Message

from torchtitan.experiments.rl.envs.special_texts import SpecialTexts
from torchtitan.experiments.rl.frozen import read_only


def cut_messages(
    messages: Sequence[Message], limit: int, texts: SpecialTexts
) -> tuple[list[Message], int]:
    """Return the messages, each with at most ``limit`` tokens of its text, and how many were cut.

    A message that is not too long is the same object as before.
    """
    cut = [_cut_message(message, limit, texts) for message in messages]
    count = sum(now is not before for now, before in zip(cut, messages, strict=True))
    return cut, count


def _cut_message(message: Message, limit: int, texts: SpecialTexts) -> Message:
    content = message["content"]
    if not isinstance(content, str):
        content = "".join(cast(dict[str, str], part)["text"] for part in content)
    shorter = cut_in_the_middle(content, limit, texts)
    if shorter is content:
        return message
    return cast(Message, read_only({**message, "content": shorter}))


def cut_in_the_middle(text: str, limit: int, texts: SpecialTexts) -> str:
    """Return a text without the tokens between its first and its last ``limit / 2``.

    A line in their place says how many there were. It is not counted.
    """
    if len(text) <= limit:
        return text  # no token is shorter than a character's byte
    positions = texts.positions_of_tokens(text)
    if len(positions) <= limit:
        return text
    tail = limit // 2
    head = limit - tail
    _, end = positions[head - 1]
    start = positions[-tail][0] if tail else len(text)
    left_out = len(positions) - limit
    return f"{text[:end]}\n[... {left_out:,} tokens left out ...]\n{text[start:]}"
