"""torchstore as this library uses it: where a version's manifest, and for other hosts its bytes, are kept."""

import torchstore
from monarch.actor import ProcMesh

from torchtitan.experiments.rl.compat.torchstore import use_async_controller
from torchtitan.experiments.rl.process.host_identity import host_identity
from torchtitan.experiments.rl.weights.snapshot import Manifest, SharedBuffer


async def start_store(mesh: ProcMesh) -> None:
    """Start the run's store, its one volume on ``mesh`` (the trainer's first process: what is published stays where it is).

    A store that this process has started before is given up; the process of its volume may have ended.
    """
    use_async_controller()
    await torchstore.shutdown()
    await torchstore.initialize(mesh=mesh)


def manifest_key(version: int) -> str:
    return f"policy/{version}/manifest"


def payload_key(version: int) -> str:
    return f"policy/{version}/payload"


_fetched: dict[str, SharedBuffer] = {}
"""Buffers of this process for snapshots from other hosts, by the trainer's path: reused, as the trainer reuses its own."""


async def local_copy(manifest: Manifest) -> str:
    """Path of the snapshot in this host's memory: the trainer's own buffer, or one filled through torchstore."""
    if manifest.host == host_identity():
        return manifest.path
    if manifest.path not in _fetched:
        _fetched[manifest.path] = SharedBuffer.create(manifest.layout.nbytes)
    buffer = _fetched[manifest.path]
    await torchstore.get(manifest.payload_key, buffer.bytes)
    return buffer.path
