"""Makes text of models, envs and servers safe to print, and finds names that are alike.

Such text may hold characters that act on a terminal, reorder a line or have no encoding. They are
printed as their escapes.
"""

import difflib
import re
from pathlib import Path

_UNSAFE = re.compile(
    "[\x00-\x08\x0b-\x1f\x7f"  # C0 controls but tab and newline: ESC begins a terminal's commands
    "\x80-\x9f"  # C1 controls: some terminals take them for ESC sequences
    "\u061c\u200e\u200f\u202a-\u202e\u2066-\u2069"  # writing directions: they reorder text
    "\u2028\u2029"  # line separators
    "\ud800-\udfff]"  # halves of characters, which no encoding takes
)
_LINE_BREAKS = re.compile(r"[\t\n]")


def printable(text: str) -> str:
    r"""Return ``text`` with unsafe characters as their escapes, such as ``\x1b``.

    Tabs and newlines stay.
    """
    return _UNSAFE.sub(lambda match: match[0].encode("unicode_escape").decode(), text)


def printable_line(text: str) -> str:
    """Return ``text`` in one line, safe to print: tabs and newlines become spaces."""
    return printable(_LINE_BREAKS.sub(" ", text))


_SENTENCE_LENGTH = 300
"""Maximum number of characters of a message that is printed as one line."""


def one_sentence(text: str, length: int = _SENTENCE_LENGTH) -> str:
    """Return ``text`` as one line of at most ``length`` characters.

    If all of the text does not fit, its first line stands for it. A traceback's last line, which
    names the error, stands for it in any case.
    """
    lines = [" ".join(line.split()) for line in text.splitlines() if line.strip()]
    line = " ".join(lines)
    if any("Traceback (most recent call last)" in line for line in lines):
        line = lines[-1]
    elif len(line) > length:
        line = lines[0]
    return line if len(line) <= length else f"{line[:length]}..."


def printable_json(text: str) -> str:
    """Return JSON text with unsafe characters as JSON's escapes. It decodes to the same value."""
    return _UNSAFE.sub(lambda match: f"\\u{ord(match[0]):04x}", text)


def text_of(value: object, length: int = 60) -> str:
    """Return the beginning of a value's text; "?" if a user's class fails to give one."""
    try:
        return printable_line(str(value)[:length])
    except Exception:  # noqa: BLE001 - the value may be of a user's class
        return "?"


def shown(value: object) -> str:
    """Return the type of a value and the beginning of its text."""
    return f"{type(value).__name__} '{text_of(value)}'"


def perhaps_meant(path: Path) -> str:
    """Return the end of an error about a path that is not there: what is there by a like name.

    It is empty where nothing is.
    """
    try:
        names = [entry.name for entry in path.parent.iterdir()]
    except OSError:
        return ""
    near = difflib.get_close_matches(path.name, names, n=1, cutoff=0.7)
    return f"; perhaps you meant {printable_line(str(path.with_name(near[0])))}" if near else ""
