"""A generator host's copy of the weights: complete or not there, read once, and read again where it was lost."""

import asyncio
from collections import Counter
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from monarch.actor import ActorError

from tests.fakes.trainer import TrainerMesh
from tests.fakes.waiting import iterations, until
from torchtitan.experiments.rl.errors import PeerGone, RunError
from torchtitan.experiments.rl.fleet.role import SpawnedProcess
from torchtitan.experiments.rl.fleet.weight_readers import (
    READERS_AT_ONCE,
    WeightReaders,
    first_generators,
)
from torchtitan.experiments.rl.process.lifetime import Lifetime
from torchtitan.experiments.rl.weights import reader as reader_module
from torchtitan.experiments.rl.weights.reader import (
    Fetched,
    WeightReader,
    copy_key,
    manifest_key,
    memory_key,
    on_this_host,
    read_offered,
)
from torchtitan.experiments.rl.weights.snapshot import (
    Manifest,
    RankParts,
    SharedBuffer,
    SnapshotReader,
    buffer_bytes,
    index_of,
    views,
)
from torchtitan.experiments.rl.weights.sync import CANARY_TOKENS, CanaryBound, CopiedOut, WeightSync

# ---- the reader of a host


class TrainerHosts:
    """Hosts "a" and "b" that hold the rows of one tensor, a half each; and the store."""

    ROWS = 40

    def __init__(self, monkeypatch):
        self.store, self.reads, self.publications = {}, 0, 0
        self.broken = False
        """Whether the third read of host b fails."""
        monkeypatch.setattr(reader_module, "READ_BYTES", 100)

        async def put(key, value):
            self.store[key] = value

        async def get(key):
            return self.store[key]

        monkeypatch.setattr(reader_module.torchstore, "put", put)
        monkeypatch.setattr(reader_module.torchstore, "get", get)
        self.divide(self.ROWS // 2)

    def divide(self, rows: int) -> None:
        """Host "a" holds so many rows, and "b" the others."""
        self.shards = {"a": {"t": ((0, rows), (0, 4))}, "b": {"t": ((rows, self.ROWS), (0, 4))}}
        self.memory = {
            host: SharedBuffer.create(buffer_bytes(shards, torch.float32))
            for host, shards in self.shards.items()
        }
        for host, buffer in self.memory.items():
            self.store[memory_key(host, buffer.path)] = self.handles(host, buffer)

    def handles(self, name: str, buffer: SharedBuffer) -> list[SimpleNamespace]:
        return [self._handle(f"{name}{n}", part) for n, part in enumerate(buffer.bytes.split(100))]

    def _handle(self, name: str, memory: torch.Tensor) -> SimpleNamespace:
        async def read_into(target, *, timeout):
            await asyncio.sleep(0)
            if self.broken and name == "b2":
                raise ConnectionError("no route")
            self.reads += 1
            target.copy_(memory)

        return SimpleNamespace(read_into=read_into)

    def publish(self, version: int, values: torch.Tensor) -> None:
        for host, shards in self.shards.items():
            views(self.memory[host].bytes, shards, torch.float32)["t"].copy_(
                values[index_of(shards["t"])]
            )
        self.publications += 1
        self.manifest = self.store[manifest_key(version)] = Manifest(
            version=version,
            shapes={"t": (self.ROWS, 4)},
            dtype=torch.float32,
            parts=tuple(
                RankParts(host, self.memory[host].path, shards)
                for host, shards in self.shards.items()
            ),
            publication=f"publication {self.publications}",
            digests={},
        )

    def values_on(self, host: str) -> torch.Tensor:
        """What a generator of the host finds, of the version that was published last or the one before."""
        parts = self.store[copy_key(host)].parts
        assert {part.host for part in parts} == {host}
        return SnapshotReader().tensors(replace(self.manifest, parts=parts))["t"]


@pytest.fixture
def hosts(monkeypatch) -> TrainerHosts:
    return TrainerHosts(monkeypatch)


def reader_on(host: str, monkeypatch) -> WeightReader:
    monkeypatch.setattr(reader_module, "host_identity", lambda: host)
    monkeypatch.setattr(reader_module, "set_up_logging", lambda *arguments: None)
    return WeightReader(run_dir="", index=0)


def random_values(seed: int) -> torch.Tensor:
    return torch.randn(TrainerHosts.ROWS, 4, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("host, nbytes", [("a", 320), ("b", 320), ("c", 640)])
async def test_a_host_reads_what_others_have_once_and_has_all_of_it(
    hosts, monkeypatch, host, nbytes
):
    reader = reader_on(host, monkeypatch)
    for version in (1, 2, 3):
        hosts.publish(version, random_values(version))
        hosts.reads = 0
        assert (await reader.bring(version)).nbytes == nbytes
        assert hosts.reads == nbytes // 320 * 4, "320 bytes in reads of at most 100"
        assert (await on_this_host(hosts.manifest)).parts == hosts.store[copy_key(host)].parts
        assert torch.equal(hosts.values_on(host), random_values(version))
        assert (await reader.bring(version)).nbytes == 0, "it is there"
    with pytest.raises(RunError, match="has a copy of version 3, and not of version 2"):
        await on_this_host(hosts.store[manifest_key(2)])


async def test_what_was_read_in_part_is_never_announced_and_is_read_again(hosts, monkeypatch):
    reader = reader_on("c", monkeypatch)
    hosts.publish(1, random_values(1))
    await reader.bring(1)
    with pytest.raises(
        RunError, match="the store has the manifest of version 1, and not of version 3"
    ):
        await reader.bring(3)  # version 1 was in the same place
    hosts.publish(2, random_values(2))
    hosts.broken = True
    with pytest.raises(
        PeerGone, match="version 2 can't be read from host b: ConnectionError: no route"
    ):
        await reader.bring(2)
    assert hosts.store[copy_key("c")].version == 1 and torch.equal(
        hosts.values_on("c"), random_values(1)
    )
    hosts.broken = False
    assert (await reader.bring(2)).nbytes == 640
    assert torch.equal(hosts.values_on("c"), random_values(2))


async def test_a_version_that_is_published_again_with_other_weights_is_read_again(
    hosts, monkeypatch
):
    reader = reader_on("c", monkeypatch)
    hosts.publish(1, random_values(1))
    await reader.bring(1)
    hosts.publish(1, random_values(9))
    assert (await reader.bring(1)).nbytes == 640
    assert torch.equal(hosts.values_on("c"), random_values(9))


async def test_a_fetch_that_nobody_waits_for_gives_way_to_the_next(hosts, monkeypatch):
    reader = reader_on("c", monkeypatch)
    hosts.publish(1, random_values(1))
    never = SimpleNamespace(read_into=lambda target, *, timeout: asyncio.Event().wait())
    key = memory_key("b", hosts.memory["b"].path)
    good = hosts.store[key]
    hosts.store[key] = [never] * 4
    stuck = asyncio.create_task(reader.bring(1))
    await until(lambda: hosts.reads == 4)  # those of host a
    await iterations()
    hosts.store[key] = good
    assert (await reader.bring(1)).nbytes == 640
    assert torch.equal(hosts.values_on("c"), random_values(1))
    with pytest.raises((asyncio.CancelledError, RunError)):
        await stuck


async def test_a_host_reads_from_another_reader_what_that_has_read(hosts, monkeypatch):
    async def offered(host: str, buffer: SharedBuffer) -> None:
        hosts.store[memory_key(host, buffer.path)] = hosts.handles("copy", buffer)

    monkeypatch.setattr(reader_module, "offer", offered)
    first, second = reader_on("c", monkeypatch), reader_on("d", monkeypatch)
    for version in (1, 2, 3):
        hosts.publish(version, random_values(version))
        fetched = await first.bring(version, serves=True)
        assert (fetched.source, fetched.nbytes) == ("c", 640)
        for buffer in hosts.memory.values():
            buffer.bytes.zero_()  # nobody reads the trainer any more
        assert (await second.bring(version, source="c")).nbytes == 640
        assert torch.equal(hosts.values_on("d"), random_values(version))


async def test_a_host_with_a_part_of_the_trainer_reads_the_rest_from_the_trainer(
    hosts, monkeypatch
):
    reader = reader_on("a", monkeypatch)
    hosts.publish(1, random_values(1))
    assert (await reader.bring(1, source="c")).nbytes == 320
    assert torch.equal(hosts.values_on("a"), random_values(1))


async def test_a_trainer_that_divides_itself_otherwise_is_read_into_other_memory(
    hosts, monkeypatch
):
    reader, engine = reader_on("c", monkeypatch), SnapshotReader()
    for version, rows in ((1, 20), (2, 20), (3, 12), (4, 12), (5, 8), (6, 8)):
        hosts.divide(rows)
        hosts.publish(version, random_values(version))
        assert (await reader.bring(version)).nbytes == 640
        found = engine.tensors(await on_this_host(hosts.manifest))
        assert torch.equal(found["t"], random_values(version)), (
            "and the engine finds it there, whatever it mapped before"
        )


async def test_a_read_that_fails_ends_the_fetch_and_the_reads_beside_it():
    ended = []

    async def broken(target, *, timeout):
        raise ConnectionError("the host is gone")

    async def slow(target, *, timeout):
        try:
            await asyncio.Event().wait()
        finally:
            ended.append(True)

    target = torch.zeros(2 * reader_module.READ_BYTES, dtype=torch.uint8)
    with pytest.raises(ConnectionError, match="the host is gone"):
        await read_offered(
            [SimpleNamespace(read_into=slow), SimpleNamespace(read_into=broken)], target
        )
    assert ended == [True]


# ---- the readers of a run


def test_a_host_needs_a_reader_unless_it_has_the_whole_trainer():
    assert first_generators({"a"}, ["a", "a"]) == []
    assert first_generators({"a"}, ["a", "b", "b", "c"]) == [1, 3]
    assert first_generators({"a", "b"}, ["a", "a", "c"]) == [0, 2]


class ReaderProcess:
    """Answers when told to; ``died`` ends its life."""

    def __init__(self, nbytes: int = 100):
        self.fetched: list[int] = []
        self.life = Lifetime("weight reader")
        self.may_answer = asyncio.Event()
        self.may_answer.set()

        self.sources: list[str] = []
        self.fault: Exception | None = None
        """Error of the next fetch."""

        async def answer(version: int, source: str, serves: bool) -> Fetched:
            self.fetched.append(version)
            self.sources.append(source)
            await self.may_answer.wait()
            if self.fault is not None:
                fault, self.fault = self.fault, None
                raise ActorError(fault)  # as Monarch delivers what an endpoint raises
            own = str(id(self)) if serves else ""
            return Fetched(
                source=own, nbytes=nbytes if self.fetched.count(version) == 1 else 0, seconds=0.1
            )

        self.part = SpawnedProcess(
            procs=None, actor=SimpleNamespace(fetch=SimpleNamespace(choose=answer)), life=self.life
        )


async def test_a_version_is_asked_of_every_host_and_its_bytes_are_counted_by_host():
    readers, first, second = (
        WeightReaders(["host 1", "host 2"]),
        ReaderProcess(),
        ReaderProcess(nbytes=50),
    )
    await readers.admit("host 1", first.part)
    await readers.admit("host 2", second.part)
    await readers.fetch(1)
    await readers.fetch(1)
    await readers.fetch(2)
    assert readers.take_fetched_bytes() == {"host 1": 200, "host 2": 100}
    assert readers.take_fetched_bytes() == {"host 1": 0, "host 2": 0}


async def test_replicas_that_join_side_by_side_have_a_version_read_once():
    readers, reader = WeightReaders(["host 1"]), ReaderProcess()
    await readers.admit("host 1", reader.part)
    reader.may_answer.clear()
    joining = [asyncio.create_task(readers.fetch(1)) for _ in range(3)]
    await iterations()
    assert reader.fetched == [1], "a second request would end the read of the first"
    reader.may_answer.set()
    await asyncio.gather(*joining)
    assert reader.fetched == [1, 1, 1] and readers.take_fetched_bytes() == {"host 1": 100}


async def test_a_version_is_asked_again_of_the_reader_that_takes_the_place_of_a_dead_one():
    readers, first, second = WeightReaders(["host 1"]), ReaderProcess(), ReaderProcess()
    await readers.admit("host 1", first.part)
    first.may_answer.clear()
    fetching = asyncio.create_task(readers.fetch(1))
    await iterations()
    first.life.end("killed by SIGKILL")
    await iterations()
    assert first.fetched == [1] and not fetching.done()
    readers.lose("host 1")  # the supervisor sees it later
    await iterations()
    assert not fetching.done()
    await readers.admit("host 1", second.part)
    await fetching
    assert second.fetched == [1] and readers.lost == 1


async def test_many_hosts_read_from_each_other_and_few_from_the_trainer():
    processes = {f"host {index}": ReaderProcess() for index in range(30)}
    readers = WeightReaders(processes)
    for host, process in processes.items():
        await readers.admit(host, process.part)
        process.may_answer.clear()
    fetching = asyncio.create_task(readers.fetch(1))
    rounds = []
    while not fetching.done():
        await iterations()
        asked = [
            process
            for process in processes.values()
            if process.fetched and not process.may_answer.is_set()
        ]
        rounds.append(Counter(source for process in asked for source in process.sources))
        for process in asked:
            process.may_answer.set()
    await fetching
    assert [sum(reads.values()) for reads in rounds if reads] == [4, 20, 6]
    assert all(most == READERS_AT_ONCE for reads in rounds[:2] for most in reads.values())
    assert rounds[0] == {"": 4} and rounds[1][""] == 4


async def others_that_join_after_the_first() -> tuple[
    ReaderProcess, ReaderProcess, list[ReaderProcess], asyncio.Task[None]
]:
    """The first of six readers, one that reads from it, the other five, and the fetch of them all.

    The first has the version, and the others have not answered.
    """
    processes = {f"host {index}": ReaderProcess() for index in range(6)}
    readers = WeightReaders(processes)
    first, *others = processes.values()
    await readers.admit("host 0", first.part)
    fetching = asyncio.create_task(readers.fetch(1))
    await iterations()  # it has the version
    for process in others:
        process.may_answer.clear()
    for host in [*processes][1:]:
        await readers.admit(host, processes[host].part)
    await iterations()
    reads_from_first = next(process for process in others if process.sources == [str(id(first))])
    return first, reads_from_first, others, fetching


async def test_a_host_that_reads_from_a_reader_that_dies_reads_from_another():
    first, reads_from_first, others, fetching = await others_that_join_after_the_first()
    first.life.end("killed by SIGKILL")
    for process in others:
        process.may_answer.set()
    await fetching
    assert len(reads_from_first.sources) == 2 and reads_from_first.sources[1] != str(id(first))


async def test_a_trainer_that_can_not_be_read_ends_the_fetch_by_the_error_of_its_reader():
    readers, reader, other = WeightReaders(["host 1", "host 2"]), ReaderProcess(), ReaderProcess()
    reader.fault = PeerGone("version 1 can't be read from host a: no route")
    other.may_answer.clear()
    await readers.admit("host 1", reader.part)
    await readers.admit("host 2", other.part)
    with pytest.raises(PeerGone, match="^version 1 can't be read from host a: no route$"):
        await readers.fetch(1)


async def test_a_reader_that_can_not_be_read_is_passed_over():
    first, reads_from_first, others, fetching = await others_that_join_after_the_first()
    reads_from_first.fault = PeerGone("version 1 can't be read from host 0: no route")
    for process in others:
        process.may_answer.set()
    await fetching
    assert len(reads_from_first.sources) > 1, "it was asked to read from another"


def sync_with(copies: WeightReaders, load) -> WeightSync:
    async def answer(value):
        return value

    rank0 = SimpleNamespace(
        proof=SimpleNamespace(choose=lambda: answer(("aa", np.zeros(CANARY_TOKENS)))),
    )
    trainer = SimpleNamespace(size=lambda dim: 1, slice=lambda procs: rank0)
    return WeightSync(
        trainer,
        SimpleNamespace(update_weights=load),
        text=np.arange(CANARY_TOKENS),
        bound=CanaryBound("float32"),
        copies=copies,
    )


async def test_generators_that_find_a_dead_readers_memory_gone_load_from_the_next():
    readers, first, second = WeightReaders(["host 1"]), ReaderProcess(), ReaderProcess()
    await readers.admit("host 1", first.part)
    loads = []

    async def load(version, canary_token_ids):
        loads.append(version)
        if len(loads) == 1:
            first.life.end("killed by SIGKILL")
            raise ActorError(PeerGone("generator 0: the memory is gone"))
        return {}

    updating = asyncio.create_task(
        sync_with(readers, load).update(CopiedOut(version=5, seconds=0.0))
    )
    await iterations()
    assert loads == [5] and not updating.done()
    readers.lose("host 1")
    await readers.admit("host 1", second.part)
    report = await updating
    assert loads == [5, 5] and second.fetched == [5] and report.fetched_bytes == {"host 1": 200}


async def test_generators_that_fail_for_another_reason_end_the_update():
    readers, reader = WeightReaders(["host 1"]), ReaderProcess()
    await readers.admit("host 1", reader.part)

    async def load(version, canary_token_ids):
        raise ActorError(RunError("generator 0: the engine stopped"))

    with pytest.raises(ActorError, match="generator 0: the engine stopped"):
        await sync_with(readers, load).update(CopiedOut(version=5, seconds=0.0))


@pytest.mark.parametrize("copies", [None, WeightReaders(["host 1"])])
async def test_a_trainer_is_told_whether_other_hosts_read_its_versions(copies):
    trainer = TrainerMesh()
    bound = CanaryBound("float32")
    await WeightSync(trainer, None, text=np.arange(2), bound=bound, copies=copies).copy_out(1)
    assert trainer.published == 1 and trainer.has_remote_readers == (copies is not None)
