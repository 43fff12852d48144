"""The trainer publishes two versions side by side, with the digests of its own tensors."""

import asyncio
import os
from mmap import PAGESIZE as PAGE
from types import SimpleNamespace

import pytest
import torch

from tests.fakes.waiting import until
from torchtitan.experiments.rl.errors import PeerGone
from torchtitan.experiments.rl.weights import publisher as publisher_module
from torchtitan.experiments.rl.weights import reader as reader_module
from torchtitan.experiments.rl.weights import snapshot as snapshot_module
from torchtitan.experiments.rl.weights.publisher import SnapshotPublisher
from torchtitan.experiments.rl.weights.snapshot import (
    Manifest,
    SharedBuffer,
    SnapshotReader,
    digest,
    named,
)


def tensors_of(seed: int = 0, dtype=torch.float32) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    shapes = {"embed": (7, 5), "norm": (5,), "head": (3, 11), "scalar": (), "nothing": (0, 4)}
    return {
        name: torch.randn(shape, generator=generator).to(dtype) for name, shape in shapes.items()
    }


def digests_of(seed: int, dtype=torch.float32) -> dict[str, str]:
    return named(
        (name, int(digest(tensor.float()))) for name, tensor in tensors_of(seed, dtype).items()
    )


@pytest.fixture
def published(monkeypatch):
    """What the store holds, and a publisher over it."""
    store = {}

    async def put(key, value):
        store[key] = value

    async def get(key):
        return store[key]

    monkeypatch.setattr(publisher_module.torchstore, "put", put)
    monkeypatch.setattr(publisher_module.torchstore, "get", get)
    return store, SnapshotPublisher(rank=0, host="here", dtype=torch.float32)


def found_digests(tensors) -> dict[str, str]:
    return named((name, int(digest(tensor))) for name, tensor in tensors.items())


def manifests(store) -> dict:
    return {value.version: value for key, value in store.items() if "manifest" in key}


async def test_version_before_can_still_be_read_while_the_next_is_written(published):
    store, publisher = published
    reader, found = SnapshotReader(), {}
    for version in (1, 2, 3, 4):
        publisher.write(version, tensors_of(version))
        if version > 1:  # being read meanwhile
            assert found_digests(found[version - 1]) == digests_of(version - 1)
        await publisher.announce(False)
        manifest = await publisher.prove()
        assert manifest == manifests(store)[version]
        found[version] = reader.tensors(manifest)
        assert found_digests(found[version]) == digests_of(version)
    assert (
        len({part.handle for manifest in manifests(store).values() for part in manifest.parts}) == 2
    )


async def test_what_is_published_are_the_digests_of_the_trainers_tensors(published):
    store, publisher = published
    for version, dtype in ((1, torch.float32), (2, torch.bfloat16)):  # the second is converted
        publisher.write(version, tensors_of(version, dtype))
        await publisher.announce(False)
        found = await publisher.prove()
        assert found == manifests(store)[version] and found.digests == digests_of(version, dtype)
        assert found.digests == found_digests(SnapshotReader().tensors(found))


async def test_a_version_is_announced_without_digests_and_proven_when_they_are_taken(
    published, monkeypatch
):
    store, publisher = published
    monkeypatch.setattr(reader_module.torchstore, "get", publisher_module.torchstore.get)
    publisher.write(1, tensors_of(1))
    await publisher.announce(False)
    announced = await reader_module.published(1)
    assert announced.digests == {} and found_digests(
        SnapshotReader().tensors(announced)
    ) == digests_of(1)
    waiting = asyncio.create_task(reader_module.proven(announced))
    await asyncio.sleep(0.02)
    assert not waiting.done()
    await publisher.prove()
    assert await asyncio.wait_for(waiting, 10) == digests_of(1)


async def test_versions_that_stay_on_the_device_are_the_same_bytes_in_one_buffer_of_the_ranks_own(
    published,
):
    store, host = published
    device = SnapshotPublisher(rank=0, host="here", dtype=torch.float32, device=torch.device("cpu"))
    reader, handles = SnapshotReader(), set()
    for version in (1, 2, 3):
        manifests = []
        for publisher in (host, device):
            publisher.write(version, tensors_of(version))
            await publisher.announce(False)
            manifests.append(await publisher.prove())
        in_host, on_device = manifests
        assert on_device.digests == in_host.digests and on_device.shapes == in_host.shapes
        ((where, handle, shards),) = on_device.parts
        assert where == "here" and "nothing" not in shards and in_host.parts[0].shards == shards
        handles.add(handle)
        found, wanted = reader.tensors(on_device), SnapshotReader().tensors(in_host)
        assert list(found) == list(wanted)
        assert all(
            torch.equal(tensor, wanted[name]) and tensor.dtype == torch.float32
            for name, tensor in found.items()
        )
    assert len(handles) == 1 and len({*reader._last, *reader._before}) == 1
    # Another trainer's handles are other ones, and the reader lets go of the first one's.
    again = SnapshotPublisher(rank=0, host="here", dtype=torch.float32, device=torch.device("cpu"))
    again.write(3, tensors_of(3))
    await again.announce(False)
    (part,) = (manifest := await again.prove()).parts
    assert part.handle not in handles and reader.tensors(manifest) and reader.tensors(manifest)
    assert {*reader._last, *reader._before} == {again._buffers[0].inode}
    del publisher, device
    # The thread that computed the last digests lets go of its publisher a moment after its result is there.
    await until(lambda: not os.path.exists(handle))
    with pytest.raises(PeerGone, match="the process that published them has ended"):
        SnapshotReader().tensors(on_device)


async def test_a_trainer_that_is_made_again_publishes_under_another_name(published):
    store, first = published
    names = set()
    for trainer in (first, SnapshotPublisher(rank=0, host="here", dtype=torch.float32)):
        for version in (1, 1):
            trainer.write(version, tensors_of(version))
            await trainer.announce(False)
            names.add((await trainer.prove()).publication)
    assert len(names) == 4


async def test_store_keeps_the_two_newest_versions_and_no_bytes(published):
    store, publisher = published
    for version in (1, 2, 3, 4, 5):
        publisher.write(version, tensors_of(version))
        await publisher.announce(False)
        await publisher.prove()
    assert sorted(manifests(store)) == [4, 5] and len(store) == 2


# ---- copies from a GPU: what torch is asked to do, by stand-ins for it


class OnGpu:
    """A tensor that says it lies on a GPU."""

    device = torch.device("cuda", 0)

    def __init__(self, values: torch.Tensor):
        self.values = values

    def to(self, dtype: torch.dtype) -> "OnGpu":
        return OnGpu(self.values.to(dtype))


class Target:
    """CPU memory that records how it is written."""

    def __init__(self, memory: torch.Tensor):
        self.memory, self.dtype, self.calls, self.is_cpu = memory, memory.dtype, [], True

    def copy_(self, source: OnGpu, non_blocking: bool = False) -> None:
        self.calls.append((source.values.dtype, non_blocking))
        self.memory.copy_(source.values)


def test_a_gpu_converts_before_it_copies_and_nobody_waits_for_the_copy():
    target = Target(torch.zeros(4, 6, dtype=torch.bfloat16))
    values = torch.randn(target.memory.shape)
    sent = publisher_module.copy_out(target, OnGpu(values))
    assert torch.equal(sent.values, target.memory), (
        "what is digested is what was sent, where it lies"
    )
    assert target.calls == [(torch.bfloat16, True)]
    torch.testing.assert_close(target.memory, values.bfloat16())


def test_memory_of_a_gpu_is_offered_once_and_opened_for_each_load(monkeypatch):
    """CUDA's part is played by a list of the memory that was offered."""
    offered, events, real = [], [], torch.empty
    monkeypatch.setattr(
        torch, "empty", lambda *size, device=None, **options: real(*size, **options)
    )
    monkeypatch.setattr(
        publisher_module,
        "offered_memory",
        lambda memory: offered.append(memory) or (len(offered) - 1,),
    )
    monkeypatch.setattr(
        snapshot_module,
        "opened_memory",
        lambda handle, device: events.append(device) or offered[handle[0]],
    )
    monkeypatch.setattr(
        publisher_module, "wait_for_copies", lambda device: events.append(f"wait for {device.type}")
    )
    publisher = SnapshotPublisher(
        rank=0, host="here", dtype=torch.bfloat16, device=torch.device("cuda", 0)
    )
    reader, tensors = SnapshotReader(), {"a": torch.randn(3, 5), "b": torch.randn(7)}
    for version in (1, 2):
        publisher.write(version, tensors)
        shapes, parts = publisher._shapes, publisher._parts[version % 2]
        manifest = Manifest(
            version=version,
            shapes=shapes,
            dtype=torch.bfloat16,
            parts=parts,
            publication="p",
            digests={},
        )
        found = dict(reader.tensors(manifest, torch.device("cuda", 1)))
        assert all(torch.equal(found[name], tensor.bfloat16()) for name, tensor in tensors.items())
    assert (
        len(offered) == 1
        and events == ["wait for cuda", torch.device("cuda", 1)] * 2
        and not reader._last
    )


@pytest.mark.parametrize("code, locked", [(0, True), (1, False)])
def test_pages_of_the_buffers_are_locked_and_a_refusal_is_only_logged(
    monkeypatch, caplog, code, locked
):
    calls = []
    cudart = SimpleNamespace(cudaHostRegister=lambda *arguments: calls.append(arguments) or code)
    monkeypatch.setattr(torch.cuda, "cudart", lambda: cudart)
    kept = [code]  # the runtime's last error, which a kernel launch would raise
    monkeypatch.setattr(snapshot_module, "take_cuda_error", kept.clear)
    buffer = SharedBuffer.create(8 * PAGE).bytes
    first = buffer.data_ptr()
    assert snapshot_module.page_lock([buffer[:PAGE], buffer[3 * PAGE : 4 * PAGE]]) is locked
    assert calls == [(first, PAGE, 0), (first + 3 * PAGE, PAGE, 0)][: 1 if code else 2]
    assert not any(kept), "the next kernel launch finds no error"
    assert ("can't be page-locked (CUDA error 1)" in caplog.text) is not locked


def test_a_publisher_locks_what_it_writes_once_and_returns_when_the_gpu_has_written_them(
    monkeypatch,
):
    """The device of every tensor is said to be a GPU; the copies themselves are the CPU's."""
    events = []
    module = "torchtitan.experiments.rl.weights.publisher"
    monkeypatch.setattr(
        f"{module}.page_lock", lambda targets: events.append(f"lock {len([*targets])}")
    )
    monkeypatch.setattr(
        f"{module}.wait_for_copies", lambda device: events.append(f"wait for {device.type}")
    )
    real = publisher_module.copy_out
    monkeypatch.setattr(
        f"{module}.copy_out", lambda target, source: events.append("copy") or real(target, source)
    )
    publisher = SnapshotPublisher(rank=0, host="here", dtype=torch.bfloat16)
    on_gpu = SimpleNamespace(device=torch.device("cuda"))
    monkeypatch.setattr(f"{module}.local_of", lambda tensor: tensor if publisher._parts else on_gpu)
    tensors = {"a": torch.randn(3, 5), "b": torch.randn(7)}
    publisher.write(1, tensors)
    publisher.write(2, tensors)
    one_write = ["copy", "copy", "wait for cuda"]
    assert events == ["lock 2", *one_write, *one_write]  # two buffers
