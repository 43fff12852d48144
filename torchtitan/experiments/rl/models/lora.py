"""LoRA: the base model is frozen, and each chosen matrix W computes ``W x + alpha/rank B (A x)``, where A and B are trained.

torchtitan's converter puts A and B beside W. Outside of the trainer they have PEFT's names and the hub's rows. Of q_proj::

    base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight   [rank, in]
    base_model.model.model.layers.0.self_attn.q_proj.lora_B.weight   [out, rank]
"""

import hashlib
import json
import math
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
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
PEFT_PREFIX = "base_model.model."
"""Of each name in a PEFT folder: a model in a model."""
SEED = 0
"""Of A's first values: those of a run do not depend on its ranks."""


class LoRA:
    @dataclass(kw_only=True, slots=True)
    class Config:
        """Adapters of the policy. Embedding, head, experts and what routes to these have none."""

        rank: PositiveInt = 8
        alpha: PositiveFloat = 16.0
        """What an adapter adds is multiplied by alpha / rank."""
        targets: Literal["all-linear"] | tuple[NonEmptyStr, ...] = "all-linear"
        """Which matrices of a layer have one: torchtitan's names, such as wq, wkv, wo, w1, w2, w3."""
        init_from: str | None = None
        """A folder of PEFT with the same rank, alpha and targets that training begins with. None: A is random and B is 0."""
        serve: Literal["served", "merged"] = "served"
        """Form in which generators get the adapters.

        served: the engine holds the base, and swaps adapters between two of its steps.
        merged: the trainer adds them to the base in float32 and publishes the whole model, for an
        engine that can't serve adapters."""

        @property
        def scaling(self) -> float:
            return self.alpha / self.rank


def with_lora(spec: ModelSpec, lora: LoRA.Config) -> ModelSpec:
    """The spec of a model whose base is frozen and whose ``targets`` have adapters.

    Raises:
        ConfigError: a target that names no matrix of the layers.
    """
    matrices = [
        name for name, *_ in spec.model.traverse(Linear.Config) if name.startswith("layers.")
    ]
    found = {name.rpartition(".")[2] for name in matrices if ".moe." not in name}
    targets = sorted(found) if lora.targets == "all-linear" else list(lora.targets)
    if unknown := [name for name in targets if name not in found]:
        cure = f"{unknown[0]} names no matrix of this model's layers; choose among {', '.join(sorted(found))}, or all-linear"
        if len(found) < len({name.rpartition(".")[2] for name in matrices}):
            cure += "; experts have no adapters"
        raise ConfigError(f"{FIELD}.targets", lora.targets, cure)
    if not targets:
        raise ConfigError(
            f"{FIELD}.targets",
            lora.targets,
            "nothing would be trained; name a matrix, or all-linear",
        )
    converter = LoRAConverter(
        LoRAConverter.Config(rank=lora.rank, alpha=lora.alpha, target_modules=targets)
    )
    converted: Any = converter.convert(spec.model)
    return replace(spec, model=converted)


@dataclass(slots=True)
class _Adapted:
    """A matrix with its adapter, by torchtitan's name of the matrix."""

    name: str
    module: Any
    rows: dict[str, torch.Tensor]
    """By hub module (three of a fused query, key and value): which row of torchtitan's matrix each of its rows is."""


class Adapters:
    """The adapters of a model, whole tensors by PEFT's names. Every method is collective.

    What ``items`` gives has ``alpha / rank`` in it: whoever computes with it takes ``W + B A``, and can't scale twice.

    There may be several of one base, by name. The model computes with one at a time, and the others lie beside it::

        model     W, and A and B of "math"
        held      "math": A B    "code": A B
    """

    def __init__(
        self, model: nn.Module, spec: ModelSpec, lora: LoRA.Config, names: Sequence[str] = ("",)
    ):
        """``names``: of adapters, in order. "" is that of a run with one."""
        self.lora, self.names = lora, tuple(names)
        self._model, self._parameters = model, trained_state(model)
        self._active, self._gradients = self.names[0], dict[str, list[torch.Tensor | None]]()
        own = {key: parameter.detach() for key, parameter in self._parameters.items()}
        self.held = {
            name: own if len(self.names) == 1 else {k: v.clone() for k, v in own.items()}
            for name in self.names
        }
        """By name: what is trained, as it is after the last step."""
        assert spec.state_dict_adapter is not None, "every family has one"
        to_hub = spec.state_dict_adapter(spec.model, None).to_hf
        modules = {_clean(name): module for name, module in model.named_modules()}
        self._adapted = []
        of_first: dict[str, dict[str, torch.Tensor]] = {}
        for name, module in modules.items():
            if hasattr(module, "lora_b"):
                _, layer, matrix = name.split(".", 2)
                if matrix not in of_first:
                    parent = modules[name.rpartition(".")[0]]
                    found = _hub_rows(name, module, parent, to_hub)
                    of_first[matrix] = {
                        hub.replace(f".{layer}.", ".{}.", 1): own for hub, own in found.items()
                    }
                rows = {hub.format(layer): own for hub, own in of_first[matrix].items()}
                self._adapted.append(_Adapted(name, module, rows))

    @torch.no_grad()
    def activate(self, name: str) -> None:
        """Have the model compute with adapter ``name``. Gradients of the one before are kept with it."""
        if name == self._active:
            return
        of_own = self._gradients.pop(name, None) or [None] * len(self._parameters)
        self._gradients[self._active] = [parameter.grad for parameter in self._parameters.values()]
        for parameter, gradient in zip(self._parameters.values(), of_own, strict=True):
            parameter.grad = gradient
        self._active = name
        self.take_held()

    @torch.no_grad()
    def take_held(self) -> None:
        """The model's is what is held: another than before."""
        forget_gathered(self._model)
        for key, held in self.held[self._active].items():
            self._parameters[key].copy_(held)

    @torch.no_grad()
    def hold(self) -> None:
        """What is held is the model's, which an optimizer has moved."""
        if len(self.names) == 1:  # they are the same tensors
            return
        for key, held in self.held[self._active].items():
            held.copy_(self._parameters[key])

    @torch.no_grad()
    def start(self) -> None:
        """Give each adapter its first values: those of ``init_from``, or A as torchtitan draws it, from a generator of its own,
        and B = 0.

        Raises:
            ConfigError: the folder of ``init_from`` has other adapters than the model.
        """
        path = self.lora.init_from
        given = {} if path is None else read_adapter(Path(path), self.lora, self._shapes())
        for adapted in self._adapted:
            a, b = adapted.module.lora_a.weight, adapted.module.lora_b.weight
            seed = (
                int.from_bytes(
                    hashlib.sha256(f"{SEED} {adapted.name}".encode()).digest()[:8], "big"
                )
                >> 1
            )
            bound = 1 / math.sqrt(a.shape[1])
            first_a = torch.empty(a.shape).uniform_(
                -bound, bound, generator=torch.Generator().manual_seed(seed)
            )
            first_b = torch.zeros(b.shape)
            found = []
            for hub, rows in adapted.rows.items():
                if given:
                    own_a, own_b = (
                        given[f"{PEFT_PREFIX}{hub}.lora_{part}.weight"].float() for part in "AB"
                    )
                    found.append(own_a)
                    first_b[rows] = own_b
            if any(not torch.equal(found[0], other) for other in found):
                cure = "this flavor has one adapter for queries, keys and values, the folder several; set model.flavor to None"
                raise ConfigError(f"{FIELD}.init_from", path, cure)
            _fill(a, found[0] if found else first_a)
            _fill(b, first_b)
        for held in self.held.values():
            for key, tensor in held.items():
                tensor.copy_(self._parameters[key])

    def _shapes(self) -> "AdapterShapes":
        """Return the shapes of one adapter's tensors, as ``adapter_shapes`` does."""
        shapes: AdapterShapes = {}
        for adapted in self._adapted:
            of_target = shapes.setdefault(target_of(adapted.name), {})
            for hub, rows in adapted.rows.items():
                of_target |= pair_shapes(
                    hub, (len(rows), adapted.module.lora_a.weight.shape[1]), self.lora.rank
                )
        return shapes

    def items(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Of all adapters, scaled: see above. One with a name has it before its tensors', as ``math/base_model...``."""
        for name in self.names:
            self.activate(name)
            for key, tensor in self._tensors(self.lora.scaling):
                yield of_adapter(name, key), tensor

    def peft(self) -> dict[str, dict[str, torch.Tensor]]:
        """By adapter: as PEFT keeps them, not scaled, on the CPU."""
        found = {}
        for name in self.names:
            self.activate(name)
            found[name] = {key: tensor.detach().cpu().clone() for key, tensor in self._tensors(1.0)}
        return found

    @torch.no_grad()
    def _tensors(self, scaling: float) -> Iterator[tuple[str, torch.Tensor]]:
        for adapted in self._adapted:
            a, b = (_whole(part.weight) for part in (adapted.module.lora_a, adapted.module.lora_b))
            for hub, rows in adapted.rows.items():
                yield f"{PEFT_PREFIX}{hub}.lora_A.weight", a
                yield f"{PEFT_PREFIX}{hub}.lora_B.weight", b[rows.to(b.device)] * scaling

    @contextmanager
    def merged(self, part: nn.Module) -> Iterator[None]:
        """Inside, each base weight in ``part`` has its adapter added, in float32. They come back bit for bit."""
        kept: list[tuple[torch.Tensor, torch.Tensor]] = []
        adapted: list[Any] = [module for module in part.modules() if hasattr(module, "lora_b")]
        with torch.no_grad():
            for module in adapted:
                weight = module.weight
                kept.append((weight, weight.detach().clone()))
                added = module.lora_b.weight.float() @ module.lora_a.weight.float()
                if isinstance(weight, DTensor):
                    added = added.redistribute(weight.device_mesh, weight.placements)
                weight.copy_((weight.float() + self.lora.scaling * added).to(weight.dtype))
            try:
                yield
            finally:
                for weight, before in kept:
                    weight.copy_(before)


def of_adapter(name: str, key: str) -> str:
    """How what belongs to an adapter is called: ``math/base_model...``. Of a run's only one, which has no name: ``key``."""
    return f"{name}/{key}" if name else key


def forget_gathered(model: nn.Module) -> None:
    """What FSDP has gathered is of values that its shards had before."""
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()


def trained_state(model: nn.Module) -> dict[str, torch.Tensor]:
    """Parameters that are trained, by the names of a checkpoint."""
    return {
        _clean(name): parameter
        for name, parameter in model.named_parameters()
        if parameter.requires_grad
    }


def adapter_sizes(folder: Path, *, field: str) -> tuple[int, float]:
    """Rank and alpha of a PEFT folder.

    Raises:
        ConfigError: by ``field``: it is no PEFT folder, or one of adapters that are not trained here.
    """
    try:
        config = json.loads((folder / ADAPTER_CONFIG).read_text(encoding="utf-8"))
        rank, alpha = int(config["r"]), float(config["lora_alpha"])
    except (OSError, ValueError, KeyError, TypeError) as error:
        cure = f"is no folder of PEFT, such as a run's policy/step-N/adapter: {ADAPTER_CONFIG}: {error}"
        raise ConfigError(field, str(folder), cure) from error
    unknown = (
        "use_dora",
        "use_rslora",
        "modules_to_save",
        "rank_pattern",
        "alpha_pattern",
        "fan_in_fan_out",
        "lora_bias",
    )
    if names := [name for name in unknown if config.get(name)]:
        raise ConfigError(
            field, str(folder), f"its {names[0]} is set: such adapters are not trained here"
        )
    return rank, alpha


AdapterShapes = dict[str, dict[str, Shape]]
"""Shapes of the tensors in a PEFT folder, by the target (wq) that they are of, and then by their own names."""


def target_of(module: str) -> str:
    """Return the target by which ``LoRA.Config`` names a matrix. Keys and values have one config, and so one target."""
    name = module.rpartition(".")[2]
    return "wkv" if name in ("wk", "wv") else name


def adapter_base(folder: Path, *, field: str) -> str:
    """Return the model that a PEFT folder names as its base.

    Raises:
        ConfigError: by ``field``: it names none.
    """
    with suppress(OSError, ValueError, AttributeError):
        base = json.loads((folder / ADAPTER_CONFIG).read_text(encoding="utf-8")).get(
            "base_model_name_or_path"
        )
        if isinstance(base, str) and base:
            return base
    raise ConfigError(
        field,
        str(folder),
        f"its {ADAPTER_CONFIG} names no base_model_name_or_path: name the base as --model",
    )


def pair_shapes(module: str, weight: Sequence[int], rank: int) -> dict[str, Shape]:
    """Return the shapes of A and B of a matrix, by their names in a PEFT folder.

    Args:
        module: the matrix's name in a hub folder, without ``.weight``.
        weight: its shape, [out, in].
    """
    out, width = weight
    name = f"{PEFT_PREFIX}{module}.lora_{{}}.weight"
    return {name.format("A"): (rank, width), name.format("B"): (out, rank)}


def adapter_shapes(spec: ModelSpec, lora: LoRA.Config) -> AdapterShapes:
    """Return the shapes of the tensors that a PEFT folder of the model's adapters has. Nothing is allocated.

    Args:
        spec: of ``with_lora``.
    """
    assert spec.state_dict_adapter is not None, "every family has one"
    to_hub = spec.state_dict_adapter(spec.model, None).to_hf
    with torch.device("meta"):
        modules = dict(spec.model.build().named_modules())
    shapes: AdapterShapes = {}
    for name, module in modules.items():
        if hasattr(module, "lora_b"):
            parent = name.rpartition(".")[0]
            of_target = shapes.setdefault(target_of(name), {})
            weights = split_of_fused(
                modules[parent], {f"{name}.weight": module.weight}, prefix=f"{parent}."
            )
            for hub, weight in to_hub(weights).items():
                of_target |= pair_shapes(
                    hub.removesuffix(".weight"), tuple(weight.shape), lora.rank
                )
    return shapes


def check_adapter(folder: Path, lora: LoRA.Config, shapes: AdapterShapes) -> None:
    """Compare a PEFT folder with the adapters that are trained. Of its tensors the header alone is read.

    Args:
        shapes: of ``adapter_shapes``.

    Raises:
        ConfigError: the folder is no PEFT folder, its rank or alpha is another, or a matrix is missing, unknown or of another
            shape.
    """
    field = f"{FIELD}.init_from"
    if (sizes := adapter_sizes(folder, field=field)) != (lora.rank, lora.alpha):
        cure = f"its rank and alpha are {sizes[0]} and {sizes[1]:g}: set {FIELD}.rank and {FIELD}.alpha to these"
        raise ConfigError(field, str(folder), cure)
    found = adapter_header(folder, field=field)
    expected = {name: shape for of_target in shapes.values() for name, shape in of_target.items()}
    for name in found:
        if name not in expected:
            raise ConfigError(
                field,
                str(folder),
                f"it has {name}, which is no adapter of {FIELD}.targets in this model",
            )
    absent = [name for name in expected if name not in found]
    if absent:
        whole = [target for target, of_target in shapes.items() if of_target.keys() <= found.keys()]
        cure = "name a whole adapter"
        if len(found) == sum(len(shapes[target]) for target in whole):
            cure = (
                f"train the matrices that it has: --trainer.lora.targets {' '.join(sorted(whole))}"
            )
        fault = f"it has no {absent[0]}, and lacks {len(absent)} of the {len(expected)} tensors of {FIELD}.targets"
        raise ConfigError(field, str(folder), f"{fault}: {cure}")
    for name, shape in found.items():
        if shape != expected[name]:
            cure = f"{name} has shape {list(shape)}, and does not fit this model, which has {list(expected[name])}"
            raise ConfigError(field, str(folder), cure)


def adapter_header(folder: Path, *, field: str) -> dict[str, Shape]:
    """Return the shape of each tensor of a PEFT folder.

    Raises:
        ConfigError: by ``field``: its file can't be read, or has no tensors.
    """
    file = folder / ADAPTER_WEIGHTS
    if not file.is_file():
        cure = f"has no {ADAPTER_WEIGHTS}: save the adapter again with safe_serialization=True"
        raise ConfigError(field, str(folder), cure)
    shapes = read_header(file, str(folder), field=field)
    if not shapes:
        raise ConfigError(
            field, str(folder), f"its {ADAPTER_WEIGHTS} has no tensors: save the adapter again"
        )
    return shapes


def read_adapter(folder: Path, lora: LoRA.Config, shapes: AdapterShapes) -> dict[str, torch.Tensor]:
    """Return the tensors of a PEFT folder, which are those of ``shapes``. Raises as ``check_adapter`` does."""
    check_adapter(folder, lora, shapes)
    return load_file(folder / ADAPTER_WEIGHTS)


def write_adapter(
    folder: Path, tensors: Mapping[str, torch.Tensor], lora: LoRA.Config, *, base: str
) -> None:
    """Write a PEFT folder. ``tensors``: of ``Adapters.peft``. ``base``: path or name of the base model."""
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
    """Write a PEFT folder merged into its base as the hub folder ``target``, which is there when it is whole.

    Args:
        field: the option that names ``folder``; errors name it.

    Raises:
        ConfigError: the folder has no adapters, or some that are of no matrix of the base or do not fit it.
    """
    rank, alpha = adapter_sizes(folder, field=field)
    weights, found = read_shapes(str(base), field="--model"), adapter_header(folder, field=field)
    for name, shape in found.items():
        module = name.removeprefix(PEFT_PREFIX).rpartition(".lora_")[0]
        weight = weights.get(f"{module}.weight", ())
        pair = pair_shapes(module, weight, rank) if len(weight) == 2 else {}
        if name not in pair:
            cure = f"it has {name}, which is no adapter of a matrix of {base}: name its base as --model"
            raise ConfigError(field, str(folder), cure)
        if shape != pair[name]:
            cure = f"{name} has shape {list(shape)}, and that of {base} has {list(pair[name])}: name its base as --model"
            raise ConfigError(field, str(folder), cure)
        if absent := [other for other in pair if other not in found]:
            raise ConfigError(
                field, str(folder), f"it has {name}, and no {absent[0]}: name a whole adapter"
            )
    being_written = target.with_name(f".{target.name}.partial")
    shutil.rmtree(being_written, ignore_errors=True)  # of a command that was killed
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
    """Write a hub folder: the base with the adapters added in float32, each value then as the base has it.

    Args:
        tensors: of ``Adapters.peft``.
        base: the hub folder that was trained on.
    """
    folder.mkdir(parents=True)
    added = {name.removeprefix(PEFT_PREFIX).rpartition(".lora_")[0] for name in tensors}
    for file in sorted(base.iterdir()):
        if not file.is_file():
            continue
        if file.suffix != ".safetensors":
            shutil.copy(file, folder)
            continue
        with safe_open(file, "pt") as reader:
            metadata = reader.metadata()
        weights = load_file(file)
        for module in sorted(added):
            if (weight := weights.get(f"{module}.weight")) is not None:
                a, b = (
                    tensors[f"{PEFT_PREFIX}{module}.lora_{part}.weight"].float() for part in "AB"
                )
                weights[f"{module}.weight"] = (weight.float() + lora.scaling * (b @ a)).to(
                    weight.dtype
                )
                added.discard(module)
        save_file(weights, folder / file.name, metadata)
    if added:
        raise ConfigError("model.hf_assets_path", str(base), f"it has no {sorted(added)[0]}.weight")


def _hub_rows(
    name: str, module: Any, parent: nn.Module, to_hub: Callable[[dict[str, Any]], dict[str, Any]]
) -> dict[str, torch.Tensor]:
    """By hub module: the rows of torchtitan's matrix that it has, in its order. The numbers of the rows go the way of a weight:
    as a matrix of the weight's shape, each row of which holds its number."""
    out, width = module.out_features, module.in_features
    numbers = {
        f"{name}.weight": torch.arange(out, dtype=torch.int32)[:, None]
        .expand(out, width)
        .contiguous()
    }
    hub = to_hub(split_of_fused(parent, numbers, prefix=f"{name.rpartition('.')[0]}."))
    return {key.removesuffix(".weight"): matrix[:, 0].long() for key, matrix in hub.items()}


def _clean(name: str) -> str:
    """Without the wrappers of activation checkpointing and torch.compile."""
    return name.replace("_checkpoint_wrapped_module.", "").replace("_orig_mod.", "")


def _whole(parameter: torch.Tensor) -> torch.Tensor:
    return parameter.full_tensor() if isinstance(parameter, DTensor) else parameter.detach()


def _fill(parameter: torch.Tensor, whole: torch.Tensor) -> None:
    if isinstance(parameter, DTensor):
        whole = whole.to(parameter.device_mesh.device_type, parameter.dtype)
        parameter.copy_(
            distribute_tensor(
                whole, parameter.device_mesh, parameter.placements, src_data_rank=None
            )
        )
    else:
        parameter.copy_(whole)
