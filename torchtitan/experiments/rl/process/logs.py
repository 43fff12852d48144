"""Handlers and formats of a process's log: every record to a file as JSON, few of them to the terminal."""

import contextlib
import errno
import json
import logging
import os
import sys
from datetime import UTC, datetime
from logging.handlers import RotatingFileHandler
from pathlib import Path

from torchtitan.experiments.rl.printable import one_sentence, printable_json, printable_line
from torchtitan.experiments.rl.process.output import printed_file, terminal

OURS = "torchtitan.experiments.rl"


LOG_BYTES = 64 * 2**20
"""Of one file. What the run needs itself it reads from no log: a resumed run does not cut logs back."""


class RunFileHandler(RotatingFileHandler):
    """A file that grows to LOG_BYTES, and the one before it, which is named ``<name>.jsonl.1``.

    A class of its own: a second ``set_up_logging`` removes the handler that the first one made, and no other.
    """

    _failed = False

    def __init__(self, path: Path):
        # A lone surrogate (half a character, in a model's output) can't be UTF-8; escaped, it stays valid JSON.
        super().__init__(path, maxBytes=LOG_BYTES, backupCount=1, encoding="utf-8", errors="backslashreplace")

    def handleError(self, record: logging.LogRecord) -> None:
        """One line on the terminal; Python's own handler would print a traceback for each record."""
        if not self._failed:
            self._failed = True
            line = f"WARNING the log {self.baseFilename} can't be written: {_text(sys.exc_info()[1])}"
            if worth_a_line(line):
                with contextlib.suppress(OSError, ValueError):
                    print(printable_line(one_sentence(line)), file=terminal(), flush=True)


class TerminalHandler(logging.StreamHandler):
    """Writes to ``terminal`` as it is at each record: process launchers and tests replace it."""

    def __init__(self) -> None:
        super().__init__(terminal())

    def emit(self, record: logging.LogRecord) -> None:
        if worth_a_line(self.format(record)):
            self.stream = terminal()
            super().emit(record)


_FULL = (os.strerror(errno.ENOSPC), os.strerror(errno.EDQUOT))
_said_full = False


def worth_a_line(line: str) -> bool:
    """Not where it says once more that the disk is full: every part of each process meets that. The command says it."""
    global _said_full
    if not any(full in line for full in _FULL):
        return True
    first, _said_full = not _said_full, True
    return first and not printed_file()


class JsonLine(logging.Formatter):
    def __init__(self, process_name: str):
        super().__init__()
        self._process_name = process_name

    def format(self, record: logging.LogRecord) -> str:
        line = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname,
            "logger": record.name,
            "process": self._process_name,
            "message": _message(record),
        }
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        return printable_json(json.dumps(line, ensure_ascii=False))


class TerminalLine(logging.Formatter):
    def __init__(self, process_name: str, path: Path):
        super().__init__()
        self._process_name, self._path = process_name, path

    def format(self, record: logging.LogRecord) -> str:
        line = f"{record.levelname} {self._process_name}: {one_sentence(_message(record))}"
        if record.exc_info and record.exc_info[0] is not None:
            line += f" ({record.exc_info[0].__name__}: {one_sentence(_text(record.exc_info[1]))}; traceback in {self._path})"
        return printable_line(" ".join(line.split()))


def _message(record: logging.LogRecord) -> str:
    try:
        return record.getMessage()
    except Exception:  # arguments that don't fit the format: logging would print a traceback to the terminal
        return f"{record.msg} {record.args}"


def _text(error: BaseException | None) -> str:
    try:
        return str(error)
    except BaseException:  # the exception's class may be anyone's
        return "its message can't be read"


def worth_the_terminal(record: logging.LogRecord) -> bool:
    ours = record.name == "__main__" or record.name == OURS or record.name.startswith(OURS + ".")
    return record.levelno >= (logging.WARNING if ours else logging.ERROR)
