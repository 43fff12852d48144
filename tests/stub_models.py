"""Hub folders of models of any size, without their weights: what a check of a folder reads.

A safetensors file has a header, which names each tensor with its shape, and then the values. The header here is whole, and the
file is sparse: as long as it says, with nothing written.
"""

import json
import math
import shutil
from pathlib import Path
from typing import Any

from torchtitan.experiments.rl.config_registry import TINY_MODEL
from torchtitan.experiments.rl.models.policy import (
    ModelConfig,
    decoder_config,
    hub_shapes,
    policy_spec,
)
from torchtitan.experiments.rl.plan.costs import ModelSizes


def stub_model(folder: Path, flavor: str) -> Path:
    """A folder of a Qwen3 ``flavor`` of torchtitan ("qwen3/8B"), with the tiny model's tokenizer."""
    folder.mkdir(parents=True)
    for name in (
        "tokenizer.json",
        "tokenizer_config.json",
        "generation_config.json",
        "chat_template.jinja",
    ):
        if Path(TINY_MODEL, name).exists():
            shutil.copy(Path(TINY_MODEL, name), folder)
    spec = policy_spec(
        ModelConfig(hf_assets_path=str(folder), flavor=flavor), device="cpu", max_seq_len=2
    )
    decoder: Any = decoder_config(spec)
    sizes, layer = ModelSizes.of(decoder, 0, 0), decoder.layers[0]
    config = {
        "architectures": ["Qwen3ForCausalLM"],
        "attention_bias": False,
        "dtype": "bfloat16",
        "head_dim": sizes.head_width,
        "hidden_act": "silu",
        "hidden_size": sizes.dim,
        "intermediate_size": sizes.feed_forward_width,
        "max_position_embeddings": 40960,
        "model_type": "qwen3",
        "num_attention_heads": layer.attention.n_heads,
        "num_hidden_layers": sizes.layers,
        "num_key_value_heads": layer.attention.n_kv_heads,
        "rms_norm_eps": layer.attention_norm.eps,
        "rope_theta": layer.attention.rope.theta,
        "tie_word_embeddings": sizes.tied,
        "vocab_size": sizes.vocabulary,
    }
    if layer.moe is not None:
        config |= {
            "architectures": ["Qwen3MoeForCausalLM"],
            "model_type": "qwen3_moe",
            "num_experts": sizes.experts,
            "num_experts_per_tok": sizes.chosen,
            "moe_intermediate_size": layer.moe.routed_experts.inner_experts.hidden_dim,
            "norm_topk_prob": True,
            "decoder_sparse_step": 1,
            "mlp_only_layers": [],
        }
    (folder / "config.json").write_text(json.dumps(config))
    header: dict[str, Any] = {}
    end = 0
    for name, shape in hub_shapes(spec).items():
        start, end = end, end + 2 * math.prod(shape)
        header[name] = {"dtype": "BF16", "shape": shape, "data_offsets": [start, end]}
    text = json.dumps(header).encode()
    with (folder / "model.safetensors").open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        file.truncate(8 + len(text) + end)
    return folder
