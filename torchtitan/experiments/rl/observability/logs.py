"""Where log messages go: all of them to a file per process, few of them to the terminal.

1. `<run_dir>/logs/<process>.jsonl` holds every record of the process at the chosen level, one JSON object a line, Python
   warnings and exceptions that end a thread included.
2. The terminal gets one line each for our warnings and for other libraries' errors; tracebacks stay in the file.
3. Libraries that print their log to the terminal by handlers of their own (vLLM, monarch, torchstore, transformers) lose those
   handlers, and their records take the same way.
"""

import json
import logging
import os
import sys
import threading
from datetime import UTC, datetime
from pathlib import Path

from torchtitan.experiments.rl.observability.printable import printable_json, printable_line

OURS = "torchtitan.experiments.rl"


def setup_process_logging(run_dir: Path, process_name: str, level: int = logging.INFO) -> Path:
    """Send this process's log to `<run_dir>/logs/<process_name>.jsonl`, and return that path.

    Calling it again replaces what the last call set up. Do so after importing a library that prints its own log: handlers it
    made meanwhile are taken away.
    """
    path = Path(run_dir) / "logs" / f"{process_name}.jsonl"
    path.parent.mkdir(parents=True, exist_ok=True)
    os.environ.setdefault("VLLM_CONFIGURE_LOGGING", "0")  # read when vLLM is imported: some hundred lines on stdout otherwise
    _silence_terminal_handlers()

    root = logging.getLogger()
    for handler in root.handlers[:]:
        if isinstance(handler, (_RunFileHandler, _TerminalHandler)):
            root.removeHandler(handler)
            handler.close()
    # A lone surrogate (half a character, in a model's output) can't be UTF-8; escaped, it stays valid JSON.
    file_handler = _RunFileHandler(path, encoding="utf-8", errors="backslashreplace")
    file_handler.setFormatter(_JsonLine(process_name))
    terminal_handler = _TerminalHandler()
    terminal_handler.setFormatter(_TerminalLine(process_name, path))
    for handler, filters in ((file_handler, []), (terminal_handler, [_worth_the_terminal])):
        root.addHandler(handler)
        # Monarch's addHandler adds a filter that writes the actor's name into the message, once for each handler.
        handler.filters = filters
    root.setLevel(level)

    logging.captureWarnings(True)
    threading.excepthook = _log_thread_exception
    return path


class _RunFileHandler(logging.FileHandler):
    """Its own class, so that a second setup knows its predecessor's handler from anyone else's."""


class _TerminalHandler(logging.StreamHandler):
    """Writes to whatever sys.stderr is at the time: process launchers and tests replace it."""

    def __init__(self) -> None:
        super().__init__(sys.stderr)

    def emit(self, record: logging.LogRecord) -> None:
        self.stream = sys.stderr
        super().emit(record)


class _JsonLine(logging.Formatter):
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


class _TerminalLine(logging.Formatter):
    def __init__(self, process_name: str, path: Path):
        super().__init__()
        self._process_name, self._path = process_name, path

    def format(self, record: logging.LogRecord) -> str:
        line = f"{record.levelname} {self._process_name}: {_message(record)}"
        if record.exc_info and record.exc_info[0] is not None:
            line += f" ({record.exc_info[0].__name__}: {record.exc_info[1]}; traceback in {self._path})"
        return printable_line(" ".join(line.split()))


def _message(record: logging.LogRecord) -> str:
    try:
        return record.getMessage()
    except Exception:  # arguments that don't fit the format: logging would print a traceback to the terminal
        return f"{record.msg} {record.args}"


def _worth_the_terminal(record: logging.LogRecord) -> bool:
    ours = record.name == "__main__" or record.name == OURS or record.name.startswith(OURS + ".")
    return record.levelno >= (logging.WARNING if ours else logging.ERROR)


def _silence_terminal_handlers() -> None:
    streams = (sys.stdout, sys.stderr, sys.__stdout__, sys.__stderr__)
    for logger in [logging.getLogger(), *logging.root.manager.loggerDict.values()]:
        for handler in getattr(logger, "handlers", [])[:]:  # loggerDict also holds placeholders, which have none
            if type(handler) is logging.StreamHandler and handler.stream in streams:
                logger.removeHandler(handler)
                logger.propagate = True


def _log_thread_exception(args: threading.ExceptHookArgs) -> None:
    if issubclass(args.exc_type, SystemExit):  # how a thread ends itself; Python's own hook is silent about it too
        return
    thread = args.thread.name if args.thread is not None else "unknown"
    exc_info = (args.exc_type, args.exc_value, args.exc_traceback)
    logging.getLogger(OURS).error("thread %s ended by an exception", thread, exc_info=exc_info)
