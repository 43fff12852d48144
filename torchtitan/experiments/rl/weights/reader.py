"""A generator host's copy of each version, for the hosts that are not the trainer's. One process of the host fetches it."""

import asyncio
import logging
import time
from dataclasses import dataclass

import torchstore

from torchtitan.experiments.rl.errors import PeerGone, RunError
from torchtitan.experiments.rl.process.host import host_identity
from torchtitan.experiments.rl.process.setup import collect_again, set_up_logging
from torchtitan.experiments.rl.user_code.endpoint import WatchedActor, cause_in, reported_endpoint
from torchtitan.experiments.rl.weights.host_shards import RemoteShards, copy_held, fetch, offer
from torchtitan.experiments.rl.weights.snapshot import Manifest, SharedBuffer
from torchtitan.experiments.rl.weights.store import copy_key, copy_shards_key, published, shards_key

logger = logging.getLogger(__name__)


@dataclass(kw_only=True, slots=True, frozen=True)
class HostCopy:
    """A whole snapshot in a generator host's memory."""

    version: int
    publication: str
    """An engine proves what it makes of the copy."""
    path: str
    """Of a SharedBuffer."""


@dataclass(kw_only=True, slots=True, frozen=True)
class Fetched:
    source: str
    """This host, if other readers may read the version from it; "" if not."""
    nbytes: int
    """Read from other hosts; 0 where the host had the version."""
    seconds: float


class WeightReader(WatchedActor):
    """Fetches versions into this host's memory, into two buffers alternately, as the trainer writes them."""

    def __init__(self, *, run_dir: str, index: int):
        super().__init__()
        self.part = f"weight reader {index}"
        set_up_logging(run_dir, f"weight-reader-{index}")
        self._host = host_identity()
        self._buffers: dict[int, SharedBuffer] = {}
        self._offered: set[str] = set()
        """Paths of buffers that other readers can read."""
        self._copy: HostCopy | None = None
        self._running: asyncio.Task[int] | None = None

    @reported_endpoint
    async def setup(self) -> str:
        """Its host's identity."""
        collect_again()
        return self._host

    @reported_endpoint
    async def fetch(self, version: int, source: str = "", serves: bool = False) -> Fetched:
        """Return when this host has a copy of a published version, and its generators can find it.

        Args:
            source: host of a reader that has the version; "": read from the trainer's hosts.
            serves: other readers will read from this one.

        Raises:
            PeerGone: a host can't be read.
        """
        return await self.bring(version, source, serves)

    @reported_endpoint
    async def shutdown(self) -> None:
        """Nothing is left behind: the memory is gone with its last process."""

    async def bring(self, version: int, source: str = "", serves: bool = False) -> Fetched:
        """``fetch``, in this process."""
        started = time.perf_counter()
        manifest = await published(version)
        if manifest.whole_on(self._host) is not None:
            return Fetched(source="", nbytes=0, seconds=0.0)
        nbytes = 0
        if self._copy is None or self._copy.publication != manifest.publication:
            nbytes = await self._fetch(manifest, source)
        await torchstore.put(copy_key(self._host), self._copy)
        if serves:
            await self._offer(manifest)
        return Fetched(source=self._host if serves else "", nbytes=nbytes, seconds=time.perf_counter() - started)

    async def _offer(self, manifest: Manifest) -> None:
        """Let other readers read the version that was fetched last. They find each buffer once."""
        buffer = self._buffers[manifest.version % 2]
        if buffer.path not in self._offered:
            whole = {
                entry.name: [tuple((0, size) for size in entry.shape)] for entry in manifest.layout.entries if entry.nbytes
            }
            offered = await asyncio.to_thread(offer, whole, manifest.layout, [buffer.bytes])
            await torchstore.put(copy_shards_key(self._host, manifest.version % 2), offered)
            self._offered.add(buffer.path)

    async def _fetch(self, manifest: Manifest, source: str) -> int:
        if self._running is not None and not self._running.done():  # nobody waits for it any more: its caller was cancelled
            self._running.cancel()
            await asyncio.wait({self._running})
        # Taken out while it is written: what is interrupted may still be written to, and is not used again.
        buffer = self._buffers.pop(manifest.version % 2, None)
        if buffer is None:
            buffer = await asyncio.to_thread(SharedBuffer.create, manifest.layout.nbytes)
        running = self._running = asyncio.create_task(self._read_all(manifest, buffer, source))
        nbytes = await running
        self._buffers[manifest.version % 2] = buffer
        self._copy = HostCopy(version=manifest.version, publication=manifest.publication, path=buffer.path)
        return nbytes

    async def _read_all(self, manifest: Manifest, buffer: SharedBuffer, source: str) -> int:
        nbytes, layout, parity = 0, manifest.layout, manifest.version % 2
        offers = {host: (shards_key(host), parity) for host in manifest.paths}
        if source and self._host not in offers:
            offers = {source: (copy_shards_key(source, parity), 0)}
        for host, (key, index) in offers.items():
            remote: RemoteShards = await torchstore.get(key)
            if host == self._host:
                own = SharedBuffer.attach(manifest.paths[host]).bytes
                await asyncio.to_thread(copy_held, remote.shards, layout, own, buffer.bytes)
                continue
            try:
                nbytes += await fetch(remote, layout, index, buffer.bytes)
            except Exception as error:
                raise PeerGone(f"version {manifest.version} can't be read from host {host}: {cause_in(error)}") from error
        return nbytes


async def local_snapshot(manifest: Manifest) -> str:
    """Path of the snapshot in this host's memory: the trainer's own buffer, or the copy that this host's reader has made. "" of
    one that the trainer's ranks hold on their devices.

    Raises:
        RunError: there is none.
    """
    if manifest.parts:
        return ""
    host = host_identity()
    if (path := manifest.whole_on(host)) is not None:
        return path
    copy: HostCopy = await torchstore.get(copy_key(host))
    if copy.publication != manifest.publication:
        raise RunError(f"host {host} has a copy of version {copy.version}, and not of version {manifest.version}")
    return copy.path
