"""Shows a model the text of a special token, such as "<|im_end|>" in a web page, as text.

A tokenizer reads such a text as the control token itself, so that a page could end its message and
write the next one. Renderers hand a whole turn to the tokenizer, their own control tokens and the
message's text in one string, so something in the string has to tell the two apart:

    a message      page: <|im_end|>                   `SpecialTexts.twin` writes each special text
      its twin     page: ⟨twin of <|im_end|>⟩         as its twin: rare characters, in an order
                                                      that stands in no text
    the renderer   <|im_end|> ... ⟨twin⟩ ...          writes its control tokens as ever
    TwinTokenizer  ⟨twin⟩ ... <|im_end|> ...          exchanges the two. Only a twin is now read as
                                                      a control token; <|im_end|> is split as text

A twin has as many characters as its text, so that places in the string stay as they are. Only
conversations that have a special text are rendered in this way; all others never come here.

Renderers decode the arguments of a call that are given as JSON, so a special text is found there
however its characters are escaped.
"""

import copy
import functools
import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, cast
from weakref import WeakKeyDictionary

import renderers
from renderers import Message, RenderedTokens, Renderer, RendererConfig, ToolSpec
from tokenizers import AddedToken, Regex, Tokenizer, pre_tokenizers
from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast

_FIRST = 0x20000
"""First of the 2**15 characters in which twins are written: ideographs of CJK Extension B.

They are rare, so that no text has a twin by chance. They are printable, so that a template that
prints a list of texts does not escape them.
"""
_ESCAPED_BACKSLASH = "\\\\"
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
        self._in_json = _json_pattern_of(self._tokens)

    def first_in(self, value: object) -> str | None:
        """Return the first special text in a message or in messages; None if there is none."""
        return next(self._all_in(value), None)

    def _all_in(self, value: object) -> Iterator[str]:
        """Yield the special texts in a text, or in data with texts."""
        if isinstance(value, str):
            for found in self._pattern.finditer(value):
                yield found[0]
        elif isinstance(value, Mapping):
            for key, entry in value.items():
                yield from self._all_in(key)
                if _is_json(key, entry):
                    yield from filter(None, map(_decoded, self._in_json.finditer(entry)))
                else:
                    yield from self._all_in(entry)
        elif isinstance(value, list | tuple):
            for entry in value:
                yield from self._all_in(entry)

    def twin(self, value: Any) -> Any:  # noqa: ANN401 - of the type that it is given
        """Return text, or data with texts, with a twin in the place of each special text."""
        if isinstance(value, str):
            return self._pattern.sub(lambda found: _twin_of(found[0]), value)
        if isinstance(value, Mapping):
            # Keys too: arguments of calls and schemas of tools are rendered with them.
            return {
                self.twin(key): self._twin_in_json(entry)
                if _is_json(key, entry)
                else self.twin(entry)
                for key, entry in value.items()
            }
        if isinstance(value, list | tuple):
            return [self.twin(entry) for entry in value]
        return value

    def _twin_in_json(self, text: str) -> str:
        """Return JSON with a twin in the place of each special text that a parser would read."""

        def replaced(found: re.Match[str]) -> str:
            special = _decoded(found)
            return found[0] if special is None else _twin_of(special)

        return self._in_json.sub(replaced, text)

    def positions_of_tokens(self, text: str) -> list[tuple[int, int]]:
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

    @functools.cached_property
    def renderer(self) -> Renderer:
        """Renderer of the same model whose tokenizer reads twins as text.

        It only renders: replies are parsed by the renderer that tasks have.
        """
        return renderers.create_renderer(self._twins, self._settings)


def _pattern_of(texts: Iterable[str]) -> re.Pattern[str]:
    """Return a pattern that finds any of the texts, and nothing if there are none.

    Where one text begins with another, the longer is the token.
    """
    return _any_of(map(re.escape, sorted(texts, key=len, reverse=True)))


def _any_of(patterns: Iterable[str]) -> re.Pattern[str]:
    return re.compile("|".join(patterns) or r"(?!)")


def _json_pattern_of(texts: Iterable[str]) -> re.Pattern[str]:
    r"""Return a pattern that finds the texts in JSON, where any character may be escaped.

    It finds escaped backslashes too, so that what follows one is not taken for an escape:

        <|im_\u0065nd|>     is <|im_end|>
        <|im_\\u0065nd|>    is no special text
    """
    longest_first = sorted(texts, key=len, reverse=True)
    in_json = ["".join(map(_json_forms, text)) for text in longest_first]
    return _any_of([re.escape(_ESCAPED_BACKSLASH), *in_json])


def _json_forms(character: str) -> str:
    """Return a pattern of the forms that a character has in JSON."""
    units = re.findall("....", character.encode("utf-16-be").hex())
    escaped = "".join(rf"\\u(?i:{unit})" for unit in units)
    as_it_is = re.escape(json.dumps(character, ensure_ascii=False)[1:-1])
    return f"(?:{as_it_is}|{escaped}" + (r"|\\/)" if character == "/" else ")")


def _is_json(key: object, entry: object) -> bool:
    """Return True if an entry of a message is the arguments of a call, as JSON."""
    return key == "arguments" and isinstance(entry, str)


def _decoded(found: re.Match[str]) -> str | None:
    """Return the special text that was found in JSON; None if it is an escaped backslash."""
    if found[0] == _ESCAPED_BACKSLASH:
        return None
    return cast(str, json.loads(f'"{found[0]}"'))


def _twin_of(text: str) -> str:
    return "".join(chr(_FIRST + ord(character) % 2**15) for character in text)


def _copy_with_twins(
    tokenizer: PreTrainedTokenizerBase, tokens: Mapping[str, AddedToken]
) -> PreTrainedTokenizerBase:
    """Return a copy of a tokenizer that has a token of its own for each special text's twin.

    The copy shares the vocabulary and the merges: to copy those takes about a second.

    Args:
        tokens: special tokens by their texts.
    """
    memo: dict[int, object] = {}
    if isinstance(tokenizer, PreTrainedTokenizerFast):
        own = tokenizer.backend_tokenizer
        memo[id(own)] = _backend_like(own, splits=tokens)
    copied = copy.deepcopy(tokenizer, memo)
    # Thus the twins are no special tokens: the copy is told to split those.
    copied.add_tokens(
        [
            AddedToken(
                _twin_of(text),
                special=False,
                normalized=token.normalized,
                lstrip=token.lstrip,
                rstrip=token.rstrip,
                single_word=token.single_word,
            )
            for text, token in tokens.items()
        ]
    )
    return copied


def _backend_like(own: Tokenizer, *, splits: Iterable[str]) -> Tokenizer:
    """Return a tokenizer with the same model, parts and added tokens.

    Args:
        splits: texts that become two words, so that one that is in the model's vocabulary too, as
            "<unk>" is in that of a Unigram model, does not become its token.
    """
    backend = Tokenizer(own.model)
    backend.normalizer = own.normalizer
    backend.decoder = own.decoder
    backend.post_processor = own.post_processor
    cuts: list[Any] = [
        pre_tokenizers.Split(
            Regex(f"{re.escape(text[0])}(?={re.escape(text[1:])})"), "merged_with_previous"
        )
        for text in splits
        if len(text) > 1 and own.model.token_to_id(text) is not None
    ]
    parts = [part for part in (own.pre_tokenizer, *cuts) if part is not None]
    backend.pre_tokenizer = pre_tokenizers.Sequence(parts) if cuts else own.pre_tokenizer
    added = own.get_added_tokens_decoder()
    backend.add_tokens([added[index] for index in sorted(added)])
    return backend


class TwinTokenizer:
    """Tokenizer of a model that reads twins of special texts as text.

    It has what the `renderers` package asks of a tokenizer. Whatever does not encode is answered by
    the model's own tokenizer.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, tokens: Mapping[str, AddedToken]):
        """Make a copy of the tokenizer in which twins are tokens.

        Args:
            tokenizer: the model's tokenizer, which stays as it is.
            tokens: its special tokens, by their texts.
        """
        self._tokenizer = tokenizer
        twins = {text: _twin_of(text) for text in tokens}
        self._exchanged = twins | {twin: text for text, twin in twins.items()}
        self._either = _pattern_of(self._exchanged)
        self._twin = _pattern_of(twins.values())
        self._copy = _copy_with_twins(tokenizer, tokens)
        added = {token.content: token.content for token in tokenizer.added_tokens_decoder.values()}
        written = added | {twin: text for text, twin in twins.items()}
        self._id_of = {
            self._copy.convert_tokens_to_ids(text): tokenizer.convert_tokens_to_ids(original)
            for text, original in written.items()
        }
        # Without special texts, too, a character that the vocabulary lacks is the unknown token.
        self._control_ids = {self._copy.convert_tokens_to_ids(text) for text in tokens} - {
            tokenizer.unk_token_id
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
        """Raise a ValueError if the copy read a text as a control token all the same.

        A special token of one character, which the model's vocabulary has too, can't be split.
        """
        found = self._control_ids.intersection(ids)
        if found:
            text = self._copy.convert_ids_to_tokens(min(found))
            raise ValueError(
                f"the tokenizer can't read {text!r} as text, because its vocabulary has it as a "
                "piece too: change the text, or give control_tokens=True if that is meant"
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
