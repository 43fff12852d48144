"""Errors a person reads as one line."""

import sysconfig
import threading
import traceback
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

_PLAIN = (str, int, float, bool, type(None))

_SHOWN, CAUSE_LENGTH = 500, 400
"""Characters of a value that an error shows, and of a cause that are kept: it goes into logs and rollout records."""
OWN_LENGTH = 1000
"""Characters of an error of the library's own that are kept: room for all of it, as its cure stands last."""
TRACEBACK_LINES = 40
"""Maximum number of lines of a traceback that a person is shown; the innermost are kept."""


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


class UnknownOption(ConfigError):
    """Words of a command line that no field of its config takes, and the options that were probably meant."""

    def __str__(self) -> str:
        return f"no option {self.field}" + (f"; {self.cure}" if self.cure else "")


class RunError(RuntimeError):
    """A run that can't go on, in one line."""

    traceback = ""
    """Result of ``users_traceback`` in the process that raised the error: a ``__cause__`` stays behind there."""


class PeerGone(RunError):
    """A process of the run lacks another one, which has probably ended: that it has may be seen a little later."""


class UserCodeError(Exception):
    """User code failed; the message is its cause in one line, exception type first."""

    where = ""
    """Function of the user's in which late code waited at its deadline, with file and line."""
    returned = False
    """True if late code has returned, too late, and raised nothing."""
    traceback = ""
    """Result of ``users_traceback`` in the process that raised the error: a ``__cause__`` stays behind there."""

    def of(self, owner: str) -> "UserCodeError":
        """The same, with a message that begins with whose code it is."""
        named = type(self)(f"{owner}: {self}")
        named.where, named.returned, named.traceback = (
            self.where,
            self.returned,
            users_traceback(self),
        )
        return named


class UserCodeTimeout(UserCodeError):
    """User code took longer than its limit."""


def _shown(value: Any) -> str:
    try:
        text = repr(value)
    except Exception:  # of a user's class
        text = f"<{type(value).__name__}>"
    return text if len(text) <= _SHOWN else f"{text[:_SHOWN]}..."


class _Text:
    """A value of an error from another process: what was shown of it."""

    def __init__(self, text: str):
        self._text = text

    def __repr__(self) -> str:
        return self._text


_LIBRARY = f"{Path(__file__).parent}/"
_OTHERS = (
    "<frozen ",
    *{sysconfig.get_paths()[name] for name in ("stdlib", "platstdlib", "purelib", "platlib")},
)


@contextmanager
def user_code(field: str, value: Any, what: str) -> Iterator[None]:
    """Refuse ``field`` if the code in the block raises or exits. A ConfigError passes as it is, and so does Ctrl-C, which only
    the main thread gets.

    Args:
        what: names the code in the error, such as "its constructor failed".
    """
    try:
        yield
    except (
        BaseException
    ) as error:  # SystemExit too, and whatever else a user's code derives from it
        pressed = (
            isinstance(error, KeyboardInterrupt)
            and threading.current_thread() is threading.main_thread()
        )
        if pressed or isinstance(error, ConfigError):
            raise
        raise ConfigError(field, value, f"{what}: {cause_of(error, folder=True)}") from error


@contextmanager
def inside(field: str) -> Iterator[None]:
    """Put ``field`` before the field of a ConfigError that is raised in the block by a part, which does not know its place. It
    may begin with the part's own name, or with ``field``."""
    try:
        yield
    except ConfigError as error:
        own = error.field.removeprefix(f"{field}.").removeprefix(f"{field.rpartition('.')[2]}.")
        kind = MissingError if isinstance(error, MissingError) else ConfigError
        raise kind(f"{field}.{own}", error.value, error.cure, lines=error.lines) from error


def cause_of(error: BaseException, *, folder: bool = False) -> str:
    """One line. The library's own errors are sentences; of others the type, the message, and the file and line of the user's
    code that it came through: the innermost frame that is not the library's, Python's or an installed package's; without one,
    the innermost. For a message that can't be read the line says so.

    Args:
        folder: name the file with its folder.
    """
    try:
        text = " ".join(str(error).split())
    except Exception as broken:  # the exception is the user's too
        text = f"its message can't be read ({type(broken).__name__} in __str__)"
    if isinstance(error, UserCodeError | RunError | ConfigError):
        return text[:OWN_LENGTH]
    text = text[:CAUSE_LENGTH]
    where = "".join(
        f" ({file if folder else Path(file).name}:{line})" for file, line in places_of(error)[-1:]
    )
    return f"{type(error).__name__}{text and f': {text}'}{where}"


def places_of(error: BaseException) -> list[tuple[str, int | None]]:
    """Return file and line of each frame of the user's code that an error came through; of all where there is none."""
    if isinstance(error, SyntaxError) and error.filename:
        return [(error.filename, error.lineno)]
    frames = traceback.walk_tb(error.__traceback__)
    places: list[tuple[str, int | None]] = [
        (frame.f_code.co_filename, line) for frame, line in frames
    ]
    return [place for place in places if is_users_file(place[0])] or places


def users_traceback(error: BaseException) -> str:
    """Return the traceback of an error as Python prints it, with the frames of the user's code alone.

    Of an error that the library made of a user's, the traceback is the user's. Causes, groups and notes of the error are in it.

    Returns:
        At most TRACEBACK_LINES lines, without a line end behind the last. Empty where the error came through no code of a user.
    """
    if isinstance(error, UserCodeError | RunError | ConfigError):
        kept = getattr(error, "traceback", "")
        return kept or (users_traceback(error.__cause__) if error.__cause__ is not None else "")
    try:
        whole = traceback.TracebackException.from_exception(error, compact=True)
        text = "".join(whole.format()) if _keep_users_frames(whole) else ""
    except Exception:  # the exception is the user's, and so are its notes
        return ""
    lines = [line[:CAUSE_LENGTH] for line in text.splitlines()]
    return "\n".join(
        lines if len(lines) <= TRACEBACK_LINES else ["...", *lines[1 - TRACEBACK_LINES :]]
    )


def _keep_users_frames(whole: traceback.TracebackException) -> bool:
    """Take all other frames out of a traceback, its causes and its groups; False if none is left."""
    users = False
    parts = [whole]
    while parts:
        part = parts.pop()
        part.stack[:] = [frame for frame in part.stack if is_users_file(frame.filename)]
        in_file = issubclass(part.exc_type, SyntaxError) and bool(
            part.filename
        )  # such a file has no frame
        users = users or bool(part.stack) or in_file
        parts += [
            other
            for other in (part.__cause__, part.__context__, *(part.exceptions or ()))
            if other is not None
        ]
    return users


def is_users_file(file: str) -> bool:
    """True if the code of this file is neither the library's, Python's nor an installed package's."""
    return not file.startswith((_LIBRARY, *_OTHERS))


def is_library_file(file: str) -> bool:
    """True if the code of this file is the library's."""
    return file.startswith(_LIBRARY)
