"""Weights of a trainer on two hosts, for generators on a third: each host reads a version once, and all its engines map that.

One machine plays the hosts, by their identities. The engine's weights are one table, and every probability is known.
"""

import asyncio
import itertools
import os
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
import torchstore
from monarch.actor import (
    Actor,
    Point,
    ProcMesh,
    concurrent_endpoint,
    current_rank,
    default_bootstrap_cmd,
    this_host,
)
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

from tests.fakes.engine import TABLE, ScriptedEngineConfig, save_table
from torchtitan.experiments.rl.fleet.role import SpawnedProcess
from torchtitan.experiments.rl.fleet.weight_readers import WeightReaders
from torchtitan.experiments.rl.generation.client import GeneratorClient
from torchtitan.experiments.rl.generation.config import GeneratorConfig
from torchtitan.experiments.rl.generation.generator import Generator
from torchtitan.experiments.rl.process.host import HOST_VARIABLE, host_identity
from torchtitan.experiments.rl.process.lifetime import Lifetime
from torchtitan.experiments.rl.process.setup import launch_environment, set_up_spawned_process
from torchtitan.experiments.rl.weights.publisher import SnapshotPublisher
from torchtitan.experiments.rl.weights.reader import (
    HostCopy,
    WeightReader,
    copy_key,
    published,
    start_store,
)
from torchtitan.experiments.rl.weights.snapshot import SnapshotReader, fingerprint
from torchtitan.experiments.rl.weights.sync import CanaryBound, WeightSync

VOCABULARY = 2100
"""A host's half of the table is then more than what one read takes."""
HALF = VOCABULARY * VOCABULARY * 2 + 32
"""Bytes of float32 that each trainer host has, up to a multiple of 64."""


def table_of(version: int) -> torch.Tensor:
    """No two versions agree on any token."""
    return torch.randn(
        VOCABULARY, VOCABULARY, generator=torch.Generator().manual_seed(version)
    ).softmax(-1)


class TrainerRank(Actor):
    """What weight synchronisation asks of a PolicyTrainer. Each rank holds a half of the table."""

    @concurrent_endpoint
    async def begin(self, rendezvous: str | None, dimension: int) -> None:
        """A trainer whose ranks cut the table along a dimension; without a rendezvous, in the place of another one."""
        if rendezvous is not None:
            dist.init_process_group(
                "gloo", init_method=rendezvous, rank=current_rank().rank, world_size=2
            )
        self._publisher = SnapshotPublisher(
            rank=dist.get_rank(), host=host_identity(), dtype=torch.float32
        )
        self._mesh, self._dimension = init_device_mesh("cpu", (2,)), dimension

    @concurrent_endpoint
    async def copy_weights(
        self, version: int, canary_token_ids: np.ndarray, remote_readers: bool
    ) -> None:
        table = table_of(version)
        self._canary = np.concatenate(
            [[0.0], np.log(table.numpy()[canary_token_ids[:-1], canary_token_ids[1:]])]
        )
        self._publisher.write(
            version, {TABLE: distribute_tensor(table, self._mesh, [Shard(self._dimension)])}
        )
        await self._publisher.announce(remote_readers)

    @concurrent_endpoint
    async def proof(self) -> tuple[str, np.ndarray]:
        return fingerprint((await self._publisher.prove()).digests), self._canary


def spawn(name: str, *hosts: str) -> ProcMesh:
    """A process for each of the hosts."""
    cores = tuple(sorted(os.sched_getaffinity(0)))
    shares = (cores,) * len(hosts)

    def launch(point: Point) -> Any:
        return default_bootstrap_cmd().with_env(
            launch_environment(cores, "cpu") | {HOST_VARIABLE: hosts[point.rank]}
        )

    return this_host().spawn_procs(
        per_host={"procs": len(hosts)},
        bootstrap=partial(set_up_spawned_process, shares, "cpu"),
        name=name,
        bootstrap_command=launch,
    )


@dataclass
class World:
    trainer: Any
    generators: Any
    client: GeneratorClient
    readers: WeightReaders
    sync: WeightSync
    procs: ProcMesh
    folder: str
    version: int = 0
    ids: Iterator[int] = field(default_factory=itertools.count)

    async def deliver(self):
        self.version += 1
        return await self.sync.update(await self.sync.copy_out(self.version))

    async def start_reader(self, host: str, proc: int) -> None:
        """A run starts a process for it. Here it is one more actor of a process that is there."""
        await self.readers.admit(
            host, SpawnedProcess(procs=self.procs, actor=self.reader(proc), life=Lifetime(host))
        )

    def reader(self, proc: int) -> Any:
        name = f"reader_{next(self.ids)}"
        return self.procs.slice(procs=proc).spawn(
            name, WeightReader, run_dir=self.folder, index=proc
        )


async def build(folder: Path) -> World:
    # Host a has a rank, and a reader for generators beside it.
    procs = spawn("hosts", "a", "b", "c", "c", "d")
    trainer = procs.slice(procs=slice(0, 2)).spawn("trainer", TrainerRank)
    engine = ScriptedEngineConfig(max_model_len=64)
    generators = procs.slice(procs=slice(2, 4)).spawn(
        "generator",
        Generator,
        GeneratorConfig(replicas=2, engine=engine),
        model_path=save_table(table_of(0), folder),
        device="cpu",
        run_dir=str(folder),
    )
    await start_store(procs.slice(procs=0))
    await asyncio.gather(
        trainer.begin.call(f"file://{folder}/rendezvous", 1), generators.setup.call()
    )
    client, readers = GeneratorClient(), WeightReaders(["host a", "host c"])
    for index in range(2):
        await client.admit(index, generators.slice(procs=index))
    sync = WeightSync(
        trainer,
        client,
        text=np.arange(8) % VOCABULARY,
        bound=CanaryBound("float32"),
        copies=readers,
    )
    world = World(trainer, generators, client, readers, sync, procs, str(folder))
    await world.start_reader("host a", 0)
    await world.start_reader("host c", 2)
    return world


@pytest.fixture(scope="module")
def world(tmp_path_factory) -> Iterator[World]:
    made = asyncio.run(build(tmp_path_factory.mktemp("hosts")))
    yield made

    async def close() -> None:
        made.client.close()
        await made.generators.shutdown.call()
        await torchstore.shutdown()  # a process has one store at a time
        await made.procs.stop()

    asyncio.run(close())


async def copy_on(host: str) -> HostCopy:
    return await torchstore.get(copy_key(host))


async def assert_holds(world: World, host: str) -> None:
    """The snapshot on a host is the table of the version, to the last bit."""
    copy = await copy_on(host)
    assert copy.version == world.version and {part.host for part in copy.parts} == {host}
    seen = SnapshotReader().tensors(replace(await published(world.version), parts=copy.parts))
    assert torch.equal(seen[TABLE], table_of(world.version))


async def test_each_host_reads_a_version_once_and_its_engines_map_what_was_read(world):
    for _ in range(3):
        report = await world.deliver()
        assert report.version == world.version and report.canary_max_diff < 1e-5
        # Two generators are on host c. Host a has one half of each version itself.
        assert report.fetched_bytes == {"host a": HALF, "host c": 2 * HALF}
        await assert_holds(world, "a")
        await assert_holds(world, "c")
    shared = {str(os.stat(part.handle).st_ino) for part in (await copy_on("c")).parts}
    for identity in (await world.generators.identity.call()).values():
        mapped = [
            line.split() for line in Path(f"/proc/{identity.pid}/maps").read_text().splitlines()
        ]
        assert shared <= {fields[4] for fields in mapped}


async def test_a_replica_that_is_back_loads_what_its_host_has_read(world):
    await world.deliver()
    admitted = []

    async def take_requests() -> None:
        admitted.append(True)

    await world.sync.admit(1, world.generators.slice(procs=1), take_requests)
    assert admitted and world.readers.take_fetched_bytes() == {"host a": 0, "host c": 0}


async def test_a_reader_that_is_made_again_reads_the_version_again_and_the_engines_take_it_from_there(
    world,
):
    await world.deliver()
    before = await copy_on("c")
    world.readers.lose("host c")
    await world.start_reader("host c", 2)
    admitted = []

    async def take_requests() -> None:
        admitted.append(True)

    await world.sync.admit(0, world.generators.slice(procs=0), take_requests)
    assert admitted and world.readers.take_fetched_bytes() == {"host a": 0, "host c": 2 * HALF}
    assert (await copy_on("c")).parts != before.parts
    world.readers.lose("host c")
    updating = asyncio.create_task(world.deliver())  # it waits for the next reader
    await world.start_reader("host c", 3)
    assert (await updating).fetched_bytes == {"host a": HALF, "host c": 2 * HALF}
    await assert_holds(world, "c")


async def test_engines_that_find_the_memory_of_a_dead_reader_gone_load_from_the_next(
    world, monkeypatch
):
    procs = spawn("short_lived", "c")
    reader = procs.spawn("reader", WeightReader, run_dir=world.folder, index=9)
    process = SpawnedProcess(procs=procs, actor=reader, life=Lifetime("host c"))
    await world.readers.admit("host c", process)

    async def load_after_its_death(version, canary_token_ids):
        monkeypatch.undo()
        await procs.stop()
        world.readers.lose("host c")
        await world.start_reader("host c", 2)
        return await world.client.update_weights(version, canary_token_ids)

    monkeypatch.setattr(world.client, "update_weights", load_after_its_death)
    report = await world.deliver()
    assert report.version == world.version and report.canary_max_diff < 1e-5
    await assert_holds(world, "c")


async def test_a_host_reads_from_another_reader_what_that_has_read(world):
    first, second = world.reader(2), world.reader(4)
    for _ in range(3):
        await world.deliver()
        assert (await first.fetch.call_one(world.version, serves=True)).source == "c"
        assert (await second.fetch.call_one(world.version, source="c")).nbytes == 2 * HALF
        await assert_holds(world, "d")


async def test_a_trainer_that_is_made_again_and_divides_itself_otherwise_is_read_anew(world):
    await world.deliver()
    await world.trainer.begin.call(None, 0)
    world.version -= 1  # it has lost the last step
    report = await world.deliver()
    assert report.fetched_bytes == {"host a": HALF, "host c": 2 * HALF}
    await assert_holds(world, "a")
    await assert_holds(world, "c")
