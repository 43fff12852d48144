"""Bytes and seconds of one version from a trainer's host to a generator's, against one copy in memory.

    python benchmarks/host_weights.py [--megabytes 500] [--versions 9] [--hosts 1]

1. Processes play the hosts, by their identities, on as many cores as there are. Monarch's RDMA buffers fall back to TCP
   on a machine without InfiniBand.
2. The trainer's process writes each version into its shared memory and publishes it. That is not measured here: see
   ``weight_sync.py``.
3. Measured is what a generator host needs beside: its reader gets the manifest and fetches the version into its own shared
   memory, which all engines of the host map.
4. Against a plain copy of as many bytes between two warm buffers in the reader's process.

The sides take turns; each figure is a median. Every version is compared with what was published, tensor by tensor.
"""

import argparse
import asyncio
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
import torch  # noqa: E402
from monarch.actor import (  # noqa: E402
    Actor,
    ProcMesh,
    concurrent_endpoint,
    default_bootstrap_cmd,
    shutdown_context,
    this_host,
)

from torchtitan.experiments.rl.errors import RunError  # noqa: E402
from torchtitan.experiments.rl.fleet.role import SpawnedProcess  # noqa: E402
from torchtitan.experiments.rl.fleet.weight_readers import WeightReaders  # noqa: E402
from torchtitan.experiments.rl.process.host import HOST_VARIABLE, host_identity  # noqa: E402
from torchtitan.experiments.rl.process.lifetime import Lifetime  # noqa: E402
from torchtitan.experiments.rl.process.setup import (  # noqa: E402
    launch_environment,
    set_up_process,
    set_up_spawned_process,
)
from torchtitan.experiments.rl.weights.publisher import SnapshotPublisher  # noqa: E402
from torchtitan.experiments.rl.weights.reader import (  # noqa: E402
    Fetched,
    WeightReader,
    on_this_host,
    published,
    start_store,
)
from torchtitan.experiments.rl.weights.snapshot import SnapshotReader, digest, named  # noqa: E402

TENSORS = 300
"""About as many as a model of 28 layers has."""


class Trainer(Actor):
    """One rank, with random weights that change with each version."""

    def __init__(self, nbytes: int):
        self._tensors = {f"tensor {i}": torch.randn(nbytes // 4 // TENSORS) for i in range(TENSORS)}
        self._publisher = SnapshotPublisher(rank=0, host=host_identity(), dtype=torch.float32)

    @concurrent_endpoint
    async def publish(self, version: int) -> None:
        for tensor in self._tensors.values():
            tensor[0] = version
        self._publisher.write(version, self._tensors)
        await self._publisher.announce(True)
        await self._publisher.prove()


class MeasuredReader(WeightReader):
    """A reader that also copies as many bytes, and checks what it has fetched."""

    async def bring(self, version: int, source: str = "", serves: bool = False) -> Fetched:
        self._source = source
        return await super().bring(version, source, serves)

    @concurrent_endpoint
    async def source(self) -> str:
        """Where the last version was read; "" is the trainer."""
        return self._source

    @concurrent_endpoint
    async def copy_seconds(self, nbytes: int) -> float:
        if not hasattr(self, "_warm"):
            self._warm = [torch.ones(nbytes, dtype=torch.uint8) for _ in range(2)]
        started = time.perf_counter()
        self._warm[0].copy_(self._warm[1])
        return time.perf_counter() - started

    @concurrent_endpoint
    async def verify(self, version: int) -> None:
        """
        Raises:
            RunError: the bytes are not those that were published.
        """
        manifest = await on_this_host(await published(version))
        tensors = SnapshotReader().tensors(manifest)
        if (
            named((name, int(digest(tensor))) for name, tensor in tensors.items())
            != manifest.digests
        ):
            raise RunError(f"version {version} was not fetched as it was published")


def spawn(host: str, cores: Sequence[int]) -> ProcMesh:
    def launch(point: Any) -> Any:
        return default_bootstrap_cmd().with_env(
            launch_environment(tuple(cores), "cpu") | {HOST_VARIABLE: host}
        )

    return this_host().spawn_procs(
        per_host={"procs": 1},
        bootstrap=partial(set_up_spawned_process, (tuple(cores),), "cpu"),
        name=host,
        bootstrap_command=launch,
    )


async def measure(
    nbytes: int, versions: int, warmup: int, hosts_of_generators: int
) -> tuple[str, list[float], list[float]]:
    """What was fetched, seconds until every host had a version, and seconds of each copy."""
    cores = sorted(os.sched_getaffinity(0))
    half = max(1, len(cores) // 2)
    names = [f"generator_host_{index}" for index in range(hosts_of_generators)]
    hosts = [
        spawn("trainer_host", cores[:half]),
        *(spawn(name, cores[half:] or cores) for name in names),
    ]
    try:
        with tempfile.TemporaryDirectory() as folder:
            trainer = hosts[0].spawn("trainer", Trainer, nbytes)
            readers, actors = WeightReaders(names), []
            for index, (name, host) in enumerate(zip(names, hosts[1:], strict=True)):
                actors.append(host.spawn("reader", MeasuredReader, run_dir=folder, index=index))
                await readers.admit(
                    name, SpawnedProcess(procs=host, actor=actors[-1], life=Lifetime(name))
                )
            await start_store(hosts[0])
            fetched, fetch_s, copy_s = "", [], []
            for version in range(1, versions + warmup + 1):
                await trainer.publish.call_one(version)
                started = time.perf_counter()
                await readers.fetch(version)
                seconds = time.perf_counter() - started
                copied = await actors[0].copy_seconds.call_one(nbytes)
                for actor in actors:
                    await actor.verify.call_one(version)
                counts = {*readers.take_fetched_bytes().values()}
                sources = [await actor.source.call_one() for actor in actors]
                if version > warmup:
                    fetched = (
                        f"{counts}, {sources.count('')} of {len(sources)} hosts from the trainer"
                    )
                    fetch_s.append(seconds)
                    copy_s.append(copied)
        return fetched, fetch_s, copy_s
    finally:
        for host in hosts:
            await host.stop()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--megabytes", type=int, default=500)
    parser.add_argument("--versions", type=int, default=9)
    parser.add_argument(
        "--hosts",
        type=int,
        default=1,
        help="of generators; of more than four, some read from others",
    )
    parser.add_argument(
        "--warmup",
        type=int,
        default=4,
        help="versions that are not counted; the first two make the pages",
    )
    arguments = parser.parse_args()
    set_up_process()
    nbytes = arguments.megabytes * 10**6 // (4 * TENSORS) * 4 * TENSORS
    try:
        fetched, fetch_s, copy_s = asyncio.run(
            measure(nbytes, arguments.versions, arguments.warmup, arguments.hosts)
        )
    except KeyboardInterrupt:
        sys.exit(130)
    finally:
        shutdown_context().get()
    fetch, copy = statistics.median(fetch_s), statistics.median(copy_s)
    print(f"weights of {nbytes / 1e6:.1f} MB in {TENSORS} tensors, {arguments.versions} versions")
    print(f"bytes fetched per host and version: {fetched}")
    print(
        f"fetch       {fetch * 1e3:8.0f} ms  {nbytes / fetch / 1e9:5.2f} GB/s  ({min(fetch_s):.2f} to {max(fetch_s):.2f} s)"
    )
    print(f"plain copy  {copy * 1e3:8.0f} ms  {nbytes / copy / 1e9:5.2f} GB/s")
    print(f"ratio fetch / plain copy: {fetch / copy:.1f}")


if __name__ == "__main__":
    main()
