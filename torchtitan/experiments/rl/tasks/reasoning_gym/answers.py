"""What a model gave as its answer."""

import re


def answer_in(message: str, tag: str | None) -> str | None:
    """What is between the last pair of <tag> and </tag>; None where there is none. Without a tag, the whole message."""
    if tag is None:
        return message.strip()
    pairs = re.findall(rf"<{re.escape(tag)}>((?:(?!<{re.escape(tag)}>).)*?)</{re.escape(tag)}>", message, re.DOTALL)
    return pairs[-1].strip() if pairs else None
