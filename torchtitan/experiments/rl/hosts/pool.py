"""The hosts of a run while it runs: what each has, and the notice of its end.

    command ──connection, for the whole run──▶ keeper, one process on each host

The keeper says what its host has. If the host dies, the connection ends, and the command reports
the host as dead. If the command ends, in whatever way, the connection ends too, and the keeper
kills the host's processes.
"""

import contextlib
import hmac
import itertools
import os
import secrets
import socket
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from monarch.actor import Actor, HostMesh, attach_to_workers, default_bootstrap_cmd

from torchtitan.experiments.rl.compat.monarch import printed_to
from torchtitan.experiments.rl.errors import RunError
from torchtitan.experiments.rl.process.actor import reported_endpoint
from torchtitan.experiments.rl.process.host import (
    LOOPBACK_ADDRESS,
    gpu_host_lacks,
    mask_of,
    memory_gib,
    network_address,
    own_cores,
    visible_gpus,
)
from torchtitan.experiments.rl.process.lifetime import kill_family
from torchtitan.experiments.rl.process.setup import ignore_signals_of_the_command

_started: dict[int, "HostPool"] = {}
"""Pools of this process that are not closed, by their key."""
_keys = itertools.count()
POLL_S = 0.2
"""Seconds between two looks at what is waited for."""
TOKEN_BYTES = 32
"""Length of the token by which a keeper knows the command's connection."""
GREETING_S = 10.0
"""Limit in seconds for a connection to send the token."""
SILENCE_S = 30
"""Seconds without an answer of a host's kernel after which the host is taken for dead."""


@dataclass(kw_only=True, slots=True)
class Host:
    """A host of the run, and what it has."""

    name: str
    """Host name, as its keeper reports it. The pool makes it "host 1 (node17)", for people."""
    address: str
    """Address that its keeper waits for the command's connection at."""
    port: int
    """Port that its keeper waits for the command's connection at."""
    cores: tuple[int, ...]
    """Numbers of its cores, NUMA node by NUMA node."""
    gpus: tuple[str, ...]
    """Names of its GPUs for CUDA_VISIBLE_DEVICES, by index; empty in a run on CPU."""
    memory_gib: float
    """Memory that processes may have there, by the host's own limits."""
    lacks: tuple[str, ...] = ()
    """What a run on GPUs would miss there (``gpu_host_lacks``)."""
    environment: Mapping[str, str] = field(default_factory=dict)
    """Environment variables that its processes get beside those of every process of a run."""


@dataclass(frozen=True, kw_only=True, slots=True)
class TakenHosts:
    """Hosts that a job has given to the run, with an agent of Monarch's on each."""

    mesh: HostMesh
    """Monarch's mesh of the hosts, of one dimension "hosts"."""
    environments: Sequence[Mapping[str, str]]
    """Environment variables of each host's processes."""
    on_gpus: bool
    """True if the run uses the hosts' GPUs."""
    one_machine: bool = False
    """True if the hosts are processes of this machine."""
    devices: Sequence[Sequence[Any]] | None = None
    """Cores, or names of GPUs, that each host has of the machine. None: all that the host has."""
    give_back: Callable[[], None] = lambda: None
    """Function that returns the hosts to the job."""


class HostKeeper(Actor):
    """Process on a host that says what the host has, and ends its processes with the command."""

    def __init__(self, token: bytes, on_gpus: bool, one_machine: bool):
        """Wait for the command's connection.

        Args:
            token: bytes that the command's connection begins with, and no other.
            on_gpus: True if the host's GPUs are counted.
            one_machine: True if the command is on this machine, and no other may connect.
        """
        ignore_signals_of_the_command()
        self.process_name = f"host {socket.gethostname()}"
        self._on_gpus = on_gpus
        self._address = LOOPBACK_ADDRESS if one_machine else network_address()
        self._listener = socket.create_server((self._address, 0))
        threading.Thread(
            target=_end_with_command, args=(self._listener, token, os.getppid()), daemon=True
        ).start()

    @reported_endpoint
    async def report(self) -> Host:
        return Host(
            name=socket.gethostname(),
            address=self._address,
            port=self._listener.getsockname()[1],
            cores=tuple(own_cores()),
            gpus=tuple(mask_of([gpu]) for gpu in visible_gpus()) if self._on_gpus else (),
            memory_gib=memory_gib()[1],
            lacks=tuple(gpu_host_lacks(several_hosts=True)) if self._on_gpus else (),
        )

    @reported_endpoint
    async def read(self, file: Path) -> str | None:
        return text_of(file)


def text_of(file: Path) -> str | None:
    """Return the text of a file; None if this host can't read the file."""
    with contextlib.suppress(OSError):
        return file.read_text(errors="replace")
    return None


def keep_alive(connection: socket.socket) -> None:
    """Have the kernel end a connection whose other host is gone."""
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, SILENCE_S // 3)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, SILENCE_S // 6)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, 4)


def _end_with_command(listener: socket.socket, token: bytes, agent: int) -> None:
    """Accept connections until one of them is the command's, which closes the listener.

    Each has a thread of its own, so that the command does not wait for a stranger.
    """
    with contextlib.suppress(OSError):  # the listener was closed
        while True:
            threading.Thread(
                target=_hear, args=(listener, listener.accept()[0], token, agent), daemon=True
            ).start()


def _hear(listener: socket.socket, connection: socket.socket, token: bytes, agent: int) -> None:
    """Kill the agent's family, the host's processes, when the command's connection ends.

    A connection that does not begin with the token is not the command's, and is closed.
    """
    connection.settimeout(GREETING_S)
    greeting = b""
    with contextlib.suppress(OSError):
        while len(greeting) < TOKEN_BYTES:
            received = connection.recv(TOKEN_BYTES - len(greeting))
            if not received:
                break
            greeting += received
    if not hmac.compare_digest(greeting, token):
        connection.close()
        return
    listener.close()
    keep_alive(connection)
    connection.settimeout(None)
    with contextlib.suppress(OSError):  # raised if the command's host is gone
        while connection.recv(64):
            pass
    kill_family(agent)


class HostPool:
    """The run's hosts, with a keeper and a connection to each.

    A pool is made before the run's first actor. ``close`` ends every process on the hosts, and so
    does the end of this process.
    """

    def __init__(self, taken: TakenHosts, *, timeout_s: float, stopped: Callable[[], bool]):
        """Start a keeper on each host, ask it what the host has, and connect to it.

        Args:
            timeout_s: limit for the hosts to answer.
            stopped: returns True if the run was stopped, and wants no hosts any more.

        Raises:
            RunError: a host does not answer or lacks something, or the run was stopped meanwhile.
        """
        self.mesh = taken.mesh
        self.hosts: list[Host] = []
        self.dead: dict[int, str] = {}
        """Sentence about each host that died, by the host's number."""
        self._taken = taken
        self._key = next(_keys)
        self._links: list[socket.socket] = []
        self._keepers: list[Any] = []
        self._on_death: Callable[[str], None] | None = None
        self._closed = False
        self._lock = threading.Lock()
        token = secrets.token_bytes(TOKEN_BYTES)
        with contextlib.ExitStack() as on_error:
            on_error.callback(self.close)
            for index in range(len(taken.environments)):
                self._keepers.append(self._start_keeper(index, token))
            self._meet_keepers(token, timeout_s, stopped)
            on_error.pop_all()
        _started[self._key] = self

    def __reduce__(self) -> tuple[Any, ...]:
        # An actor of this process, which a pool is sent to, gets the pool itself.
        return _pool, (self._key,)

    def _start_keeper(self, index: int, token: bytes) -> Any:  # noqa: ANN401 - Monarch has no types
        command = default_bootstrap_cmd().with_env(dict(self._taken.environments[index]))
        procs = self.mesh.slice(hosts=index).spawn_procs(
            per_host={"procs": 1},
            name=f"keeper_{index}",
            bootstrap_command=lambda point: command,
        )
        keeper = procs.spawn(
            f"keeper_{index}", HostKeeper, token, self._taken.on_gpus, self._taken.one_machine
        )
        return keeper.slice(procs=0)

    def _meet_keepers(self, token: bytes, timeout_s: float, stopped: Callable[[], bool]) -> None:
        """Fill ``hosts`` with what the keepers report, and connect to each."""
        deadline = time.monotonic() + timeout_s
        reports = [keeper.report.call_one() for keeper in self._keepers]
        for index, report in enumerate(reports):
            late = f"host {index} of {len(reports)} did not answer within {timeout_s:g} s"
            host = _wait_for_report(report, stopped, deadline, late)
            host.name = f"host {index} ({host.name})"
            host.environment = self._taken.environments[index]
            if host.lacks:
                raise RunError(f"{host.name} {host.lacks[0]}")
            if self._taken.devices is not None:
                devices = tuple(self._taken.devices[index])
                if self._taken.on_gpus:
                    host.gpus = devices
                else:
                    host.cores = devices
            self.hosts.append(host)
            self._link(index, host, token)

    def on_death(self, report: Callable[[str], None]) -> None:
        """Have ``report`` called with a sentence about each host that dies, or has died already.

        It is called in any thread.
        """
        with self._lock:
            self._on_death = report
            died = list(self.dead.values())
        for line in died:
            report(line)

    def read(self, file: Path) -> dict[str, str | None]:
        """Return the text of a file as each host reads it, by the host's name."""
        answers = [keeper.read.call_one(file) for keeper in self._keepers]
        return {
            host.name: answer.get(timeout=60)
            for host, answer in zip(self.hosts, answers, strict=True)
        }

    def close(self) -> None:
        """End the hosts' processes and give the hosts back. May be called again."""
        with self._lock:
            if self._closed:
                return
            self._closed = True
        _started.pop(self._key, None)
        for link in self._links:
            with contextlib.suppress(OSError):
                link.shutdown(socket.SHUT_RDWR)
            link.close()
        self._taken.give_back()

    def _link(self, index: int, host: Host, token: bytes) -> None:
        """Connect to a host's keeper, and watch the connection in a thread."""
        place = (host.address, host.port)
        try:
            link = socket.create_connection(place, timeout=30)
        except OSError as error:
            why = error.strerror or str(error)
            raise RunError(
                f"{host.name} can't be reached at {place[0]}:{place[1]}: {why}"
            ) from None
        self._links.append(link)
        link.settimeout(None)
        keep_alive(link)
        link.sendall(token)
        threading.Thread(
            target=self._wait_for_end, args=(index, host.name, link), daemon=True
        ).start()

    def _wait_for_end(self, index: int, name: str, link: socket.socket) -> None:
        try:
            while link.recv(64):
                pass
            cause = "its processes ended"
        except OSError as error:
            cause = error.strerror or str(error)
        with self._lock:
            if self._closed:
                return
            line = f"{name} died: {cause}"
            self.dead[index] = line
            report = self._on_death
        if report is not None:
            report(line)


def attach(
    workers: Sequence[str],
    endpoints: Sequence[tuple[str, int] | str],
    *,
    timeout_s: float,
    stopped: Callable[[], bool] = lambda: False,
    printed: Path = Path(os.devnull),
) -> HostMesh:
    """Attach to Monarch's agents when all of them listen.

    Monarch loses its first message to an agent that begins to listen more than half a minute later.
    It then gives up after a minute, whatever limits it is given. On a shared file system the
    agents' imports may take longer.

    Args:
        workers: Monarch's address of each agent.
        endpoints: host name and port that each agent listens at, or the path of its socket.
        timeout_s: limit for all agents to listen.
        stopped: returns True if the run was stopped, and wants no hosts any more.
        printed: file that gets what Monarch prints.

    Raises:
        RunError: an agent does not listen, or the attach fails.
    """
    for port in sorted({endpoint[1] for endpoint in endpoints if not isinstance(endpoint, str)}):
        print(
            f"warning: whoever reaches port {port} of these hosts can run code as you: "
            "give them a network of their own (docs/security.md)",
            file=sys.stderr,
            flush=True,
        )
    deadline = time.monotonic() + timeout_s
    for index, endpoint in enumerate(endpoints):
        while (fault := _connection_fault(endpoint)) is not None:
            where = endpoint if isinstance(endpoint, str) else f"{endpoint[0]}:{endpoint[1]}"
            late = (
                f"host {index} of {len(endpoints)}: no agent at {where} after {timeout_s:g} s "
                f"({fault}): see that host's log, or give it longer (provision.job.start_timeout_s)"
            )
            _check_wait(stopped, deadline, late)
            time.sleep(POLL_S)
    try:
        with printed_to(printed):
            return attach_to_workers(
                ca="trust_all_connections", workers=list(workers), name="hosts"
            )
    except Exception as error:  # noqa: BLE001 - Monarch raises several types
        why = str(error).partition("\n")[0]
        raise RunError(f"the hosts' agents can't be attached to: {why}") from error


def _wait_for_report(
    report: Any,  # noqa: ANN401 - Monarch's future
    stopped: Callable[[], bool],
    deadline: float,
    late: str,
) -> Host:
    while True:
        try:
            return report.get(timeout=POLL_S)
        except TimeoutError:
            _check_wait(stopped, deadline, late)


def _check_wait(stopped: Callable[[], bool], deadline: float, late: str) -> None:
    """Raise if hosts are not to be waited for any longer.

    Raises:
        RunError: the run was stopped, or the deadline has passed (with ``late`` as the message).
    """
    if stopped():
        raise RunError("stopped while its hosts were taken")
    if time.monotonic() > deadline:
        raise RunError(late)


def _connection_fault(endpoint: tuple[str, int] | str) -> str | None:
    """Return why no connection to ``endpoint`` can be made; None if one can."""
    try:
        if isinstance(endpoint, str):
            with socket.socket(socket.AF_UNIX) as connection:
                connection.connect(endpoint)
        else:
            socket.create_connection(endpoint, timeout=2).close()
    except OSError as error:
        return error.strerror or str(error)
    return None


def _pool(key: int) -> HostPool:
    return _started[key]
