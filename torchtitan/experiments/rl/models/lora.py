"""LoRA: trains adapters of chosen matrices while the base model is frozen.

A matrix W with an adapter computes ``W x + alpha/rank B (A x)``, where A and B are trained.
torchtitan's converter puts A and B beside W. Outside of the trainer they have PEFT's names and the
hub's rows. Those of q_proj are::

    base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight   [rank, in]
    base_model.model.model.layers.0.self_attn.q_proj.lora_B.weight   [out, rank]
"""

import hashlib
import json
import math
import shutil
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor, distribute_tensor

from torchtitan.components.lora import LoRAConverter
from torchtitan.experiments.rl.bounds import NonEmptyStr, PositiveFloat, PositiveInt
from torchtitan.experiments.rl.compat.torchtitan.models import split_of_fused
from torchtitan.experiments.rl.errors import ConfigError
from torchtitan.experiments.rl.models.hub import (
    ADAPTER_CONFIG,
    ADAPTER_WEIGHTS,
    Shape,
    read_header,
    read_shapes,
)
from torchtitan.models.common.linear import Linear
from torchtitan.protocols.model_spec import ModelSpec

FIELD = "trainer.lora"
"""Config field of the adapters; errors name it."""
PEFT_PREFIX = "base_model.model."
"""Prefix of every name in a PEFT folder, where the model lies inside PEFT's own two."""
SEED = 0
"""Seed of the first values of A, which are the same for any number of ranks."""


class LoRA:
    """Namespace of the adapters' config."""

    @dataclass(kw_only=True, slots=True)
    class Config:
        """Adapters of the policy. Embedding, head, experts and their routers have none."""

        rank: PositiveInt = 8
        alpha: PositiveFloat = 16.0
        """Numerator of the scale alpha / rank, by which the output of an adapter is multiplied."""
        targets: Literal["all-linear"] | tuple[NonEmptyStr, ...] = "all-linear"
        """Matrices of each layer that have an adapter.

        They are given by the names that the trained modules have: torchtitan's, such as wq, wkv,
        wo, w1, w2 and w3, or transformers', such as q_proj and down_proj (docs/models.md)."""
        init_from: str | None = None
        """PEFT folder with the adapters that training begins with.

        It has the same rank, alpha and targets. None begins with a random A and B = 0."""
        serve: Literal["served", "merged"] = "served"
        """Form in which generators get the adapters.

        served: the engine holds the base, and swaps adapters between two of its steps.
        merged: the trainer adds them to the base in float32 and publishes the whole model, for an
        engine that can't serve adapters."""

        @property
        def scaling(self) -> float:
            """Factor of an adapter's output."""
            return self.alpha / self.rank


def with_lora(spec: ModelSpec, lora: LoRA.Config) -> ModelSpec:
    """Return the spec of the model with a frozen base and adapters of ``lora.targets``.

    Raises:
        ConfigError: a target names no matrix of the layers, or there are no targets.
    """
    matrices = [
        name for name, *_ in spec.model.traverse(Linear.Config) if name.startswith("layers.")
    ]
    names = {name.rpartition(".")[2] for name in matrices}
    adaptable = {name.rpartition(".")[2] for name in matrices if ".moe." not in name}
    targets = sorted(adaptable) if lora.targets == "all-linear" else list(lora.targets)
    check_targets(targets, adaptable, lora, has_experts=len(adaptable) < len(names))
    converter = LoRAConverter(
        LoRAConverter.Config(rank=lora.rank, alpha=lora.alpha, target_modules=targets)
    )
    converted: Any = converter.convert(spec.model)
    return replace(spec, model=converted)


def check_targets(
    targets: Sequence[str],
    adaptable: Collection[str],
    lora: LoRA.Config,
    *,
    has_experts: bool = False,
) -> None:
    """Raise if targets name no matrix of a model, or there are none.

    Args:
        targets: names of the matrices that are to have adapters.
        adaptable: names of the matrices that can have some.
        lora: config that the targets are of.
        has_experts: True if the model has experts, which have no adapters.
    """
    field = f"{FIELD}.targets"
    unknown = [name for name in targets if name not in adaptable]
    if unknown:
        cure = (
            f"{unknown[0]} names no matrix of this model's layers; choose among "
            f"{', '.join(sorted(adaptable))}, or all-linear"
        )
        if has_experts:
            cure += "; experts have no adapters"
        raise ConfigError(field, lora.targets, cure)
    if not targets:
        cure = "nothing would be trained; name a matrix, or all-linear"
        raise ConfigError(field, lora.targets, cure)


def adapted_layers(linears: Mapping[str, nn.Linear], lora: LoRA.Config) -> dict[str, nn.Linear]:
    """Return torchtitan's layer with an adapter for each linear layer, by the same names.

    The layers have the sizes, the dtypes and the devices of the given ones, and values that nobody
    has set yet. Their base is frozen.
    """
    converter = LoRAConverter(LoRAConverter.Config(rank=lora.rank, alpha=lora.alpha))
    adapted: dict[str, nn.Linear] = {}
    for name, linear in linears.items():
        config: Any = converter.convert(
            Linear.Config(
                in_features=linear.in_features,
                out_features=linear.out_features,
                bias=linear.bias is not None,
            )
        )
        with linear.weight.device:
            adapted[name] = config.build().to(linear.weight.dtype)
    return adapted


@dataclass(slots=True)
class _Adapted:
    """A matrix of the model that has an adapter."""

    name: str
    """torchtitan's name of the matrix."""
    module: Any
    """The linear layer, with ``lora_a`` and ``lora_b``."""
    rows: dict[str, torch.Tensor]
    """Rows of torchtitan's matrix that each hub module consists of, in the hub's order.

    There are three hub modules for a fused query, key and value, and one otherwise."""


class Adapters:
    """The adapters of a model, as whole tensors by PEFT's names. Every method is collective.

    Tensors that ``items`` yields are already multiplied by ``alpha / rank``: their user computes
    ``W + B A``, and can't scale twice.

    Several adapters may share a base. The model computes with one of them, the active one, and the
    values of all lie beside it::

        model     W, and A and B of "math"
        states    "math": A B    "code": A B
    """

    def __init__(
        self, model: nn.Module, spec: ModelSpec, lora: LoRA.Config, names: Sequence[str] = ("",)
    ):
        """Find the adapters in a model.

        Args:
            model: the model, built and divided over the ranks.
            spec: spec of the model, from ``with_lora``.
            lora: config of the adapters.
            names: names of the adapters, in order. The only adapter of a run is called "".
        """
        self.lora = lora
        self.names = tuple(names)
        self._model = model
        self._parameters = trained_state(model)
        self._active = self.names[0]
        self._gradients: dict[str, list[torch.Tensor | None]] = {}
        """Gradients of the adapters that are not active, in the order of the parameters."""
        parameters = {key: parameter.detach() for key, parameter in self._parameters.items()}
        is_only = len(self.names) == 1
        self.states = {
            name: parameters if is_only else {key: p.clone() for key, p in parameters.items()}
            for name in self.names
        }
        """Trained tensors of each adapter after its last step, by the names of a checkpoint.

        The tensors of a run's only adapter are the model's parameters themselves."""
        self._adapted = _adapted_matrices(model, spec)

    @torch.no_grad()
    def activate(self, name: str) -> None:
        """Have the model compute with adapter ``name``.

        The gradients of the adapter that was active are kept until it is activated again.
        """
        if name == self._active:
            return
        gradients = self._gradients.pop(name, None) or [None] * len(self._parameters)
        self._gradients[self._active] = [parameter.grad for parameter in self._parameters.values()]
        for parameter, gradient in zip(self._parameters.values(), gradients, strict=True):
            parameter.grad = gradient
        self._active = name
        self.load_active()

    @torch.no_grad()
    def load_active(self) -> None:
        """Copy the active adapter's state into the model."""
        forget_gathered(self._model)
        for key, tensor in self.states[self._active].items():
            self._parameters[key].copy_(tensor)

    @torch.no_grad()
    def save_active(self) -> None:
        """Copy the model's parameters, which an optimizer has moved, into the active state."""
        if len(self.names) == 1:  # they are the same tensors
            return
        for key, tensor in self.states[self._active].items():
            tensor.copy_(self._parameters[key])

    @torch.no_grad()
    def start(self) -> None:
        """Give every adapter its first values.

        They are those of ``init_from``, or B = 0 and an A that is drawn as torchtitan draws it, but
        from a generator of its own for each matrix.

        Raises:
            ConfigError: the folder of ``init_from`` has other adapters than the model.
        """
        given = None
        if self.lora.init_from is not None:
            given = read_adapter(Path(self.lora.init_from), self.lora, self._shapes())
        for adapted in self._adapted:
            a = adapted.module.lora_a.weight
            b = adapted.module.lora_b.weight
            first_b = torch.zeros(b.shape)
            if given is None:
                first_a = _random_a(adapted.name, a.shape)
            else:
                first_a = self._given_a(adapted, given)
                for hub, rows in adapted.rows.items():
                    first_b[rows] = given[f"{PEFT_PREFIX}{hub}.lora_B.weight"].float()
            _fill(a, first_a)
            _fill(b, first_b)
        for state in self.states.values():
            for key, tensor in state.items():
                tensor.copy_(self._parameters[key])

    def _given_a(self, adapted: _Adapted, given: Mapping[str, torch.Tensor]) -> torch.Tensor:
        """Return the A of a matrix from a PEFT folder's tensors.

        Raises:
            ConfigError: the matrix is several hub modules, to which the folder gives different A.
        """
        first, *others = [given[f"{PEFT_PREFIX}{hub}.lora_A.weight"] for hub in adapted.rows]
        first = first.float()
        if any(not torch.equal(first, other.float()) for other in others):
            cure = (
                "this flavor has one adapter for queries, keys and values, the folder several; set "
                "model.flavor to None"
            )
            raise ConfigError(f"{FIELD}.init_from", self.lora.init_from, cure)
        return first

    def _shapes(self) -> "AdapterShapes":
        """Return the shapes of one adapter's tensors, as ``adapter_shapes`` does."""
        shapes: AdapterShapes = {}
        for adapted in self._adapted:
            target_shapes = shapes.setdefault(target_of(adapted.name), {})
            width = adapted.module.lora_a.weight.shape[1]
            for hub, rows in adapted.rows.items():
                target_shapes |= pair_shapes(hub, (len(rows), width), self.lora.rank)
        return shapes

    def items(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield the tensors of all adapters, multiplied by ``alpha / rank``.

        The tensors of an adapter that has a name are called ``math/base_model...``.
        """
        for name in self.names:
            self.activate(name)
            for key, tensor in self._tensors(self.lora.scaling):
                yield of_adapter(name, key), tensor

    def peft(self) -> dict[str, dict[str, torch.Tensor]]:
        """Return the tensors of each adapter as PEFT keeps them: not scaled, on the CPU."""
        tensors = {}
        for name in self.names:
            self.activate(name)
            tensors[name] = {
                key: tensor.detach().cpu().clone() for key, tensor in self._tensors(1.0)
            }
        return tensors

    @torch.no_grad()
    def _tensors(self, scaling: float) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield A and ``scaling * B`` of the active adapter, for each hub module."""
        for adapted in self._adapted:
            a = _whole(adapted.module.lora_a.weight)
            b = _whole(adapted.module.lora_b.weight)
            for hub, rows in adapted.rows.items():
                yield f"{PEFT_PREFIX}{hub}.lora_A.weight", a
                yield f"{PEFT_PREFIX}{hub}.lora_B.weight", b[rows.to(b.device)] * scaling

    @contextmanager
    def merged(self, root: nn.Module) -> Iterator[None]:
        """Within the context, add each adapter in ``root`` to its base weight, in float32.

        At the end, the base weights come back bit for bit.
        """
        adapted: list[Any] = [module for module in root.modules() if hasattr(module, "lora_b")]
        base: list[tuple[torch.Tensor, torch.Tensor]] = []
        with torch.no_grad():
            for module in adapted:
                weight = module.weight
                base.append((weight, weight.detach().clone()))
                added = module.lora_b.weight.float() @ module.lora_a.weight.float()
                if isinstance(weight, DTensor):
                    added = added.redistribute(weight.device_mesh, weight.placements)
                weight.copy_((weight.float() + self.lora.scaling * added).to(weight.dtype))
            try:
                yield
            finally:
                for weight, values in base:
                    weight.copy_(values)


def _layer_and_matrix(name: str) -> tuple[str, str]:
    """Return the number of the layer that a module lies in, and the module's name in the layer."""
    _, _, inside = f".{name}".partition(".layers.")
    layer, _, matrix = inside.partition(".")
    return layer, matrix


def _adapted_matrices(model: nn.Module, spec: ModelSpec) -> list[_Adapted]:
    """Return the matrices of a model that have adapters.

    Rows are worked out for the first layer that has a matrix of that size, and hold for all layers.
    """
    assert spec.state_dict_adapter is not None, "every family has one"
    to_hub = spec.state_dict_adapter(spec.model, None).to_hf
    modules = {_clean(name): module for name, module in model.named_modules()}
    adapted = []
    rows_of_matrix: dict[tuple[str, int], dict[str, torch.Tensor]] = {}
    for name, module in modules.items():
        if not hasattr(module, "lora_b"):
            continue
        layer, matrix = _layer_and_matrix(name)
        kind = matrix, module.out_features
        if kind not in rows_of_matrix:
            parent = modules[name.rpartition(".")[0]]
            rows_of_matrix[kind] = {
                hub.replace(f".{layer}.", ".{}.", 1): rows
                for hub, rows in _hub_rows(name, module, parent, to_hub).items()
            }
        hub_rows = {hub.format(layer): rows for hub, rows in rows_of_matrix[kind].items()}
        adapted.append(_Adapted(name=name, module=module, rows=hub_rows))
    return adapted


def _random_a(name: str, shape: torch.Size) -> torch.Tensor:
    """Draw the first A of a matrix, uniform within 1 / sqrt(in), from the matrix's name alone."""
    digest = hashlib.sha256(f"{SEED} {name}".encode()).digest()
    seed = int.from_bytes(digest[:8], "big") >> 1
    bound = 1 / math.sqrt(shape[1])
    generator = torch.Generator().manual_seed(seed)
    return torch.empty(shape).uniform_(-bound, bound, generator=generator)


def of_adapter(name: str, key: str) -> str:
    """Return the name of something that belongs to an adapter, such as ``math/base_model...``.

    The only adapter of a run has the name "", and what belongs to it is called ``key``.
    """
    return f"{name}/{key}" if name else key


def forget_gathered(model: nn.Module) -> None:
    """Have FSDP gather parameters anew: their shards have changed since it last did."""
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()


def trained_state(model: nn.Module) -> dict[str, torch.Tensor]:
    """Return the parameters that are trained, by the names of a checkpoint."""
    return {
        _clean(name): parameter
        for name, parameter in model.named_parameters()
        if parameter.requires_grad
    }


_UNSUPPORTED_OPTIONS = (
    "use_dora",
    "use_rslora",
    "modules_to_save",
    "rank_pattern",
    "alpha_pattern",
    "fan_in_fan_out",
    "lora_bias",
)
"""PEFT's options that make another kind of adapter."""


def adapter_sizes(folder: Path, *, field: str) -> tuple[int, float]:
    """Return rank and alpha of a PEFT folder.

    Args:
        folder: the folder.
        field: config field or option that holds ``folder``; errors name it.

    Raises:
        ConfigError: it is no PEFT folder, or has adapters of a kind that is not trained here.
    """
    try:
        config = json.loads((folder / ADAPTER_CONFIG).read_text(encoding="utf-8"))
        rank = int(config["r"])
        alpha = float(config["lora_alpha"])
    except (OSError, ValueError, KeyError, TypeError) as error:
        cure = (
            f"is no folder of PEFT, such as a run's policy/step-N/adapter: {ADAPTER_CONFIG}: "
            f"{error}"
        )
        raise ConfigError(field, str(folder), cure) from error
    unsupported = [name for name in _UNSUPPORTED_OPTIONS if config.get(name)]
    if unsupported:
        cure = f"its {unsupported[0]} is set: such adapters are not trained here"
        raise ConfigError(field, str(folder), cure)
    return rank, alpha


AdapterShapes = dict[str, dict[str, Shape]]
"""Shapes of the tensors in a PEFT folder, by their target (such as wq), and then by name."""


def target_of(module: str) -> str:
    """Return the target by which ``LoRA.Config`` names a matrix.

    Keys and values have one config, and so one target.
    """
    name = module.rpartition(".")[2]
    return "wkv" if name in ("wk", "wv") else name


def adapter_base(folder: Path, *, field: str) -> str:
    """Return the model that a PEFT folder names as its base.

    Args:
        folder: the folder.
        field: option that holds ``folder``; the error names it.

    Raises:
        ConfigError: the folder names no base.
    """
    with suppress(OSError, ValueError, AttributeError):
        config = json.loads((folder / ADAPTER_CONFIG).read_text(encoding="utf-8"))
        base = config.get("base_model_name_or_path")
        if isinstance(base, str) and base:
            return base
    cure = f"its {ADAPTER_CONFIG} names no base_model_name_or_path: name the base as --model"
    raise ConfigError(field, str(folder), cure)


def pair_shapes(module: str, weight: Sequence[int], rank: int) -> dict[str, Shape]:
    """Return the shapes of A and B of a matrix, by their names in a PEFT folder.

    Args:
        module: the matrix's name in a hub folder, without ``.weight``.
        weight: its shape, [out, in].
        rank: rank of the adapter.
    """
    out, width = weight
    name = f"{PEFT_PREFIX}{module}.lora_{{}}.weight"
    return {name.format("A"): (rank, width), name.format("B"): (out, rank)}


def adapter_shapes(spec: ModelSpec, lora: LoRA.Config) -> AdapterShapes:
    """Return the shapes of the tensors that a PEFT folder of the model's adapters has.

    No memory is allocated for the tensors.

    Args:
        spec: spec of the model, from ``with_lora``.
        lora: config of the adapters.
    """
    assert spec.state_dict_adapter is not None, "every family has one"
    to_hub = spec.state_dict_adapter(spec.model, None).to_hf
    with torch.device("meta"):
        modules = dict(spec.model.build().named_modules())
    shapes: AdapterShapes = {}
    for name, module in modules.items():
        if not hasattr(module, "lora_b"):
            continue
        parent = name.rpartition(".")[0]
        weights = split_of_fused(
            modules[parent], {f"{name}.weight": module.weight}, prefix=f"{parent}."
        )
        target_shapes = shapes.setdefault(target_of(name), {})
        for hub, weight in to_hub(weights).items():
            hub_module = hub.removesuffix(".weight")
            target_shapes |= pair_shapes(hub_module, tuple(weight.shape), lora.rank)
    return shapes


def check_adapter(folder: Path, lora: LoRA.Config, shapes: AdapterShapes) -> None:
    """Raise if a PEFT folder does not have the adapters that are trained.

    Of its tensors only the header is read.

    Args:
        folder: the folder.
        lora: config of the adapters.
        shapes: shapes of the adapters, from ``adapter_shapes``.

    Raises:
        ConfigError: the folder is no PEFT folder, its rank or alpha is another, or a matrix is
            missing, unknown or of another shape.
    """
    field = f"{FIELD}.init_from"
    rank, alpha = adapter_sizes(folder, field=field)
    if (rank, alpha) != (lora.rank, lora.alpha):
        cure = (
            f"its rank and alpha are {rank} and {alpha:g}: set {FIELD}.rank and {FIELD}.alpha to "
            "these"
        )
        raise ConfigError(field, str(folder), cure)

    header = adapter_header(folder, field=field)
    expected = {
        name: shape for target_shapes in shapes.values() for name, shape in target_shapes.items()
    }
    for name in header:
        if name not in expected:
            cure = f"it has {name}, which is no adapter of {FIELD}.targets in this model"
            raise ConfigError(field, str(folder), cure)
    absent = [name for name in expected if name not in header]
    if absent:
        fault = (
            f"it has no {absent[0]}, and lacks {len(absent)} of the {len(expected)} tensors of "
            f"{FIELD}.targets"
        )
        cure = _cure_of_absent_tensors(header, shapes)
        raise ConfigError(field, str(folder), f"{fault}: {cure}")
    for name, shape in header.items():
        if shape != expected[name]:
            cure = (
                f"{name} has shape {list(shape)}, and does not fit this model, which has "
                f"{list(expected[name])}"
            )
            raise ConfigError(field, str(folder), cure)


def _cure_of_absent_tensors(header: Mapping[str, Shape], shapes: AdapterShapes) -> str:
    """Return the advice on a PEFT folder that lacks tensors of the targets.

    If it has all tensors of some targets and no others, these can be trained.
    """
    complete = [
        target for target, target_shapes in shapes.items() if target_shapes.keys() <= header.keys()
    ]
    if len(header) != sum(len(shapes[target]) for target in complete):
        return "name a whole adapter"
    return f"train the matrices that it has: --trainer.lora.targets {' '.join(sorted(complete))}"


def adapter_header(folder: Path, *, field: str) -> dict[str, Shape]:
    """Return the shape of each tensor of a PEFT folder.

    Args:
        folder: the folder.
        field: config field or option that holds ``folder``; errors name it.

    Raises:
        ConfigError: the file of tensors can't be read, or has none.
    """
    file = folder / ADAPTER_WEIGHTS
    if not file.is_file():
        cure = f"has no {ADAPTER_WEIGHTS}: save the adapter again with safe_serialization=True"
        raise ConfigError(field, str(folder), cure)
    shapes = read_header(file, str(folder), field=field)
    if not shapes:
        cure = f"its {ADAPTER_WEIGHTS} has no tensors: save the adapter again"
        raise ConfigError(field, str(folder), cure)
    return shapes


def read_adapter(folder: Path, lora: LoRA.Config, shapes: AdapterShapes) -> dict[str, torch.Tensor]:
    """Check a PEFT folder, and return its tensors. Raises as ``check_adapter`` does."""
    check_adapter(folder, lora, shapes)
    return load_file(folder / ADAPTER_WEIGHTS)


def write_adapter(
    folder: Path, tensors: Mapping[str, torch.Tensor], lora: LoRA.Config, *, base: str
) -> None:
    """Write a PEFT folder.

    Args:
        folder: the folder, which does not exist.
        tensors: those of one adapter, from ``Adapters.peft``.
        lora: config of the adapters.
        base: path or name of the base model.
    """
    folder.mkdir(parents=True)
    targets = sorted({name.split(".")[-3] for name in tensors})
    config = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": base,
        "r": lora.rank,
        "lora_alpha": lora.alpha,
        "target_modules": targets,
        "lora_dropout": 0.0,
        "bias": "none",
        "inference_mode": True,
    }
    (folder / ADAPTER_CONFIG).write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
    save_file(
        {name: tensor.contiguous() for name, tensor in tensors.items()},
        folder / ADAPTER_WEIGHTS,
        {"format": "pt"},
    )


def merge_adapter(folder: Path, base: Path, target: Path, *, field: str) -> None:
    """Merge a PEFT folder into its base, and write the hub folder ``target``.

    The target appears under its name only when it is whole.

    Args:
        folder: the PEFT folder.
        base: the hub folder of its base model.
        target: the hub folder to write.
        field: option that names ``folder``; errors name it.

    Raises:
        ConfigError: the folder has no adapters, or some that are of no matrix of the base or do not
            fit it.
    """
    rank, alpha = adapter_sizes(folder, field=field)
    weights = read_shapes(str(base), field="--model")
    header = adapter_header(folder, field=field)
    for name, shape in header.items():
        module = _module_of(name)
        weight = weights.get(f"{module}.weight", ())
        pair = pair_shapes(module, weight, rank) if len(weight) == 2 else {}
        if name not in pair:
            cure = (
                f"it has {name}, which is no adapter of a matrix of {base}: name its base as "
                "--model"
            )
            raise ConfigError(field, str(folder), cure)
        if shape != pair[name]:
            cure = (
                f"{name} has shape {list(shape)}, and that of {base} has {list(pair[name])}: name "
                "its base as --model"
            )
            raise ConfigError(field, str(folder), cure)
        absent = [other for other in pair if other not in header]
        if absent:
            cure = f"it has {name}, and no {absent[0]}: name a whole adapter"
            raise ConfigError(field, str(folder), cure)

    being_written = target.with_name(f".{target.name}.partial")
    shutil.rmtree(being_written, ignore_errors=True)  # left by a command that was killed
    write_merged(
        being_written,
        load_file(folder / ADAPTER_WEIGHTS),
        LoRA.Config(rank=rank, alpha=alpha),
        base=base,
    )
    being_written.rename(target)


def write_merged(
    folder: Path, tensors: Mapping[str, torch.Tensor], lora: LoRA.Config, *, base: Path
) -> None:
    """Write a hub folder that holds the base with the adapters added.

    The sum is computed in float32 and kept in the dtype that the base has.

    Args:
        folder: the hub folder to write, which does not exist.
        tensors: those of one adapter, from ``Adapters.peft``.
        lora: config of the adapters.
        base: the hub folder that was trained on.

    Raises:
        ConfigError: the base lacks a matrix that has an adapter.
    """
    folder.mkdir(parents=True)
    to_merge = {_module_of(name) for name in tensors}
    for file in sorted(base.iterdir()):
        if not file.is_file():
            continue
        if file.suffix != ".safetensors":
            shutil.copy(file, folder)
            continue
        with safe_open(file, "pt") as reader:
            metadata = reader.metadata()
        weights = load_file(file)
        for module in sorted(to_merge):
            weight = weights.get(f"{module}.weight")
            if weight is None:
                continue
            a = tensors[f"{PEFT_PREFIX}{module}.lora_A.weight"].float()
            b = tensors[f"{PEFT_PREFIX}{module}.lora_B.weight"].float()
            merged = weight.float() + lora.scaling * (b @ a)
            weights[f"{module}.weight"] = merged.to(weight.dtype)
            to_merge.discard(module)
        save_file(weights, folder / file.name, metadata)
    if to_merge:
        cure = f"it has no {sorted(to_merge)[0]}.weight"
        raise ConfigError("model.hf_assets_path", str(base), cure)


def _module_of(name: str) -> str:
    """Return the hub module of a tensor of a PEFT folder."""
    return name.removeprefix(PEFT_PREFIX).rpartition(".lora_")[0]


def _hub_rows(
    name: str,
    module: Any,  # noqa: ANN401 - torchtitan declares less than every linear layer has
    parent: nn.Module,
    to_hub: Callable[[dict[str, Any]], dict[str, Any]],
) -> dict[str, torch.Tensor]:
    """Return the rows of torchtitan's matrix that each hub module has, in the hub's order.

    The row numbers are converted the way a weight is: as a matrix of the weight's shape, each row
    of which holds its number.

    Args:
        name: torchtitan's name of the matrix.
        module: its linear layer.
        parent: module that holds the linear layer.
        to_hub: converter of a state dict.
    """
    out = module.out_features
    numbers = torch.arange(out, dtype=torch.int32)[:, None].expand(out, module.in_features)
    state = {f"{name}.weight": numbers.contiguous()}
    hub = to_hub(split_of_fused(parent, state, prefix=f"{name.rpartition('.')[0]}."))
    return {key.removesuffix(".weight"): matrix[:, 0].long() for key, matrix in hub.items()}


def _clean(name: str) -> str:
    """Return a parameter's name without the wrappers of checkpointing and torch.compile."""
    return name.replace("_checkpoint_wrapped_module.", "").replace("_orig_mod.", "")


def _whole(parameter: torch.Tensor) -> torch.Tensor:
    """Return the whole parameter, gathered from the ranks that share it. Collective."""
    return parameter.full_tensor() if isinstance(parameter, DTensor) else parameter.detach()


def _fill(parameter: torch.Tensor, whole: torch.Tensor) -> None:
    """Copy a whole tensor, the same on every rank, into a parameter that ranks may share."""
    if isinstance(parameter, DTensor):
        mesh = parameter.device_mesh
        whole = whole.to(mesh.device_type, parameter.dtype)
        whole = distribute_tensor(whole, mesh, parameter.placements, src_data_rank=None)
    parameter.copy_(whole)
