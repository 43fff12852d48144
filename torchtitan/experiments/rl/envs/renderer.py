"""Builds the renderer, which alone depends on a model's chat template."""

from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any, Literal, get_args

import renderers
from renderers import Renderer
from transformers import AutoTokenizer

from torchtitan.experiments.rl.errors import ConfigError

DEFAULT = "default"
"""Name of the renderer of any tokenizer with a chat template."""
SHORT_TEXT = 64
"""Characters."""
SHORT_TEXTS = 1024
"""Distinct ones that are kept."""


@dataclass(kw_only=True, slots=True)
class RendererConfig:
    name: str = "qwen3"
    """A model family that the renderers package knows: qwen3, qwen3.5, llama-3, gpt-oss, ... or "default" for the tokenizer's
    own chat template. That is rendered anew at each turn, so each turn may be a training sample of its own, and it does not say
    whose message a token belongs to, so nothing that weighs tokens by role works with it."""
    enable_thinking: bool = False
    """Let the model think before it answers. Families without the switch follow their template."""
    thinking_retention: Literal["tool_cycle", "all"] | None = "all"
    """Whether earlier turns' thinking stays in the prompt. "all" keeps every token, so a conversation is one training sample;
    "tool_cycle" drops it at each new user message, which starts a new sample there; None follows the template, as "default"
    always does."""


def renderer_names() -> list[str]:
    """Names RendererConfig.name may have."""
    return sorted(_config_classes())


def build_renderer(config: RendererConfig, tokenizer_path: str | Path) -> Renderer:
    """Make the renderer from a local tokenizer folder, without asking the hub.

    Raises:
        ConfigError: no such folder or renderer name, or the renderer and the tokenizer don't fit.
    """
    classes = _config_classes()
    if config.name not in classes:
        raise ConfigError("renderer.name", config.name, f"not a renderer; known: {', '.join(sorted(classes))}")
    fields = classes[config.name].model_fields
    retention = config.thinking_retention
    if config.name == DEFAULT and retention == "tool_cycle":
        cure = "the default renderer follows the tokenizer's chat template: set None, or name a renderer of the model's family"
        raise ConfigError("renderer.thinking_retention", retention, cure)
    knobs: dict[str, Any] = {"thinking_retention": None if config.name == DEFAULT else retention}
    if "enable_thinking" in fields:
        knobs["enable_thinking"] = config.enable_thinking
    elif config.enable_thinking:
        raise ConfigError("renderer.enable_thinking", True, f"{config.name} has no such switch; leave it False")
    if not Path(tokenizer_path).is_dir():
        raise ConfigError("tokenizer_path", str(tokenizer_path), "not a local folder; download the tokenizer first")
    try:
        tokenizer = AutoTokenizer.from_pretrained(str(tokenizer_path), local_files_only=True)
    except (OSError, ValueError) as error:
        cause = str(error).partition("\n")[0]
        raise ConfigError("tokenizer_path", str(tokenizer_path), f"holds no tokenizer: {cause}") from error
    if config.name == DEFAULT and not getattr(tokenizer, "chat_template", None):
        cure = f"the tokenizer in {tokenizer_path} has no chat template: name a renderer of the model's family"
        raise ConfigError("renderer.name", config.name, cure)
    _remember_short_texts(tokenizer)
    try:
        return renderers.create_renderer(tokenizer, classes[config.name](**knobs))
    # The package asserts that the tokenizer has the template's special tokens.
    except (AssertionError, ValueError) as error:
        cause = " ".join(str(error).split())
        raise ConfigError("renderer.name", config.name, f"does not fit the tokenizer in {tokenizer_path}: {cause}") from error


def attributes_roles(renderer: Renderer) -> bool:
    """Whether the renderer says whose message each token of a prompt belongs to, and whether it is of the message's body."""
    return bool(renderer.render([{"role": "user", "content": "x"}], add_generation_prompt=True).is_content)


def _remember_short_texts(tokenizer: Any) -> None:
    """Have a tokenizer encode equal short texts once. Renderers encode a turn's header, and newlines, again at every turn, and
    each takes 40 us."""
    encode = tokenizer.encode
    known = lru_cache(SHORT_TEXTS)(lambda text: tuple(encode(text, add_special_tokens=False)))

    def remembered(text: Any, *args: Any, **options: Any) -> list[int]:
        if args or options != {"add_special_tokens": False} or not isinstance(text, str) or len(text) > SHORT_TEXT:
            return encode(text, *args, **options)
        return list(known(text))

    tokenizer.encode = remembered


def _config_classes() -> dict[str, Any]:
    """The package's typed configs by name. "auto" is left out because it may ask the hub, "custom" because it needs a path."""
    union, *_ = get_args(renderers.RendererConfig)
    by_name = {config.model_fields["name"].default: config for config in get_args(union)}
    return {name: config for name, config in by_name.items() if name not in ("auto", "custom")}
