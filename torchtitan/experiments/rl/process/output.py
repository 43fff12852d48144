"""Where a process of a run prints.

One process prints for people, the command's. Every other process has a file of its own, which gets
whatever its libraries print and the last words of a crash (``print_to``). Its notes, which are the
lines that people are to see, go through a port to the command's process (``send_notes_to``), whose
`observability.console` keeps lines whole.
"""

import atexit
import os
import sys
from pathlib import Path
from typing import Protocol, TextIO

MAX_UNSENT = 100
"""Maximum number of notes that a process keeps until it knows where to send them."""


def can_redraw(stream: TextIO) -> bool:
    """Return whether a stream is a terminal that takes escape sequences."""
    try:
        return stream.isatty() and os.environ.get("TERM", "dumb") not in ("", "dumb")
    except ValueError:  # it is closed
        return False


def has_colours(stream: TextIO) -> bool:
    """Return whether a stream is a terminal whose user wants colours: https://no-color.org."""
    return can_redraw(stream) and not os.environ.get("NO_COLOR")


class NotePort(Protocol):
    """Way to the process that prints, such as Monarch's ``Port``."""

    def send(self, note: str, /) -> None:
        """Send a note without waiting for anything. Any thread may call it."""


_file = ""
_port: NotePort | None = None
_unsent: list[str] = []


def tell(note: str) -> None:
    """Show lines to the people who follow the run.

    The process that prints writes them to its stderr. Another process sends them there, or keeps
    them until it knows the way.
    """
    if _port is not None:
        _port.send(note)
    elif not _file:
        sys.stderr.write(f"{note}\n")  # at once: another thread may print
        sys.stderr.flush()
    elif len(_unsent) < MAX_UNSENT:
        _unsent.append(note)


def send_notes_to(port: NotePort) -> None:
    """Send the notes of this process to ``port`` from now on, those first that it has kept."""
    global _port
    _port = port
    while _unsent:
        port.send(_unsent.pop(0))


def printed_file() -> str:
    """Return the path of the file that ``print_to`` was given; empty if it was not called."""
    return _file


def print_to(path: Path) -> None:
    """Send the stdout and stderr of this process, and of those that it starts, to a file.

    It does not matter which language writes to them. The file is removed when the process ends by
    itself and has printed nothing.
    """
    global _file
    _file = str(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    atexit.register(_remove_if_empty, path)
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
