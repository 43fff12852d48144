"""Qwen3, dense and as a mixture of experts."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from torchtitan.experiments.rl.models.decoder import LogprobDecoder
from torchtitan.experiments.rl.models.family import (
    UNUSED_INIT,
    ModelFamily,
    dense_decoder,
    head_dim,
)
from torchtitan.experiments.rl.models.hub import HubConfig
from torchtitan.models.common import CosSinRoPE, Decoder
from torchtitan.models.common.config_utils import (
    make_moe_config,
    make_routed_experts_config,
    make_router_config,
)
from torchtitan.models.common.moe import MoE
from torchtitan.models.qwen3 import model_registry, parallelize_qwen3, qwen3_configs
from torchtitan.models.qwen3.model import Qwen3Model, Qwen3TransformerBlock
from torchtitan.models.qwen3.state_dict_adapter import Qwen3StateDictAdapter


class Qwen3Policy(LogprobDecoder, Qwen3Model):
    """torchtitan's Qwen3, returning log-probabilities."""

    @dataclass(kw_only=True, slots=True)
    class Config(Qwen3Model.Config):
        pass


def _model_of(
    hub: HubConfig, experts: Callable[[HubConfig], MoE.Config] | None = None
) -> Decoder.Config:
    hub.require("use_sliding_window", False)
    hub.rope.require("rope_type", "default")
    rope = CosSinRoPE.Config(
        dim=head_dim(hub),
        max_seq_len=hub.size("max_position_embeddings"),
        theta=hub.rope.positive("rope_theta"),
    )
    return dense_decoder(
        hub,
        model=Qwen3Model.Config,
        block=Qwen3TransformerBlock.Config,
        rope=rope,
        qk_norm=True,
        experts=experts,
    )


def _experts_of(hub: HubConfig) -> MoE.Config:
    """Return the mixture of a layer. Every layer must have one: sparse steps are not supported."""
    hub.require("decoder_sparse_step", 1)
    hub.require("mlp_only_layers", [])
    # transformers 4 writes num_experts, transformers 5 num_local_experts.
    num_experts = hub.size("num_experts", hub.get("num_local_experts"))
    top_k = hub.size("num_experts_per_tok")
    if top_k > num_experts:
        raise hub.error(
            f"its config.json has num_experts_per_tok = {top_k}, and {num_experts} experts"
        )
    sizes: dict[str, Any] = dict(dim=hub.size("hidden_size"), num_experts=num_experts, top_k=top_k)
    return make_moe_config(
        num_experts=num_experts,
        router=make_router_config(
            **sizes,
            gate_param_init=UNUSED_INIT,
            score_func="softmax",
            route_norm=hub.get("norm_topk_prob", False),
        ),
        routed_experts=make_routed_experts_config(
            **sizes,
            hidden_dim=hub.size("moe_intermediate_size"),
            param_init=UNUSED_INIT,
            comm_backend="standard",
        ),
    )


def _is_mixture(flavor: str) -> bool:
    return qwen3_configs[flavor](attn_backend="flex").layers[0].moe is not None


QWEN3 = ModelFamily(
    name="qwen3",
    policy_config=Qwen3Policy.Config,
    model_of=_model_of,
    flavors=tuple(flavor for flavor in qwen3_configs if not _is_mixture(flavor)),
    spec_of_flavor=model_registry,
    parallelize=parallelize_qwen3,
    state_dict_adapter=Qwen3StateDictAdapter,
)
QWEN3_MOE = replace(
    QWEN3,
    model_of=partial(_model_of, experts=_experts_of),
    flavors=tuple(flavor for flavor in qwen3_configs if _is_mixture(flavor)),
)
