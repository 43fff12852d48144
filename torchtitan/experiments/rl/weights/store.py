"""torchstore as this library uses it: where the manifests of the versions are kept, and what hosts say of their memory."""

import asyncio
from dataclasses import dataclass
from typing import Any

import torchstore
from monarch.actor import ProcMesh

from torchtitan.experiments.rl.compat.monarch import OneActor
from torchtitan.experiments.rl.compat.torchstore import is_missing, use_async_controller
from torchtitan.experiments.rl.errors import RunError
from torchtitan.experiments.rl.weights.snapshot import Manifest, Shard, digests_of_shards

FIRST_PAUSE_S, LONGEST_PAUSE_S = 0.01, 1.0
"""Between looks for digests that are still being taken. Each pause is twice the one before."""


@dataclass(kw_only=True, slots=True, frozen=True)
class HostDigests:
    """Of what one trainer host holds of a version."""

    publication: str
    digests: dict[tuple[str, Shard], str]
    """By name and shard."""


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


def digests_key(version: int, host: str) -> str:
    """Of the ``HostDigests`` of a trainer host. Two keys alternate."""
    return f"policy/digests/{version % 2}/{host}"


async def published_digests(manifest: Manifest) -> dict[str, str]:
    """``weights.snapshot.tensor_digests`` of a published version, as the trainer has taken them. Waits until it has."""
    hosts = await asyncio.gather(*(_digests_on(host, manifest) for host in manifest.paths))
    return digests_of_shards({key: value for own in hosts for key, value in own.items()}, manifest.layout)


async def _digests_on(host: str, manifest: Manifest) -> dict[tuple[str, Shard], str]:
    pause = FIRST_PAUSE_S
    while True:
        try:
            found: HostDigests = await torchstore.get(digests_key(manifest.version, host))
            if found.publication == manifest.publication:
                return found.digests
        except Exception as error:
            if not is_missing(error):
                raise
        await asyncio.sleep(pause)
        pause = min(2 * pause, LONGEST_PAUSE_S)


def shards_key(host: str) -> str:
    """Of the ``weights.remote.RemoteShards`` of a trainer host."""
    return f"policy/shards/{host}"


def copy_key(host: str) -> str:
    """Of the ``weights.reader.HostCopy`` of a generator host."""
    return f"policy/copy/{host}"
