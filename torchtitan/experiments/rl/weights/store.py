"""torchstore as this library uses it: where the manifests of the versions are kept, and what hosts say of their memory."""

from typing import Any

import torchstore
from monarch.actor import ProcMesh

from torchtitan.experiments.rl.compat.monarch import OneActor
from torchtitan.experiments.rl.compat.torchstore import use_async_controller
from torchtitan.experiments.rl.errors import RunError
from torchtitan.experiments.rl.weights.snapshot import Manifest


class OneVolume(torchstore.SingletonStrategy):
    """Gives the store's only volume without a slice of its mesh, and for calls that keep little (``compat.monarch.ask``)."""

    def get_storage_volume(self, volume_id: str) -> Any:
        return OneActor(self.storage_volumes)


async def start_store(mesh: ProcMesh) -> None:
    """Start the run's store, its one volume on ``mesh`` (the trainer's first process: what is published stays where it is).

    A store that this process has started before is given up; the process of its volume may have ended.
    """
    use_async_controller()
    await torchstore.shutdown()
    await torchstore.initialize(mesh=mesh, strategy=OneVolume())


def manifest_key(version: int) -> str:
    """Of a ``weights.snapshot.Manifest``. Two keys alternate, as the buffers do: nothing has to be deleted."""
    return f"policy/manifest/{version % 2}"


async def published(version: int) -> Manifest:
    """The manifest of a version, of which the next is not published yet.

    Raises:
        RunError: its place has another version's.
    """
    manifest: Manifest = await torchstore.get(manifest_key(version))
    if manifest.version != version:
        raise RunError(f"the store has the manifest of version {manifest.version}, and not of version {version}")
    return manifest


def shards_key(host: str) -> str:
    """Of the ``weights.host_shards.RemoteShards`` of a trainer host."""
    return f"policy/shards/{host}"


def copy_shards_key(host: str, buffer: int) -> str:
    """Of the ``weights.host_shards.RemoteShards`` of a buffer of a generator host's reader, which holds whole versions."""
    return f"policy/copy/{host}/{buffer}"


def copy_key(host: str) -> str:
    """Of the ``weights.reader.HostCopy`` of a generator host."""
    return f"policy/copy/{host}"
