"""Errors that a person reads as one line: what failed, the value seen and the cure.

ConfigError     the config can't run; raised before a process is spawned
RunError        the run can't go on
UserCodeError   code of the user's failed: an env, a reward function, an algorithm

`cause_of` makes such a line of any exception. `users_traceback` keeps the frames of the user's
code.
"""

import re
import sysconfig
import threading
import traceback
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

_PLAIN = (str, int, float, bool, type(None))
"""Types of values that are sent to another process as they are."""
_SHOWN_LENGTH = 500
"""Maximum number of characters of a value that a ConfigError shows."""
CAUSE_LENGTH = 400
"""Maximum number of characters of a cause, which goes into logs and rollout records."""
OWN_LENGTH = 1000
"""Maximum number of characters of an error of the library's own, whose cure stands last."""
TRACEBACK_LINES = 40
"""Maximum number of lines of a traceback that a person is shown; the innermost are kept."""


class ConfigError(ValueError):
    """A config that can't run: names the field, the value seen and the cure."""

    def __init__(self, field: str, value: object, cure: str, *, lines: Sequence[str] = ()):
        """Make the error's message of its parts.

        Args:
            lines: what else is printed, a line for each part at fault, such as the rows of a file.
        """
        self.field = field
        self.value = value
        self.cure = cure
        self.lines = tuple(lines)
        super().__init__(f"{field} = {_shown(value)}: {cure}")

    def __reduce__(self) -> tuple[type["ConfigError"], tuple[str, object, str]]:
        # The value may be of a class that can't be pickled, or whose pickle runs code.
        value = self.value if type(self.value) in _PLAIN else _Text(_shown(self.value))
        return type(self), (self.field, value, self.cure)


class MissingError(ConfigError):
    """A config that names what this machine lacks: a file, a package, a key.

    A plan of the run can be made without it, so a dry run only notes it.
    """


class UnknownOption(ConfigError):
    """Words of a command line that no field of its config takes.

    The cure names the options that were probably meant, if there are any.
    """

    def __str__(self) -> str:
        return f"no option {self.field}" + (f"; {self.cure}" if self.cure else "")


class RunError(RuntimeError):
    """A run that can't go on, in one line."""

    traceback = ""
    """Traceback of the user's code, for an error that left its cause in another process."""


class PeerGone(RunError):
    """A process of the run that does not answer another one.

    It has probably ended, which its supervisor may see a little later.
    """


class UserCodeError(Exception):
    """A failure of the user's code. The message is its cause in one line, exception type first."""

    where = ""
    """Function of the user's that was waited in at the deadline, with file and line."""
    returned = False
    """True if the code returned after its deadline."""
    is_inner = False
    """True if a call inside the one that failed was late, with a limit of its own."""
    was_abandoned = False
    """True if the code ignored its cancellation, and still runs."""
    traceback = ""
    """Traceback of the user's code, for an error that left its cause in another process."""

    def of(self, owner: str) -> "UserCodeError":
        """Return the same error with a message that begins with the owner of the code."""
        named = type(self)(f"{owner}: {self}")
        named.where = self.where
        named.returned = self.returned
        named.is_inner = self.is_inner
        named.was_abandoned = self.was_abandoned
        named.traceback = users_traceback(self)
        return named


class UserCodeTimeout(UserCodeError):
    """User code that took longer than its limit."""


def _shown(value: object) -> str:
    try:
        text = repr(value)
    except Exception:  # noqa: BLE001 - the value may be of a user's class
        text = f"<{type(value).__name__}>"
    return text if len(text) <= _SHOWN_LENGTH else f"{text[:_SHOWN_LENGTH]}..."


class _Text:
    """Text of a value that stayed in another process, shown as it was there."""

    def __init__(self, text: str):
        self._text = text

    def __repr__(self) -> str:
        return self._text


_VARIES = re.compile(r"0x[0-9a-f]+|\d+")
"""Parts of a cause that differ between failures of one kind: addresses and numbers."""
_LIBRARY = f"{Path(__file__).parent}/"
"""Beginning of the paths of the library's files."""
_OTHERS = (
    "<frozen ",  # modules of Python's own
    *{sysconfig.get_paths()[name] for name in ("stdlib", "platstdlib", "purelib", "platlib")},
)
"""Beginnings of the paths of Python's files and of installed packages'."""


@contextmanager
def user_code(field: str, value: object, what: str) -> Iterator[None]:
    """Refuse ``field`` if the code in the block raises or exits.

    A ConfigError passes unchanged. So does Ctrl-C, which Python raises in the main thread only.

    Args:
        what: the beginning of the cure, such as "its constructor failed".
    """
    try:
        yield
    except ConfigError:
        raise
    except BaseException as error:  # noqa: BLE001 - user code may exit
        in_main_thread = threading.current_thread() is threading.main_thread()
        if isinstance(error, KeyboardInterrupt) and in_main_thread:
            raise
        raise ConfigError(field, value, f"{what}: {cause_of(error, folder=True)}") from error


@contextmanager
def inside(field: str) -> Iterator[None]:
    """Put ``field`` before the field of a ConfigError that the block raises.

    A component checks its own fields and does not know its place in the config. The field that it
    names may begin with the component's own name already, or with the whole of ``field``.
    """
    try:
        yield
    except ConfigError as error:
        own_name = field.rpartition(".")[2]
        inner = error.field.removeprefix(f"{field}.").removeprefix(f"{own_name}.")
        kind = MissingError if isinstance(error, MissingError) else ConfigError
        raise kind(f"{field}.{inner}", error.value, error.cure, lines=error.lines) from error


def cause_of(error: BaseException, *, folder: bool = False) -> str:
    """Return an exception in one line.

    An error of the library's own is a sentence already. Of any other the line has the type, the
    message, and the file and line of the innermost frame of the user's code; if it came through
    none, of the innermost frame.

    Args:
        folder: True if the file is named with its folder.
    """
    text = _message_of(error)
    if isinstance(error, UserCodeError | RunError | ConfigError):
        return text[:OWN_LENGTH]
    line = type(error).__name__
    if text:
        line += f": {text[:CAUSE_LENGTH]}"
    if locations := locations_of(error):
        file, number = locations[-1]
        line += f" ({file if folder else Path(file).name}:{number})"
    return line


def kind_of(cause: str) -> str:
    """Return what the causes of failures of one kind have in common: all but numbers."""
    return _VARIES.sub("#", cause)


def cause_text(cause: object) -> str:
    """Return the cause of a failure as a line, where a user may have given an exception for it."""
    if isinstance(cause, BaseException):
        return cause_of(cause)
    return cause if isinstance(cause, str) else _message_of(cause)


def _message_of(error: object) -> str:
    try:
        return " ".join(str(error).split())
    except Exception as broken:  # noqa: BLE001 - the exception may be of a user's class
        return f"its message can't be read ({type(broken).__name__} in __str__)"


def locations_of(error: BaseException) -> list[tuple[str, int | None]]:
    """Return file and line of each frame of the user's code that an error came through.

    An error that came through no code of the user's has the locations of all its frames.
    """
    if isinstance(error, SyntaxError) and error.filename:
        return [(error.filename, error.lineno)]
    locations: list[tuple[str, int | None]] = []
    for frame, line in traceback.walk_tb(error.__traceback__):
        locations.append((frame.f_code.co_filename, line))
    return [location for location in locations if is_users_file(location[0])] or locations


def users_traceback(error: BaseException) -> str:
    """Return an error's traceback as Python prints it, with the frames of the user's code alone.

    An error of the library's own has the traceback of the user's error that caused it. Causes,
    groups and notes of the user's error are in it.

    Returns:
        At most TRACEBACK_LINES lines, without a line end behind the last. The text is empty if the
        error came through no code of the user's.
    """
    if isinstance(error, UserCodeError | RunError | ConfigError):
        kept = getattr(error, "traceback", "")
        if kept or error.__cause__ is None:
            return kept
        return users_traceback(error.__cause__)
    try:
        whole = traceback.TracebackException.from_exception(error, compact=True)
        text = "".join(whole.format()) if _keep_users_frames(whole) else ""
    except Exception:  # noqa: BLE001 - the exception and its notes may be of a user's class
        return ""
    lines = [line[:CAUSE_LENGTH] for line in text.splitlines()]
    if len(lines) > TRACEBACK_LINES:
        lines = ["...", *lines[1 - TRACEBACK_LINES :]]
    return "\n".join(lines)


def _keep_users_frames(whole: traceback.TracebackException) -> bool:
    """Take all other frames out of a traceback, its causes and its groups.

    Returns:
        True if the traceback names code of the user's.
    """
    names_users_code = False
    pending = [whole]
    while pending:
        current = pending.pop()
        current.stack[:] = [frame for frame in current.stack if is_users_file(frame.filename)]
        # A file that can't be parsed has no frame: the SyntaxError names it.
        is_in_file = bool(getattr(current, "filename", None))
        names_users_code = names_users_code or bool(current.stack) or is_in_file
        related = (current.__cause__, current.__context__, *(current.exceptions or ()))
        pending += [error for error in related if error is not None]
    return names_users_code


def is_users_file(file: str) -> bool:
    """Return True if a file is the user's: no file of the library, Python or a package."""
    return not file.startswith((_LIBRARY, *_OTHERS))


def is_library_file(file: str) -> bool:
    """Return True if a file is the library's."""
    return file.startswith(_LIBRARY)
