"""torchstore as this library uses it: where a version's manifest, and for other hosts its bytes, are kept."""

import socket
from typing import Any

import torchstore
import torchstore.api
from monarch.actor import ProcMesh, endpoint
from torchstore.controller import Controller as TorchStoreController

from torchtitan.experiments.rl.weights.snapshot import Manifest, SharedBuffer


class _AsyncController(TorchStoreController):
    """torchstore 0.1.2 mixes sync and async endpoints in one actor, which Monarch 0.7 refuses: all are async here."""

    @endpoint
    async def get_controller_strategy(self) -> Any:
        return TorchStoreController.get_controller_strategy._method(self)

    @endpoint
    async def locate_volumes(self, key: str) -> Any:
        return TorchStoreController.locate_volumes._method(self, key)

    @endpoint
    async def notify_put(self, key: str, request: Any, storage_volume_id: str) -> None:
        TorchStoreController.notify_put._method(self, key, request, storage_volume_id)

    @endpoint
    async def keys(self, prefix: str | None = None) -> list[str]:
        return TorchStoreController.keys._method(self, prefix)

    @endpoint
    async def notify_delete(self, key: str, storage_volume_id: str) -> None:
        TorchStoreController.notify_delete._method(self, key, storage_volume_id)


def use_torchstore() -> None:
    """Make this process's torchstore speak to the store that works. Call before any put or get."""
    torchstore.api.Controller = _AsyncController


async def start_store(mesh: ProcMesh) -> None:
    """Start the run's store, its one volume on ``mesh`` (the trainer's first process: what is published stays where it is)."""
    use_torchstore()
    await torchstore.initialize(mesh=mesh)


def manifest_key(version: int) -> str:
    return f"policy/{version}/manifest"


def payload_key(version: int) -> str:
    return f"policy/{version}/payload"


_fetched: dict[str, SharedBuffer] = {}
"""Buffers of this process for snapshots from other hosts, by the trainer's path: reused, as the trainer reuses its own."""


async def local_copy(manifest: Manifest) -> str:
    """Path of the snapshot in this host's memory: the trainer's own buffer, or one filled through torchstore."""
    if manifest.host == socket.gethostname():
        return manifest.path
    if manifest.path not in _fetched:
        _fetched[manifest.path] = SharedBuffer.create(manifest.layout.nbytes)
    buffer = _fetched[manifest.path]
    await torchstore.get(manifest.payload_key, buffer.bytes)
    return buffer.path
