"""Errors a person reads as one line."""

from collections.abc import Sequence
from typing import Any

_PLAIN = (str, int, float, bool, type(None))

_SHOWN = 500
"""Characters of a value that an error shows."""


class ConfigError(ValueError):
    """A config that can't run: names the field, the value seen and the cure."""

    def __init__(self, field: str, value: Any, cure: str, *, lines: Sequence[str] = ()):
        """``lines``: one for each part at fault, such as the rows of a file."""
        self.field, self.value, self.cure, self.lines = field, value, cure, tuple(lines)
        super().__init__(f"{field} = {_shown(value)}: {cure}")

    def __reduce__(self) -> tuple[type["ConfigError"], tuple[str, Any, str]]:
        # Between processes: the value may be of a class that can't be pickled, or whose pickle runs code.
        value = self.value if type(self.value) in _PLAIN else _Text(_shown(self.value))
        return type(self), (self.field, value, self.cure)


class MissingError(ConfigError):
    """This machine lacks what the config names: a file, a package, a key. A plan of the run can be made without it."""


class RunError(RuntimeError):
    """A run that can't go on, in one line."""


class PeerGone(RunError):
    """A process of the run lacks another one, which has probably ended: that it has may be seen a little later."""


def _shown(value: Any) -> str:
    try:
        text = repr(value)
    except BaseException:  # of a user's class
        text = f"<{type(value).__name__}>"
    return text if len(text) <= _SHOWN else f"{text[:_SHOWN]}..."


class _Text:
    """A value of an error from another process: what was shown of it."""

    def __init__(self, text: str):
        self._text = text

    def __repr__(self) -> str:
        return self._text
