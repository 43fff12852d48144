"""The record of a model family, and the config of a dense decoder with grouped-query attention, as most folders describe one.

Each family is a module beside this one, of which ``policy.py`` has the list.
"""

from collections.abc import Callable, Collection
from dataclasses import dataclass, fields
from typing import Any

import torch

from torchtitan.experiments.rl.models.hub import HubConfig
from torchtitan.models.common import Decoder, Embedding, Linear, RoPE, TransformerBlock
from torchtitan.models.common.attention import FlexAttention
from torchtitan.models.common.config_utils import make_ffn_config, make_gqa_config
from torchtitan.models.common.moe import MoE
from torchtitan.models.common.nn_modules import RMSNorm
from torchtitan.models.common.param_init import skip_param_init
from torchtitan.protocols.model_spec import ModelSpec
from torchtitan.protocols.state_dict_adapter import StateDictAdapter


@dataclass(kw_only=True, slots=True, frozen=True)
class ModelFamily:
    name: str
    """torchtitan's. A flavor may be written as ``name/flavor``."""
    policy_config: type[Decoder.Config]
    """Builds a LogprobDecoder: torchtitan's decoder with the log-probability forward pass."""
    model_of: Callable[[HubConfig], Decoder.Config]
    """torchtitan's model config of a hub folder.

    Raises:
        ConfigError: config.json lacks a field, or has a value that torchtitan's model does not support.
    """
    flavors: Collection[str]
    """torchtitan's named configurations."""
    spec_of_flavor: Callable[..., ModelSpec]
    """``(flavor, attn_backend=...)``."""
    parallelize: Callable[..., Any]
    state_dict_adapter: type[StateDictAdapter]
    """Between hub names and layout, and torchtitan's."""


_MOST_LAYERS = 1024
"""The config of each layer is an object: a number that is rubbish would fill the memory."""

UNUSED_INIT = dict.fromkeys(("weight", "bias", "w1_EFD", "w2_EDF", "w3_EFD"), torch.nn.init.zeros_)
"""torchtitan's required field. Weights always come from a checkpoint."""


def dense_decoder(
    hub: HubConfig,
    *,
    model: type[Decoder.Config],
    block: type[TransformerBlock.Config],
    rope: RoPE.Config,
    qk_norm: bool,
    experts: Callable[[HubConfig], MoE.Config] | None = None,
) -> Decoder.Config:
    """
    Args:
        model, block: the family's config classes.
        rope: its ``dim`` is the size of a head.
        qk_norm: queries and keys are normalised, each head on its own.
        experts: of each layer, in place of one feed-forward network.

    Raises:
        ConfigError: config.json lacks a field, has a size that no model can have, biases, or another activation than SiLU.
    """
    for name in ("attention_bias", "mlp_bias"):
        hub.require(name, False)
    hub.require("hidden_act", "silu")
    dim, vocab_size, heads = (
        hub.size("hidden_size"),
        hub.size("vocab_size"),
        hub.size("num_attention_heads"),
    )
    kv_heads, layers = hub.size("num_key_value_heads", heads), hub.size("num_hidden_layers")
    if heads % kv_heads:
        raise hub.error(
            f"its config.json has num_attention_heads = {heads}, which num_key_value_heads = {kv_heads} does not divide"
        )
    if layers > _MOST_LAYERS:
        raise hub.error(
            f"its config.json has num_hidden_layers = {layers}, want at most {_MOST_LAYERS}"
        )
    tied = hub.get("tie_word_embeddings", False)
    init = UNUSED_INIT

    def feed_forward() -> dict[str, Any]:
        if experts is not None:
            return {"moe": experts(hub)}
        hidden = hub.size("intermediate_size")
        return {
            "feed_forward": make_ffn_config(
                dim=dim, hidden_dim=hidden, w1_param_init=init, w2w3_param_init=init
            )
        }

    def norm(size: int) -> RMSNorm.Config:
        return RMSNorm.Config(
            normalized_shape=size,
            eps=hub.positive("rms_norm_eps"),
            param_init={"weight": torch.nn.init.ones_},
        )

    def layer() -> TransformerBlock.Config:
        return block(
            attention_norm=norm(dim),
            ffn_norm=norm(dim),
            attention=make_gqa_config(
                dim=dim,
                n_heads=heads,
                n_kv_heads=kv_heads,
                head_dim=rope.dim,
                wqkv_param_init=init,
                wo_param_init=init,
                inner_attention=FlexAttention.Config(),
                qk_norm=norm(rope.dim) if qk_norm else None,
                rope=rope,
            ),
            **feed_forward(),
        )

    return model(
        vocab_size=vocab_size,
        dim=dim,
        norm=norm(dim),
        enable_weight_tying=tied,
        tok_embeddings=Embedding.Config(
            num_embeddings=vocab_size,
            embedding_dim=dim,
            param_init={"weight": skip_param_init} if tied else init,
        ),
        lm_head=Linear.Config(in_features=dim, out_features=vocab_size, param_init=init),
        layers=[layer() for _ in range(layers)],
    )


def recast(config: Any, kind: Callable[..., Any], **changes: Any) -> Any:
    """A config of ``kind``, which extends that of ``config``, with the values of its fields."""
    return kind(**{field.name: getattr(config, field.name) for field in fields(config)} | changes)


def head_dim(hub: HubConfig, *, default: int | None = None) -> int:
    """Size of an attention head. Rotary embeddings turn pairs, so it is even.

    Raises:
        ConfigError: it is odd, or not given and there is no default.
    """
    size = hub.size("head_dim", default)
    if size % 2:
        raise hub.error(f"its config.json gives heads of size {size}, want an even one")
    return size
