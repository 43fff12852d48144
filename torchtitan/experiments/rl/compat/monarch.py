"""Monarch 0.7.0: its message limit, its sockets, what it prints, its log prefix, the memory of its calls, and its reports of a
process that died.

``monarch`` is imported when a function needs it: this module's environment has to be set before.
"""

import asyncio
import ctypes
import logging
import mmap
import os
import re
import signal
import struct
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


_UNIX = 1
"""AF_UNIX in a C sockaddr: two bytes of family, then the path; an abstract name begins with a zero byte."""
_LONGEST_PATH = 107
SOCKET_NAME = 24
"""Characters of the names that Monarch makes up for its sockets."""
_BIND_TYPE = ctypes.CFUNCTYPE(
    ctypes.c_int, ctypes.c_int, ctypes.c_void_p, ctypes.c_uint, use_errno=True
)
_binds: list[Any] = []
"""What Monarch calls in place of libc's ``bind``. ctypes does not keep it."""


def bind_privately(folder: Path) -> bool:
    """Have Monarch, in this process and from now on, listen in ``folder`` where it would at an abstract Unix socket.

    An abstract socket has no permissions: every user of the host may connect to it, and Monarch runs what it is sent. Where a
    process spawns others Monarch listens at one for them, whatever the transport is, and no option changes that (its
    ``BootstrapProcManager`` in Rust). So this replaces the pointer by which Monarch's library finds libc's ``bind``. Monarch
    asks the kernel for the address that a socket has, and tells others that one.

    Args:
        folder: one that only this user may enter, and whose path leaves room for a name of SOCKET_NAME characters.

    Returns:
        False: it can't be done here, and Monarch's sockets are as they were.
    """
    from monarch import _rust_bindings

    if len(bytes(folder)) + len("/") + SOCKET_NAME > _LONGEST_PATH:
        return False
    libc = ctypes.CDLL(None, use_errno=True)
    bind = ctypes.cast(libc.bind, ctypes.c_void_p)
    slots = _pointers_to(bind, _rust_bindings.__file__)
    if not slots:
        return False
    libc_bind = _BIND_TYPE(bind.value or 0)

    def bind_in_folder(descriptor: int, address: int, size: int) -> int:
        name = ctypes.string_at(address, size)
        if len(name) > 3 and struct.unpack_from("=HB", name) == (_UNIX, 0):
            name = name[:2] + bytes(folder) + b"/" + name[3:] + b"\0"
        held = ctypes.create_string_buffer(name, len(name))
        return int(libc_bind(descriptor, ctypes.addressof(held), len(name)))

    _binds.append(_BIND_TYPE(bind_in_folder))
    libc.mprotect.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
    for slot in slots:
        page = slot & -mmap.PAGESIZE
        if libc.mprotect(page, mmap.PAGESIZE, mmap.PROT_READ | mmap.PROT_WRITE):
            return False
        ctypes.c_void_p.from_address(slot).value = ctypes.cast(_binds[-1], ctypes.c_void_p).value
        libc.mprotect(page, mmap.PAGESIZE, mmap.PROT_READ)
    return True


def _pointers_to(function: ctypes.c_void_p, library: str) -> list[int]:
    """Where the loaded ``library`` holds the address of another library's function: the loader puts it into pages that nobody
    may write afterwards."""
    library = os.path.realpath(library)
    lines = Path("/proc/self/maps").read_text().splitlines()
    readable = [
        line.split()[0].split("-")
        for line in lines
        if line.endswith(f" {library}") and " r--p " in line
    ]
    if not readable:
        return []
    start, end = (int(place, 16) for place in readable[-1])  # those before hold constants
    places = re.finditer(re.escape(bytes(function)), ctypes.string_at(start, end - start))
    return [start + place.start() for place in places if place.start() % 8 == 0]


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
