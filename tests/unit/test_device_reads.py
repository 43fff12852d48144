"""Count of the reads for which a version's proof waits: each may be as long as the kernels queued."""

from types import SimpleNamespace

import pytest
import torch

from tests.fakes.device import DEVICE, Device
from torchtitan.experiments.rl.compat import vllm as compat
from torchtitan.experiments.rl.generation.vllm import worker
from torchtitan.experiments.rl.weights import publisher as publisher_module
from torchtitan.experiments.rl.weights.publisher import SnapshotPublisher
from torchtitan.experiments.rl.weights.snapshot import (
    Manifest,
    PartedTensors,
    RankParts,
    buffer_bytes,
    digest,
    named,
    views,
)

EXPERTS = ("layers.0.mlp.experts.*.gate_proj.weight", "layers.0.mlp.experts.*.up_proj.weight")
DOWN = "layers.0.mlp.experts.*.down_proj.weight"
QKV = ("layers.0.q_proj.weight", "layers.0.k_proj.weight", "layers.0.v_proj.weight")
NORM = "norm.weight"


def version() -> dict[str, torch.Tensor]:
    """Make random tensors of every kind that an engine holds in its own way."""
    shapes = {QKV[0]: (8, 6), QKV[1]: (4, 6), QKV[2]: (4, 6), NORM: (6,)}
    shapes |= {EXPERTS[0]: (3, 4, 6), EXPERTS[1]: (3, 4, 6), DOWN: (3, 6, 4)}
    generator = torch.Generator().manual_seed(0)
    return {name: torch.randn(shape, generator=generator) for name, shape in shapes.items()}


def digests_of(tensors: dict[str, torch.Tensor]) -> dict[str, str]:
    return named((name, int(digest(tensor))) for name, tensor in tensors.items())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
async def test_a_publisher_waits_for_the_device_once_a_version_and_not_after_its_copies(
    dtype, monkeypatch
):
    """The next step's kernels are queued when a version is announced and proven."""

    async def put(key: str, value: Manifest) -> None:
        pass

    monkeypatch.setattr(publisher_module.torchstore, "put", put)
    publisher, tensors = SnapshotPublisher(rank=0, host="here", dtype=dtype), version()
    for number in (1, 2):
        device = Device()
        with device:
            publisher.write(
                number, {name: device.place(tensor) for name, tensor in tensors.items()}
            )
        assert device.reads == 1, "all digests together, before the next step begins"
        await publisher.announce(False)
        manifest = await publisher.prove()
        assert device.reads == 1
        assert manifest.digests == digests_of(
            {name: tensor.to(dtype) for name, tensor in tensors.items()}
        )


def held(names: tuple[str, ...], weight: torch.Tensor, **module) -> compat.HeldWeight:
    name = {EXPERTS: "w13_weight", (DOWN,): "w2_weight"}.get(names, "weight")
    return compat.HeldWeight(
        module=SimpleNamespace(**module), name=name, parameter=weight, sources=names, packed=False
    )


def test_an_engine_waits_for_the_device_once_for_all_that_it_holds(monkeypatch):
    tensors, device = version(), Device()
    weights = [
        held(
            QKV,
            device.place(torch.cat([tensors[name] for name in QKV])),
            output_partition_sizes=[8, 4, 4],
        ),
        held(EXPERTS, device.place(torch.cat([tensors[name] for name in EXPERTS], 1))),
        held((DOWN,), device.place(tensors[DOWN])),
        held((NORM,), device.place(tensors[NORM])),
    ]
    monkeypatch.setattr(worker.compat, "held_weights", lambda model, names: iter(weights))
    shapes = {name: tuple(tensor.shape) for name, tensor in tensors.items()}
    manifest = Manifest(
        version=1, shapes=shapes, dtype=torch.float32, parts=(), publication="", digests={}
    )
    with device:
        found = worker.HeldWeights(None, manifest).read()
    assert device.reads == 1
    assert worker.whole_digests([found]) == digests_of(tensors)


def test_an_engine_of_adapters_waits_for_the_device_once_for_all_that_it_holds(monkeypatch):
    device, prefix = Device(), "base_model.model.layers"
    tensors = {
        f"{prefix}.{i}.lora_{part}.weight": torch.randn(4, 8) for i in range(5) for part in "AB"
    }
    computed_with = [
        (name, device.place(tensor.clone()), tensor) for name, tensor in tensors.items()
    ]
    monkeypatch.setattr(worker.compat, "set_adapters", lambda worker, tensors: None)
    monkeypatch.setattr(worker.compat, "held_adapters", lambda worker, tensors: iter(computed_with))
    with device:
        loaded = worker.SnapshotLoader()._load_adapters(tensors, verify=True, started=0.0)
    assert device.reads == 1
    assert worker.whole_digests([loaded.held]) == digests_of(tensors)


def test_adapters_on_two_ranks_devices_are_read_once_from_each():
    shape = (4, 8)
    tensors = {
        f"layers.{i}.lora_{part}.weight": torch.randn(shape) for i in range(5) for part in "AB"
    }
    device, parts, buffers = Device(), [], []
    for rows in ((0, 1), (1, 4)):
        shards = dict.fromkeys(tensors, (rows, (0, 8)))
        buffer = torch.zeros(buffer_bytes(shards, torch.float32), dtype=torch.uint8)
        for name, part in views(buffer, shards, torch.float32).items():
            part.copy_(tensors[name][slice(*rows)])
        parts.append(RankParts("here", "", shards))
        buffers.append(device.place(buffer))
    shapes = dict.fromkeys(tensors, shape)
    manifest = Manifest(
        version=1,
        shapes=shapes,
        dtype=torch.float32,
        parts=tuple(parts),
        publication="",
        digests={},
    )
    found = dict(PartedTensors(manifest, buffers, DEVICE).in_host_memory())
    assert device.reads == 2
    assert all(torch.equal(found[name], tensor) for name, tensor in tensors.items())


def test_the_count_sees_every_way_to_read_a_device_and_no_copy_that_nobody_waits_for():
    device = Device()
    with device:
        values = device.place(torch.arange(4.0))
        doubled = (values * 2).sum() + torch.ones((), device=values.device)
        torch.empty(4).copy_(values, non_blocking=True)
        assert device.reads == 0
        assert float(doubled) == 13 and device.reads == 1
        assert values.cpu().tolist() == [0, 1, 2, 3] and device.reads == 2
        torch.empty(4).copy_(values)
        assert device.reads == 3
        torch.stack([values, values]).to("cpu")
    assert device.reads == 4
