"""The terminal that all processes of a run share, with its live line: the last line, which is drawn again in place.

The command draws it (``LiveLine``). Whatever else a process of the run prints has to erase it first, else the two would be
mixed on one line: ``share_terminal`` sees to that, in each process. What libraries print in a spawned process, and the last
words of one that crashes, go to a file (``print_to``); its log goes on to the terminal, one line each for warnings and errors.
"""

import atexit
import os
import sys
import threading
from pathlib import Path
from typing import Any, TextIO, cast

ERASE = "\r\033[K"
"""To the first column, and what is on the line goes."""
USUAL_COLUMNS = 80
_terminal: TextIO | None = None
_file = ""


def can_redraw(stream: Any) -> bool:
    """Whether ``stream`` is a terminal that takes escape sequences."""
    try:
        return bool(stream.isatty()) and os.environ.get("TERM", "dumb") not in ("", "dumb")
    except ValueError:  # it is closed
        return False


def has_colours(stream: Any) -> bool:
    """Whether to print in colours there: https://no-color.org."""
    return can_redraw(stream) and not os.environ.get("NO_COLOR")


def columns(stream: Any) -> int:
    """Width of the terminal, as it is now."""
    try:
        return os.get_terminal_size(stream.fileno()).columns or USUAL_COLUMNS
    except (OSError, ValueError):
        return USUAL_COLUMNS


class SharedTerminal:
    """A stream of a terminal that may have a live line: each line that is written begins by erasing that."""

    def __init__(self, stream: TextIO):
        self._stream = stream
        self.in_line = False
        """Whether what was written last has not ended its line yet."""

    def write(self, text: str) -> int:
        if text:
            self._stream.write(text if self.in_line else ERASE + text)
            self.in_line = not text.endswith("\n")
        return len(text)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


def shared(stream: TextIO) -> TextIO:
    """``stream``, as a SharedTerminal where it is a terminal."""
    if not can_redraw(stream) or isinstance(stream, SharedTerminal):
        return stream
    return cast(TextIO, SharedTerminal(stream))


def share_terminal() -> None:
    """Have this process's stdout and stderr erase the live line, where they are a terminal. May be called again."""
    sys.stdout, sys.stderr = shared(sys.stdout), shared(sys.stderr)


class LiveLine:
    """Any thread may call it."""

    _newest: "LiveLine | None" = None

    def __init__(self, stream: TextIO):
        """``stream`` can be redrawn."""
        self._stream = stream._stream if isinstance(stream, SharedTerminal) else stream
        self._lock = threading.Lock()
        self._text, self._ended = "", False
        LiveLine._newest = self

    def show(self, text: str) -> None:
        """Draw ``text`` in place of what was shown; "" shows nothing. It is cut where the terminal ends."""
        with self._lock:
            if text or self._text:
                self._text = text
                self._draw()

    def end(self) -> None:
        """Erase it. Nothing is shown afterwards."""
        self.show("")
        with self._lock:
            self._ended = True

    def _draw(self) -> None:
        # A line that somebody has begun would be erased.
        if self._ended or any(
            isinstance(stream, SharedTerminal) and stream.in_line
            for stream in (sys.stdout, sys.stderr)
        ):
            return
        try:
            # Not the last column: some terminals go to the next line there.
            self._stream.write(ERASE + self._text[: columns(self._stream) - 1])
            self._stream.flush()
        except (
            OSError,
            ValueError,
        ):  # the terminal is gone; the next whole line says so in the log
            self._ended = True


def end_live_line() -> None:
    """Erase this process's live line, if it has one: it is about to end."""
    if LiveLine._newest is not None:
        LiveLine._newest.end()


def terminal() -> TextIO:
    """Where this process prints lines for people: its stderr, also after ``print_to``."""
    return _terminal or sys.stderr


def printed_file() -> str:
    """Path of the file that ``print_to`` was given; "" where it was not called."""
    return _file


def print_to(path: Path) -> None:
    """Send stdout and stderr of this process, and of those that it starts, to ``path``, whatever language writes to them.

    The file is removed when the process ends by itself and has printed nothing.
    """
    global _terminal, _file
    _file = str(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    atexit.register(_remove_if_empty, path)
    _terminal = shared(
        os.fdopen(os.dup(2), "w", buffering=1, encoding="utf-8", errors="backslashreplace")
    )
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    os.dup2(file, 1)
    os.dup2(file, 2)
    os.close(file)


def _remove_if_empty(path: Path) -> None:
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    if path.exists() and path.stat().st_size == 0:
        path.unlink()
