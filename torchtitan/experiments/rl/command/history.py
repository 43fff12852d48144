"""History of a run folder: each start and resume of the run, and how it ended.

`history.jsonl` has a line for each. A start reserves the room of the line that ends it::

    {"event": "start", "time": 1700000000.0, "step": 0, "host": "node-1"}
    {"event": "end", "time": 1700000900.0, "how": "failed", "why": "generator 0 died: ..."}
    {"event": "start", "time": 1700001200.0, "step": 40, "host": "node-1"}
    (blanks)

So the cause is kept also where the disk is full. A command that was killed leaves the blanks.
"""

import contextlib
import socket
import time
from pathlib import Path
from typing import Annotated, Literal

import msgspec

HISTORY_FILE = "history.jsonl"
RESERVED_BYTES = 8192
"""Length of the line that a start reserves; the end is padded to it with blanks. The cause has at
most 1,000 characters (`errors.OWN_LENGTH`)."""

Time = Annotated[float, msgspec.Meta(ge=0, le=1e11)]
"""Time in seconds since 1970."""
How = Literal["done", "stopped", "failed"]
"""End of a run: "done" after the last step, or if nothing was left to learn; "stopped" by a signal;
"failed" by an error."""


class Started(msgspec.Struct, kw_only=True, tag_field="event", tag="start"):
    """Start of a run by a command."""

    time: Time
    step: int
    """Number of steps that the run had taken: 0 for a new run, else those of the checkpoint that it
    was resumed from."""
    host: str
    """Name of the host of the command."""


class Ended(msgspec.Struct, kw_only=True, tag_field="event", tag="end"):
    """End of a run that its command saw."""

    time: Time
    how: How
    why: str | None
    """Error that the command printed, or what stopped the run; None if it took all its steps."""


class History(msgspec.Struct, kw_only=True):
    """All starts of a run, and its last end."""

    starts: list[Started] = []
    end: Ended | None = None
    """End after the last start; None while the run goes on, and for a command that was killed."""

    @property
    def resumes(self) -> list[Started]:
        """Starts from a checkpoint, in order.

        A resume from an earlier checkpoint takes steps back, and the resumes from these.
        """
        resumes: list[Started] = []
        for start in self.starts:
            resumes = [earlier for earlier in resumes if earlier.step < start.step]
            if start.step > 0:
                resumes.append(start)
        return resumes


_DECODE = msgspec.json.Decoder(Started | Ended).decode


def write_start(run_dir: Path, step: int) -> None:
    """Append that a command starts the run.

    Raises:
        OSError: the file can't be written.
    """
    start = Started(time=time.time(), step=step, host=socket.gethostname())
    path = run_dir / HISTORY_FILE
    try:
        with path.open("ab") as file:
            file.write(msgspec.json.encode(start) + b"\n" + b" " * (RESERVED_BYTES - 1) + b"\n")
    except OSError as error:  # an error of writing does not name the file
        raise OSError(error.errno, error.strerror, str(path)) from error


def write_end(run_dir: Path, how: How, why: str | None) -> None:
    """Write the end of the run that was started last into the room that its start reserved.

    Nothing is written where that run has an end already: the start of this command could not be
    written. A run ends whether or not its end can be written down, so an error of the disk is
    dropped: the folder then reads as that of a command that was killed.
    """
    if read_history(run_dir).end is not None:
        return
    end = msgspec.json.encode(Ended(time=time.time(), how=how, why=why))
    with contextlib.suppress(OSError), (run_dir / HISTORY_FILE).open("rb+") as file:
        file.seek(len(file.read().rstrip()) + 1)  # behind the line end of the start
        file.write(end.ljust(RESERVED_BYTES - 1) + b"\n")


def read_history(run_dir: Path) -> History:
    """Return the history of a run. Lines that are no event are skipped, such as damaged ones."""
    history = History()
    path = run_dir / HISTORY_FILE
    try:
        lines = [] if path.is_symlink() else path.read_bytes().splitlines()
    except OSError:
        return history
    for line in lines:
        with contextlib.suppress(msgspec.MsgspecError, UnicodeDecodeError):
            event = _DECODE(line)
            if isinstance(event, Started):
                history.starts.append(event)
                history.end = None
            else:
                history.end = event
    return history
