"""Makes text of models, envs and servers safe to print."""

import re
from typing import Any

_UNSAFE = re.compile(
    "[\x00-\x08\x0b-\x1f\x7f"  # C0 controls but tab and newline: ESC begins a terminal's commands
    "\x80-\x9f"  # C1 controls: some terminals take them for ESC sequences
    "\u061c\u200e\u200f\u202a-\u202e\u2066-\u2069"  # marks and overrides of the writing direction: they reorder text
    "\u2028\u2029"  # line separators
    "\ud800-\udfff]"  # halves of characters, which no encoding takes
)
_LINE_BREAKS = re.compile(r"[\t\n]")


def printable(text: str) -> str:
    r"""``text`` with every character that could act on a terminal as its escape, such as ``\x1b``. Tabs and newlines stay."""
    return _UNSAFE.sub(lambda match: match[0].encode("unicode_escape").decode(), text)


def printable_line(text: str) -> str:
    """The same in one line: tabs and newlines become spaces."""
    return printable(_LINE_BREAKS.sub(" ", text))


_SENTENCE = 300
"""Characters."""


def one_sentence(text: str, length: int = _SENTENCE) -> str:
    """``text`` in one line. Of a longer one the first line that says something, of a traceback the last, cut there."""
    lines = [" ".join(line.split()) for line in text.splitlines() if line.strip()]
    traceback = any("Traceback (most recent call last)" in line for line in lines)
    whole = " ".join(lines)
    line = whole if len(whole) <= length and not traceback else lines[-1 if traceback else 0]
    return line if len(line) <= length else f"{line[:length]}..."


def printable_json(text: str) -> str:
    """JSON text with the same characters as JSON escapes: what it decodes to does not change."""
    return _UNSAFE.sub(lambda match: f"\\u{ord(match[0]):04x}", text)


def text_of(value: Any, length: int = 60) -> str:
    """Return the beginning of a value's text; "?" if a user's class fails to give one."""
    try:
        return printable_line(str(value)[:length])
    except Exception:
        return "?"


def shown(value: Any) -> str:
    """The type of a value, and the beginning of its text."""
    return f"{type(value).__name__} '{text_of(value)}'"
