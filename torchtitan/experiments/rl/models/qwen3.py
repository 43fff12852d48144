"""Qwen3."""

from dataclasses import dataclass

from torchtitan.experiments.rl.models.decoder import LogprobDecoder
from torchtitan.experiments.rl.models.family import ModelFamily, dense_decoder, head_dim
from torchtitan.experiments.rl.models.hub import HubConfig
from torchtitan.models.common import CosSinRoPE, Decoder
from torchtitan.models.qwen3 import model_registry, parallelize_qwen3, qwen3_configs
from torchtitan.models.qwen3.model import Qwen3Model, Qwen3TransformerBlock
from torchtitan.models.qwen3.state_dict_adapter import Qwen3StateDictAdapter


class Qwen3Policy(LogprobDecoder, Qwen3Model):
    @dataclass(kw_only=True, slots=True)
    class Config(Qwen3Model.Config):
        pass


def _model_of(hub: HubConfig) -> Decoder.Config:
    hub.require("use_sliding_window", False)
    hub.rope.require("rope_type", "default")
    rope = CosSinRoPE.Config(
        dim=head_dim(hub), max_seq_len=hub.size("max_position_embeddings"), theta=hub.rope.positive("rope_theta")
    )
    return dense_decoder(hub, model=Qwen3Model.Config, block=Qwen3TransformerBlock.Config, rope=rope, qk_norm=True)


QWEN3 = ModelFamily(
    name="qwen3",
    policy_config=Qwen3Policy.Config,
    model_of=_model_of,
    flavors=tuple(qwen3_configs),
    spec_of_flavor=model_registry,
    parallelize=parallelize_qwen3,
    state_dict_adapter=Qwen3StateDictAdapter,
)
