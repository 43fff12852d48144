"""Models on disk that the integration tests share."""

import shutil
from pathlib import Path

import torch
from transformers import LlamaConfig, LlamaForCausalLM

MODEL = Path(__file__).resolve().parents[2] / "assets" / "tiny_qwen3"
"""Tied head, as Qwen3 0.6B to 4B have it."""
MOE_MODEL = MODEL.with_name("tiny_qwen3_moe")
"""A mixture of experts."""


def llama_folder(folder: Path, *, num_key_value_heads: int = 1, **changes) -> str:
    """A random Llama with large weights, saved by transformers, and the tiny model's tokenizer. Heads are twice as wide as
    ``hidden_size`` shared out over them."""
    config = LlamaConfig(
        vocab_size=768,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=num_key_value_heads,
        head_dim=32,
        max_position_embeddings=1024,
        initializer_range=0.15,
        rms_norm_eps=1e-5,
        **changes,
    )
    torch.manual_seed(0)
    LlamaForCausalLM(config).float().save_pretrained(folder)
    for file in (*MODEL.glob("tokenizer*"), MODEL / "chat_template.jinja"):
        shutil.copy(file, folder)
    return str(folder)
