"""The policy's model: torchtitan's decoder with a log-probability head, made from a hub folder or a torchtitan flavor."""

import dataclasses
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch

from torchtitan.experiments.rl.bounds import NonEmptyStr
from torchtitan.experiments.rl.errors import ConfigError, MissingError
from torchtitan.experiments.rl.models.cpu_attention import CPUVarlenAttention
from torchtitan.experiments.rl.models.families import family_of_flavor, family_of_folder
from torchtitan.experiments.rl.models.family import ModelFamily
from torchtitan.experiments.rl.models.flavor import check_flavor
from torchtitan.experiments.rl.models.hub import HubConfig
from torchtitan.experiments.rl.models.logprob_head import LogprobHead
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
        return min(positions, HubConfig.read(model.hf_assets_path).size("max_position_embeddings", positions))
    except MissingError:
        return positions


def policy_spec(model: ModelConfig, *, device: Literal["cpu", "cuda"], max_seq_len: int, chunk_tokens: int = 1024) -> ModelSpec:
    """torchtitan's model spec with our head, rotary tables of ``max_seq_len``, and attention that runs on ``device``.

    Raises:
        ConfigError: unknown flavor or one that is not the folder's model, a folder of no known family, or rows longer than the
            model's positions.
    """
    family, spec = _base_spec(model)
    decoder = decoder_config(spec)
    if max_seq_len > decoder.max_seq_len:
        cure = f"the model has {decoder.max_seq_len} positions; choose at most that"
        raise ConfigError("batcher.row_length", max_seq_len, cure)
    config = family.policy_config(**{f.name: getattr(decoder, f.name) for f in dataclasses.fields(decoder)})
    head = {f.name: getattr(config.lm_head, f.name) for f in dataclasses.fields(config.lm_head)}
    config.lm_head = LogprobHead.Config(**head, chunk_tokens=chunk_tokens)
    for layer in config.layers:
        # Non-Trainer configs skip torchtitan's own resize of the rotary cache.
        layer.attention.rope = dataclasses.replace(layer.attention.rope, max_seq_len=max_seq_len)
        if device == "cpu":
            layer.attention.inner_attention = CPUVarlenAttention.Config()
    return dataclasses.replace(spec, model=config)


def parameter_count(spec: ModelSpec) -> int:
    """Parameters of the model, a tied head counted once. Nothing is allocated."""
    with torch.device("meta"):
        return sum(parameter.numel() for parameter in spec.model.build().parameters())


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
    if any(getattr(layer, "moe", None) is not None for layer in decoder_config(spec).layers):
        cure = "a mixture of experts can't be published to the generators yet; choose a dense flavor"
        raise ConfigError("model.flavor", model.flavor, cure)
    check_flavor(model.flavor, family, decoder_config(spec), model.hf_assets_path)
    return family, spec
