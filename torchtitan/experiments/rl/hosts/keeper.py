"""One process on each host that says what the host has, and ends with it.

The command holds a connection to each. Where the host dies, the connection ends, and the command knows it. Where the command
ends, however it does, the connection ends too, and the host's processes are killed.
"""

import contextlib
import hmac
import os
import queue
import socket
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from monarch.actor import Actor

from torchtitan.experiments.rl.process.descendants import kill_family
from torchtitan.experiments.rl.process.gpus import gpu_host_lacks, mask_of, visible_gpus
from torchtitan.experiments.rl.process.host_identity import host_identity
from torchtitan.experiments.rl.process.network import LOOPBACK_ADDRESS, network_address
from torchtitan.experiments.rl.process.numa import own_cores
from torchtitan.experiments.rl.process.setup import ignore_signals_of_the_command
from torchtitan.experiments.rl.user_code.endpoint import reported_endpoint

TOKEN_BYTES = 32
GREETING_S = 10.0
"""A connection that has not said the token by then is not the command's."""
SILENCE_S = 30
"""A host whose kernel does not answer for so long is taken for dead."""


@dataclass(frozen=True, kw_only=True, slots=True)
class HostReport:
    """What a host says of itself."""

    identity: str
    """From ``host_identity``."""
    name: str
    """Its host name."""
    address: str
    port: int
    """Where its keeper waits for the command's connection."""
    cores: tuple[int, ...]
    """Node by node."""
    gpus: tuple[str, ...]
    """By index: what CUDA_VISIBLE_DEVICES calls each."""
    lacks: tuple[str, ...] = ()
    """From ``gpu_host_lacks``."""


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
        threading.Thread(target=_end_with_command, args=(self._listener, token, os.getppid()), daemon=True).start()

    @reported_endpoint
    async def report(self) -> HostReport:
        return HostReport(
            identity=host_identity(),
            name=socket.gethostname(),
            address=self._address,
            port=self._listener.getsockname()[1],
            cores=tuple(own_cores()),
            gpus=tuple(mask_of([gpu]) for gpu in visible_gpus()) if self._on_gpus else (),
            lacks=tuple(gpu_host_lacks(several_hosts=True)) if self._on_gpus else (),
        )

    @reported_endpoint
    async def unread(self, files: Sequence[tuple[str, str]]) -> list[str]:
        """Of paths and the text each is to begin with: the paths where this host reads something else, or nothing."""
        return [path for path, text in files if not _begins_with(path, text)]


def _begins_with(path: str, text: str) -> bool:
    try:
        with Path(path).open("rb") as file:
            return file.read(len(text.encode())) == text.encode()
    except OSError:
        return False


def keep_alive(connection: socket.socket) -> None:
    """Have the kernel end a connection whose other host is gone."""
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, SILENCE_S // 3)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, SILENCE_S // 6)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, 4)


def _end_with_command(listener: socket.socket, token: bytes, agent: int) -> None:
    """Wait for the command's connection, and for its end. Then kill the host's processes, those of ``agent``."""
    admitted: queue.SimpleQueue[socket.socket] = queue.SimpleQueue()
    threading.Thread(target=_admit, args=(listener, token, admitted), daemon=True).start()
    connection = admitted.get()
    listener.close()
    keep_alive(connection)
    connection.settimeout(None)
    try:
        while connection.recv(64):
            pass
    except OSError:  # the command's host is gone
        pass
    kill_family(agent)


def _admit(listener: socket.socket, token: bytes, admitted: queue.SimpleQueue[socket.socket]) -> None:
    """Hear strangers side by side: the command does not wait for one that says nothing."""

    def hear(connection: socket.socket) -> None:
        if _is_command(connection, token):
            admitted.put(connection)
        else:
            connection.close()

    with contextlib.suppress(OSError):  # closed: the command is here
        while True:
            threading.Thread(target=hear, args=(listener.accept()[0],), daemon=True).start()


def _is_command(connection: socket.socket, token: bytes) -> bool:
    connection.settimeout(GREETING_S)
    said = b""
    try:
        while len(said) < TOKEN_BYTES and (more := connection.recv(TOKEN_BYTES - len(said))):
            said += more
    except OSError:
        return False
    return hmac.compare_digest(said, token)
