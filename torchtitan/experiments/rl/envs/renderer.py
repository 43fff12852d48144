"""Builds the renderer, which alone depends on a model's chat template."""

import contextlib
import json
import re
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any, Literal, get_args
from weakref import WeakKeyDictionary

import renderers
from renderers import Message, ParsedResponse, RenderedTokens, Renderer, ToolSpec
from transformers import AutoTokenizer

from torchtitan.experiments.rl.configurable import BuildContext
from torchtitan.experiments.rl.errors import ConfigError
from torchtitan.experiments.rl.models.hub import HubConfig

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
_REPLY: Message = {"role": "assistant", "content": "The answer is 42."}
"""Reply behind which a template's end of the assistant's turn is looked for."""
_GENERATION_FILES = ("generation_config.json", "config.json")
"""Files that name the ids at which generation ends. The second is read where the first is not there."""
_NEVER_PICKED = (DEFAULT, "gpt-oss")
"""gpt-oss downloads a vocabulary when it is built, so it has to be named."""
SHORT_TEXT = 64
"""Characters."""
SHORT_TEXTS = 1024
"""Distinct ones that are kept."""
_CONTROL_TOKENS: WeakKeyDictionary[Renderer, re.Pattern[str]] = WeakKeyDictionary()
"""Pattern of the control tokens of each renderer's tokenizer."""


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


def load_tokenizer(tokenizer_path: str | Path) -> Any:
    """Load the tokenizer of a local folder, without asking the hub.

    Raises:
        ConfigError: no such folder, or it holds no tokenizer.
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
    config: RendererConfig, tokenizer_path: str | Path, tokenizer: Any = None
) -> Renderer:
    """Make the renderer from a local tokenizer folder, without asking the hub.

    Its stop tokens are those of the renderer, of the tokenizer, of the folder's generation config and of the chat template.

    Args:
        tokenizer: what ``load_tokenizer`` has loaded from the folder; None loads it here.

    Raises:
        ConfigError: no such folder or renderer name, the renderer and the tokenizer don't fit, or nothing says which token ends
            the model's turn.
    """
    classes = _config_classes()
    if config.name not in (AUTO, *classes):
        raise ConfigError(
            "renderer.name",
            config.name,
            f"not a renderer; known: {', '.join([AUTO, *sorted(classes)])}",
        )
    if config.name != AUTO:
        _check_knobs(config, config.name)
    if tokenizer is None:
        tokenizer = load_tokenizer(tokenizer_path)
    if config.name in (AUTO, DEFAULT) and not getattr(tokenizer, "chat_template", None):
        cure = f"the tokenizer in {tokenizer_path} has no chat template: name a renderer of the model's family"
        raise ConfigError("renderer.name", config.name, cure)
    tokens = sorted(map(re.escape, control_tokens(tokenizer)))
    _remember_short_texts(tokenizer)
    fitting = (
        _fitting(config, tokenizer)
        if config.name == AUTO
        else _named(config, tokenizer, tokenizer_path)
    )
    renderer = _with_all_stops(fitting, tokenizer, Path(tokenizer_path))
    if tokens:
        _CONTROL_TOKENS[renderer] = re.compile("|".join(tokens))
    return renderer


def build_context(
    config: RendererConfig, model_path: str, *, seed: int, tokenizer: Any = None
) -> BuildContext:
    """Return what a run's tasks, algorithms and filters are built with, read from the policy's folder.

    Args:
        model_path: folder of the policy, with its tokenizer and its config.json.
        seed: seed of the run.
        tokenizer: what ``load_tokenizer`` has loaded from the folder; None loads it here.

    Raises:
        ConfigError: as ``build_renderer`` does, or config.json does not say the vocabulary's size.
    """
    renderer = build_renderer(config, model_path, tokenizer)
    vocab_size = HubConfig.read(model_path).size("vocab_size")
    return BuildContext(renderer=renderer, vocab_size=vocab_size, seed=seed)


def control_tokens(tokenizer: Any) -> set[str]:
    """Return the texts that a tokenizer reads as special tokens, wherever they stand."""
    return {
        token.content
        for token in tokenizer.added_tokens_decoder.values()
        if token.special and token.content
    }


def control_token_in(value: Any, renderer: Renderer) -> str | None:
    """Return the first text of a message, or of messages, that the renderer would write as a control token.

    None: there is none, or the renderer was not made by ``build_renderer``.
    """
    pattern = _CONTROL_TOKENS.get(renderer)
    found = None if pattern is None else pattern.search(str(value))
    return None if found is None else found[0]


def _named(config: RendererConfig, tokenizer: Any, tokenizer_path: str | Path) -> Renderer:
    """Make the renderer that a config names. Raises as ``build_renderer`` does."""
    try:
        return _made(config, config.name, tokenizer)
    # The package asserts that the tokenizer has the template's special tokens.
    except (AssertionError, ValueError) as error:
        cause = " ".join(str(error).split())
        cure = f'does not fit the tokenizer in {tokenizer_path}: {cause}; "{AUTO}" takes the one that fits'
        raise ConfigError("renderer.name", config.name, cure) from error


class StopRenderer:
    """Renderer whose turns end at more tokens than those that its family, or the tokenizer, knows of.

    A fine-tuned model may end its turn at <|im_end|>, and its tokenizer still name the <|endoftext|> of its base as the end.
    """

    def __init__(self, renderer: Renderer, stop_token_ids: list[int]):
        self._renderer = renderer
        self._stop_token_ids = stop_token_ids
        self._unknown = set(stop_token_ids) - set(renderer.get_stop_token_ids())
        """Stop tokens that the wrapped renderer would read as a part of the reply."""
        self.config = getattr(renderer, "config", None)
        self.supports_tools = getattr(renderer, "supports_tools", True)

    @property
    def is_prefix_stable(self) -> bool:
        return self._renderer.is_prefix_stable

    def get_stop_token_ids(self) -> list[int]:
        return self._stop_token_ids

    def parse_response(
        self,
        token_ids: list[int],
        *,
        tools: list[ToolSpec] | None = None,
        prompt_ids: list[int] | None = None,
    ) -> ParsedResponse:
        end = next(
            (place for place, token in enumerate(token_ids) if token in self._unknown),
            len(token_ids),
        )
        return self._renderer.parse_response(token_ids[:end], tools=tools, prompt_ids=prompt_ids)

    def render(
        self,
        messages: list[Message],
        *,
        tools: list[ToolSpec] | None = None,
        add_generation_prompt: bool = False,
    ) -> RenderedTokens:
        return self._renderer.render(
            messages, tools=tools, add_generation_prompt=add_generation_prompt
        )

    def render_ids(
        self,
        messages: list[Message],
        *,
        tools: list[ToolSpec] | None = None,
        add_generation_prompt: bool = False,
    ) -> list[int]:
        return self._renderer.render_ids(
            messages, tools=tools, add_generation_prompt=add_generation_prompt
        )

    def bridge_to_next_turn(
        self,
        previous_prompt_ids: list[int],
        previous_completion_ids: list[int],
        new_messages: list[Message],
        *,
        tools: list[ToolSpec] | None = None,
    ) -> RenderedTokens | None:
        return self._renderer.bridge_to_next_turn(
            previous_prompt_ids, previous_completion_ids, new_messages, tools=tools
        )


def _with_all_stops(renderer: Renderer, tokenizer: Any, folder: Path) -> Renderer:
    """Return a renderer that ends a turn at every token that the model's folder names as its end.

    Raises:
        ConfigError: there is no such token.
    """
    known = renderer.get_stop_token_ids()
    turn_end = template_turn_end(tokenizer)
    # Scripted replies end at the first of them, which the default renderer does not know by itself.
    first = [turn_end, *known] if renderer_name(renderer) == DEFAULT else [*known, turn_end]
    named = [*first, tokenizer.eos_token_id, *_generation_ends(folder)]
    stops = [token for token in dict.fromkeys(named) if token is not None]
    if not stops:
        cure = (
            "nothing in it says which token ends the model's turn, neither its tokenizer's eos_token nor eos_token_id of its "
            "generation_config.json, and its chat template writes no such token: add one of these"
        )
        raise ConfigError("tokenizer_path", str(folder), cure)
    return renderer if set(stops) == set(known) else StopRenderer(renderer, stops)


def template_turn_end(tokenizer: Any) -> int | None:
    """Return the token with which the chat template ends the assistant's turn, or None where it writes none.

    The turn ends with the first token after the reply that is no ordinary text. Templates that write none after the last reply
    end it with the header of the next message.
    """
    if not getattr(tokenizer, "chat_template", None):
        return None
    control = {
        token for token, added in tokenizer.added_tokens_decoder.items() if added.content.strip()
    }
    for following in ([], [_QUESTION]):
        with contextlib.suppress(
            Exception
        ):  # a template may refuse a conversation, each in its own way
            text = tokenizer.apply_chat_template([_QUESTION, _REPLY, *following], tokenize=False)
            _, _, after_reply = text.rpartition(_REPLY["content"])
            ids = (
                tokenizer.encode(after_reply, add_special_tokens=False)
                if after_reply != text
                else []
            )
            if (end := next((token for token in ids if token in control), None)) is not None:
                return end
    return None


def _generation_ends(folder: Path) -> list[int]:
    """Return ``eos_token_id`` of the folder's generation config, one or several ids.

    Raises:
        ConfigError: the file can't be read, or its field holds no ids.
    """
    file = next((folder / name for name in _GENERATION_FILES if (folder / name).is_file()), None)
    if file is None:
        return []
    try:
        value = json.loads(file.read_bytes()).get("eos_token_id")
    except (OSError, ValueError, AttributeError) as error:
        raise ConfigError(
            "tokenizer_path", str(folder), f"its {file.name} can't be read: {error}"
        ) from error
    if value is None:
        return []
    ids = value if isinstance(value, list) else [value]
    if not all(type(token) is int and token >= 0 for token in ids):
        cure = f"its {file.name} has eos_token_id = {value!r}, want an id or a list of ids"
        raise ConfigError("tokenizer_path", str(folder), cure)
    return ids


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
        raise ConfigError(
            "renderer.enable_thinking", True, f"{name} has no such switch; leave it False"
        )


def _made(config: RendererConfig, name: str, tokenizer: Any) -> Renderer:
    of_renderer = _config_classes()[name]
    knobs: dict[str, Any] = {
        "thinking_retention": None if name == DEFAULT else config.thinking_retention
    }
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
        with contextlib.suppress(
            Exception
        ):  # some templates refuse a system message or tools, each in its own way
            ids = _by_template(tokenizer, messages, tools, enable_thinking=config.enable_thinking)
            wanted.append((messages, tools, ids))
    for name, of_renderer in _config_classes().items() if wanted else ():
        if name in _NEVER_PICKED or (
            config.enable_thinking and "enable_thinking" not in of_renderer.model_fields
        ):
            continue
        try:
            renderer = _made(config, name, tokenizer)
            if all(
                renderer.render_ids(messages, tools=tools or None, add_generation_prompt=True)
                == ids
                for messages, tools, ids in wanted
            ):
                return renderer
        except Exception:  # it asks for tokens that this tokenizer does not have
            continue
    _check_knobs(config, DEFAULT)
    return _made(config, DEFAULT, tokenizer)


def _by_template(
    tokenizer: Any, messages: list[Message], tools: list[ToolSpec], **knobs: Any
) -> list[int]:
    """Ids of a prompt, by the tokenizer's own chat template."""
    text = tokenizer.apply_chat_template(
        messages, tools=tools or None, add_generation_prompt=True, tokenize=False, **knobs
    )
    return list(tokenizer.encode(text, add_special_tokens=False))


def attributes_roles(renderer: Renderer) -> bool:
    """Whether the renderer says whose message each token of a prompt belongs to, and whether it is of the message's body."""
    return bool(
        renderer.render([{"role": "user", "content": "x"}], add_generation_prompt=True).is_content
    )


def _remember_short_texts(tokenizer: Any) -> None:
    """Have a tokenizer encode equal short texts once. Renderers encode a turn's header, and newlines, again at every turn, and
    each takes 40 us."""
    encode = tokenizer.encode
    known = lru_cache(SHORT_TEXTS)(lambda text: tuple(encode(text, add_special_tokens=False)))

    def remembered(text: Any, *args: Any, **options: Any) -> list[int]:
        if (
            args
            or options != {"add_special_tokens": False}
            or not isinstance(text, str)
            or len(text) > SHORT_TEXT
        ):
            return encode(text, *args, **options)
        return list(known(text))

    tokenizer.encode = remembered


def _config_classes() -> dict[str, Any]:
    """The package's typed configs by name. Its own "auto" is left out because it may ask the hub, "custom" because it needs a
    path."""
    union, *_ = get_args(renderers.RendererConfig)
    by_name = {config.model_fields["name"].default: config for config in get_args(union)}
    return {name: config for name, config in by_name.items() if name not in ("auto", "custom")}
