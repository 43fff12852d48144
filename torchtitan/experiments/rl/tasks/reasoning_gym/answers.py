"""Reads the answer in a message."""

import re


def answer_in(message: str, tag: str | None) -> str | None:
    """The text between the last pair of <tag> and </tag>, or None. Without a tag, the whole message."""
    if tag is None:
        return message.strip()
    pairs = re.findall(rf"<{re.escape(tag)}>((?:(?!<{re.escape(tag)}>).)*?)</{re.escape(tag)}>", message, re.DOTALL)
    return pairs[-1].strip() if pairs else None
