"""Tiny models of families that transformers defines, with what is special about each in small numbers."""

from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

SIZES: dict[str, Any] = dict(
    vocab_size=768,
    hidden_size=128,
    intermediate_size=96,
    num_hidden_layers=4,
    num_attention_heads=4,
    num_key_value_heads=2,
    max_position_embeddings=512,
    pad_token_id=0,
    bos_token_id=1,
    eos_token_id=2,
    initializer_range=0.15,
)
WINDOW = 8
FAMILIES: dict[str, dict[str, Any]] = {
    "qwen2": {},  # biases of queries, keys and values
    "gemma3_text": dict(
        head_dim=32,
        query_pre_attn_scalar=40,
        sliding_window=WINDOW,
        layer_types=[*["sliding_attention"] * 2, "full_attention", "sliding_attention"],
    ),  # scaled embeddings, two rotary bases, a tied head
    "gemma2": dict(
        head_dim=32,
        query_pre_attn_scalar=40,
        sliding_window=WINDOW,
        attn_logit_softcapping=5.0,
        final_logit_softcapping=3.0,
    ),
    "mistral": dict(head_dim=32, sliding_window=WINDOW),
    "phi3": dict(partial_rotary_factor=0.5),  # fused queries, keys and values
    "olmo2": {},  # norms behind attention and feed-forward network
    "smollm3": dict(no_rope_layers=[1, 1, 1, 0]),
    "glm4": dict(head_dim=32, partial_rotary_factor=0.5),
    "gpt_oss": dict(
        head_dim=32, sliding_window=WINDOW, num_local_experts=4, num_experts_per_tok=2
    ),  # sinks, biases, experts
    "granite": dict(logits_scaling=4.0, attention_multiplier=0.2),
    # Layers that hand on no keyword arguments to their attention.
    "nemotron": dict(head_dim=32, partial_rotary_factor=0.5),  # norms of 1 + weight, no gates
    "stablelm": dict(use_qkv_bias=True, partial_rotary_factor=0.5),
    # No norm between the two parts. Its window is longer than what tests sample: vLLM shows one
    # more token in it than transformers does.
    "cohere2": dict(sliding_window=512, logit_scale=0.25),
}
"""Fields of config.json beside SIZES, by the name of the model in transformers."""


LARGE: dict[str, dict[str, Any]] = {
    "qwen2": dict(
        vocab=152064, dim=3584, width=18944, layers=28, heads=28, key_heads=4, tied=False
    ),
    "gemma2": dict(
        vocab=256000, dim=3584, width=14336, layers=42, heads=16, key_heads=8, tied=True
    ),
    "gemma3_text": dict(
        vocab=262208, dim=3840, width=15360, layers=28, heads=16, key_heads=8, tied=True
    ),
    "mistral": dict(
        vocab=32768, dim=4096, width=14336, layers=32, heads=32, key_heads=8, tied=False
    ),
    "phi3": dict(vocab=100352, dim=4096, width=14336, layers=32, heads=32, key_heads=8, tied=False),
    "olmo2": dict(
        vocab=100352, dim=4096, width=11008, layers=32, heads=32, key_heads=32, tied=False
    ),
    "smollm3": dict(
        vocab=128256, dim=4096, width=14336, layers=32, heads=32, key_heads=8, tied=False
    ),
    "glm4": dict(vocab=151552, dim=4096, width=13696, layers=40, heads=32, key_heads=2, tied=False),
    "granite": dict(
        vocab=49155, dim=4096, width=12800, layers=40, heads=32, key_heads=8, tied=True
    ),
    "cohere2": dict(
        vocab=256000, dim=4096, width=14336, layers=32, heads=32, key_heads=8, tied=True
    ),
}
"""Sizes of 7B to 9B parameters: those of Qwen2.5-7B, Gemma 2 9B, Mistral 7B v0.3, OLMo 2 7B, GLM-4 9B, Granite 3.3 8B and Command
R7B; of the others, a model of that family as large as that."""
_OF_TINY_MODELS = ("head_dim", "layer_types", "no_rope_layers", "sliding_window")
"""Fields that a tiny model has in smaller numbers, and a large one as the family's own config says."""
_LARGE_NAMES = dict(
    vocab="vocab_size",
    dim="hidden_size",
    width="intermediate_size",
    layers="num_hidden_layers",
    heads="num_attention_heads",
    key_heads="num_key_value_heads",
    tied="tie_word_embeddings",
)


def tiny_config(name: str, **changes: object) -> PreTrainedConfig:
    """Return the config of the family's tiny model."""
    return _config(name, SIZES | FAMILIES[name] | changes)


def large_config(name: str, **changes: object) -> PreTrainedConfig:
    """Return the config of the family's model of 7B to 9B parameters."""
    sizes = {_LARGE_NAMES[field]: value for field, value in LARGE[name].items()}
    special = {
        field: value for field, value in FAMILIES[name].items() if field not in _OF_TINY_MODELS
    }
    head_dim = 256 if name.startswith("gemma") else 128
    tokens = dict(pad_token_id=0, bos_token_id=1, eos_token_id=2)
    own = dict(head_dim=head_dim, max_position_embeddings=16384, dtype="bfloat16")
    return _config(name, sizes | special | tokens | own | changes)


def _config(name: str, values: dict[str, Any]) -> PreTrainedConfig:
    architecture = MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[name]
    return AutoConfig.for_model(name, **values, architectures=[architecture])


def write_family(name: str, folder: Path, **changes: object) -> Path:
    """Write the family's tiny model, with random weights in float32, as a hub folder."""
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(tiny_config(name, **changes)).float()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 1:  # norms and biases, which begin as 1 and 0
                parameter.add_(0.2 * torch.randn_like(parameter))
    model.save_pretrained(folder)
    return folder


def load_family(folder: Path, dtype: torch.dtype = torch.float32) -> PreTrainedModel:
    """Load a hub folder as transformers does, with its plain attention."""
    options = {"attn_implementation": "eager", "experts_implementation": "eager"}
    return AutoModelForCausalLM.from_pretrained(folder, dtype=dtype, **options).eval()
