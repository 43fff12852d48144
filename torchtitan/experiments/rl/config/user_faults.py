"""Turns what a user's code raises while a config is checked into a ConfigError that names the field, the file and the line."""

import sysconfig
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from torchtitan.experiments.rl.errors import ConfigError, RunError

_LIBRARY = str(Path(__file__).parents[1])
_OTHERS = ("<frozen ", *{sysconfig.get_paths()[name] for name in ("stdlib", "platstdlib", "purelib", "platlib")})


@contextmanager
def user_code(field: str, value: Any, what: str) -> Iterator[None]:
    """Refuse ``field`` if the code in the block raises or exits. A ConfigError and Ctrl-C pass as they are.

    Args:
        what: names the code in the error, such as "its constructor failed".
    """
    try:
        yield
    except (ConfigError, KeyboardInterrupt):
        raise
    except BaseException as error:  # SystemExit, and whatever else a user's code derives from it
        raise ConfigError(field, value, f"{what}: {fault_of(error)}") from error


def fault_of(error: BaseException) -> str:
    """One line: exception type, message, and the file and line of the user's code that the exception came through.

    A RunError names the user's code and its fault; the file and line are those of its cause.
    """
    if isinstance(error, RunError):
        return f"{error} ({_place(error.__cause__ or error)})"
    try:
        text = " ".join(str(error).split())
    except Exception:  # a __str__ that fails
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
