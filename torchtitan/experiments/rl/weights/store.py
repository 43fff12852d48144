"""torchstore as this library uses it: where the manifests of the versions are kept, and what hosts say of their memory."""

import torchstore
from monarch.actor import ProcMesh

from torchtitan.experiments.rl.compat.torchstore import use_async_controller


async def start_store(mesh: ProcMesh) -> None:
    """Start the run's store, its one volume on ``mesh`` (the trainer's first process: what is published stays where it is).

    A store that this process has started before is given up; the process of its volume may have ended.
    """
    use_async_controller()
    await torchstore.shutdown()
    await torchstore.initialize(mesh=mesh)


def manifest_key(version: int) -> str:
    """Of a ``weights.snapshot.Manifest``."""
    return f"policy/{version}/manifest"


def shards_key(host: str) -> str:
    """Of the ``weights.remote.RemoteShards`` of a trainer host."""
    return f"policy/shards/{host}"


def copy_key(host: str) -> str:
    """Of the ``weights.reader.HostCopy`` of a generator host."""
    return f"policy/copy/{host}"
