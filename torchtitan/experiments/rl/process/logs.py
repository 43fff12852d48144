"""Writes the log of each process to a file, and tells people what they have to see of it.

``logs/<process>.jsonl`` in the run's folder has everything from INFO on. People get one line for
each warning of the library and each error of another library, and the frames of their own code
behind an error. They don't get the rest, and libraries that print their log by themselves are kept
from doing so.

`set_up_logging` does that for a process. `quiet_libraries` is for the time before.
"""

import contextlib
import errno
import json
import logging
import os
import sys
import threading
import warnings
from collections.abc import Iterator
from datetime import UTC, datetime
from logging.handlers import RotatingFileHandler
from pathlib import Path

from torchtitan.experiments.rl.compat import monarch
from torchtitan.experiments.rl.errors import users_traceback
from torchtitan.experiments.rl.printable import (
    one_sentence,
    printable,
    printable_json,
    printable_line,
)
from torchtitan.experiments.rl.process.output import printed_file, tell

ENDS_THE_RUN = {"ends_the_run": True}
"""``extra`` of the log record of an error that ends the run. The terminal shows only the traceback
of such a record, because the command prints the error as its last line (controller/signals.py)."""
LIBRARY = "torchtitan.experiments.rl"
"""Logger that all loggers of this library are below."""
LOG_BYTES = 64 * 2**20
"""Maximum size of a log file in bytes. The run reads nothing from its logs that it needs, so a
resumed run does not cut them back."""
MOST_TRACEBACKS = 20
"""Maximum number of tracebacks of the user's code that a process writes to the terminal."""
HTTP_CLIENTS = ("httpx", "httpx2", "openai", "anthropic")
"""Libraries that log every request, or every retry of one: thousands of lines a step. Only their
warnings are kept."""
_DISK_IS_FULL = (os.strerror(errno.ENOSPC), os.strerror(errno.EDQUOT))
"""Words of the system's errors of a full disk and of a used-up quota."""
_full_disk_was_told = False


def set_up_logging(run_dir: Path | str, process_name: str) -> Path:
    """Send this process's log to ``<run_dir>/logs/<process_name>.jsonl``, and return that path.

    Python's warnings and exceptions that end a thread are logged too. A second call replaces what
    the first one set up. Call it again after the import of a library that prints its own log, such
    as vLLM, Monarch, torchstore or transformers: the library loses the handlers that it has made,
    and its records go where all others go.
    """
    path = Path(run_dir) / "logs" / f"{process_name}.jsonl"
    path.parent.mkdir(parents=True, exist_ok=True)
    for logger in [logging.getLogger(), *logging.root.manager.loggerDict.values()]:
        if isinstance(logger, logging.Logger):  # the dict has placeholders too
            _remove_terminal_handlers(logger)
    for library in HTTP_CLIENTS:
        logging.getLogger(library).setLevel(logging.WARNING)
    root = logging.getLogger()
    for handler in root.handlers[:]:
        if isinstance(handler, RunFileHandler | NoteHandler):
            root.removeHandler(handler)
            handler.close()
    for handler in (RunFileHandler(path, process_name), NoteHandler(path, process_name)):
        root.addHandler(handler)
        monarch.keep_messages_as_written(handler)
    root.setLevel(logging.INFO)
    logging.captureWarnings(True)
    threading.excepthook = _log_thread_exception
    return path


@contextlib.contextmanager
def quiet_libraries() -> Iterator[None]:
    """Log nothing and show no Python warning in the block.

    Use it before a run has a log file, when libraries would write to the terminal.
    """
    disabled = logging.root.manager.disable
    logging.disable(logging.CRITICAL)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(disabled)


class RunFileHandler(RotatingFileHandler):
    """Handler that writes each record as a line of JSON to the log of a process.

    A log that has grown to LOG_BYTES is renamed to ``<process>.jsonl.1``, in place of the one
    before it.
    """

    def __init__(self, path: Path, process_name: str):
        # Half a character (a lone surrogate), which a model may write, has no UTF-8. As its escape
        # it stays valid JSON.
        super().__init__(
            path, maxBytes=LOG_BYTES, backupCount=1, encoding="utf-8", errors="backslashreplace"
        )
        self._process_name = process_name
        self._failed = False
        """True once a record could not be written."""

    def format(self, record: logging.LogRecord) -> str:
        line = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname,
            "logger": record.name,
            "process": self._process_name,
            "message": _message_of(record),
        }
        if record.exc_info:
            line["exception"] = logging.Formatter().formatException(record.exc_info)
        return printable_json(json.dumps(line, ensure_ascii=False))

    def handleError(self, record: logging.LogRecord) -> None:
        """Tell people once that the log can't be written.

        Python's own method would print a traceback for each record.
        """
        if self._failed:
            return
        self._failed = True
        cause = _text_of(sys.exc_info()[1])
        line = f"WARNING the log {self.baseFilename} can't be written: {cause}"
        if not _is_told_elsewhere(line):
            with contextlib.suppress(OSError, ValueError):
                tell(printable_line(one_sentence(line)))


class NoteHandler(logging.Handler):
    """Handler that tells people a line for each record that they have to see.

    The frames of the user's code behind an error follow the line.
    """

    def __init__(self, path: Path, process_name: str):
        super().__init__()
        self._path = path
        self._process_name = process_name
        self._shown: set[str] = set()
        """Tracebacks that were shown."""
        self.addFilter(_is_for_people)

    def format(self, record: logging.LogRecord) -> str:
        line = f"{record.levelname} {self._process_name}: {one_sentence(_message_of(record))}"
        if record.exc_info and record.exc_info[0] is not None:
            kind = record.exc_info[0].__name__
            cause = one_sentence(_text_of(record.exc_info[1]))
            line += f" ({kind}: {cause}; traceback in {self._path})"
        return printable_line(" ".join(line.split()))

    def emit(self, record: logging.LogRecord) -> None:
        line = self.format(record)
        if _is_told_elsewhere(line):
            return
        lines = [] if hasattr(record, "ends_the_run") else [line]
        try:
            if traceback := self._traceback(record):
                lines.append(traceback)
            if lines:
                tell("\n".join(lines))
        except Exception:  # noqa: BLE001 - as Python's own handlers do: a log stops no program
            self.handleError(record)

    def _traceback(self, record: logging.LogRecord) -> str:
        """Return the frames of the user's code behind a record's error.

        The result is empty if there are none, or if they were shown before.
        """
        error = record.exc_info[1] if record.exc_info else None
        if error is None:
            return ""
        traceback = printable(users_traceback(monarch.original(error)))
        if not traceback or traceback in self._shown or len(self._shown) >= MOST_TRACEBACKS:
            return ""
        self._shown.add(traceback)
        return traceback


def _is_for_people(record: logging.LogRecord) -> bool:
    """Return True if people have to see a record: warnings of the library, and others' errors."""
    is_ours = record.name in ("__main__", LIBRARY) or record.name.startswith(f"{LIBRARY}.")
    return record.levelno >= (logging.WARNING if is_ours else logging.ERROR)


def _is_told_elsewhere(line: str) -> bool:
    """Return True if a line is about a full disk, and the command has told people of that.

    Every part of each process meets a full disk. People hear of it from the command alone, once.
    """
    global _full_disk_was_told
    if not any(words in line for words in _DISK_IS_FULL):
        return False
    was_told = _full_disk_was_told
    _full_disk_was_told = True
    is_command = not printed_file()
    return was_told or not is_command


def _message_of(record: logging.LogRecord) -> str:
    """Return a record's message, also if its arguments don't fit its format.

    Python's logging would print a traceback to the terminal then.
    """
    try:
        return record.getMessage()
    except Exception:  # noqa: BLE001 - an argument may be of any class
        return f"{record.msg} {record.args}"


def _text_of(error: BaseException | None) -> str:
    try:
        return str(error)
    except Exception:  # noqa: BLE001 - the exception's class may be anyone's
        return "its message can't be read"


def _remove_terminal_handlers(logger: logging.Logger) -> None:
    """Have the records of a logger that prints to the terminal go to the root logger instead."""
    terminal = (sys.stdout, sys.stderr, sys.__stdout__, sys.__stderr__)
    for handler in logger.handlers[:]:
        if type(handler) is logging.StreamHandler and handler.stream in terminal:
            logger.removeHandler(handler)
            logger.propagate = True


def _log_thread_exception(args: threading.ExceptHookArgs) -> None:
    """Log the exception that ends a thread.

    SystemExit is left out, as Python does: it is how a thread ends itself.
    """
    if issubclass(args.exc_type, SystemExit):
        return
    thread = args.thread.name if args.thread is not None else "unknown"
    logging.getLogger(LIBRARY).error(
        "thread %s ended by an exception", thread, exc_info=args.exc_value
    )
