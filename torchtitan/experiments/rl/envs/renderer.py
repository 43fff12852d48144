"""Builds a model's renderer, which turns messages into tokens and a reply's tokens into a message.

Only the renderer depends on the model's chat template. `renderers`, a package, has one for each of
many model families; ``default`` renders with the chat template of any tokenizer. `build_renderer`

1. takes the family's renderer that the config names, or, for ``auto``, the first one that renders
   some prompts as the tokenizer's own chat template does;
2. has it end replies at every token that ends the model's turn (`envs/stop_tokens.py`);
3. remembers the tokenizer's special tokens, whose texts may stand in messages
   (`envs/special_texts.py`).
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, cast, get_args

import renderers
from renderers import Message, Renderer, ToolSpec
from transformers import AutoTokenizer, PreTrainedTokenizerBase

from torchtitan.experiments.rl.configurable import BuildContext
from torchtitan.experiments.rl.envs.chat_template import PLAIN, PLAIN_STOP, set_template
from torchtitan.experiments.rl.envs.special_texts import register_special_texts
from torchtitan.experiments.rl.envs.stop_tokens import with_all_stop_tokens
from torchtitan.experiments.rl.errors import ConfigError
from torchtitan.experiments.rl.models.hub import HubConfig

AUTO = "auto"
"""Name that asks for the renderer that fits the tokenizer."""
DEFAULT = "default"
"""Name of the renderer of any tokenizer with a chat template."""
_NEVER_PICKED = (DEFAULT, "gpt-oss")
"""Renderers that ``auto`` does not try. gpt-oss downloads a vocabulary when it is built, so it has
to be named."""
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
"""Prompts, each with its tools, that ``auto`` renders to compare a family's renderer with the
tokenizer's own template."""


@dataclass(kw_only=True, slots=True)
class RendererConfig:
    """Choice of the renderer, and what it does with the model's thinking."""

    name: str = AUTO
    """Name of a model family that the renderers package knows, such as qwen3, qwen3.5, llama-3 or
    gpt-oss; "default"; or "auto". "default" follows the tokenizer's own chat template. It renders
    the whole conversation at each turn, so each turn may become a training sample, and it does not
    say whose message a token belongs to, so nothing that weighs tokens by role works with it.
    "auto" takes the family whose prompts are those of the tokenizer's template, and "default" if
    there is none. ``--dry-run`` says which."""
    template: str | None = None
    """Chat template to take instead of the tokenizer's own: path of a Jinja file, or "plain".

    "plain" is for a base model, whose tokenizer has none. It writes "Question: ", the question, a
    newline and "Answer:", and an answer ends where the model begins the next "Question:"."""
    enable_thinking: bool = False
    """True to let the model think before it answers. Families without that switch follow their
    template."""
    thinking_retention: Literal["tool_cycle", "all"] | None = "all"
    """Thinking of earlier turns that stays in the prompt. "all" keeps every token, so that a
    conversation is one training sample. "tool_cycle" drops it at each new user message, where a new
    sample starts. None follows the template, as "default" always does."""


def load_tokenizer(tokenizer_path: str | Path) -> PreTrainedTokenizerBase:
    """Load the tokenizer of a local folder, without asking the hub.

    Raises:
        ConfigError: There is no such folder, or it holds no tokenizer.
    """
    path = str(tokenizer_path)
    if not Path(path).is_dir():
        cure = "not a local folder; download the tokenizer first"
        raise ConfigError("tokenizer_path", path, cure)
    try:
        return AutoTokenizer.from_pretrained(path, local_files_only=True)
    except (OSError, ValueError) as error:
        cause = str(error).partition("\n")[0]
        raise ConfigError("tokenizer_path", path, f"holds no tokenizer: {cause}") from error


def build_renderer(
    config: RendererConfig,
    tokenizer_path: str | Path,
    tokenizer: PreTrainedTokenizerBase | None = None,
) -> Renderer:
    """Build the renderer from a local tokenizer folder, without asking the hub.

    Args:
        config: choice of the renderer.
        tokenizer_path: the folder.
        tokenizer: tokenizer that `load_tokenizer` has loaded from the folder; None to load it. It
            is given the config's template, if that names one.

    Raises:
        ConfigError: There is no such folder or renderer; the renderer does not fit the tokenizer,
            or can't do what the config asks; or nothing says which token ends the model's turn.
    """
    _check_name(config)
    if tokenizer is None:
        tokenizer = load_tokenizer(tokenizer_path)
    if config.template is not None:
        set_template(tokenizer, config.template)
    if config.name in (AUTO, DEFAULT) and not getattr(tokenizer, "chat_template", None):
        cure = (
            f"the tokenizer in {tokenizer_path} has no chat template: name a renderer of the "
            f'model\'s family, or set renderer.template to "{PLAIN}" or to a file that holds one'
        )
        raise ConfigError("renderer.name", config.name, cure)
    if config.name == AUTO:
        family = _fitting_renderer(config, tokenizer)
    else:
        family = _named_renderer(config, tokenizer, tokenizer_path)
    # The default renderer knows only the tokenizer's end, which may be that of the model's base.
    template_first = renderer_name(family) == DEFAULT
    folder = Path(tokenizer_path)
    renderer = with_all_stop_tokens(
        family,
        tokenizer,
        folder,
        template_first=template_first,
        texts=[PLAIN_STOP] if config.template == PLAIN else [],
    )
    register_special_texts(renderer, tokenizer, cast(Any, family).config)
    return renderer


def build_context(
    config: RendererConfig,
    model_path: str,
    *,
    seed: int,
    tokenizer: PreTrainedTokenizerBase | None = None,
) -> BuildContext:
    """Return what a run's tasks, algorithms and filters are built with.

    Args:
        config: choice of the renderer.
        model_path: folder of the policy, with its tokenizer and its config.json.
        seed: seed of the run.
        tokenizer: tokenizer that `load_tokenizer` has loaded from the folder; None to load it.

    Raises:
        ConfigError: `build_renderer` raised it, or config.json does not say the vocabulary's size.
    """
    renderer = build_renderer(config, model_path, tokenizer)
    vocab_size = HubConfig.read(model_path).size("vocab_size")
    return BuildContext(renderer=renderer, vocab_size=vocab_size, seed=seed)


def renderer_name(renderer: Renderer) -> str:
    """Return the name that a RendererConfig has for a renderer; for a user's class, its name."""
    return getattr(getattr(renderer, "config", None), "name", type(renderer).__name__)


def attributes_roles(renderer: Renderer) -> bool:
    """Return True if the renderer says whose message each token of a prompt belongs to.

    Such a renderer also says which tokens are the message's own, and not its header.
    """
    prompt = renderer.render([{"role": "user", "content": "x"}], add_generation_prompt=True)
    return bool(prompt.is_content)


# ---- the choice of the renderer


def _check_name(config: RendererConfig) -> None:
    """Check what can be checked without a tokenizer.

    Raises:
        ConfigError: There is no renderer of that name, or it can't do what the config asks.
    """
    if config.template is not None and config.name not in (AUTO, DEFAULT):
        cure = f"{config.name} renders by a template of its own: set renderer.name to {DEFAULT}"
        raise ConfigError("renderer.template", config.template, cure)
    if config.name == AUTO:
        return
    known = _config_classes()
    if config.name not in known:
        cure = f"not a renderer; known: {', '.join([AUTO, *sorted(known)])}"
        raise ConfigError("renderer.name", config.name, cure)
    _check_settings(config, config.name)


def _check_settings(config: RendererConfig, name: str) -> None:
    """Check that a renderer can do what the config asks.

    Raises:
        ConfigError: It can't.
    """
    if name == DEFAULT and config.thinking_retention == "tool_cycle":
        cure = (
            "the default renderer follows the tokenizer's chat template: set None, or name a "
            "renderer of the model's family"
        )
        raise ConfigError("renderer.thinking_retention", config.thinking_retention, cure)
    if config.enable_thinking and not _has_thinking_switch(name):
        cure = f"{name} has no such switch; leave it False"
        raise ConfigError("renderer.enable_thinking", True, cure)


def _named_renderer(
    config: RendererConfig, tokenizer: PreTrainedTokenizerBase, tokenizer_path: str | Path
) -> Renderer:
    """Make the renderer that the config names.

    Raises:
        ConfigError: The renderer does not fit the tokenizer.
    """
    try:
        return _make_renderer(config, config.name, tokenizer)
    # The package asserts that the tokenizer has the special tokens of the family's template.
    except (AssertionError, ValueError) as error:
        cause = " ".join(str(error).split())
        cure = (
            f"does not fit the tokenizer in {tokenizer_path}: {cause}; "
            f'"{AUTO}" takes the one that fits'
        )
        raise ConfigError("renderer.name", config.name, cure) from error


def _fitting_renderer(config: RendererConfig, tokenizer: PreTrainedTokenizerBase) -> Renderer:
    """Make the first family's renderer that renders each probe as the tokenizer's template does.

    If there is none, it is the default renderer.

    Raises:
        ConfigError: It is the default renderer, which can't do what the config asks.
    """
    probes = _rendered_probes(config, tokenizer)
    for name in _config_classes() if probes else ():
        if name in _NEVER_PICKED or (config.enable_thinking and not _has_thinking_switch(name)):
            continue
        try:
            renderer = _make_renderer(config, name, tokenizer)
            if all(_renders_as(renderer, *probe) for probe in probes):
                return renderer
        except Exception:  # noqa: BLE001 - it needs tokens that the tokenizer lacks, or refuses a probe
            continue
    _check_settings(config, DEFAULT)
    return _make_renderer(config, DEFAULT, tokenizer)


def _rendered_probes(
    config: RendererConfig, tokenizer: PreTrainedTokenizerBase
) -> list[tuple[list[Message], list[ToolSpec], list[int]]]:
    """Return each probe with its tokens by the tokenizer's own chat template.

    A probe that the template refuses, such as a system message or tools, is left out.
    """
    rendered = []
    for messages, tools in _PROBES:
        try:
            text = tokenizer.apply_chat_template(
                messages,
                tools=tools or None,
                add_generation_prompt=True,
                tokenize=False,
                enable_thinking=config.enable_thinking,
            )
        except Exception:  # noqa: BLE001 - each template refuses by an error of its own
            continue
        ids = tokenizer.encode(str(text), add_special_tokens=False)
        rendered.append((messages, tools, list(ids)))
    return rendered


def _renders_as(
    renderer: Renderer, messages: list[Message], tools: list[ToolSpec], ids: list[int]
) -> bool:
    """Return True if a renderer makes these tokens of a prompt."""
    return renderer.render_ids(messages, tools=tools or None, add_generation_prompt=True) == ids


def _make_renderer(
    config: RendererConfig, name: str, tokenizer: PreTrainedTokenizerBase
) -> Renderer:
    """Make a renderer by name, with the config's settings as far as it has them."""
    settings: dict[str, Any] = {
        "thinking_retention": None if name == DEFAULT else config.thinking_retention
    }
    if _has_thinking_switch(name):
        settings["enable_thinking"] = config.enable_thinking
    return renderers.create_renderer(tokenizer, _config_classes()[name](**settings))


def _has_thinking_switch(name: str) -> bool:
    return "enable_thinking" in _config_classes()[name].model_fields


def _config_classes() -> dict[str, Any]:
    """Return the package's config class of each renderer, by the renderer's name.

    Its own "auto" is left out because it may ask the hub, and "custom" because it needs a path.
    """
    union, *_ = get_args(renderers.RendererConfig)
    by_name = {config.model_fields["name"].default: config for config in get_args(union)}
    return {name: config for name, config in by_name.items() if name not in ("auto", "custom")}
