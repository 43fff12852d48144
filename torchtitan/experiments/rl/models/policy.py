"""The policy model: torchtitan's Qwen3 with a log-probability head, made from a hub folder or a torchtitan flavor."""

import dataclasses
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch

from torchtitan.experiments.rl.errors import ConfigError
from torchtitan.experiments.rl.models.cpu_attention import CPUVarlenAttention, packed_metadata
from torchtitan.experiments.rl.models.logprob_head import LogprobHead
from torchtitan.models.common import CosSinRoPE, Embedding, Linear
from torchtitan.models.common.attention import AttentionMasksType, VarlenAttention
from torchtitan.models.common.config_utils import get_attention_config, make_ffn_config, make_gqa_config
from torchtitan.models.common.nn_modules import RMSNorm
from torchtitan.models.common.param_init import skip_param_init
from torchtitan.models.qwen3 import model_registry, parallelize_qwen3, qwen3_configs
from torchtitan.models.qwen3.model import Qwen3Model, Qwen3TransformerBlock
from torchtitan.models.qwen3.state_dict_adapter import Qwen3StateDictAdapter
from torchtitan.protocols.model_spec import ModelSpec


@dataclass(kw_only=True, slots=True)
class ModelConfig:
    hf_assets_path: str
    """Hub-format folder: config.json, safetensors, tokenizer."""
    flavor: str | None = None
    """torchtitan's name of the architecture ("0.6B" ... "32B", "30B-A3B"). None reads it from the folder's config.json."""


class PolicyModel(Qwen3Model):
    """Qwen3 that returns log-probabilities of its input tokens."""

    @dataclass(kw_only=True, slots=True)
    class Config(Qwen3Model.Config):
        pass

    def forward(
        self, tokens: torch.Tensor, positions: torch.Tensor, temperatures: torch.Tensor, needed: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Log-probability of each needed token given those before it in its sample.

        Args:
            tokens, positions: int [B, L]; positions restart at 0 at each sample.
            temperatures: float [B, L].
            needed: bool [B, L]; the other tokens cost no logits. Never a sample's first token: nothing predicts it.

        Returns:
            logprobs and entropy [B, L]; 0 where not needed. Entropy is detached.
        """
        # Under FSDP everything runs inside this forward, so the head's weight is gathered when the head is called.
        self._skip_lm_head = True
        hidden_BLD = super().forward(tokens.long(), positions.long(), self.get_attention_masks(positions))
        rows, columns = needed.nonzero(as_tuple=True)
        logprobs_N, entropy_N = self.lm_head(
            hidden_BLD[rows, columns - 1],
            tokens[rows, columns],
            temperatures[rows, columns],
            # Short rows fit one chunk whole; a quarter of a row at a time keeps the promise for them too.
            chunk_tokens=max(1, tokens.shape[1] // 4),
        )
        zeros = logprobs_N.new_zeros(tokens.shape)
        return zeros.index_put((rows, columns), logprobs_N), zeros.index_put((rows, columns), entropy_N)

    def get_attention_masks(self, positions: torch.Tensor) -> AttentionMasksType | None:
        if isinstance(self.config.first_attention.inner_attention, CPUVarlenAttention.Config):
            return packed_metadata(positions)
        return super().get_attention_masks(positions)


def model_positions(model: ModelConfig) -> int:
    """Longest sequence the model knows positions for."""
    return _base_spec(model, "varlen").model.max_seq_len


def policy_spec(model: ModelConfig, *, device: Literal["cpu", "cuda"], max_seq_len: int, chunk_tokens: int = 1024) -> ModelSpec:
    """torchtitan's model spec with our head, rotary tables of ``max_seq_len``, and attention that runs on ``device``.

    Raises:
        ConfigError: unknown flavor, a folder that is not Qwen3, or rows longer than the model's positions.
    """
    spec = _base_spec(model, "varlen" if device == "cpu" else "flex")
    if max_seq_len > spec.model.max_seq_len:
        cure = f"the model has {spec.model.max_seq_len} positions; choose at most that"
        raise ConfigError("batcher.row_length", max_seq_len, cure)
    config = PolicyModel.Config(**{f.name: getattr(spec.model, f.name) for f in dataclasses.fields(spec.model)})
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


def read_hub_config(path: str) -> dict[str, Any]:
    """config.json of a hub folder.

    Raises:
        ConfigError: no such folder, or no readable config.json in it.
    """
    file = Path(path) / "config.json"
    if not Path(path).is_dir():
        raise ConfigError(
            "model.hf_assets_path", path, "no such folder; download the model there, or name the folder that has it"
        )
    try:
        return json.loads(file.read_text())
    except (OSError, json.JSONDecodeError) as error:
        raise ConfigError("model.hf_assets_path", path, f"no readable config.json in it ({type(error).__name__})") from None


def _base_spec(model: ModelConfig, backend: str) -> ModelSpec:
    if model.flavor is None:
        return _spec_from_folder(model, backend)
    if model.flavor not in qwen3_configs:
        raise ConfigError("model.flavor", model.flavor, f"choose one of {', '.join(qwen3_configs)}")
    return model_registry(model.flavor, attn_backend=backend)


def _spec_from_folder(model: ModelConfig, backend: str) -> ModelSpec:
    hub = read_hub_config(model.hf_assets_path)
    if hub.get("architectures") != ["Qwen3ForCausalLM"]:
        cure = f"architectures is {hub.get('architectures')}; this library trains Qwen3ForCausalLM, or set model.flavor"
        raise ConfigError("model.hf_assets_path", model.hf_assets_path, cure)
    try:
        return _spec_from_hub(hub, model, backend)
    except KeyError as missing:
        raise ConfigError("model.hf_assets_path", model.hf_assets_path, f"its config.json has no {missing}") from None


def _spec_from_hub(hub: dict[str, Any], model: ModelConfig, backend: str) -> ModelSpec:
    rope_theta = hub.get("rope_theta") or hub["rope_parameters"]["rope_theta"]
    config = _dense_qwen3(
        vocab_size=hub["vocab_size"],
        dim=hub["hidden_size"],
        hidden_dim=hub["intermediate_size"],
        n_layers=hub["num_hidden_layers"],
        n_heads=hub["num_attention_heads"],
        n_kv_heads=hub["num_key_value_heads"],
        head_dim=hub["head_dim"],
        norm_eps=hub["rms_norm_eps"],
        tied=hub["tie_word_embeddings"],
        rope=CosSinRoPE.Config(dim=hub["head_dim"], max_seq_len=hub["max_position_embeddings"], theta=rope_theta),
        attention=get_attention_config(backend),
    )
    return ModelSpec(
        name="qwen3",
        flavor=Path(model.hf_assets_path).name,
        model=config,
        parallelize_fn=parallelize_qwen3,
        pipelining_fn=None,
        post_optimizer_build_fn=None,
        state_dict_adapter=Qwen3StateDictAdapter,
    )


def _dense_qwen3(
    *,
    vocab_size: int,
    dim: int,
    hidden_dim: int,
    n_layers: int,
    n_heads: int,
    n_kv_heads: int,
    head_dim: int,
    norm_eps: float,
    tied: bool,
    rope: CosSinRoPE.Config,
    attention: VarlenAttention.Config,
) -> Qwen3Model.Config:
    # Weights always come from a checkpoint: the initialisation is only torchtitan's required field.
    init = {"weight": torch.nn.init.zeros_, "bias": torch.nn.init.zeros_}

    def norm(size: int) -> RMSNorm.Config:
        return RMSNorm.Config(normalized_shape=size, eps=norm_eps, param_init={"weight": torch.nn.init.ones_})

    def layer() -> Qwen3TransformerBlock.Config:
        return Qwen3TransformerBlock.Config(
            attention_norm=norm(dim),
            ffn_norm=norm(dim),
            attention=make_gqa_config(
                dim=dim,
                n_heads=n_heads,
                n_kv_heads=n_kv_heads,
                head_dim=head_dim,
                wqkv_param_init=init,
                wo_param_init=init,
                inner_attention=attention,
                qk_norm=norm(head_dim),
                rope=rope,
            ),
            feed_forward=make_ffn_config(dim=dim, hidden_dim=hidden_dim, w1_param_init=init, w2w3_param_init=init),
        )

    embedding_init = {"weight": skip_param_init} if tied else init
    return Qwen3Model.Config(
        vocab_size=vocab_size,
        dim=dim,
        norm=norm(dim),
        enable_weight_tying=tied,
        tok_embeddings=Embedding.Config(num_embeddings=vocab_size, embedding_dim=dim, param_init=embedding_init),
        lm_head=Linear.Config(in_features=dim, out_features=vocab_size, param_init=init),
        layers=[layer() for _ in range(n_layers)],
    )
