"""Shows a model the text of a special token, such as "<|im_end|>" in a web page, as text.

A tokenizer reads such a text as the control token itself, so that a page could end its message and
write the next one. Renderers hand a whole turn to the tokenizer, their own control tokens and the
message's text in one string, so something in the string has to tell the two apart:

    a message      page: <|im_end|>                   `SpecialTexts.twin` writes its special texts
      its twin     page: ⟨twin of <|im_end|>⟩         in characters that no text has in this order
    the renderer   <|im_end|> ... ⟨twin⟩ ...          writes its control tokens as ever
    TwinTokenizer  ⟨twin⟩ ... <|im_end|> ...          exchanges the two, and reads twins alone as
                                                      control tokens

A twin has as many characters as its text, so that places in the string stay as they are. Only
conversations that have a special text are rendered in this way; all others never come here.
"""

import copy
import functools
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, cast
from weakref import WeakKeyDictionary

import renderers
from renderers import Message, RenderedTokens, Renderer, RendererConfig, ToolSpec
from tokenizers import AddedToken
from transformers import PreTrainedTokenizerBase

_FIRST = 0x20000
"""First of the 2**15 ideographs in which twins are written: rare ones (CJK Extension B), so that no
text has a twin by chance, and printable, so that a template that writes a list writes them as they
are."""
_SPECIAL_TEXTS: "WeakKeyDictionary[Renderer, SpecialTexts]" = WeakKeyDictionary()
"""Special texts of each renderer's tokenizer."""


def control_tokens(tokenizer: PreTrainedTokenizerBase) -> dict[str, AddedToken]:
    """Return the texts that a tokenizer reads as special tokens, wherever they stand."""
    return {
        token.content: token
        for token in tokenizer.added_tokens_decoder.values()
        if token.special and token.content
    }


def register_special_texts(
    renderer: Renderer, tokenizer: PreTrainedTokenizerBase, settings: RendererConfig
) -> None:
    """Remember the special tokens of a renderer's tokenizer.

    Args:
        renderer: renderer that tasks are given.
        tokenizer: tokenizer that it renders with.
        settings: config of the `renderers` package that it was made of.
    """
    _SPECIAL_TEXTS[renderer] = SpecialTexts(tokenizer, settings)


def special_texts(renderer: Renderer) -> "SpecialTexts | None":
    """Return the special texts of a renderer's tokenizer.

    None if `build_renderer` did not make the renderer.
    """
    return _SPECIAL_TEXTS.get(renderer)


def control_token_in(value: object, renderer: Renderer) -> str | None:
    """Return the first text in a message, or in messages, that reads as a control token.

    None if there is none, or if the renderer was not made by `build_renderer`.
    """
    texts = special_texts(renderer)
    return None if texts is None else texts.first_in(value)


def render_as_text(
    renderer: Renderer,
    messages: Sequence[Message],
    *,
    tools: Sequence[ToolSpec] | None = None,
    add_generation_prompt: bool = False,
) -> RenderedTokens:
    """Render a conversation, with each special text in its messages and tools as text."""
    texts = special_texts(renderer)
    if texts is not None and texts.first_in((messages, tools)) is not None:
        renderer = texts.renderer
        messages = texts.twin(messages)
        tools = texts.twin(tools)
    return renderer.render(
        list(messages),
        tools=None if tools is None else list(tools),
        add_generation_prompt=add_generation_prompt,
    )


class SpecialTexts:
    """Texts of a tokenizer's special tokens, and the renderer of conversations that have some."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, settings: RendererConfig):
        self._tokenizer = tokenizer
        self._settings = settings
        self._tokens = control_tokens(tokenizer)
        self._pattern = _pattern_of(self._tokens)

    def first_in(self, value: object) -> str | None:
        """Return the first special text in a message or in messages; None if there is none."""
        found = self._pattern.search(str(value))
        return None if found is None else found[0]

    def twin(self, value: Any) -> Any:  # noqa: ANN401 - of the type that it is given
        """Return text, or data with texts, with a twin in the place of each special text."""
        if isinstance(value, str):
            return self._pattern.sub(lambda found: _twin_of(found[0]), value)
        if isinstance(value, Mapping):
            # Keys too: arguments of calls and schemas of tools are rendered with them.
            return {self.twin(key): self.twin(entry) for key, entry in value.items()}
        if isinstance(value, list | tuple):
            return [self.twin(entry) for entry in value]
        return value

    def places_of_tokens(self, text: str) -> list[tuple[int, int]]:
        """Return where each token of a text begins and ends in it; its special texts are text."""
        tokenizer: Any = self._tokenizer
        if self._pattern.search(text):
            tokenizer = self._twins
            text = self.twin(text)
        encoded = tokenizer(
            text, add_special_tokens=False, return_offsets_mapping=True, verbose=False
        )
        return [(start, end) for start, end in encoded["offset_mapping"]]

    @functools.cached_property
    def _twins(self) -> "TwinTokenizer":
        return TwinTokenizer(self._tokenizer, self._tokens)

    @functools.cached_property
    def token_ids(self) -> frozenset[int]:
        """Ids of the special tokens."""
        ids = cast(list[int], self._tokenizer.convert_tokens_to_ids(list(self._tokens)))
        return frozenset(ids)

    @property
    def is_ready(self) -> bool:
        """True if ``renderer`` is made already. The first use makes it, in a second or two."""
        return "renderer" in self.__dict__

    @functools.cached_property
    def renderer(self) -> Renderer:
        """Renderer of the same model that writes twins as the special texts which they stand for.

        It only renders: replies are parsed by the renderer that tasks have.
        """
        return renderers.create_renderer(self._twins, self._settings)


def _pattern_of(texts: Iterable[str]) -> re.Pattern[str]:
    """Return a pattern of any of the texts, and of nothing if there are none.

    Of two texts that begin alike, the longer is the token.
    """
    longest_first = sorted(texts, key=len, reverse=True)
    return re.compile("|".join(map(re.escape, longest_first)) or r"(?!)")


def _twin_of(text: str) -> str:
    return "".join(chr(_FIRST + ord(character) % 2**15) for character in text)


class TwinTokenizer:
    """Tokenizer of a model that reads twins of special texts as text.

    It takes part in the protocol of the `renderers` package; what is no encoding is the model's own
    tokenizer's.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, tokens: Mapping[str, AddedToken]):
        """Copy the tokenizer, and give the copy a token of its own for each twin.

        Args:
            tokenizer: the model's tokenizer, which stays as it is.
            tokens: its special tokens, by their texts.
        """
        self._tokenizer = tokenizer
        twins = {text: _twin_of(text) for text in tokens}
        self._exchanged = twins | {twin: text for text, twin in twins.items()}
        self._either = _pattern_of(self._exchanged)
        self._twin = _pattern_of(twins.values())
        # Thus the twins are no special tokens: the copy is told to split those (`_encode`).
        self._copy = copy.deepcopy(tokenizer)
        self._copy.add_tokens(
            [
                AddedToken(
                    twins[text],
                    special=False,
                    normalized=token.normalized,
                    lstrip=token.lstrip,
                    rstrip=token.rstrip,
                    single_word=token.single_word,
                )
                for text, token in tokens.items()
            ]
        )
        self._id_of = {
            self._copy.convert_tokens_to_ids(twin): tokenizer.convert_tokens_to_ids(text)
            for text, twin in twins.items()
        }

    def __getattr__(self, name: str) -> Any:  # noqa: ANN401 - of the model's tokenizer
        return getattr(self._tokenizer, name)

    def __call__(self, text: str, **options: Any) -> Mapping[str, Any]:  # noqa: ANN401 - as above
        if self._twin.search(text) is None:
            return self._tokenizer(text, **options)
        exchanged = self._either.sub(lambda found: self._exchanged[found[0]], text)
        encoded = dict(self._copy(exchanged, split_special_tokens=True, **options))
        ids = encoded["input_ids"]
        self._check_no_control_token(ids)
        encoded["input_ids"] = [self._id_of.get(token, token) for token in ids]
        return encoded

    def _check_no_control_token(self, ids: Sequence[int]) -> None:
        """Raise a ValueError if a text that no twin stands for became a control token.

        A model of Unigram may have "</s>" among the pieces that it divides a text into.
        """
        found = set(ids).intersection(self._id_of.values())
        if found:
            text = self._tokenizer.convert_ids_to_tokens(min(found))
            raise ValueError(
                f"the tokenizer has {text!r} among its ordinary texts too, and reads it as a "
                "control token: change the text, or give control_tokens=True if that is meant"
            )

    def encode(self, text: str, **options: Any) -> list[int]:  # noqa: ANN401 - as above
        return list(self(text, **options)["input_ids"])

    def apply_chat_template(
        self,
        messages: list[dict[str, str]],
        *,
        tokenize: bool = True,
        return_dict: bool = False,
        **options: Any,  # noqa: ANN401 - variables of the template
    ) -> str | list[int]:
        """Return the conversation as the template writes it, or the ids of that.

        Raises:
            TypeError: a dict is asked for, which no renderer does.
        """
        if return_dict:
            raise TypeError("apply_chat_template(return_dict=True) is not supported")
        text = self._tokenizer.apply_chat_template(messages, tokenize=False, **options)
        assert isinstance(text, str), "one conversation makes one text"
        return self.encode(text, add_special_tokens=False) if tokenize else text
