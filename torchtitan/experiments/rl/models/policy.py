"""The policy's model: torchtitan's decoder with a log-probability head, made from a hub folder or a torchtitan flavor.

A new family is a module like `qwen3.py` and a line in ``FAMILIES``.
"""

import dataclasses
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch

from torchtitan.experiments.rl.bounds import NonEmptyStr
from torchtitan.experiments.rl.errors import ConfigError, MissingError
from torchtitan.experiments.rl.models.attention import CPUVarlenAttention
from torchtitan.experiments.rl.models.experts import policy_experts
from torchtitan.experiments.rl.models.family import ModelFamily, recast
from torchtitan.experiments.rl.models.hub import HubConfig, Shape
from torchtitan.experiments.rl.models.llama3 import LLAMA3
from torchtitan.experiments.rl.models.logprob_head import LogprobHead
from torchtitan.experiments.rl.models.lora import LoRA, with_lora
from torchtitan.experiments.rl.models.qwen3 import QWEN3, QWEN3_MOE
from torchtitan.models.common import Decoder
from torchtitan.protocols.model_spec import ModelSpec


@dataclass(kw_only=True, slots=True)
class ModelConfig:
    hf_assets_path: NonEmptyStr
    """Hub-format folder: config.json, safetensors, tokenizer."""
    flavor: str | None = None
    """torchtitan's name of a configuration, with its family ("qwen3/0.6B", "llama3/8B") or, where the folder or the name itself
    tells the family, without. None reads the configuration from the folder's config.json."""


def model_positions(model: ModelConfig) -> int:
    """Longest sequence that the model has positions for, by the flavor and by config.json if there is one."""
    positions = decoder_config(_base_spec(model)[1]).max_seq_len
    try:
        return min(
            positions,
            HubConfig.read(model.hf_assets_path).size("max_position_embeddings", positions),
        )
    except MissingError:
        return positions


def policy_spec(
    model: ModelConfig,
    *,
    device: Literal["cpu", "cuda"],
    max_seq_len: int,
    chunk_tokens: int = 1024,
    lora: LoRA.Config | None = None,
) -> ModelSpec:
    """torchtitan's model spec with our head, rotary tables for rows of ``max_seq_len``, and attention that runs on ``device``;
    with ``lora``, its base frozen and adapters in its layers.

    Raises:
        ConfigError: unknown flavor or one that is not the folder's model, a folder of no known family, or adapters of no
            matrix.
    """
    family, spec = _base_spec(model)
    decoder = decoder_config(spec)
    config = recast(decoder, family.policy_config)
    config.lm_head = recast(config.lm_head, LogprobHead.Config, chunk_tokens=chunk_tokens)
    for layer in config.layers:
        # Non-Trainer configs skip torchtitan's own resize of the rotary cache.
        rotary = min(
            max_seq_len, decoder.max_seq_len
        )  # positions begin anew with each sample of a row
        layer.attention.rope = dataclasses.replace(layer.attention.rope, max_seq_len=rotary)
        if device == "cpu":
            layer.attention.inner_attention = CPUVarlenAttention.Config()
        if layer.moe is not None:
            layer.moe = policy_experts(layer.moe)
    spec = dataclasses.replace(spec, model=config)
    return spec if lora is None else with_lora(spec, lora)


def parameter_count(spec: ModelSpec) -> int:
    """Parameters of the model, a tied head counted once. Nothing is allocated."""
    with torch.device("meta"):
        return sum(parameter.numel() for parameter in spec.model.build().parameters())


def hub_shapes(spec: ModelSpec) -> dict[str, Shape]:
    """Shape of each parameter by its hub name; a tied head is not named. Nothing is allocated."""
    with torch.device("meta"):
        state = spec.model.build().state_dict()
    assert spec.state_dict_adapter is not None, "every family has one"
    return {
        name: tuple(tensor.shape)
        for name, tensor in spec.state_dict_adapter(spec.model, None).to_hf(state).items()
    }


def decoder_config(spec: ModelSpec) -> Decoder.Config:
    """The config of the spec's model, by its type: torchtitan declares that of any module."""
    assert isinstance(spec.model, Decoder.Config), "every family's model is a decoder"
    return spec.model


def folder_spec(hub: HubConfig) -> ModelSpec:
    """torchtitan's own spec of a hub folder's model.

    Raises:
        ConfigError: no family has the folder's architecture, or config.json lacks what the family needs.
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
    """The family, and torchtitan's own spec of the model. Its attention is flex: nothing of it asks for a GPU until it runs."""
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
"""By the name that config.json has in ``architectures``."""


def family_of_folder(hub: HubConfig) -> ModelFamily:
    """
    Raises:
        ConfigError: no family has this architecture.
    """
    if hub.architecture not in FAMILIES:
        cure = f"its architecture is {hub.architecture!r}; this library trains {', '.join(FAMILIES)}, or set model.flavor"
        raise hub.error(cure)
    return FAMILIES[hub.architecture]


def family_of_flavor(flavor: str, path: str) -> tuple[ModelFamily, str]:
    """A flavor's family, and its name there.

    Args:
        flavor: torchtitan's name of a configuration, as "8B", or with its family, as "llama3/8B".
        path: the hub folder. It says which family is meant where several have the flavor; it may be missing.

    Raises:
        ConfigError: no family has the flavor, or several have it and the folder does not tell which is meant.
    """
    known = {
        f"{family.name}/{name}": (family, name)
        for family in FAMILIES.values()
        for name in family.flavors
    }
    if flavor in known:
        return known[flavor]
    meant = {full: found for full, found in known.items() if found[1] == flavor}
    if not meant:
        raise ConfigError("model.flavor", flavor, f"choose one of {', '.join(known)}")
    if len(meant) > 1:
        try:
            architecture = HubConfig.read(path).architecture
        except ConfigError:  # a flavor can be planned with before its folder is there
            architecture = ""
        meant = {
            full: found for full, found in meant.items() if FAMILIES.get(architecture) is found[0]
        } or meant
    if len(meant) > 1:
        raise ConfigError("model.flavor", flavor, f"choose one of {', '.join(meant)}")
    return next(iter(meant.values()))


def check_flavor(flavor: str, family: ModelFamily, decoder: Decoder.Config, path: str) -> None:
    """Compare a flavor with config.json of the folder. The trainer computes with the flavor, the generators with config.json.

    Args:
        decoder: the flavor's model config.
        path: the hub folder; one without a config.json is not compared.

    Raises:
        ConfigError: they are of different models, or config.json can't be read.
    """
    try:
        hub = HubConfig.read(path)
    except MissingError:  # a flavor can be planned with before its folder is there
        return
    cure = "choose the flavor of this folder, or None to read config.json"
    other = FAMILIES.get(hub.architecture)
    if other is not None and other is not family:
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
    """Sizes of a model by their names in config.json; left out: those that this kind of model does not have."""
    layer: Any = decoder.layers[0]  # torchtitan declares less than every decoder has
    attention, moe = layer.attention, layer.moe
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
    if moe is None:
        return sizes | {"intermediate_size": layer.feed_forward.w1.out_features}
    experts = moe.routed_experts.inner_experts.hidden_dim
    return sizes | {
        "num_experts": moe.num_experts,
        "num_experts_per_tok": moe.router.top_k,
        "moe_intermediate_size": experts,
    }
