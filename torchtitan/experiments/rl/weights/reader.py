"""Finds published versions, and copies them to generator hosts that are not the trainer's.

    trainer's host ──RDMA──▶ WeightReader of a generator host ──shared memory──▶ its engines

torchstore holds no weights. It has the manifests, and handles of the hosts' memory: Monarch's RDMA
buffers, through which other hosts read that memory by InfiniBand or RoCE where the hosts have it,
and by TCP elsewhere. One process of each host fetches a version.
"""

import asyncio
import logging
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
import torchstore
from monarch.actor import ProcMesh

from torchtitan.experiments.rl.compat.monarch import OneActor
from torchtitan.experiments.rl.compat.torchstore import use_async_controller
from torchtitan.experiments.rl.errors import PeerGone, RunError
from torchtitan.experiments.rl.process.actor import WatchedActor, cause_in, reported_endpoint
from torchtitan.experiments.rl.process.host import host_identity
from torchtitan.experiments.rl.process.logs import set_up_logging
from torchtitan.experiments.rl.weights.snapshot import (
    Handle,
    Manifest,
    RankParts,
    SharedBuffer,
    buffer_bytes,
)

logger = logging.getLogger(__name__)

READ_BYTES = 8 * 2**20
"""Bytes of one read from another host. Over TCP, 256 MB took 0.2 s in reads of 8 MB side by side,
and 0.7 s in reads of 32 MB."""

READS_AT_ONCE = 16
"""Maximum number of reads side by side."""

FIRST_PAUSE_S = 0.002
LONGEST_PAUSE_S = 0.2
"""Pauses between looks for digests that are still being taken. Each is twice the one before."""

READ_TIMEOUT_S = 600
"""Maximum time of one read. A host that is gone is noticed by others first, and Monarch's own 60 s
are short on a busy network."""


class OneVolume(torchstore.SingletonStrategy):
    """Strategy that returns the store's only volume as one actor, whose calls leak little memory.

    torchstore's own strategy takes a slice of the volume's mesh for each call, and Monarch does not
    free all memory of a slice (`compat.monarch.call_actor`).
    """

    def get_storage_volume(self, volume_id: str) -> Any:  # noqa: ANN401 - torchstore's
        return OneActor(self.storage_volumes)


async def start_store(mesh: ProcMesh) -> None:
    """Start the run's store. A store that this process has started before is given up.

    Args:
        mesh: process of the store's only volume: the trainer's first, so that what is published
            stays where it is.
    """
    use_async_controller()
    await torchstore.shutdown()
    await torchstore.initialize(mesh=mesh, strategy=OneVolume())


def manifest_key(version: int) -> str:
    """Return the key of a version's Manifest.

    The keys of even and of odd versions alternate, as the buffers do, so nothing has to be deleted.
    """
    return f"policy/manifest/{version % 2}"


def memory_key(host: str, handle: Handle) -> str:
    """Return the key of the RDMABuffers of a SharedBuffer."""
    return f"policy/memory/{host}{handle}"


def copy_key(host: str) -> str:
    """Return the key of the HostCopy of a generator host."""
    return f"policy/copy/{host}"


async def published(version: int) -> Manifest:
    """Return the manifest of a version that was announced.

    Call it before the second version after this one is announced, whose manifest takes its place.

    Raises:
        RunError: the store has the manifest of another version.
    """
    manifest: Manifest = await torchstore.get(manifest_key(version))
    if manifest.version != version:
        raise RunError(
            f"the store has the manifest of version {manifest.version}, and not of version "
            f"{version}"
        )
    return manifest


async def proven(manifest: Manifest) -> Mapping[str, str]:
    """Return the digests of a published version, once the trainer has taken them.

    The trainer takes them while generators load. The wait has no limit of its own: if the trainer
    dies, the attempt ends, and with it the store and the processes that wait.

    Raises:
        RunError: the manifest of another version has taken this one's place in the store.
        Exception: the store is gone.
    """
    pause = FIRST_PAUSE_S
    while True:
        current = await published(manifest.version)
        if current.publication == manifest.publication and current.digests:
            return current.digests
        await asyncio.sleep(pause)
        pause = min(2 * pause, LONGEST_PAUSE_S)


@dataclass(kw_only=True, slots=True, frozen=True)
class HostCopy:
    """A version that lies whole in one generator host's memory.

    Engines prove what they load of it.
    """

    version: int
    publication: str
    """Name of the manifest's publication."""
    parts: tuple[RankParts, ...]


async def on_this_host(manifest: Manifest) -> Manifest:
    """Return the manifest with parts that processes of this host can open.

    They are the trainer's own, or what this host's reader has copied.

    Raises:
        RunError: this host has no copy of the version.
    """
    host = host_identity()
    if all(part.host == host for part in manifest.parts):
        return manifest
    copy: HostCopy = await torchstore.get(copy_key(host))
    if copy.publication != manifest.publication:
        raise RunError(
            f"host {host} has a copy of version {copy.version}, and not of version "
            f"{manifest.version}"
        )
    return replace(manifest, parts=copy.parts)


async def offer(host: str, buffer: SharedBuffer) -> None:
    """Let other hosts read a buffer of this one. Call it in an actor."""
    from monarch.rdma import RDMABuffer  # imported, it changes Python's warning filters

    def handles() -> list[Any]:
        return [RDMABuffer(part) for part in buffer.bytes.split(READ_BYTES)]

    # In a thread, because it takes 0.3 ms for each 8 MB. The thread has the actor's context, which
    # Monarch needs.
    await torchstore.put(memory_key(host, buffer.path), await asyncio.to_thread(handles))


async def read_offered(handles: Sequence[Any], target: torch.Tensor) -> None:
    """Read what another host has offered into a buffer of the same size.

    Raises:
        Exception: the other host can't be read. The other reads were cancelled before; what Monarch
            has begun of them may still write to the buffer.
    """
    seats = asyncio.Semaphore(READS_AT_ONCE)

    async def read(handle: Any, part: torch.Tensor) -> None:  # noqa: ANN401 - Monarch's
        async with seats:
            await handle.read_into(part, timeout=READ_TIMEOUT_S)

    try:
        async with asyncio.TaskGroup() as tasks:
            for handle, part in zip(handles, target.split(READ_BYTES), strict=True):
                tasks.create_task(read(handle, part))
    except ExceptionGroup as group:
        raise group.exceptions[0] from None


@dataclass(kw_only=True, slots=True, frozen=True)
class Fetched:
    """Report of a reader that has a version in its host's memory."""

    source: str
    """This host, if other readers may read the version from it; "" if not."""
    nbytes: int
    """Number of bytes read from other hosts; 0 if the host had the version."""
    seconds: float


class WeightReader(WatchedActor):
    """Fetches versions into the memory of its host, one process for each generator host.

    Two sets of buffers take turns, as the trainer's do.
    """

    def __init__(self, *, run_dir: str, index: int):
        super().__init__()
        self.process_name = f"weight reader {index}"
        set_up_logging(run_dir, f"weight-reader-{index}")
        self._host = host_identity()
        self._buffers: dict[int, list[SharedBuffer]] = {}
        """Buffers of the parts that are not in this host's memory, by the version's parity."""
        self._offered: set[int] = set()
        """Inodes of buffers that other readers can read."""
        self._copy: HostCopy | None = None
        """Version that was fetched last."""
        self._running: asyncio.Task[None] | None = None
        """Reads of the fetch that began last."""

    @reported_endpoint
    async def setup(self) -> str:
        """Return the identity of the reader's host."""
        return self._host

    @reported_endpoint
    async def fetch(self, version: int, source: str = "", serves: bool = False) -> Fetched:
        """Fetch a published version, and put it where this host's generators find it.

        Args:
            source: host of a reader that has the version; "" to read from the trainer's hosts.
            serves: True if other readers will read from this one.

        Raises:
            PeerGone: a host can't be read.
        """
        return await self.bring(version, source, serves)

    @reported_endpoint
    async def shutdown(self) -> None:
        """Do nothing: the memory is freed with its last process."""

    async def bring(self, version: int, source: str = "", serves: bool = False) -> Fetched:
        """Fetch a version, as `fetch` says.

        It is no endpoint, so a subclass can override it, and tests can call it without an actor.
        """
        started = time.perf_counter()
        manifest = await published(version)
        local = [part for part in manifest.parts if part.host == self._host]
        if len(local) == len(manifest.parts):
            return Fetched(source="", nbytes=0, seconds=0.0)
        if local:
            # The host has some of the trainer's ranks, and fetches the parts of the others alone,
            # from the trainer's hosts. No other reader can use what it fetches, because a reader
            # takes a whole version from another.
            source = ""
            serves = False
        nbytes = 0
        if self._copy is None or self._copy.publication != manifest.publication:
            nbytes = await self._copy_from(source, manifest, local)
        await torchstore.put(copy_key(self._host), self._copy)
        if serves:  # each buffer is offered once
            for buffer in self._buffers[version % 2]:
                if buffer.inode not in self._offered:
                    await offer(self._host, buffer)
                    self._offered.add(buffer.inode)
        return Fetched(
            source=self._host if serves else "",
            nbytes=nbytes,
            seconds=time.perf_counter() - started,
        )

    async def _copy_from(self, source: str, manifest: Manifest, local: Sequence[RankParts]) -> int:
        """Copy the parts that are not local. Return the number of bytes that were read."""
        if self._running is not None and not self._running.done():
            # An earlier fetch whose caller was cancelled, so nobody waits for its reads.
            self._running.cancel()
            await asyncio.wait({self._running})
        remote = [part for part in manifest.parts if part not in local]
        sizes = [buffer_bytes(part.shards, manifest.dtype) for part in remote]
        # The buffers are taken out of `_buffers` while they are written. If the fetch is
        # interrupted, a read may still write to them, so they are never used again.
        buffers = self._buffers.pop(manifest.version % 2, [])
        if [buffer.bytes.nbytes for buffer in buffers] != sizes:
            buffers = [await asyncio.to_thread(SharedBuffer.create, size) for size in sizes]
        self._running = asyncio.create_task(self._read_all(manifest, remote, buffers, source))
        await self._running
        self._buffers[manifest.version % 2] = buffers
        copied = [
            RankParts(self._host, buffer.path, part.shards)
            for part, buffer in zip(remote, buffers, strict=True)
        ]
        self._copy = HostCopy(
            version=manifest.version, publication=manifest.publication, parts=(*local, *copied)
        )
        return sum(sizes)

    async def _read_all(
        self,
        manifest: Manifest,
        remote: Sequence[RankParts],
        buffers: Sequence[SharedBuffer],
        source: str,
    ) -> None:
        if source:
            copy: HostCopy = await torchstore.get(copy_key(source))
            if copy.publication != manifest.publication:
                raise PeerGone(
                    f"version {manifest.version} can't be read from host {source}: it has version "
                    f"{copy.version}"
                )
            remote = copy.parts
        for part, buffer in zip(remote, buffers, strict=True):
            handles = await torchstore.get(memory_key(part.host, part.handle))
            try:
                await read_offered(handles, buffer.bytes)
            except Exception as error:
                cause = cause_in(error)
                raise PeerGone(
                    f"version {manifest.version} can't be read from host {part.host}: {cause}"
                ) from error
