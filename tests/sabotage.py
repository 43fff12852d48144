"""Deliveries of weights that go wrong, one at a time, against a real engine: each has to be caught at its version.

    python -m tests.sabotage [--dtypes float32 bfloat16] [--versions 200] [--seed 0]

1. The model is tiny and random, with a tied head and biases. A version moves each weight by up to the learning rate, as Adam
   does.
2. Two replicas are one engine that loads twice: the second replica wrongly, the first as it should.
3. A delivery is caught if the generator refuses it or the controller does, by an error that names the version.
4. Every sabotage is followed by honest versions, which must pass; then so many in a row.

Prints a line for each miss, and "N of N". Exits with 1 below.
"""

import argparse
import asyncio
import json
import os
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
import numpy as np  # noqa: E402
import torch  # noqa: E402
from safetensors.torch import load_file, save_file  # noqa: E402

from torchtitan.experiments.rl.compat import vllm as compat  # noqa: E402
from torchtitan.experiments.rl.errors import RunError  # noqa: E402
from torchtitan.experiments.rl.generation import vllm_worker  # noqa: E402
from torchtitan.experiments.rl.generation.engine_thread import check_held  # noqa: E402
from torchtitan.experiments.rl.generation.vllm_engine import VLLMEngineConfig  # noqa: E402
from torchtitan.experiments.rl.process.setup import set_up_process  # noqa: E402
from torchtitan.experiments.rl.weights.snapshot import (  # noqa: E402
    Manifest,
    SharedBuffer,
    SnapshotLayout,
    WeightReceipt,
    fingerprint,
    tensor_digests,
)
from torchtitan.experiments.rl.weights.sync import CopiedOut, WeightSync  # noqa: E402

Tensors = dict[str, torch.Tensor]
Q, K, V, OUT = (f"model.layers.1.self_attn.{part}_proj.weight" for part in "qkvo")
GATE, UP = "model.layers.0.mlp.gate_proj.weight", "model.layers.0.mlp.up_proj.weight"
NORM, BIAS, EMBEDDING = (
    "model.layers.1.input_layernorm.weight",
    "model.layers.0.self_attn.k_proj.bias",
    "model.embed_tokens.weight",
)


def make_model(folder: str) -> Tensors:
    """Write a random checkpoint that vLLM can serve; returns its tensors."""
    from transformers import Qwen3Config, Qwen3ForCausalLM

    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=96,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=3,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=32,
        max_position_embeddings=256,
        tie_word_embeddings=True,
        attention_bias=True,
    )
    Qwen3ForCausalLM(config).float().save_pretrained(folder)
    file = Path(folder, "model.safetensors")
    # vLLM's Qwen3 has no bias here.
    tensors = {name: value for name, value in load_file(file).items() if not name.endswith("o_proj.bias")}
    save_file(tensors, file, metadata={"format": "pt"})
    return tensors


@dataclass(kw_only=True)
class Delivery:
    """One version on its way, and the one before."""

    manifest: Manifest
    views: Tensors
    """The mapped snapshot's."""
    before: Tensors
    """Copies of the last version's tensors."""
    manifest_before: Manifest
    engine: Any

    @property
    def model(self) -> Any:
        return self.engine.model_executor.driver_worker.worker.get_model()


class World:
    """An engine, the versions published to it, and the checks of generator and controller."""

    def __init__(self, folder: str, dtype: str, seed: int):
        tensors = make_model(folder)
        config = VLLMEngineConfig(max_model_len=64, max_num_seqs=2, dtype=dtype)
        self.engine = config.build(model_path=folder, device="cpu")
        self._random = torch.Generator().manual_seed(seed)
        self._master = {name: value.float().clone() for name, value in tensors.items()}
        self._layout = SnapshotLayout.of(tensors, config.torch_dtype)
        self._buffers = [SharedBuffer.create(self._layout.nbytes) for _ in range(2)]
        self._manifests: list[Manifest] = []
        self.version = 0
        self._publish(1e-4)
        check_held(self._load(self._manifests[-1]), self._manifests[-1])

    def _publish(self, lr: float) -> None:
        self.version += 1
        buffer = self._buffers[self.version % 2]
        for name, view in buffer.views(self._layout):
            self._master[name] += lr * (2 * torch.rand(view.shape, generator=self._random) - 1)
            view.copy_(self._master[name])
        digests = tensor_digests(buffer.bytes, self._layout)
        manifest = Manifest(
            version=self.version,
            layout=self._layout,
            paths={"here": buffer.path},
            fingerprint=fingerprint(digests),
            digests=digests,
        )
        self._manifests = [*self._manifests[-1:], manifest]

    def _load(self, manifest: Manifest):
        return self.engine.load(manifest, manifest.paths["here"], recompute=False)

    def deliver(self, sabotage: "Sabotage | None", lr: float) -> str:
        """Deliver the next version to two replicas. Returns the error that ends the run, "" if there is none."""
        self._publish(lr)
        old, manifest = self._manifests
        delivery = Delivery(
            manifest=manifest,
            views=dict(self._buffers[manifest.version % 2].views(self._layout)),
            before={name: view.clone() for name, view in self._buffers[old.version % 2].views(self._layout)},
            manifest_before=old,
            engine=self.engine._engine,
        )
        intended = self._buffers[manifest.version % 2].bytes.clone()

        def replica(wrongly: Sabotage | None) -> WeightReceipt:
            """As Generator.update_weights: the manifest that the store has, a load, and the check of what is held."""
            with wrongly(delivery) if wrongly else _honest() as found:
                report = self._load(found or manifest)
            check_held(report, found or manifest)
            return WeightReceipt(
                version=(found or manifest).version,
                fingerprint=report.fingerprint,
                canary_logprobs=np.zeros(8, np.float32),
                verify_s=0.0,
                reload_s=0.0,
            )

        async def answer(value: Any) -> Any:
            return value

        async def receipts(version: int, canary_token_ids: np.ndarray) -> dict[int, WeightReceipt]:
            second = replica(sabotage)  # first, so that the engine holds the version before
            return {0: replica(None), 1: second}

        trainer = SimpleNamespace(
            publish_weights=SimpleNamespace(call=lambda version, remote: answer({0: manifest.fingerprint})),
            slice=lambda procs: SimpleNamespace(canary=SimpleNamespace(call_one=lambda: answer(np.zeros(8, np.float32)))),
        )
        generators = cast(Any, SimpleNamespace(update_weights=receipts))
        sync = WeightSync(trainer, generators, vocab_size=96, tolerance=1.0)
        try:
            asyncio.run(sync.update(CopiedOut(version=manifest.version, seconds=0.0)))
        except RunError as error:
            return str(error)
        finally:
            self._buffers[manifest.version % 2].bytes.copy_(intended)
        return ""


Sabotage = Callable[[Delivery], Any]
SABOTAGES: dict[str, tuple[Sabotage, float]] = {}
"""By name: how, and at which learning rate."""


def sabotage(lr: float = 1e-4, name: str | None = None) -> Callable[[Callable], Callable]:
    def add(function: Callable) -> Callable:
        SABOTAGES[name or function.__name__] = (contextmanager(function), lr)
        return function

    return add


@contextmanager
def _honest() -> Iterator[None]:
    yield None


@contextmanager
def reloading_by(reload: Callable[[Any, Any], None]) -> Iterator[None]:
    """The worker's ``reload_weights(worker, tensors)`` is ``reload``."""
    vllm_worker.reload_weights = reload
    try:
        yield
    finally:
        vllm_worker.reload_weights = compat.reload_weights


def _reloading(change: Callable[[Tensors], Tensors | None]) -> Iterator[None]:
    """The engine is given other tensors than those that were mapped and verified."""

    def changed(worker: Any, tensors: Any) -> None:
        given = change(dict(tensors))
        if given is not None:
            compat.reload_weights(worker, given.items())

    with reloading_by(changed):
        yield None


def change(name: str, lr: float = 1e-4) -> Callable:
    """A sabotage that changes the tensors on their way into the engine."""

    def add(function: Callable[[Delivery, Tensors], Tensors | None]) -> Callable:
        def run(delivery: Delivery) -> Iterator[None]:
            yield from _reloading(lambda tensors: function(delivery, tensors))

        sabotage(lr, name)(run)
        return function

    return add


for _lr in (1e-4, 1e-5, 1e-6, 1e-7):
    change(f"skipped reload, lr {_lr:g}", _lr)(lambda delivery, tensors: None)
    change(f"old version, lr {_lr:g}", _lr)(lambda delivery, tensors: dict(delivery.before))
change("swapped tensors, q of two layers")(lambda d, t: t | {Q: t[Q.replace("1", "0")], Q.replace("1", "0"): t[Q]})
change("swapped tensors, k and v")(lambda d, t: t | {K: t[V], V: t[K]})
change("swapped tensors, gate and up")(lambda d, t: t | {GATE: t[UP], UP: t[GATE]})
change("scaled tensor")(lambda d, t: t | {GATE: t[GATE] * 1.01})
change("negated tensor")(lambda d, t: t | {V: -t[V]})
change("transposed square tensor")(lambda d, t: t | {OUT: t[OUT].t().contiguous()})
change("two rows of the embedding swapped")(lambda d, t: t | {EMBEDDING: t[EMBEDDING][[1, 0, *range(2, 96)]]})
change("one layer of the version before")(lambda d, t: t | {n: v for n, v in d.before.items() if ".layers.1." in n})
change("norm weights of the version before", 1e-2)(lambda d, t: t | {n: v for n, v in d.before.items() if "norm" in n})
change("bias of the version before")(lambda d, t: t | {BIAS: d.before[BIAS]})
change("half of the tensors")(lambda d, t: dict(list(t.items())[: len(t) // 2]))
change("dropped tensor, a whole weight")(lambda d, t: {n: v for n, v in t.items() if n != OUT})
change("dropped tensor, a part of a weight")(lambda d, t: {n: v for n, v in t.items() if n != K})
change("dropped norm", 1e-2)(lambda d, t: {n: v for n, v in t.items() if n != NORM})
change("step taken twice")(lambda d, t: {n: v + (v - d.before[n]) for n, v in t.items()})


@change("one row zeroed")
def _(delivery: Delivery, tensors: Tensors) -> Tensors:
    changed = tensors[UP].clone()
    changed[7] = 0
    return tensors | {UP: changed}


@change("wrong rounding")
def _(delivery: Delivery, tensors: Tensors) -> Tensors:
    bits = {torch.float32: torch.int32, torch.bfloat16: torch.int16}
    return {name: (value.view(bits[value.dtype]) & ~1).view(value.dtype) for name, value in tensors.items()}


@change("last bit of one weight")
def _(delivery: Delivery, tensors: Tensors) -> Tensors:
    changed = tensors[OUT].clone()
    changed.view(torch.uint8).view(-1)[0] ^= 1
    return tensors | {OUT: changed}


@change("byte flipped in the mapping after the check")
def _(delivery: Delivery, tensors: Tensors) -> Tensors:
    delivery.views[V].view(torch.uint8).view(-1)[-1] ^= 64
    return tensors


@sabotage()
def stale_tied_head(delivery: Delivery) -> Iterator[None]:
    repack = compat.repack_tied_head
    compat.repack_tied_head = lambda model: None
    try:
        yield None
    finally:
        compat.repack_tied_head = repack


@sabotage()
def byte_flipped_in_the_engine(delivery: Delivery) -> Iterator[None]:
    """After the reload, before the engine answers."""

    def reload(worker: Any, tensors: Any) -> None:
        compat.reload_weights(worker, tensors)
        delivery.model.model.embed_tokens.weight.data.view(torch.uint8)[3, 3] ^= 1

    with reloading_by(reload):
        yield None


@sabotage()
def old_packed_copy_put_back(delivery: Delivery) -> Iterator[None]:
    layer = delivery.model.model.layers[1].mlp.down_proj
    old = layer.cpu_linear

    def reload(worker: Any, tensors: Any) -> None:
        compat.reload_weights(worker, tensors)
        layer.cpu_linear = old

    with reloading_by(reload):
        yield None


@sabotage()
def manifest_of_the_version_before(delivery: Delivery) -> Iterator[Manifest]:
    yield delivery.manifest_before


@sabotage()
def weights_of_the_version_before_under_this_versions_number(delivery: Delivery) -> Iterator[Manifest]:
    yield replace(delivery.manifest_before, version=delivery.manifest.version)


@sabotage()
def fingerprint_of_another_version(delivery: Delivery) -> Iterator[Manifest]:
    yield replace(delivery.manifest, fingerprint=delivery.manifest_before.fingerprint)


@sabotage()
def digests_of_another_version(delivery: Delivery) -> Iterator[Manifest]:
    yield replace(delivery.manifest, digests=delivery.manifest_before.digests)


def run(dtype: str, versions: int, seed: int) -> dict[str, str]:
    """Each sabotage and what went wrong with it: "" where it was caught."""
    with tempfile.TemporaryDirectory() as folder:
        world = World(folder, dtype, seed)
        found = {}
        for name, (how, lr) in SABOTAGES.items():
            error = world.deliver(how, lr)
            found[name] = "" if str(world.version) in error else f"not caught: {error!r}"
            if error := world.deliver(None, lr):
                found[name] += f" stopped an honest version after it: {error}"
        stops = [error for i in range(versions) if (error := world.deliver(None, 10.0 ** -(4 + i % 4)))]
        found[f"{versions} honest versions"] = stops[0] if stops else ""
        world.engine.close()
        return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--dtypes", nargs="+", default=["float32", "bfloat16"])
    parser.add_argument("--versions", type=int, default=200)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", help="write the outcome of each case here")
    arguments = parser.parse_args()
    set_up_process()
    found = {
        f"{dtype}: {name}": fault
        for dtype in arguments.dtypes
        for name, fault in run(dtype, arguments.versions, arguments.seed).items()
    }
    missed = {name: fault for name, fault in found.items() if fault}
    for name, fault in missed.items():
        print(f"{name}: {fault}")
    print(f"{len(found) - len(missed)} of {len(found)}")
    if arguments.json:
        Path(arguments.json).write_text(json.dumps(found))
    sys.stdout.flush()
    os._exit(1 if missed else 0)  # vLLM's exit handlers take seconds


if __name__ == "__main__":
    main()
