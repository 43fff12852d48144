"""Finds the tokens at which a model ends its turn, and has a renderer end replies there.

A fine-tuned model may end its turn at <|im_end|> while its tokenizer still names the <|endoftext|>
of its base. A reply that goes on past its end is garbage. So every source is asked: the renderer of
the model's family, the chat template, the tokenizer, and the generation config in its folder.

A base model, which was never taught to end a turn, ends it at a text as well (`stop_texts`).
"""

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from renderers import Message, ParsedResponse, RenderedTokens, Renderer, ToolSpec
from transformers import PreTrainedTokenizerBase

from torchtitan.experiments.rl.errors import ConfigError
from torchtitan.experiments.rl.rollouts.policy import SamplingConfig

_QUESTION: Message = {"role": "user", "content": "What is 6 * 7?"}
_REPLY: Message = {"role": "assistant", "content": "The answer is 42."}
_GENERATION_FILES = ("generation_config.json", "config.json")
"""Files that name the ids at which generation ends. The second is read if the first is absent."""


def with_all_stop_tokens(
    renderer: Renderer,
    tokenizer: PreTrainedTokenizerBase,
    folder: Path,
    *,
    template_first: bool,
    texts: Sequence[str] = (),
) -> Renderer:
    """Return a renderer that ends a turn at every token which the model's folder names as its end.

    Args:
        renderer: the renderer, which knows some of these tokens.
        tokenizer: the model's tokenizer.
        folder: the model's folder.
        template_first: True to name the chat template's token first, and not those that the
            renderer knows. Scripted replies end at the first token.
        texts: texts that end a turn beside the tokens.

    Raises:
        ConfigError: Nothing names such a token.
    """
    known = renderer.get_stop_token_ids()
    turn_end = template_turn_end(tokenizer)
    first = [turn_end, *known] if template_first else [*known, turn_end]
    named = [*first, tokenizer.eos_token_id, *_generation_ends(folder)]
    stops = [token for token in dict.fromkeys(named) if token is not None]
    if not stops:
        cure = (
            "nothing in it says which token ends the model's turn, neither its tokenizer's "
            "eos_token nor eos_token_id of its generation_config.json, and its chat template "
            "writes no such token: add one of these"
        )
        raise ConfigError("tokenizer_path", str(folder), cure)
    if set(stops) == set(known) and not texts:
        return renderer
    return StopRenderer(renderer, stops, texts)


def stop_texts(renderer: Renderer) -> list[str]:
    """Return the texts at which a renderer ends a turn, beside its stop tokens; mostly none."""
    return renderer.stop_texts if isinstance(renderer, StopRenderer) else []


def with_stop_texts(sampling: SamplingConfig, renderer: Renderer) -> SamplingConfig:
    """Return how to sample completions that end at the renderer's texts too."""
    texts = stop_texts(renderer)
    return replace(sampling, stop=[*sampling.stop, *texts]) if texts else sampling


def template_turn_end(tokenizer: PreTrainedTokenizerBase) -> int | None:
    """Return the token with which the chat template ends the assistant's turn.

    It is the first token after a reply that is no ordinary text. A template that writes none after
    the last reply ends it with the header of the next message. The result is None if the template
    writes no such token, or if there is no template.
    """
    if not getattr(tokenizer, "chat_template", None):
        return None
    control = {
        token for token, added in tokenizer.added_tokens_decoder.items() if added.content.strip()
    }
    for following in ([], [_QUESTION]):
        try:
            text = tokenizer.apply_chat_template([_QUESTION, _REPLY, *following], tokenize=False)
        except Exception:  # noqa: BLE001 - each template refuses a conversation by an error of its own
            continue
        _, reply, after_reply = str(text).rpartition(_REPLY["content"])
        ids = tokenizer.encode(after_reply, add_special_tokens=False) if reply else []
        for token in ids:
            if token in control:
                return token
    return None


def _generation_ends(folder: Path) -> list[int]:
    """Return the ids at which the folder's generation config ends generation; none if it has none.

    Raises:
        ConfigError: The file can't be read, or its field holds no ids.
    """
    files = (folder / name for name in _GENERATION_FILES)
    file = next((file for file in files if file.is_file()), None)
    if file is None:
        return []
    try:
        value = json.loads(file.read_bytes()).get("eos_token_id")
    except (OSError, ValueError, AttributeError) as error:
        cure = f"its {file.name} can't be read: {error}"
        raise ConfigError("tokenizer_path", str(folder), cure) from error
    if value is None:
        return []
    ids = value if isinstance(value, list) else [value]
    if not all(type(token) is int and token >= 0 for token in ids):
        cure = f"its {file.name} has eos_token_id = {value!r}, want an id or a list of ids"
        raise ConfigError("tokenizer_path", str(folder), cure)
    return ids


class StopRenderer:
    """Renderer that ends a turn at more tokens than the one that it wraps knows of, or at texts."""

    def __init__(self, renderer: Renderer, stop_token_ids: list[int], texts: Sequence[str] = ()):
        """Wrap a renderer.

        Args:
            renderer: the renderer that does everything else.
            stop_token_ids: all tokens that end a turn, those included that it knows.
            texts: texts that end a turn. They are no part of the reply's content.
        """
        self.stop_texts = list(texts)
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
        """Parse a reply up to the first stop that the wrapped renderer does not know."""
        ends = (index for index, token in enumerate(token_ids) if token in self._unknown)
        end = next(ends, len(token_ids))
        parsed = self._renderer.parse_response(token_ids[:end], tools=tools, prompt_ids=prompt_ids)
        content = parsed.content
        for text in self.stop_texts:
            content = content.partition(text)[0]
        return parsed if content == parsed.content else replace(parsed, content=content)

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
