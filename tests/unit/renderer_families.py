"""Renderers of many model families, on the tiny tokenizer with each family's special tokens added."""

import functools
from pathlib import Path

import renderers
from transformers import AutoTokenizer

from torchtitan.experiments.rl.envs.renderer import RendererConfig, build_renderer

TOKENIZER = Path(__file__).resolve().parents[2] / "assets" / "tiny_qwen3"

VISION = ["<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>"]
SPECIAL_TOKENS = {
    "qwen3": [],
    "qwen3.5": VISION,
    "glm-4.5": [
        *"[gMASK] <sop> <|system|> <|user|> <|assistant|> <|observation|>".split(),
        *"<arg_key> </arg_key> <arg_value> </arg_value>".split(),
    ],
    "llama-3": "<|begin_of_text|> <|start_header_id|> <|end_header_id|> <|eot_id|> <|end_of_text|> <|eom_id|>".split(),
    "minimax-m2": ["]~!b[", "]~b]", "[e~[", "<minimax:tool_call>", "</minimax:tool_call>"],
    "kimi-k2": [
        *"<|im_user|> <|im_assistant|> <|im_system|> <|im_middle|> <|tool_call_begin|> <|tool_call_argument_begin|>".split(),
        *"<|tool_call_end|> <|tool_calls_section_begin|> <|tool_calls_section_end|>".split(),
    ],
    "deepseek-v3": [
        *"<｜begin▁of▁sentence｜> <｜end▁of▁sentence｜> <｜User｜>".split(),
        *"<｜Assistant｜> <｜tool▁calls▁begin｜> <｜tool▁calls▁end｜>".split(),
        *"<｜tool▁call▁begin｜> <｜tool▁call▁end｜> <｜tool▁sep｜>".split(),
        *"<｜tool▁outputs▁begin｜> <｜tool▁outputs▁end｜> <｜tool▁output▁begin｜>".split(),
        *"<｜tool▁output▁end｜>".split(),
    ],
    "default": [],
}

SETTINGS: dict[str, dict] = {
    "qwen3, thoughts kept": dict(name="qwen3", enable_thinking=True, thinking_retention="all"),
    "qwen3, thoughts stripped": dict(
        name="qwen3", enable_thinking=True, thinking_retention="tool_cycle"
    ),
    "qwen3, no thinking": dict(name="qwen3"),
    "qwen3.5, thoughts kept": dict(name="qwen3.5", enable_thinking=True, thinking_retention="all"),
    "qwen3.5, as its template": dict(name="qwen3.5", enable_thinking=True, thinking_retention=None),
    "glm-4.5": dict(name="glm-4.5", thinking_retention="all"),
    "llama-3": dict(name="llama-3", thinking_retention=None),
    "minimax-m2": dict(name="minimax-m2", thinking_retention=None),
    "kimi-k2": dict(name="kimi-k2", thinking_retention=None),
    "deepseek-v3": dict(name="deepseek-v3", thinking_retention=None),
    "default": dict(name="default", thinking_retention=None),
}
"""Ways to render a conversation. The first of each family and "default" differ in who bridges, and where thoughts go."""


@functools.cache
def family_tokenizer(name: str):
    tokenizer = AutoTokenizer.from_pretrained(str(TOKENIZER))
    tokenizer.add_special_tokens({"additional_special_tokens": SPECIAL_TOKENS[name]})
    return tokenizer


@functools.cache
def family_renderer(settings: str, folder: Path) -> renderers.Renderer:
    """Built as a run builds it, from a tokenizer saved below ``folder``."""
    config = RendererConfig(**SETTINGS[settings])
    path = folder / config.name
    if not path.exists():
        family_tokenizer(config.name).save_pretrained(path)
    return build_renderer(config, path)
