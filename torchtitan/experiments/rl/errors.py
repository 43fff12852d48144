"""Errors a person reads as one line."""

import sysconfig
import threading
import traceback
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
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


_LIBRARY = str(Path(__file__).parent)
_OTHERS = ("<frozen ", *{sysconfig.get_paths()[name] for name in ("stdlib", "platstdlib", "purelib", "platlib")})


@contextmanager
def user_code(field: str, value: Any, what: str) -> Iterator[None]:
    """Refuse ``field`` if the code in the block raises or exits. A ConfigError passes as it is, and so does Ctrl-C, which only
    the main thread gets.

    Args:
        what: names the code in the error, such as "its constructor failed".
    """
    try:
        yield
    except BaseException as error:  # SystemExit too, and whatever else a user's code derives from it
        pressed = isinstance(error, KeyboardInterrupt) and threading.current_thread() is threading.main_thread()
        if pressed or isinstance(error, ConfigError):
            raise
        raise ConfigError(field, value, f"{what}: {fault_of(error)}") from error


@contextmanager
def inside(field: str) -> Iterator[None]:
    """Put ``field`` before the field of a ConfigError that is raised in the block by a part, which does not know its place. It
    may begin with the part's own name, or with ``field``."""
    try:
        yield
    except ConfigError as error:
        own = error.field.removeprefix(f"{field}.").removeprefix(f"{field.rpartition('.')[2]}.")
        raise ConfigError(f"{field}.{own}", error.value, error.cure, lines=error.lines) from error


def fault_of(error: BaseException) -> str:
    """One line: exception type, message, and the file and line of the user's code that the exception came through.

    A RunError names the user's code and its fault; the file and line are those of its cause.
    """
    if isinstance(error, RunError):
        return f"{error} ({_place(error.__cause__ or error)})"
    try:
        text = " ".join(str(error).split())
    except BaseException:  # a __str__ that fails, or exits
        text = ""
    name = type(error).__name__
    return f"{name}{f': {text}' if text else ''} ({_place(error)})"


def _place(error: BaseException) -> str:
    """The innermost frame of code that is not the library's, Python's or an installed package's; without one, the innermost."""
    if isinstance(error, SyntaxError) and error.filename:
        return f"{error.filename}:{error.lineno}"
    frames = traceback.extract_tb(error.__traceback__)
    if not frames:
        return "no traceback"
    own = [frame for frame in frames if not frame.filename.startswith((_LIBRARY, *_OTHERS))]
    frame = (own or frames)[-1]
    return f"{frame.filename}:{frame.lineno}"
