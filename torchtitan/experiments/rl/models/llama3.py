"""Llama 3, and the models that are Llama 3 but for their numbers."""

from dataclasses import dataclass

from torchtitan.experiments.rl.compat.torchtitan.models import ShardedLlama3Adapter
from torchtitan.experiments.rl.models.decoder import LogprobDecoder
from torchtitan.experiments.rl.models.family import ModelFamily, dense_decoder, head_dim
from torchtitan.experiments.rl.models.hub import HubConfig
from torchtitan.models.common import ComplexRoPE, Decoder
from torchtitan.models.llama3 import llama3_configs, model_registry, parallelize_llama
from torchtitan.models.llama3.model import Llama3Model, Llama3TransformerBlock

_DEFAULT_THETA = 10_000.0
"""Base of the rotary frequencies that transformers takes if config.json has no rope_theta."""

_WRONG_FLAVORS = ("1B", "3B")
"""Flavors of torchtitan 0.3.0 with wrong rotary frequencies.

torchtitan divides their low frequencies by 8, as Llama 3.1 does; their checkpoints are of Llama
3.2, which divides by 32. Nothing fails, but answers to long prompts get worse. The config.json of
their hub folders is right."""


class Llama3Policy(LogprobDecoder, Llama3Model):
    """torchtitan's Llama 3, returning log-probabilities."""

    @dataclass(kw_only=True, slots=True)
    class Config(Llama3Model.Config):
        pass


def _model_of(hub: HubConfig) -> Decoder.Config:
    return dense_decoder(
        hub,
        model=Llama3Model.Config,
        block=Llama3TransformerBlock.Config,
        rope=_rope(hub),
        qk_norm=False,
    )


def _rope(hub: HubConfig) -> ComplexRoPE.Config:
    """Return the rotary embedding of a hub folder: plain, or scaled as Llama 3.1 and later do."""
    dim = hub.size("hidden_size")
    heads = hub.size("num_attention_heads")
    if hub.get("head_dim") is None and dim % heads:
        raise hub.error(
            f"its config.json has hidden_size = {dim}, which num_attention_heads = {heads} does "
            "not divide"
        )
    # Complex numbers turn pairs of neighbours. torchtitan's adapter permutes the queries and keys
    # of a hub folder so that pairs are neighbours.
    rope = ComplexRoPE.Config(
        dim=head_dim(hub, default=max(1, dim // heads)),
        max_seq_len=hub.size("max_position_embeddings"),
        theta=hub.rope.positive("rope_theta", _DEFAULT_THETA),
    )
    if hub.rope["rope_type"] == "default":
        return rope
    hub.rope.require("rope_type", "llama3")
    rope.scaling = "llama"
    rope.scaling_factor = hub.rope.positive("factor")
    rope.low_freq_factor = hub.rope.positive("low_freq_factor")
    rope.high_freq_factor = hub.rope.positive("high_freq_factor")
    rope.original_max_position_embeddings = hub.rope.size("original_max_position_embeddings")
    return rope


LLAMA3 = ModelFamily(
    name="llama3",
    policy_config=Llama3Policy.Config,
    model_of=_model_of,
    flavors=tuple(flavor for flavor in llama3_configs if flavor not in _WRONG_FLAVORS),
    spec_of_flavor=model_registry,
    parallelize=parallelize_llama,
    state_dict_adapter=ShardedLlama3Adapter,
)
