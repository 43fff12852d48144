"""Hub folders of models that have shapes and no values: what checks and plans read, in a few kilobytes of disk."""

import json
import os
import shutil
import struct
from pathlib import Path
from typing import Any

from torchtitan.experiments.rl.config_registry import TINY_MODEL
from torchtitan.experiments.rl.models.hub import HubConfig
from torchtitan.experiments.rl.models.policy import folder_spec, hub_shapes

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
"""SmolLM2-135M-Instruct."""
CHATML = """{% for message in messages %}{{ '<|im_start|>' + message['role'] + '
' + message['content'] + '<|im_end|>' + '
' }}{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant
' }}{% endif %}"""
"""A template that knows no tools, such as SmolLM2's."""


def write_model(folder: Path, config: dict[str, Any], *, template: str | None = None) -> Path:
    """A hub folder with the tiny model's tokenizer. ``template``: in place of that tokenizer's own."""
    skipped = shutil.ignore_patterns("*.safetensors", "config.json")
    shutil.copytree(TINY_MODEL, folder, ignore=skipped)
    if template is not None:
        (folder / "chat_template.jinja").write_text(template)
    (folder / "config.json").write_text(json.dumps(config))
    header, end = {}, 0
    for name, shape in hub_shapes(folder_spec(HubConfig.read(str(folder)))).items():
        size = 4
        for length in shape:
            size *= length
        header[name] = {"dtype": "F32", "shape": list(shape), "data_offsets": [end, end + size]}
        end += size
    text = json.dumps(header).encode()
    with (folder / "model.safetensors").open("wb") as file:
        file.write(struct.pack("<Q", len(text)) + text)
        os.truncate(file.fileno(), 8 + len(text) + end)  # no blocks of the disk are taken
    return folder
