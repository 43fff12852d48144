"""The policy's model: torchtitan's decoder with a log-probability head.

    ModelConfig ──▶ family ──▶ torchtitan's spec ──▶ policy_spec ──▶ built by the trainer
    hub folder,     FAMILIES   of config.json or     our head, experts,
    or flavor                  of the flavor         attention, adapters

To add a family, write a module like `qwen3.py` and add a line to ``FAMILIES``.
"""

import dataclasses
import functools
from collections.abc import Hashable
from dataclasses import dataclass
from pathlib import Path
from types import FunctionType, ModuleType
from typing import Any, Literal

import torch

from torchtitan.experiments.rl.bounds import NonEmptyStr
from torchtitan.experiments.rl.errors import ConfigError, MissingError
from torchtitan.experiments.rl.models.attention import CPUVarlenAttention
from torchtitan.experiments.rl.models.experts import policy_experts
from torchtitan.experiments.rl.models.family import DecoderShape, ModelFamily, recast
from torchtitan.experiments.rl.models.hub import HubConfig, Shape
from torchtitan.experiments.rl.models.llama3 import LLAMA3
from torchtitan.experiments.rl.models.logprob_head import LogprobHead
from torchtitan.experiments.rl.models.lora import LoRA, with_lora
from torchtitan.experiments.rl.models.qwen3 import QWEN3, QWEN3_MOE
from torchtitan.models.common import Decoder
from torchtitan.protocols.model_spec import ModelSpec


@dataclass(kw_only=True, slots=True)
class ModelConfig:
    """The model that a run trains or serves."""

    hf_assets_path: NonEmptyStr
    """Folder in hub format: config.json, safetensors and tokenizer."""
    flavor: str | None = None
    """torchtitan's name of a configuration, such as "qwen3/0.6B" or "llama3/8B".

    The family may be left out if the folder or the name itself tells it. None reads the
    configuration from the folder's config.json."""
    trained_by: Literal["auto", "torchtitan", "transformers"] = "auto"
    """Library whose modules the trainer computes with.

    "auto" takes torchtitan's where it has the architecture, and transformers' for all others."""


def model_positions(model: ModelConfig) -> int:
    """Return the length of the longest sequence, in tokens, that the model has positions for.

    It is the smaller one of what the flavor and config.json say, if both are there.
    """
    if is_of_transformers(model):
        return _transformers_decoder().longest_sample(HubConfig.read(model.hf_assets_path))
    _, spec = _base_spec(model)
    positions = decoder_config(spec).max_seq_len
    try:
        hub = HubConfig.read(model.hf_assets_path)
    except MissingError:
        return positions
    return min(positions, hub.size("max_position_embeddings", positions))


def policy_spec(
    model: ModelConfig,
    *,
    device: Literal["cpu", "cuda"],
    max_seq_len: int,
    chunk_tokens: int = 1024,
    lora: LoRA.Config | None = None,
) -> ModelSpec:
    """Return the spec of a model that computes log-probabilities.

    Args:
        model: hub folder, or flavor.
        device: where attention must run.
        max_seq_len: maximum number of tokens of a row, for which rotary tables are made.
        chunk_tokens: number of tokens whose logits the head holds at once.
        lora: adapters of the layers; the base model is then frozen.

    Raises:
        ConfigError: the flavor is unknown or is not the folder's model, the folder's model can't be
            trained, or the adapters name no matrix.
    """
    if is_of_transformers(model):
        hub = HubConfig.read(model.hf_assets_path)
        return _transformers_decoder().transformers_spec(
            hub, device=device, chunk_tokens=chunk_tokens, lora=lora
        )
    family, spec = _base_spec(model)
    decoder = decoder_config(spec)
    config = recast(decoder, family.policy_config)
    config.lm_head = recast(config.lm_head, LogprobHead.Config, chunk_tokens=chunk_tokens)
    # torchtitan resizes the rotary tables only for its own Trainer's config. Positions begin anew
    # with each sample of a row, so the model's own length is enough for any row.
    rotary_length = min(max_seq_len, decoder.max_seq_len)
    for layer in config.layers:
        layer.attention.rope = dataclasses.replace(layer.attention.rope, max_seq_len=rotary_length)
        if device == "cpu":
            layer.attention.inner_attention = CPUVarlenAttention.Config()
        if layer.moe is not None:
            layer.moe = policy_experts(layer.moe)
    spec = dataclasses.replace(spec, model=config)
    return spec if lora is None else with_lora(spec, lora)


def is_layer_matrix(name: str, parameter: torch.Tensor) -> bool:
    """Return True for a matrix of a layer, and False for embedding, head and stacks of experts."""
    return parameter.ndim == 2 and ".layers." in f".{name}"


@dataclass(kw_only=True, slots=True, frozen=True)
class ParameterCounts:
    """Numbers of a model's parameters, a tied head counted once."""

    all: int
    matrices: int
    """Number of those that are in the layers' matrices (`is_layer_matrix`)."""


def parameter_count(spec: ModelSpec) -> int:
    """Return the number of the model's parameters, a tied head counted once."""
    return parameter_counts(spec).all


def parameter_counts(spec: ModelSpec) -> ParameterCounts:
    """Count the model's parameters.

    No memory is allocated for the parameters. A model whose sizes were counted before is not built
    again: ``--gpus`` plans hundreds of divisions of the same model.
    """
    sizes = _sizes_key(spec.model)
    if sizes not in _COUNTS:
        with torch.device("meta"):
            model = spec.model.build()
        parameters = dict(model.named_parameters())
        matrices = [value for name, value in parameters.items() if is_layer_matrix(name, value)]
        _COUNTS[sizes] = ParameterCounts(
            all=sum(parameter.numel() for parameter in parameters.values()),
            matrices=sum(matrix.numel() for matrix in matrices),
        )
    return _COUNTS[sizes]


_COUNTS: dict[Hashable, ParameterCounts] = {}
"""Numbers of parameters, by the `_sizes_key` of the model's config."""


def _sizes_key(config: Any) -> Hashable:  # noqa: ANN401 - any part of a model's config
    """Return the fields of a model's config, or of a part of it, as a key of a dict.

    Functions are left out: they give the parameters their values, and two configs of the same model
    have different ones.
    """
    if isinstance(config, FunctionType | functools.partial):
        return None
    if isinstance(config, dict):
        return tuple((name, _sizes_key(entry)) for name, entry in config.items())
    if isinstance(config, list | tuple):
        return tuple(map(_sizes_key, config))
    if dataclasses.is_dataclass(config) and not isinstance(config, type):
        fields = [getattr(config, entry.name) for entry in dataclasses.fields(config)]
        return (type(config), *map(_sizes_key, fields))
    return config


def hub_shapes(spec: ModelSpec) -> dict[str, Shape]:
    """Return the shape of each parameter by its hub name. A tied head is not named.

    No memory is allocated for the parameters.
    """
    with torch.device("meta"):
        state = spec.model.build().state_dict()
    assert spec.state_dict_adapter is not None, "every family has one"
    hub_state = spec.state_dict_adapter(spec.model, None).to_hf(state)
    return {name: tuple(tensor.shape) for name, tensor in hub_state.items()}


def decoder_shape(spec: ModelSpec) -> DecoderShape:
    """Return the sizes of the spec's model."""
    if isinstance(spec.model, Decoder.Config):
        return DecoderShape.of(spec.model)
    model: Any = spec.model
    return model.shape


def is_of_transformers(model: ModelConfig) -> bool:
    """Return True if the trainer computes with transformers' modules.

    Raises:
        ConfigError: the config asks for them with a flavor of torchtitan.
    """
    if model.trained_by == "transformers" and model.flavor is not None:
        cure = "a flavor is torchtitan's: set model.flavor to None"
        raise ConfigError("model.trained_by", model.trained_by, cure)
    if model.trained_by != "auto" or model.flavor is not None:
        return model.trained_by == "transformers"
    return HubConfig.read(model.hf_assets_path).architecture not in FAMILIES


def adapted_modules(model: ModelConfig, lora: LoRA.Config) -> list[str]:
    """Return the names of the modules that have adapters in a model of transformers.

    Raises:
        ConfigError: a target names no linear layer of the model's layers.
    """
    return _transformers_decoder().adapted_modules(HubConfig.read(model.hf_assets_path), lora)


def _transformers_decoder() -> ModuleType:
    """Return the module of transformers' decoders. Its import takes a second, which others save."""
    from torchtitan.experiments.rl.models import transformers_decoder

    return transformers_decoder


def decoder_config(spec: ModelSpec) -> Decoder.Config:
    """Return the config of the spec's model, typed as a decoder's.

    torchtitan declares it as the config of any module.
    """
    assert isinstance(spec.model, Decoder.Config), "every family's model is a decoder"
    return spec.model


def folder_spec(hub: HubConfig) -> ModelSpec:
    """Return torchtitan's own spec of the model in a hub folder.

    Raises:
        ConfigError: no family has the folder's architecture, or config.json lacks what the family
            needs.
    """
    family = family_of_folder(hub)
    return ModelSpec(
        name=family.name,
        flavor=Path(hub.path).name,
        model=family.model_of(hub),
        parallelize_fn=family.parallelize,
        pipelining_fn=None,
        post_optimizer_build_fn=None,
        state_dict_adapter=family.state_dict_adapter,
    )


def _base_spec(model: ModelConfig) -> tuple[ModelFamily, ModelSpec]:
    """Return the model's family and torchtitan's own spec of it.

    Its attention is flex, which does not ask for a GPU until it runs.
    """
    if model.flavor is None:
        hub = HubConfig.read(model.hf_assets_path)
        return family_of_folder(hub), folder_spec(hub)
    family, flavor = family_of_flavor(model.flavor, model.hf_assets_path)
    spec = family.spec_of_flavor(flavor, attn_backend="flex")
    check_flavor(model.flavor, family, decoder_config(spec), model.hf_assets_path)
    return family, spec


FAMILIES: dict[str, ModelFamily] = {
    "Qwen3ForCausalLM": QWEN3,
    "Qwen3MoeForCausalLM": QWEN3_MOE,
    "LlamaForCausalLM": LLAMA3,
}
"""Families by the name that config.json has in ``architectures``."""


def family_of_folder(hub: HubConfig) -> ModelFamily:
    """Return the family of a hub folder.

    Raises:
        ConfigError: no family has this architecture.
    """
    if hub.architecture not in FAMILIES:
        raise hub.error(
            f"its architecture is {hub.architecture!r}; torchtitan trains {', '.join(FAMILIES)}: "
            'set model.trained_by to "auto", or model.flavor'
        )
    return FAMILIES[hub.architecture]


def family_of_flavor(flavor: str, path: str) -> tuple[ModelFamily, str]:
    """Return the family of a flavor, and the flavor's name in the family.

    Args:
        flavor: torchtitan's name of a configuration, as "8B", or with its family, as "llama3/8B".
        path: the hub folder, which may be missing. It tells the family if several have the flavor.

    Raises:
        ConfigError: no family has the flavor, or several have it and the folder does not tell which
            is meant.
    """
    flavors = {
        f"{family.name}/{name}": (family, name)
        for family in FAMILIES.values()
        for name in family.flavors
    }
    if flavor in flavors:
        return flavors[flavor]

    matches = {full: match for full, match in flavors.items() if match[1] == flavor}
    if not matches:
        raise ConfigError("model.flavor", flavor, f"choose one of {', '.join(flavors)}")
    if len(matches) > 1:
        folder_family = FAMILIES.get(_architecture(path))
        of_folder = {full: match for full, match in matches.items() if match[0] is folder_family}
        matches = of_folder or matches
    if len(matches) > 1:
        raise ConfigError("model.flavor", flavor, f"choose one of {', '.join(matches)}")
    return next(iter(matches.values()))


def _architecture(path: str) -> str:
    """Return the architecture that a hub folder names; "" if there is no readable config.json.

    A run can be planned with a flavor before its folder is there.
    """
    try:
        return HubConfig.read(path).architecture
    except ConfigError:
        return ""


def check_flavor(flavor: str, family: ModelFamily, decoder: Decoder.Config, path: str) -> None:
    """Raise if a flavor is another model than the hub folder's.

    The trainer computes with the flavor, and the generators with config.json.

    Args:
        flavor: the flavor as the config has it.
        family: the flavor's family.
        decoder: the flavor's model config.
        path: the hub folder. One without a config.json is not compared: a run can be planned with a
            flavor before its folder is there.

    Raises:
        ConfigError: they are different models, or config.json can't be read.
    """
    try:
        hub = HubConfig.read(path)
    except MissingError:
        return
    cure = "choose the flavor of this folder, or None to read config.json"
    folder_family = FAMILIES.get(hub.architecture)
    if folder_family is not None and folder_family is not family:
        raise ConfigError("model.flavor", flavor, f"{path} holds a {hub.architecture}; {cure}")
    for name, size in _sizes(decoder).items():
        value = hub.rope.get(name) if name == "rope_theta" else hub.get(name)
        if None not in (value, size) and value != size:
            raise ConfigError(
                "model.flavor",
                flavor,
                f"it has {name} = {size}, and config.json of {path} has {value}; {cure}",
            )


def _sizes(decoder: Decoder.Config) -> dict[str, Any]:
    """Return the sizes of a model by their names in config.json.

    Sizes that this kind of model does not have are left out.
    """
    layer: Any = decoder.layers[0]  # torchtitan declares less than every decoder has
    attention = layer.attention
    sizes = {
        "hidden_size": decoder.dim,
        "vocab_size": decoder.vocab_size,
        "num_hidden_layers": len(decoder.layers),
        "num_attention_heads": attention.n_heads,
        "num_key_value_heads": attention.n_kv_heads,
        "head_dim": attention.rope.dim,
        "rope_theta": attention.rope.theta,
        "tie_word_embeddings": getattr(decoder, "enable_weight_tying", False),
    }
    moe = layer.moe
    if moe is None:
        return sizes | {"intermediate_size": layer.feed_forward.w1.out_features}
    return sizes | {
        "num_experts": moe.num_experts,
        "num_experts_per_tok": moe.router.top_k,
        "moe_intermediate_size": moe.routed_experts.inner_experts.hidden_dim,
    }
