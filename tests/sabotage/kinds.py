"""The ways a delivery goes wrong. Each is a context manager: in it, one replica loads a version wrongly.

It yields what the replica finds in the store where that is not what was published, and None otherwise.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch

from torchtitan.experiments.rl.compat import vllm as compat
from torchtitan.experiments.rl.generation.vllm import worker as vllm_worker
from torchtitan.experiments.rl.weights.snapshot import Manifest

Tensors = dict[str, torch.Tensor]
Q, K, V, OUT = (f"model.layers.1.self_attn.{part}_proj.weight" for part in "qkvo")
GATE, UP = "model.layers.0.mlp.gate_proj.weight", "model.layers.0.mlp.up_proj.weight"
NORM, BIAS, EMBEDDING = (
    "model.layers.1.input_layernorm.weight",
    "model.layers.0.self_attn.k_proj.bias",
    "model.embed_tokens.weight",
)


@dataclass(kw_only=True)
class Delivery:
    """One version on its way, and the one before."""

    published: Manifest
    views: Tensors
    """The mapped snapshot's."""
    before: Tensors
    """Copies of the last version's tensors."""
    published_before: Manifest
    engine: Any

    @property
    def model(self) -> Any:
        return self.engine.model_executor.driver_worker.worker.get_model()


Sabotage = Callable[[Delivery], Any]
SABOTAGES: dict[str, tuple[Sabotage, float]] = {}
"""By name: how, and at which learning rate."""


EXPERT_SABOTAGES: dict[str, tuple[Sabotage, float]] = {}
"""Of a mixture of experts."""


def sabotage(lr: float = 1e-4, name: str | None = None, among: dict = SABOTAGES) -> Callable[[Callable], Callable]:
    def add(function: Callable) -> Callable:
        among[name or function.__name__] = (contextmanager(function), lr)
        return function

    return add


class Given(dict):
    """Tensors as ``compat.reload_weights`` takes them."""

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        return {name: tuple(tensor.shape) for name, tensor in self.items()}

    def copy_to(self, name: str, target: torch.Tensor) -> None:
        target.copy_(self[name])


@contextmanager
def reloading_by(reload: Callable[[Any, Any], None]) -> Iterator[None]:
    """The worker's ``reload_weights(worker, tensors)`` is ``reload``."""
    vllm_worker.reload_weights = reload
    try:
        yield
    finally:
        vllm_worker.reload_weights = compat.reload_weights


def _reloading(change: Callable[[Tensors], Tensors | None]) -> Iterator[None]:
    """The engine is given other tensors than those that were mapped."""

    def changed(worker: Any, tensors: Any) -> None:
        given = change(dict(tensors))
        if given is not None:
            compat.reload_weights(worker, Given(given))

    with reloading_by(changed):
        yield None


def change(name: str, lr: float = 1e-4, among: dict = SABOTAGES) -> Callable:
    """A sabotage that changes the tensors on their way into the engine."""

    def add(function: Callable[[Delivery, Tensors], Tensors | None]) -> Callable:
        def run(delivery: Delivery) -> Iterator[None]:
            yield from _reloading(lambda tensors: function(delivery, tensors))

        sabotage(lr, name, among)(run)
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
change("two rows of the embedding swapped")(lambda d, t: t | {EMBEDDING: t[EMBEDDING][[1, 0, *range(2, len(t[EMBEDDING]))]]})
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


@change("byte flipped in the mapping")
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
def manifest_and_digests_of_the_version_before(delivery: Delivery) -> Iterator[Manifest]:
    yield delivery.published_before


@sabotage()
def weights_of_the_version_before_under_this_versions_number(delivery: Delivery) -> Iterator[Manifest]:
    yield replace(delivery.published_before, version=delivery.published.version)


@sabotage()
def digests_of_another_version(delivery: Delivery) -> Iterator[Manifest]:
    yield replace(delivery.published, digests=delivery.published_before.digests)


@sabotage()
def digest_of_another_tensor(delivery: Delivery) -> Iterator[Manifest]:
    digests = delivery.published.digests
    yield replace(delivery.published, digests=digests | {Q: digests[OUT]})


EXPERT, OTHER, ROUTER = ("model.layers.1.mlp.experts.0.", "model.layers.1.mlp.experts.3.", "model.layers.0.mlp.gate.weight")


def _swapped(tensors: Tensors, of: str) -> Tensors:
    """Two experts' tensors whose names end so have each other's places."""
    own = {name: name.replace(EXPERT, OTHER) for name in tensors if name.startswith(EXPERT) and name.endswith(of)}
    return {own[name]: tensors[name] for name in own} | {name: tensors[other] for name, other in own.items()}


def _of_experts(tensors: Tensors, *experts: int) -> Tensors:
    return {name: t for name, t in tensors.items() if any(f".experts.{expert}." in name for expert in experts)}


change("two experts swapped", among=EXPERT_SABOTAGES)(lambda d, t: t | _swapped(t, ".weight"))
change("gates of two experts swapped", among=EXPERT_SABOTAGES)(lambda d, t: t | _swapped(t, "gate_proj.weight"))
change("gate and up of an expert swapped", among=EXPERT_SABOTAGES)(
    lambda d, t: (
        t
        | {f"{EXPERT}gate_proj.weight": t[f"{EXPERT}up_proj.weight"], f"{EXPERT}up_proj.weight": t[f"{EXPERT}gate_proj.weight"]}
    )
)
for _lr in (1e-4, 1e-6):
    change(f"an expert of the version before, lr {_lr:g}", _lr, EXPERT_SABOTAGES)(lambda d, t: t | _of_experts(d.before, 2))
    change(f"router of the version before, lr {_lr:g}", _lr, EXPERT_SABOTAGES)(lambda d, t: t | {ROUTER: d.before[ROUTER]})
change("experts of one rank missing", among=EXPERT_SABOTAGES)(
    lambda d, t: {name: tensor for name, tensor in t.items() if name not in _of_experts(t, 2, 3)}
)
change("dropped router", among=EXPERT_SABOTAGES)(lambda d, t: {name: tensor for name, tensor in t.items() if name != ROUTER})


@sabotage(among=EXPERT_SABOTAGES)
def experts_not_packed(delivery: Delivery) -> Iterator[None]:
    """As vLLM 0.32 leaves them after a reload."""
    pack = compat.pack_experts
    compat.pack_experts = lambda module: None
    try:
        yield None
    finally:
        compat.pack_experts = pack


@sabotage(among=EXPERT_SABOTAGES)
def old_packed_experts_put_back(delivery: Delivery) -> Iterator[None]:
    experts = delivery.model.model.layers[1].mlp.experts.routed_experts
    old = experts.w2_weight

    def reload(worker: Any, tensors: Any) -> None:
        compat.reload_weights(worker, tensors)
        experts.w2_weight = old

    with reloading_by(reload):
        yield None


ADAPTER_SABOTAGES: dict[str, tuple[Sabotage, float]] = {}
"""Where a version is an adapter."""
FIRST, LAST = ("base_model.model.model.layers.0.self_attn.q_proj.lora_", "base_model.model.model.layers.2.mlp.down_proj.lora_")


def change_adapter(name: str, lr: float = 1e-4) -> Callable:
    """A sabotage that changes the adapter on its way into the engine; one that is given None never arrives."""

    def add(function: Callable[[Delivery, Tensors], Tensors | None]) -> Callable:
        def run(delivery: Delivery) -> Iterator[None]:
            honest = compat.set_adapters

            def set_changed(worker: Any, tensors: Tensors) -> None:
                if (given := function(delivery, dict(tensors))) is not None:
                    honest(worker, given)

            compat.set_adapters = set_changed
            try:
                yield None
            finally:
                compat.set_adapters = honest

        ADAPTER_SABOTAGES[name] = (contextmanager(run), lr)
        return function

    return add


def scaled(tensors: Tensors) -> Tensors:
    return {name: tensor * 2 if "lora_B" in name else tensor for name, tensor in tensors.items()}


for _lr in (1e-4, 1e-6):
    change_adapter(f"adapter not loaded, lr {_lr:g}", _lr)(lambda delivery, tensors: None)
    change_adapter(f"adapter of the version before, lr {_lr:g}", _lr)(lambda delivery, tensors: dict(delivery.before))
change_adapter("scale taken twice")(lambda d, t: scaled(t))
change_adapter("adapter not scaled")(lambda d, t: {n: v / 2 if "lora_B" in n else v for n, v in t.items()})
change_adapter("matrix without its adapter")(lambda d, t: {n: v for n, v in t.items() if not n.startswith(LAST)})
change_adapter("part of a packed matrix without its adapter")(
    lambda d, t: {n: v for n, v in t.items() if not n.startswith(FIRST)}
)
change_adapter("one A of the version before")(lambda d, t: t | {f"{FIRST}A.weight": d.before[f"{FIRST}A.weight"]})
change_adapter("A of two layers swapped")(
    lambda d, t: (
        t
        | {
            f"{FIRST}A.weight": t[f"{FIRST}A.weight".replace("0", "1")],
            f"{FIRST}A.weight".replace("0", "1"): t[f"{FIRST}A.weight"],
        }
    )
)


@change_adapter("row of B lost")
def _(delivery: Delivery, tensors: Tensors) -> Tensors:
    changed = tensors[f"{LAST}B.weight"].clone()
    changed[5] = 0
    return tensors | {f"{LAST}B.weight": changed}


@change_adapter("last bit of one B")
def _(delivery: Delivery, tensors: Tensors) -> Tensors:
    changed = tensors[f"{FIRST}B.weight"].clone()
    changed.view(torch.uint8).view(-1)[0] ^= 1
    return tensors | {f"{FIRST}B.weight": changed}


def _adapter_changed_in_the_engine(delivery: Delivery) -> Iterator[None]:
    honest = compat.set_adapters

    def spoil(worker: Any, tensors: Tensors) -> None:
        honest(worker, tensors)
        module = compat._adapters_of(worker).modules["model.layers.1.mlp.gate_up_proj"]
        module.lora_b_stacked[1][0, 0, 3, 1] += 1e-3

    compat.set_adapters = spoil
    try:
        yield None
    finally:
        compat.set_adapters = honest


ADAPTER_SABOTAGES["adapter changed in the engine"] = (contextmanager(_adapter_changed_in_the_engine), 1e-4)
for _name in (
    "manifest_and_digests_of_the_version_before",
    "weights_of_the_version_before_under_this_versions_number",
    "digests_of_another_version",
):
    ADAPTER_SABOTAGES[f"adapter, {_name}"] = SABOTAGES[_name]
