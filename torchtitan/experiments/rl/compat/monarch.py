"""Monarch 0.7.0: its limits, output, memory of calls, and reports of processes that died.

``monarch`` is imported when a function needs it, because this module's environment has to be set
before.
"""

import asyncio
import logging
import os
import re
import signal
import tempfile
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

logger = logging.getLogger(__name__)

ENVIRONMENT = {
    # A batch or a snapshot is one message, and larger than the default limit.
    "HYPERACTOR_CODEC_MAX_FRAME_LENGTH": str(2**40),
    # Time that a process may be silent, 30 s to 2 min by default. A machine that is suspended or
    # busy is silent for longer, and Monarch ended its run. A process that has ended is noticed by
    # other means.
    **dict.fromkeys(
        (
            "HYPERACTOR_MESSAGE_DELIVERY_TIMEOUT",
            "HYPERACTOR_MESH_GET_ACTOR_STATE_MAX_IDLE",
            "HYPERACTOR_MESH_GET_PROC_STATE_MAX_IDLE",
            "HYPERACTOR_MESH_ORPHAN_TIMEOUT",
            "HYPERACTOR_MESH_SUPERVISION_WATCHDOG_TIMEOUT",
        ),
        "1h",
    ),
    # Monarch's own log is /tmp/<user>/monarch_log.log, one for all runs of the user, and no option
    # moves it. By default it has each "info", and the terminal gets a line for each that a full
    # disk does not take.
    "MONARCH_FILE_LOG": "error",
    "HYPERACTOR_HOST_SPAWN_READY_TIMEOUT": "10m",
    "HYPERACTOR_MESH_PROC_SPAWN_MAX_IDLE": "10m",
}
"""Environment variables that Monarch reads when it starts."""

MONARCH_OUTPUT = "logs/monarch.txt"
"""File in the run folder with the text that Monarch prints when it starts."""

_MESH_NAME = re.compile(r"(?P<actor>.+)-[0-9A-Za-z]+")
"""Pattern of the public ``MeshFailure.mesh_name``: the name that an actor was spawned under, a
hyphen and a random id."""
_REPORT = re.compile(
    r"(?P<actor>\w+)\{(?P<point>[^}]*)\}>? and all its descendants have failed:\s*(?P<cause>.+)",
    re.DOTALL,
)
"""Pattern of ``MeshFailure.report()`` and of a SupervisionError's text, which alone have rank and
cause."""
_RANK = re.compile(r"(\d+)/\d+")
"""Pattern of a coordinate in the point of a report."""
_NOT_SPAWNED = re.compile(
    r'error creating proc .*?"id":"(?P<name>[^"]*?)-\d+<.*'
    r"Terminal\(\w+ \{ (?:signal: (?P<signal>\d+)|exit_code: (?P<code>-?\d+))",
    re.DOTALL,
)
"""Pattern of the ValueError of a call to an actor whose process ended while it was started."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ProcessDeath:
    """The report of one actor whose process died.

    Monarch reports its own actors in that process too.
    """

    actor: str
    """Name that the actor was spawned under; "" if the report has none."""
    rank: str
    """Place of the actor in its mesh; "" if the report has none. In a mesh of several dimensions a
    dot joins the coordinates."""
    cause: str

    def __str__(self) -> str:
        name = " ".join(text for text in (self.actor, self.rank) if text)
        return f"{name}: {self.cause}"


@contextmanager
def printed_to(path: Path) -> Iterator[None]:
    """Within the context, write to the file ``path`` what is printed on stderr.

    If the block raises, stderr gets it after all. Monarch's Rust code prints where its log is when
    it starts in a process, and no option prevents that.
    """
    with tempfile.TemporaryFile() as printed:
        stderr = os.dup(2)
        os.dup2(printed.fileno(), 2)
        try:
            yield
        except BaseException:
            path = Path("/dev/stderr")
            raise
        finally:
            os.dup2(stderr, 2)
            os.close(stderr)
            printed.seek(0)
            text = printed.read()
            if text:
                path.parent.mkdir(exist_ok=True)
                with path.open("ab") as file:
                    file.write(text)


def process_death(failure: Any) -> ProcessDeath:  # noqa: ANN401 - Monarch's
    """Return the report in the ``MeshFailure`` that Monarch gives an owner's ``__supervise__``."""
    return _parse_report(failure.report(), mesh_name=failure.mesh_name)


def process_death_behind(error: BaseException) -> ProcessDeath | None:
    """Return the report in the error of a call to an actor whose process died.

    Returns None for any other error. Monarch's SupervisionError has no public import path.
    """
    from monarch._rust_bindings.monarch_hyperactor.supervision import SupervisionError

    error = original(error)
    match = _NOT_SPAWNED.search(str(error)) if isinstance(error, ValueError) else None
    if match is None:
        return _parse_report(str(error)) if isinstance(error, SupervisionError) else None
    end = f"exit code {match['code']}"
    if match["signal"]:
        end = f"killed by {signal.Signals(int(match['signal'])).name}"
    return ProcessDeath(actor=match["name"], rank="", cause=f"{end} while it was started")


def drop_late_faults() -> None:
    """Have Monarch ignore from now on that processes end: the run has ended, and they with it.

    If nobody handles the death of a process, Monarch ends the command with exit code 1, whatever
    the run's exit code is.
    """
    import monarch.actor

    def drop(failure: Any) -> None:  # noqa: ANN401 - Monarch's
        logger.info("after the end of the run: %s", failure.report())

    monarch.actor.unhandled_fault_hook = drop


def call_actor(
    endpoint: Any,  # noqa: ANN401 - Monarch's
    *args: Any,  # noqa: ANN401 - the endpoint's
) -> Any:  # noqa: ANN401 - whatever the endpoint answers
    """Call the only actor of a mesh, and keep little memory. Use it for calls of every step.

    Monarch does not free all memory of a call. The calling process keeps 1.4 kB of each
    ``call_one`` (5 kB if the mesh is a new slice), 0.6 kB of ``call`` and less than 0.1 kB of
    ``choose``. The called process keeps 0.5 kB, which is a sequence number for the port of each
    answer (`tests/monarch_memory.py`).
    """
    return endpoint.choose(*args)


def ranks_of(mesh: Any) -> list[Any]:  # noqa: ANN401 - Monarch's
    """Return the actor of each rank.

    Keep them, because each new slice costs memory (``call_actor``).
    """
    return [mesh.slice(procs=rank) for rank in range(mesh.size("procs"))]


async def call_ranks(
    ranks: Iterable[Any],
    endpoint: str,
    *args: Any,  # noqa: ANN401 - the endpoint's
) -> list[Any]:
    """Call an endpoint of each rank, and return the answers in the order of the ranks.

    Raises the error of the first call that fails.
    """
    return await asyncio.gather(*(call_actor(getattr(rank, endpoint), *args) for rank in ranks))


class OneActor:
    """The only actor of a mesh, for a library that uses ``call_one`` or ``call`` at every step.

    Each call is a ``call_actor``.
    """

    def __init__(self, mesh: Any):  # noqa: ANN401 - Monarch's
        self._mesh = mesh

    def __getattr__(self, endpoint: str) -> SimpleNamespace:
        call = partial(call_actor, getattr(self._mesh, endpoint))
        return SimpleNamespace(call_one=call, call=call)


def original(error: BaseException) -> BaseException:
    """Return the error that an actor has raised, without the ActorErrors that wrap it."""
    from monarch.actor import ActorError

    while isinstance(error, ActorError):
        error = error.exception
    return error


def keep_messages_as_written(handler: logging.Handler) -> None:
    """Remove the filter that Monarch's patch of ``Logger.addHandler`` gives each handler.

    The filter writes the actor's name into the message, once for each handler. Only a private flag
    turns it off for a whole process.
    """
    for message_filter in handler.filters[:]:
        if type(message_filter).__module__.partition(".")[0] == "monarch":
            handler.removeFilter(message_filter)


def _parse_report(report: str, *, mesh_name: str = "") -> ProcessDeath:
    """Return what a report tells of a death. A report of unknown form is the cause as a whole.

    Args:
        report: Monarch's text.
        mesh_name: name of the actor's mesh, which is more certain than the report's; "" if there is
            none.
    """
    actor = ""
    rank = ""
    cause = report
    match = _REPORT.search(report)
    if match is not None:
        actor = match["actor"]
        rank = ".".join(_RANK.findall(match["point"]))
        cause = match["cause"]
    name = _MESH_NAME.fullmatch(mesh_name)
    if name is not None:
        actor = name["actor"]
    return ProcessDeath(actor=actor, rank=rank, cause=" ".join(cause.split()))
