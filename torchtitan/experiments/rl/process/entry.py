"""Runs the library's commands: what is the same in all of them, around their ``main``.

* `run_command` is the last line of a command's file: ``run_command(main)``.
* `of_command` decorates its ``main``: a failure that is the user's to mend is printed as one line,
  without a traceback.
"""

import functools
import io
import locale
import os
import sys
from collections.abc import Callable, Sequence
from typing import Any, NoReturn

from torchtitan.experiments.rl.errors import ConfigError, users_traceback
from torchtitan.experiments.rl.printable import printable_line
from torchtitan.experiments.rl.process.finalization import (
    end_without_finalizing,
    may_end_without_finalizing,
)

CAN_NOT_RUN = 2
"""Exit code of a command whose config can't run."""
STOPPED_BY_CTRL_C = 130
"""Exit code of a command that Ctrl-C has stopped: 128 and the signal's number, as in shells."""


def run_command(main: Callable[[], int]) -> NoReturn:
    """Run a command as this process, and end the process with the exit code that it returns."""
    _restart_with_utf8()
    may_end_without_finalizing()
    code = main()
    end_without_finalizing(code)
    sys.exit(code)


def of_command(*failures: type[Exception]) -> Callable[[Callable[[Any], int]], Callable[..., int]]:
    """Make a command of a ``main``, which takes the words of the command line.

    The command may be called without words: ``main`` is given None then, and takes this process's.

    If ``main`` raises a ConfigError or one of ``failures``, the command prints its message, with
    the frames of the user's code where it failed there, and returns 2. On Ctrl-C it returns 130,
    until a run has begun, which handles signals itself.
    """
    known: tuple[type[Exception], ...] = (ConfigError, *failures)

    def wrap(main: Callable[[Any], int]) -> Callable[..., int]:
        @functools.wraps(main)
        def command(arguments: Sequence[str] | None = None) -> int:
            _escape_unencodable_output()
            try:
                return main(arguments)
            except known as error:
                _print_failure(error)
                return CAN_NOT_RUN
            except KeyboardInterrupt:
                return STOPPED_BY_CTRL_C

        return command

    return wrap


def _print_failure(error: Exception) -> None:
    """Print an error's message, its further lines, and the frames of the user's code behind it."""
    further_lines = getattr(error, "lines", ())
    frames = users_traceback(error).splitlines()
    for line in (f"error: {error}", *further_lines, *frames):
        print(printable_line(line), file=sys.stderr)


def _restart_with_utf8() -> None:
    """Start this process again in Python's UTF-8 mode, unless its text files are UTF-8 already.

    torch and other libraries open their own files in the encoding of the locale, and can't be
    imported if that is ASCII. Python takes the mode by itself for ``LC_ALL=C``, unless PYTHONUTF8
    or another locale prevents it.
    """
    if locale.getpreferredencoding(False).lower().replace("-", "") == "utf8":
        return
    os.environ["PYTHONUTF8"] = "1"
    os.execv(sys.executable, [sys.executable, *sys.orig_argv[1:]])


def _escape_unencodable_output() -> None:
    """Have stdout and stderr print a character that their encoding lacks as its escape.

    They would raise an error instead.
    """
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):  # a test or a launcher may have replaced it
            stream.reconfigure(errors="backslashreplace")
