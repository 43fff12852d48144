"""Sends what a spawned process prints to a file of its own: libraries' notices, and the last words of one that crashes.

Its log goes on to the terminal (``terminal``): one line each for our warnings and for errors.
"""

import atexit
import os
import sys
from pathlib import Path
from typing import TextIO

from torchtitan.experiments.rl.process.terminal import shared

_terminal: TextIO | None = None
_file = ""


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
    _terminal = shared(os.fdopen(os.dup(2), "w", buffering=1, encoding="utf-8", errors="backslashreplace"))
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
