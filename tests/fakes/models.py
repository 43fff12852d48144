"""Hub folders of models that have shapes and no values, which checks and plans read.

A safetensors file has a header, which names each tensor with its shape, and then the values. The
header here is whole, and the file is sparse: as long as the header says, with nothing written.
"""

import json
import math
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from torchtitan.experiments.rl import config_registry
from torchtitan.experiments.rl.models.family import DecoderShape
from torchtitan.experiments.rl.models.hub import HubConfig
from torchtitan.experiments.rl.models.policy import (
    ModelConfig,
    decoder_config,
    folder_spec,
    hub_shapes,
    policy_spec,
)
from torchtitan.experiments.rl.plan.costs import ModelSizes

TINY_MODEL = Path(config_registry.TINY_MODEL)
SMOLLM2: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "dtype": "float32",
    "head_dim": 64,
    "hidden_act": "silu",
    "hidden_size": 576,
    "intermediate_size": 1536,
    "max_position_embeddings": 8192,
    "num_attention_heads": 9,
    "num_hidden_layers": 30,
    "num_key_value_heads": 3,
    "rms_norm_eps": 1e-5,
    "rope_parameters": {"rope_theta": 100_000.0, "rope_type": "default"},
    "tie_word_embeddings": True,
    "vocab_size": 49_152,
}
"""Config of SmolLM2-135M-Instruct."""
CHATML = """{% for message in messages %}{{ '<|im_start|>' + message['role'] + '
' + message['content'] + '<|im_end|>' + '
' }}{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant
' }}{% endif %}"""
"""Chat template that knows no tools, such as SmolLM2's."""


def write_model(folder: Path, config: dict[str, Any], *, template: str | None = None) -> Path:
    """Write the folder of a model with this config, and with the tiny model's tokenizer.

    ``template`` takes the place of that tokenizer's own.
    """
    skipped = shutil.ignore_patterns("*.safetensors", "config.json")
    shutil.copytree(TINY_MODEL, folder, ignore=skipped)
    if template is not None:
        (folder / "chat_template.jinja").write_text(template)
    (folder / "config.json").write_text(json.dumps(config))
    shapes = hub_shapes(folder_spec(HubConfig.read(str(folder))))
    write_weights(folder, shapes, dtype="F32", bytes_each=4)
    return folder


def stub_model(folder: Path, flavor: str) -> Path:
    """Write the folder of a Qwen3 ``flavor`` of torchtitan ("qwen3/8B").

    It has the tiny model's tokenizer.
    """
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
    (folder / "config.json").write_text(json.dumps(qwen3_config(decoder)))
    write_weights(folder, hub_shapes(spec), dtype="BF16", bytes_each=2)
    return folder


def qwen3_config(decoder: Any) -> dict[str, Any]:
    """Return the Hub's config of a Qwen3 decoder of torchtitan."""
    sizes = ModelSizes.of(DecoderShape.of(decoder), 0, 0)
    layer = decoder.layers[0]
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
    return config


def write_weights(folder: Path, shapes: Mapping[str, Any], *, dtype: str, bytes_each: int) -> None:
    """Write a safetensors file of tensors of these shapes, which takes no blocks of the disk."""
    header: dict[str, Any] = {}
    end = 0
    for name, shape in shapes.items():
        start, end = end, end + bytes_each * math.prod(shape)
        header[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [start, end]}
    text = json.dumps(header).encode()
    with (folder / "model.safetensors").open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        file.truncate(8 + len(text) + end)


def broken_folder(tmp_path: Path, change: Callable[[Path], object]) -> str:
    """Return a copy of the tiny model's folder to which ``change`` was done."""
    folder = tmp_path / "model"
    shutil.copytree(TINY_MODEL, folder)
    change(folder)
    return str(folder)


def edit_config(**changes: Any) -> Callable[[Path], None]:
    """Return a change of a folder's config.json. A field that is changed to None is removed."""

    def change(folder: Path) -> None:
        config = json.loads((folder / "config.json").read_text())
        for name, value in changes.items():
            config.pop(name) if value is None else config.update({name: value})
        (folder / "config.json").write_text(json.dumps(config))

    return change
