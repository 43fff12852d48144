"""Builds the renderer, which alone depends on a model's chat template."""

import contextlib
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any, Literal, get_args

import renderers
from renderers import Message, Renderer, ToolSpec
from transformers import AutoTokenizer

from torchtitan.experiments.rl.errors import ConfigError

AUTO = "auto"
DEFAULT = "default"
"""Name of the renderer of any tokenizer with a chat template."""
_QUESTION: Message = {"role": "user", "content": "What is 6 * 7?"}
_TOOL: ToolSpec = {
    "name": "multiply",
    "description": "Multiplies two numbers.",
    "parameters": {
        "type": "object",
        "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}},
        "required": ["a", "b"],
    },
}
_PROBES: tuple[tuple[list[Message], list[ToolSpec]], ...] = (
    ([_QUESTION], []),
    ([{"role": "system", "content": "Answer with a number."}, _QUESTION], []),
    ([_QUESTION], [_TOOL]),
)
"""Prompts by which "auto" compares a family's renderer with the tokenizer's own template."""
_NEVER_PICKED = (DEFAULT, "gpt-oss")
"""gpt-oss downloads a vocabulary when it is built, so it has to be named."""
SHORT_TEXT = 64
"""Characters."""
SHORT_TEXTS = 1024
"""Distinct ones that are kept."""


@dataclass(kw_only=True, slots=True)
class RendererConfig:
    name: str = AUTO
    """A model family that the renderers package knows: qwen3, qwen3.5, llama-3, gpt-oss, ... or "default" for the tokenizer's
    own chat template. It renders the whole conversation at each turn, so each turn may be a training sample. It does not say
    whose message a token belongs to, so nothing that weighs tokens by role works with it. "auto" takes the family whose prompts
    are those of the tokenizer's template, and "default" where none is; ``--dry-run`` says which."""
    enable_thinking: bool = False
    """Let the model think before it answers. Families without the switch follow their template."""
    thinking_retention: Literal["tool_cycle", "all"] | None = "all"
    """Whether earlier turns' thinking stays in the prompt. "all" keeps every token, so a conversation is one training sample;
    "tool_cycle" drops it at each new user message, which starts a new sample there; None follows the template, as "default"
    always does."""


def build_renderer(config: RendererConfig, tokenizer_path: str | Path) -> Renderer:
    """Make the renderer from a local tokenizer folder, without asking the hub.

    Raises:
        ConfigError: no such folder or renderer name, or the renderer and the tokenizer don't fit.
    """
    classes = _config_classes()
    if config.name not in (AUTO, *classes):
        raise ConfigError("renderer.name", config.name, f"not a renderer; known: {', '.join([AUTO, *sorted(classes)])}")
    if config.name != AUTO:
        _check_knobs(config, config.name)
    if not Path(tokenizer_path).is_dir():
        raise ConfigError("tokenizer_path", str(tokenizer_path), "not a local folder; download the tokenizer first")
    try:
        tokenizer = AutoTokenizer.from_pretrained(str(tokenizer_path), local_files_only=True)
    except (OSError, ValueError) as error:
        cause = str(error).partition("\n")[0]
        raise ConfigError("tokenizer_path", str(tokenizer_path), f"holds no tokenizer: {cause}") from error
    if config.name in (AUTO, DEFAULT) and not getattr(tokenizer, "chat_template", None):
        cure = f"the tokenizer in {tokenizer_path} has no chat template: name a renderer of the model's family"
        raise ConfigError("renderer.name", config.name, cure)
    _remember_short_texts(tokenizer)
    if config.name == AUTO:
        return _fitting(config, tokenizer)
    try:
        return _made(config, config.name, tokenizer)
    # The package asserts that the tokenizer has the template's special tokens.
    except (AssertionError, ValueError) as error:
        cause = " ".join(str(error).split())
        cure = f'does not fit the tokenizer in {tokenizer_path}: {cause}; "{AUTO}" takes the one that fits'
        raise ConfigError("renderer.name", config.name, cure) from error


def renderer_name(renderer: Renderer) -> str:
    """What RendererConfig calls it; of a user's class, the class's name."""
    return getattr(getattr(renderer, "config", None), "name", type(renderer).__name__)


def _check_knobs(config: RendererConfig, name: str) -> None:
    """
    Raises:
        ConfigError: the renderer ``name`` can't do what the config asks.
    """
    if name == DEFAULT and config.thinking_retention == "tool_cycle":
        cure = "the default renderer follows the tokenizer's chat template: set None, or name a renderer of the model's family"
        raise ConfigError("renderer.thinking_retention", config.thinking_retention, cure)
    if config.enable_thinking and "enable_thinking" not in _config_classes()[name].model_fields:
        raise ConfigError("renderer.enable_thinking", True, f"{name} has no such switch; leave it False")


def _made(config: RendererConfig, name: str, tokenizer: Any) -> Renderer:
    of_renderer = _config_classes()[name]
    knobs: dict[str, Any] = {"thinking_retention": None if name == DEFAULT else config.thinking_retention}
    if "enable_thinking" in of_renderer.model_fields:
        knobs["enable_thinking"] = config.enable_thinking
    return renderers.create_renderer(tokenizer, of_renderer(**knobs))


def _fitting(config: RendererConfig, tokenizer: Any) -> Renderer:
    """The first family's renderer that makes of each probe what the tokenizer's own template does; else the default renderer.

    Raises:
        ConfigError: what it takes can't do what the config asks.
    """
    wanted = []
    for messages, tools in _PROBES:
        with contextlib.suppress(Exception):  # some templates refuse a system message or tools, each in its own way
            ids = _by_template(tokenizer, messages, tools, enable_thinking=config.enable_thinking)
            wanted.append((messages, tools, ids))
    for name, of_renderer in _config_classes().items() if wanted else ():
        if name in _NEVER_PICKED or (config.enable_thinking and "enable_thinking" not in of_renderer.model_fields):
            continue
        try:
            renderer = _made(config, name, tokenizer)
            if all(
                renderer.render_ids(messages, tools=tools or None, add_generation_prompt=True) == ids
                for messages, tools, ids in wanted
            ):
                return renderer
        except Exception:  # it asks for tokens that this tokenizer does not have
            continue
    _check_knobs(config, DEFAULT)
    return _made(config, DEFAULT, tokenizer)


def _by_template(tokenizer: Any, messages: list[Message], tools: list[ToolSpec], **knobs: Any) -> list[int]:
    """Ids of a prompt, by the tokenizer's own chat template."""
    text = tokenizer.apply_chat_template(messages, tools=tools or None, add_generation_prompt=True, tokenize=False, **knobs)
    return list(tokenizer.encode(text, add_special_tokens=False))


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
    """The package's typed configs by name. Its own "auto" is left out because it may ask the hub, "custom" because it needs a
    path."""
    union, *_ = get_args(renderers.RendererConfig)
    by_name = {config.model_fields["name"].default: config for config in get_args(union)}
    return {name: config for name, config in by_name.items() if name not in ("auto", "custom")}
