"""The ways a delivery goes wrong. Each is a context manager: in it, one replica loads a version wrongly.

It yields what the replica finds in the store where that is not what was published, and None otherwise.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch

from torchtitan.experiments.rl.compat import vllm as compat
from torchtitan.experiments.rl.weights.snapshot import Manifest

honest_reload = compat.reload_weights

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


def sabotage(
    lr: float = 1e-4, name: str | None = None, among: dict = SABOTAGES
) -> Callable[[Callable], Callable]:
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
    compat.reload_weights = reload
    try:
        yield
    finally:
        compat.reload_weights = honest_reload


def _reloading(change: Callable[[Tensors], Tensors | None]) -> Iterator[None]:
    """The engine is given other tensors than those that were mapped."""

    def changed(worker: Any, tensors: Any) -> None:
        given = change(dict(tensors))
        if given is not None:
            honest_reload(worker, Given(given))

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
change("swapped tensors, q of two layers")(
    lambda d, t: t | {Q: t[Q.replace("1", "0")], Q.replace("1", "0"): t[Q]}
)
change("swapped tensors, k and v")(lambda d, t: t | {K: t[V], V: t[K]})
change("swapped tensors, gate and up")(lambda d, t: t | {GATE: t[UP], UP: t[GATE]})
change("scaled tensor")(lambda d, t: t | {GATE: t[GATE] * 1.01})
change("negated tensor")(lambda d, t: t | {V: -t[V]})
change("transposed square tensor")(lambda d, t: t | {OUT: t[OUT].t().contiguous()})
change("two rows of the embedding swapped")(
    lambda d, t: t | {EMBEDDING: t[EMBEDDING][[1, 0, *range(2, len(t[EMBEDDING]))]]}
)
change("one layer of the version before")(
    lambda d, t: t | {n: v for n, v in d.before.items() if ".layers.1." in n}
)
change("norm weights of the version before", 1e-2)(
    lambda d, t: t | {n: v for n, v in d.before.items() if "norm" in n}
)
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
    return {
        name: (value.view(bits[value.dtype]) & ~1).view(value.dtype)
        for name, value in tensors.items()
    }


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
        honest_reload(worker, tensors)
        delivery.model.model.embed_tokens.weight.data.view(torch.uint8)[3, 3] ^= 1

    with reloading_by(reload):
        yield None


@sabotage()
def old_packed_copy_put_back(delivery: Delivery) -> Iterator[None]:
    layer = delivery.model.model.layers[1].mlp.down_proj
    old = layer.cpu_linear

    def reload(worker: Any, tensors: Any) -> None:
        honest_reload(worker, tensors)
        layer.cpu_linear = old

    with reloading_by(reload):
        yield None


@sabotage()
def manifest_and_digests_of_the_version_before(delivery: Delivery) -> Iterator[Manifest]:
    yield delivery.published_before


@sabotage()
def weights_of_the_version_before_under_this_versions_number(
    delivery: Delivery,
) -> Iterator[Manifest]:
    yield replace(delivery.published_before, version=delivery.published.version)


@sabotage()
def digests_of_another_version(delivery: Delivery) -> Iterator[Manifest]:
    yield replace(delivery.published, digests=delivery.published_before.digests)


@sabotage()
def digest_of_another_tensor(delivery: Delivery) -> Iterator[Manifest]:
    digests = delivery.published.digests
    yield replace(delivery.published, digests=digests | {Q: digests[OUT]})


EXPERT_GATE, EXPERT_UP, EXPERT_DOWN = (
    f"model.layers.1.mlp.experts.*.{part}_proj.weight" for part in ("gate", "up", "down")
)
ROUTER = "model.layers.0.mlp.gate.weight"


def change_experts(name: str, *stacks: str, lr: float = 1e-4) -> Callable:
    """Register a sabotage that changes stacks of experts on their way into the engine.

    Args:
        stacks: names of those that it changes; none: all stacks of the version.
    """

    def add(function: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]) -> Callable:
        """``function`` is given a copy of the stack, and the stack of the version before."""

        def changed(delivery: Delivery, tensors: Tensors) -> Tensors:
            chosen = stacks or [own for own in tensors if "*" in own]
            own = {
                stack: function(tensors[stack].clone(), delivery.before[stack]) for stack in chosen
            }
            return tensors | own

        change(name, lr, EXPERT_SABOTAGES)(changed)
        return function

    return add


def _zeroed(stack: torch.Tensor, *place: Any) -> torch.Tensor:
    stack[place] = 0
    return stack


def _with_expert_of(stack: torch.Tensor, before: torch.Tensor) -> torch.Tensor:
    stack[2] = before[2]
    return stack


def _with_one_bit_turned(stack: torch.Tensor) -> torch.Tensor:
    stack[3].view(torch.uint8)[0, 0] ^= 1
    return stack


OF_ONE_LAYER = (EXPERT_GATE, EXPERT_UP, EXPERT_DOWN)
change_experts("two experts swapped", *OF_ONE_LAYER)(lambda stack, before: stack[[3, 1, 2, 0]])
change_experts("gates of two experts swapped", EXPERT_GATE)(
    lambda stack, before: stack[[3, 1, 2, 0]]
)
change_experts("experts one place further", *OF_ONE_LAYER)(lambda stack, before: stack.roll(1, 0))
change_experts("rows of an expert swapped", EXPERT_UP)(
    lambda stack, before: stack[:, [1, 0, *range(2, stack.shape[1])]]
)
change_experts("half of an expert zeroed", EXPERT_DOWN)(
    lambda stack, before: _zeroed(stack, 1, slice(32, None))
)
change_experts("experts of one rank missing")(lambda stack, before: _zeroed(stack, slice(2, None)))
change_experts("a rank's rows of every expert missing")(
    lambda stack, before: _zeroed(stack, slice(None), slice(16, None))
)
change_experts("last bit of one expert", EXPERT_GATE)(
    lambda stack, before: _with_one_bit_turned(stack)
)
change_experts("truncated stack, whose end is of the version before", EXPERT_DOWN)(
    lambda stack, before: torch.cat([stack.flatten()[:-1000], before.flatten()[-1000:]]).view(
        stack.shape
    )
)
change_experts("first expert in every place", EXPERT_UP)(
    lambda stack, before: stack[:1].repeat(len(stack), 1, 1)
)


@change("gate and up of an expert swapped", among=EXPERT_SABOTAGES)
def _(delivery: Delivery, tensors: Tensors) -> Tensors:
    gate, up = tensors[EXPERT_GATE].clone(), tensors[EXPERT_UP].clone()
    gate[0], up[0] = tensors[EXPERT_UP][0], tensors[EXPERT_GATE][0]
    return tensors | {EXPERT_GATE: gate, EXPERT_UP: up}


change("gate and up of all experts swapped", among=EXPERT_SABOTAGES)(
    lambda d, t: t | {EXPERT_GATE: t[EXPERT_UP], EXPERT_UP: t[EXPERT_GATE]}
)
for _lr in (1e-4, 1e-6):
    change_experts(f"an expert of the version before, lr {_lr:g}", lr=_lr)(_with_expert_of)
    change(f"router of the version before, lr {_lr:g}", _lr, EXPERT_SABOTAGES)(
        lambda d, t: t | {ROUTER: d.before[ROUTER]}
    )
change("dropped stack", among=EXPERT_SABOTAGES)(
    lambda d, t: {name: own for name, own in t.items() if name != EXPERT_DOWN}
)
change("dropped router", among=EXPERT_SABOTAGES)(
    lambda d, t: {name: tensor for name, tensor in t.items() if name != ROUTER}
)


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
        honest_reload(worker, tensors)
        experts.w2_weight = old

    with reloading_by(reload):
        yield None


ADAPTER_SABOTAGES: dict[str, tuple[Sabotage, float]] = {}
"""Where a version is an adapter."""
FIRST, LAST = (
    "base_model.model.model.layers.0.self_attn.q_proj.lora_",
    "base_model.model.model.layers.2.mlp.down_proj.lora_",
)


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
    change_adapter(f"adapter of the version before, lr {_lr:g}", _lr)(
        lambda delivery, tensors: dict(delivery.before)
    )
change_adapter("scale taken twice")(lambda d, t: scaled(t))
change_adapter("adapter not scaled")(
    lambda d, t: {n: v / 2 if "lora_B" in n else v for n, v in t.items()}
)
change_adapter("matrix without its adapter")(
    lambda d, t: {n: v for n, v in t.items() if not n.startswith(LAST)}
)
change_adapter("part of a packed matrix without its adapter")(
    lambda d, t: {n: v for n, v in t.items() if not n.startswith(FIRST)}
)
change_adapter("one A of the version before")(
    lambda d, t: t | {f"{FIRST}A.weight": d.before[f"{FIRST}A.weight"]}
)
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
        module = compat._adapter_manager(worker).modules["model.layers.1.mlp.gate_up_proj"]
        module.lora_b_stacked[1][0, 0, 3, 1] += 1e-3

    compat.set_adapters = spoil
    try:
        yield None
    finally:
        compat.set_adapters = honest


ADAPTER_SABOTAGES["adapter changed in the engine"] = (
    contextmanager(_adapter_changed_in_the_engine),
    1e-4,
)
for _name in (
    "manifest_and_digests_of_the_version_before",
    "weights_of_the_version_before_under_this_versions_number",
    "digests_of_another_version",
):
    ADAPTER_SABOTAGES[f"adapter, {_name}"] = SABOTAGES[_name]
