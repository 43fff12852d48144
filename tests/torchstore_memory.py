"""Shows what torchstore's calls of a get and a put keep, in its own way and in the library's (`compat/torchstore.py`).

    python tests/torchstore_memory.py [--calls 2000]

A store of one volume. Prints kB for each get and put: in the process that asks, in the volume's, and in that of torchstore's
controller. `tests/monarch_memory.py` says what stays, and why.
"""

import argparse
import asyncio
import os
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from torchtitan.experiments.rl.process.setup import set_up_process  # noqa: E402

set_up_process()
import torchstore  # noqa: E402
from monarch.actor import Actor, endpoint, this_host  # noqa: E402
from torchstore.client import LocalClient  # noqa: E402

from tests.monarch_memory import kept_kb  # noqa: E402
from torchtitan.experiments.rl.compat.torchstore import SparingClient, use_async_controller  # noqa: E402
from torchtitan.experiments.rl.weights.reader import OneVolume, start_store  # noqa: E402


class Process(Actor):
    """Asks the store, or has its volume."""

    @endpoint
    async def prepare(self, sparing: bool) -> None:
        use_async_controller()
        torchstore.api.LocalClient = SparingClient if sparing else LocalClient
        if not sparing:
            OneVolume.get_storage_volume = lambda self, volume_id: self.storage_volumes
        await torchstore.put("key", list(range(100)))

    @endpoint
    async def repeat(self, what: str, calls: int) -> None:
        for _ in range(calls):
            await (
                torchstore.get("key") if what == "get" else torchstore.put("key", list(range(100)))
            )
        await asyncio.sleep(1.0)

    @endpoint
    async def kept_kb(self) -> int:
        return kept_kb()


async def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--calls", type=int, default=2000)
    calls = parser.parse_args().calls
    meshes = [this_host().spawn_procs(per_host={"procs": 1}) for _ in range(3)]
    volume, plain, sparing = (
        mesh.spawn(f"process_{index}", Process) for index, mesh in enumerate(meshes)
    )
    await start_store(meshes[0])

    async def kept() -> list[int]:
        return [await client.kept_kb.choose(), await volume.kept_kb.choose(), kept_kb()]

    for name, client in (("torchstore's", plain), ("the library's", sparing)):
        await client.prepare.choose(client is sparing)
        for what in ("get", "put"):
            await client.repeat.choose(what, calls)
            before = await kept()
            await client.repeat.choose(what, calls)
            asking, volumes, controllers = (
                (b - a) / calls for a, b in zip(before, await kept(), strict=True)
            )
            print(
                f"{name:<14} {what}  {asking:5.2f} kB in the process that asks, {volumes:5.2f} kB in the volume's, "
                f"{controllers:5.2f} kB in the controller's",
                flush=True,
            )


if __name__ == "__main__":
    asyncio.run(main())
    os._exit(0)  # Monarch waits for its processes otherwise
