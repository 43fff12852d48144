"""Monarch 0.7.0: its message limit, what it prints, its log prefix, the memory of its calls, and its reports of a process that
died.

``monarch`` is imported when a function needs it: this module's environment has to be set before.
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
    # How long a process may be silent: 30 s to 2 min by default. A machine that is suspended, or busy, is silent for longer,
    # and its run was ended. A process that has ended is noticed by other means.
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
    # Its own log is /tmp/<user>/monarch_log.log, one for all runs of the user, and no option moves it. By default it has each
    # "info", and the terminal a line for each that a full disk does not take.
    "MONARCH_FILE_LOG": "error",
    "HYPERACTOR_HOST_SPAWN_READY_TIMEOUT": "10m",
    "HYPERACTOR_MESH_PROC_SPAWN_MAX_IDLE": "10m",
}
"""Monarch reads it when it starts."""

MONARCH_OUTPUT = "logs/monarch.txt"
"""In the run folder: what Monarch prints when it starts."""

# The public ``MeshFailure.mesh_name`` is the name an actor was spawned under, a hyphen and a random id.
_MESH_NAME = re.compile(r"(?P<actor>.+)-[0-9A-Za-z]+")
# ``MeshFailure.report()`` and the text of a SupervisionError hold the only trace of rank and cause.
_REPORT = re.compile(
    r"(?P<actor>\w+)\{(?P<point>[^}]*)\}>? and all its descendants have failed:\s*(?P<cause>.+)",
    re.DOTALL,
)
_RANK = re.compile(r"(\d+)/\d+")


# Of the ValueError that calls raise to actors of a process that ended before it could have any.
_NOT_SPAWNED = re.compile(
    r'error creating proc .*?"id":"(?P<name>[^"]*?)-\d+<.*'
    r"Terminal\(\w+ \{ (?:signal: (?P<signal>\d+)|exit_code: (?P<code>-?\d+))",
    re.DOTALL,
)


@dataclass(frozen=True, kw_only=True, slots=True)
class ProcessDeath:
    """One actor of a process that died. Monarch reports its own actors in that process too."""

    actor: str
    """The name it was spawned under; "" where the report has none."""
    rank: str
    """Its place in its mesh; "" where the report has none, coordinates joined by a dot in a mesh of several dimensions."""
    cause: str

    def __str__(self) -> str:
        return f"{' '.join(part for part in (self.actor, self.rank) if part)}: {self.cause}"


@contextmanager
def printed_to(path: Path) -> Iterator[None]:
    """Write what the block prints on stderr to the file ``path``; on stderr all the same where the block raises.

    Its Rust code prints where its log is when it starts in a process, and no option prevents that.
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
            if text := printed.read():
                path.parent.mkdir(exist_ok=True)
                with path.open("ab") as file:
                    file.write(text)


def process_death(failure: Any) -> ProcessDeath:
    """What Monarch tells an owner in ``__supervise__``, by a ``monarch.actor.MeshFailure``."""
    return _read(failure.report(), mesh_name=failure.mesh_name)


def process_death_behind(error: BaseException) -> ProcessDeath | None:
    """What a call to an actor whose process died has raised; None for any other error.

    Monarch's SupervisionError has no public import path.
    """
    from monarch._rust_bindings.monarch_hyperactor.supervision import SupervisionError

    error = original(error)
    if isinstance(error, ValueError) and (found := _NOT_SPAWNED.search(str(error))):
        end = (
            f"killed by {signal.Signals(int(found['signal'])).name}"
            if found["signal"]
            else f"exit code {found['code']}"
        )
        return ProcessDeath(actor=found["name"], rank="", cause=f"{end} while it was started")
    return _read(str(error)) if isinstance(error, SupervisionError) else None


def drop_late_faults() -> None:
    """The run has ended, and with it its processes: that one of them ends is no fault from now on.

    Where nobody else handles the death of a process, Monarch ends the command with exit code 1, whatever the run's is.
    """
    import monarch.actor

    def drop(failure: Any) -> None:
        logger.info("after the end of the run: %s", failure.report())

    monarch.actor.unhandled_fault_hook = drop


def ask(endpoint: Any, *args: Any) -> Any:
    """Call the only actor of a mesh, where a run does so at every step.

    Monarch does not give back what a call takes. The calling process keeps 1.4 kB of each ``call_one`` (5 kB where the mesh is
    a new slice), 0.6 kB of ``call`` and less than 0.1 kB of ``choose``; the called process 0.5 kB, which is a sequence number
    for the port of each answer (`tests/monarch_memory.py`).
    """
    return endpoint.choose(*args)


def ranks_of(mesh: Any) -> list[Any]:
    """The actor of each rank. Keep them: see ``ask`` for what a new slice costs."""
    return [mesh.slice(procs=rank) for rank in range(mesh.size("procs"))]


async def ask_each(ranks: Iterable[Any], endpoint: str, *args: Any) -> list[Any]:
    """What each rank answers, in their order. Raises what the first that fails has raised."""
    return await asyncio.gather(*(ask(getattr(rank, endpoint), *args) for rank in ranks))


class OneActor:
    """The only actor of a mesh, for a library that says ``call_one`` or ``call`` at every step. Each call is an ``ask``."""

    def __init__(self, mesh: Any):
        self._mesh = mesh

    def __getattr__(self, endpoint: str) -> Any:
        called = partial(ask, getattr(self._mesh, endpoint))
        return SimpleNamespace(call_one=called, call=called)


def original(error: BaseException) -> BaseException:
    """What was raised in an actor, without the ActorErrors that brought it here."""
    from monarch.actor import ActorError

    while isinstance(error, ActorError):
        error = error.exception
    return error


def keep_messages_as_written(handler: logging.Handler) -> None:
    """Take away the filter that Monarch's patch of ``Logger.addHandler`` gives each handler.

    It writes the actor's name into the message, once for each handler. Only a private flag turns it off for a whole process.
    """
    for added in handler.filters[:]:
        if type(added).__module__.partition(".")[0] == "monarch":
            handler.removeFilter(added)


def _read(report: str, *, mesh_name: str = "") -> ProcessDeath:
    found = _REPORT.search(report)
    spawned_as = _MESH_NAME.fullmatch(mesh_name)
    return ProcessDeath(
        actor=spawned_as["actor"] if spawned_as else found["actor"] if found else "",
        rank=".".join(_RANK.findall(found["point"])) if found else "",
        cause=" ".join((found["cause"] if found else report).split()),
    )
