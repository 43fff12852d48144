"""Ends a process without Python's finalization, which takes seconds beside torch and an engine.

Finalization frees memory and modules one by one, although the process is about to end. Functions
that were registered with ``atexit`` run as usual, and output is flushed.

``atexit`` calls first what was registered last. So a process calls `may_end_without_finalizing`
before anything else is registered, and `end_without_finalizing` when it knows that it ends well.
"""

import atexit
import contextlib
import os
import sys

_exit_code: int | None = None
"""Exit code to end this process with in place of finalization; None to finalize it."""


def may_end_without_finalizing() -> None:
    """Prepare this process to skip finalization, should it call `end_without_finalizing`."""
    atexit.register(_exit_now)


def end_without_finalizing(code: int = 0) -> None:
    """Skip finalization when this process ends, and end it with an exit code.

    The process ends when it would have ended anyway.
    """
    global _exit_code
    _exit_code = code


def _exit_now() -> None:
    if _exit_code is None:
        return
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):
            stream.flush()
    os._exit(_exit_code)
