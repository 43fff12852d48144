"""The record of a model family, and the config of a dense decoder with grouped-query attention.

Most hub folders hold such a decoder. Each family is a module beside this one; `policy.py` lists
them.
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
class DecoderShape:
    """Sizes of a decoder, whoever defines it."""

    vocab_size: int
    dim: int
    layers: int
    heads: int
    kv_heads: int
    """Number of key heads, and of value heads."""
    head_dim: int
    feed_forward_width: int
    """Width of a feed-forward network, or of an expert."""
    rotations: int
    """Number of positions in each layer's table of rotations; 0 if there are no tables."""
    tied: bool
    """True if the head is the embedding."""
    experts: int = 1
    """Number of experts of a layer; 1 for a dense model."""
    chosen: int = 1
    """Number of experts that each token chooses."""
    windows: frozenset[int | None] = frozenset({None})
    """Sliding windows of the layers, in tokens; None for a layer that sees everything."""

    @classmethod
    def of(cls, decoder: Decoder.Config) -> "DecoderShape":
        """Return the sizes of a decoder of torchtitan."""
        layer: Any = decoder.layers[0]  # torchtitan declares less than every decoder has
        attention, moe = layer.attention, layer.moe
        if moe is None:
            experts, chosen = 1, 1
            width = layer.feed_forward.w1.out_features
        else:
            experts, chosen = moe.num_experts, moe.router.top_k
            width = moe.routed_experts.inner_experts.hidden_dim
        return cls(
            vocab_size=decoder.vocab_size,
            dim=decoder.dim,
            layers=len(decoder.layers),
            heads=attention.n_heads,
            kv_heads=attention.n_kv_heads or attention.n_heads,
            head_dim=attention.rope.dim,
            feed_forward_width=width,
            rotations=attention.rope.max_seq_len,
            tied=getattr(decoder, "enable_weight_tying", False),
            experts=experts,
            chosen=chosen,
        )


@dataclass(kw_only=True, slots=True, frozen=True)
class ModelFamily:
    """Family of models: how torchtitan builds and converts one architecture of transformers."""

    name: str
    """torchtitan's name of the family. A flavor may be written as ``name/flavor``."""
    policy_config: type[Decoder.Config]
    """Config that builds a LogprobDecoder: torchtitan's decoder, returning log-probabilities."""
    model_of: Callable[[HubConfig], Decoder.Config]
    """Function that returns torchtitan's model config of a hub folder.

    Raises:
        ConfigError: config.json lacks a field, or has a value that torchtitan's model does not
            support.
    """
    flavors: Collection[str]
    """torchtitan's named configurations."""
    spec_of_flavor: Callable[..., ModelSpec]
    """Function that returns torchtitan's spec of a flavor: ``(flavor, attn_backend=...)``."""
    parallelize: Callable[..., Any]
    """torchtitan's function that divides the model over the ranks."""
    state_dict_adapter: type[StateDictAdapter]
    """Converter between the hub's names and layout, and torchtitan's."""


_MAX_LAYERS = 1024
"""Maximum number of layers of a model.

The config of each layer is an object, so a number that is rubbish would fill the memory."""

UNUSED_INIT = dict.fromkeys(("weight", "bias", "w1_EFD", "w2_EDF", "w3_EFD"), torch.nn.init.zeros_)
"""Initial values by parameter, which torchtitan requires. Weights always come from a checkpoint."""


def dense_decoder(
    hub: HubConfig,
    *,
    model: type[Decoder.Config],
    block: type[TransformerBlock.Config],
    rope: RoPE.Config,
    qk_norm: bool,
    experts: Callable[[HubConfig], MoE.Config] | None = None,
) -> Decoder.Config:
    """Return the config of a decoder with grouped-query attention.

    Args:
        hub: the folder's config.json.
        model: the family's config class of a decoder.
        block: the family's config class of a layer.
        rope: rotary embedding; its ``dim`` is the size of a head.
        qk_norm: True if queries and keys are normalised, each head on its own.
        experts: returns the mixture of each layer, if the model has one in place of one
            feed-forward network.

    Raises:
        ConfigError: config.json lacks a field, has a size that no model can have, biases, or
            another activation than SiLU.
    """
    for name in ("attention_bias", "mlp_bias"):
        hub.require(name, False)
    hub.require("hidden_act", "silu")
    dim = hub.size("hidden_size")
    vocab_size = hub.size("vocab_size")
    heads = hub.size("num_attention_heads")
    kv_heads = hub.size("num_key_value_heads", heads)
    layers = hub.size("num_hidden_layers")
    if heads % kv_heads:
        raise hub.error(
            f"its config.json has num_attention_heads = {heads}, which num_key_value_heads = "
            f"{kv_heads} does not divide"
        )
    if layers > _MAX_LAYERS:
        raise hub.error(
            f"its config.json has num_hidden_layers = {layers}, want at most {_MAX_LAYERS}"
        )

    def feed_forward() -> dict[str, Any]:
        if experts is not None:
            return {"moe": experts(hub)}
        network = make_ffn_config(
            dim=dim,
            hidden_dim=hub.size("intermediate_size"),
            w1_param_init=UNUSED_INIT,
            w2w3_param_init=UNUSED_INIT,
        )
        return {"feed_forward": network}

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
                wqkv_param_init=UNUSED_INIT,
                wo_param_init=UNUSED_INIT,
                inner_attention=FlexAttention.Config(),
                qk_norm=norm(rope.dim) if qk_norm else None,
                rope=rope,
            ),
            **feed_forward(),
        )

    is_tied = hub.get("tie_word_embeddings", False)
    return model(
        vocab_size=vocab_size,
        dim=dim,
        norm=norm(dim),
        enable_weight_tying=is_tied,
        tok_embeddings=Embedding.Config(
            num_embeddings=vocab_size,
            embedding_dim=dim,
            param_init={"weight": skip_param_init} if is_tied else UNUSED_INIT,
        ),
        lm_head=Linear.Config(in_features=dim, out_features=vocab_size, param_init=UNUSED_INIT),
        layers=[layer() for _ in range(layers)],
    )


def recast(
    config: Any,  # noqa: ANN401 - any config of torchtitan's
    kind: Callable[..., Any],
    **changes: Any,  # noqa: ANN401 - fields of any type
) -> Any:  # noqa: ANN401 - a ``kind``
    """Return a ``kind`` with the field values of ``config``, whose type it extends.

    Args:
        config: a dataclass.
        kind: class of the returned config.
        changes: values of fields to set in place of those of ``config``, or beside them.
    """
    values = {field.name: getattr(config, field.name) for field in fields(config)}
    return kind(**values | changes)


def head_dim(hub: HubConfig, *, default: int | None = None) -> int:
    """Return the size of an attention head. It is even, because rotary embeddings turn pairs.

    Raises:
        ConfigError: it is odd, or config.json does not give it and there is no default.
    """
    size = hub.size("head_dim", default)
    if size % 2:
        raise hub.error(f"its config.json gives heads of size {size}, want an even one")
    return size
