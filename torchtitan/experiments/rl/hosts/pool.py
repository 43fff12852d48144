"""The hosts of a run while it runs: what each has, processes on them, and the notice of a host's end.

One process on each host, its keeper, says what the host has. The command holds a connection to it. Where the host dies, the
connection ends, and the command knows it. Where the command ends, however it does, the connection ends too, and the keeper
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
from torchtitan.experiments.rl.user_code.endpoint import reported_endpoint

_started: dict[int, "HostPool"] = {}
_keys = itertools.count()
POLL_S = 0.2
TOKEN_BYTES = 32
GREETING_S = 10.0
"""A connection that has not said the token by then is not the command's."""
SILENCE_S = 30
"""A host whose kernel does not answer for so long is taken for dead."""


@dataclass(kw_only=True, slots=True)
class Host:
    name: str
    """What its keeper calls it: its host name; for people, in the pool: "host 1 (node17)"."""
    address: str
    port: int
    """Where its keeper waits for the command's connection."""
    cores: tuple[int, ...]
    """Node by node."""
    gpus: tuple[str, ...]
    """By index: what CUDA_VISIBLE_DEVICES calls each. Empty in a run on CPU."""
    memory_gib: float
    """Memory that processes may have there, by the host's own limits."""
    lacks: tuple[str, ...] = ()
    """From ``gpu_host_lacks``."""
    environment: Mapping[str, str] = field(default_factory=dict)
    """What its processes get beside what every process of a run gets."""


class HostKeeper(Actor):
    def __init__(self, token: bytes, on_gpus: bool, one_machine: bool):
        """
        Args:
            token: TOKEN_BYTES that only the command's connection knows.
            on_gpus: count the host's GPUs.
            one_machine: the command runs on this machine; nobody else may connect.
        """
        ignore_signals_of_the_command()
        self.part = f"host {socket.gethostname()}"
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
    """None where this host can't read the file."""
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
    """Hear strangers side by side: the command does not wait for one that says nothing."""
    with contextlib.suppress(OSError):  # closed: the command is here
        while True:
            threading.Thread(
                target=_hear, args=(listener, listener.accept()[0], token, agent), daemon=True
            ).start()


def _hear(listener: socket.socket, connection: socket.socket, token: bytes, agent: int) -> None:
    """Wait for the end of the connection that says the token, the command's. Then kill the host's processes, ``agent``'s."""
    connection.settimeout(GREETING_S)
    said = b""
    with contextlib.suppress(OSError):
        while len(said) < TOKEN_BYTES and (more := connection.recv(TOKEN_BYTES - len(said))):
            said += more
    if not hmac.compare_digest(said, token):
        return connection.close()
    listener.close()
    keep_alive(connection)
    connection.settimeout(None)
    with contextlib.suppress(OSError):  # the command's host is gone
        while connection.recv(64):
            pass
    kill_family(agent)


class HostPool:
    """Made before the run's first actor. ``close`` ends every process on the hosts, and so does the end of this process."""

    def __init__(
        self,
        mesh: HostMesh,
        *,
        on_gpus: bool,
        one_machine: bool,
        environments: Sequence[Mapping[str, str]],
        devices: Sequence[Sequence[Any]] | None = None,
        timeout_s: float,
        stopped: Callable[[], bool],
        end_job: Callable[[], None] = lambda: None,
    ):
        """
        Args:
            mesh: of one dimension, "hosts".
            one_machine: the hosts are processes of this machine.
            environments: of each host's processes.
            devices: cores, or with ``on_gpus`` names of GPUs, that the job gives each host. None: all that the host has.
            timeout_s: how long the hosts may take until they answer.
            stopped: whether nobody wants them any more.
            end_job: gives the hosts back.

        Raises:
            RunError: a host does not answer, or the run was stopped meanwhile.
        """
        self.mesh, self._end_job = mesh, end_job
        self._key = next(_keys)
        self.hosts: list[Host] = []
        self._links: list[socket.socket] = []
        self._keepers: list[Any] = []
        self.dead: dict[int, str] = {}
        """Hosts that died, by their number, with a sentence about each."""
        self._on_death: Callable[[str], None] | None = None
        self._closed, self._lock = False, threading.Lock()
        token, deadline = secrets.token_bytes(TOKEN_BYTES), time.monotonic() + timeout_s
        try:
            for index, environment in enumerate(environments):
                command = default_bootstrap_cmd().with_env(dict(environment))
                procs = mesh.slice(hosts=index).spawn_procs(
                    per_host={"procs": 1},
                    name=f"keeper_{index}",
                    bootstrap_command=lambda point, command=command: command,
                )
                keeper = procs.spawn(f"keeper_{index}", HostKeeper, token, on_gpus, one_machine)
                self._keepers.append(keeper.slice(procs=0))
            asked = [keeper.report.call_one() for keeper in self._keepers]
            for index, answer in enumerate(asked):
                late = f"host {index} of {len(asked)} did not answer within {timeout_s:g} s"
                host = _answer(answer, stopped, deadline, late)
                host.name, host.environment = f"host {index} ({host.name})", environments[index]
                if host.lacks:
                    raise RunError(f"{host.name} {host.lacks[0]}")
                if devices is not None and on_gpus:
                    host.gpus = tuple(devices[index])
                elif devices is not None:
                    host.cores = tuple(devices[index])
                self.hosts.append(host)
                self._link(index, host, token)
        except BaseException:
            self.close()
            raise
        _started[self._key] = self

    def __reduce__(self) -> tuple[Any, ...]:
        """An actor of this process gets this object."""
        return _pool, (self._key,)

    def on_death(self, report: Callable[[str], None]) -> None:
        """Call ``report``, from any thread, with a sentence about each host that dies or has died."""
        with self._lock:
            self._on_death = report
            died = list(self.dead.values())
        for line in died:
            report(line)

    def read(self, file: Path) -> dict[str, str | None]:
        """The text of a file as each host reads it, by the host's name."""
        asked = [keeper.read.call_one(file) for keeper in self._keepers]
        return {
            host.name: answer.get(timeout=60)
            for host, answer in zip(self.hosts, asked, strict=True)
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
        self._end_job()

    def _link(self, index: int, host: Host, token: bytes) -> None:
        try:
            link = socket.create_connection((host.address, host.port), timeout=30)
        except OSError as error:
            raise RunError(
                f"{host.name} can't be reached at {host.address}:{host.port}: {error.strerror or error}"
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
            line = self.dead[index] = f"{name} died: {cause}"
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

    Monarch loses its first message to an agent that begins to listen more than half a minute later, and then gives up after a
    minute, whatever limits it is given. On a shared file system the agents' imports may take longer.

    Args:
        workers: Monarch's address of each agent.
        endpoints: where it listens: name and port, or the path of a socket.
        timeout_s: how long they may take.
        stopped: whether nobody wants them any more.
        printed: takes what Monarch prints.

    Raises:
        RunError: an agent does not listen, or the attach fails.
    """
    for port in sorted({endpoint[1] for endpoint in endpoints if not isinstance(endpoint, str)}):
        line = f"warning: whoever reaches port {port} of these hosts can run code as you: give them a network of their own"
        print(f"{line} (docs/security.md)", file=sys.stderr, flush=True)
    deadline = time.monotonic() + timeout_s
    for index, endpoint in enumerate(endpoints):
        while (fault := _unheard(endpoint)) is not None:
            where = endpoint if isinstance(endpoint, str) else f"{endpoint[0]}:{endpoint[1]}"
            late = f"host {index} of {len(endpoints)}: no agent at {where} after {timeout_s:g} s ({fault})"
            _go_on_waiting(
                stopped,
                deadline,
                f"{late}: see that host's log, or give it longer (provision.job.start_timeout_s)",
            )
            time.sleep(POLL_S)
    try:
        with printed_to(printed):
            return attach_to_workers(
                ca="trust_all_connections", workers=list(workers), name="hosts"
            )
    except Exception as error:  # Monarch's own types differ
        raise RunError(
            f"the hosts' agents can't be attached to: {str(error).partition(chr(10))[0]}"
        ) from error


def _answer(answer: Any, stopped: Callable[[], bool], deadline: float, late: str) -> Host:
    while True:
        try:
            return answer.get(timeout=POLL_S)
        except TimeoutError:
            _go_on_waiting(stopped, deadline, late)


def _go_on_waiting(stopped: Callable[[], bool], deadline: float, late: str) -> None:
    """
    Raises:
        RunError: nobody wants the hosts any more, or they are late.
    """
    if stopped():
        raise RunError("stopped while its hosts were taken")
    if time.monotonic() > deadline:
        raise RunError(late)


def _unheard(endpoint: tuple[str, int] | str) -> str | None:
    """Why nobody listens there; None: somebody does."""
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
