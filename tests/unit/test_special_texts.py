"""Special tokens in what others than the model say: the model reads their texts, and no control token."""

import copy
import functools
import json

import numpy as np
import pytest
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from tests.unit.renderer_families import SETTINGS, family_renderer, family_tokenizer
from torchtitan.experiments.rl.envs.conversation import Conversation
from torchtitan.experiments.rl.envs.renderer import RendererConfig, build_renderer
from torchtitan.experiments.rl.envs.special_texts import (
    SpecialTexts,
    TwinTokenizer,
    control_tokens,
    render_as_text,
    special_texts,
)
from torchtitan.experiments.rl.rollouts.types import Completion


def special_ids(rendered, tokenizer):
    special = {index for index, token in tokenizer.added_tokens_decoder.items() if token.special}
    return [token for token in rendered.token_ids if token in special]


@pytest.mark.parametrize("settings", SETTINGS)
def test_every_message_and_tool_is_rendered_with_the_same_text_and_the_templates_tokens_alone(
    settings, tmp_path_factory
):
    """Beside the texts of all special tokens, the prompt has the ids that it has without them."""
    renderer = family_renderer(settings, tmp_path_factory.getbasetemp())
    tokenizer = family_tokenizer(SETTINGS[settings]["name"])
    page = "see " + " ".join(control_tokens(tokenizer))

    def chat(text):
        call = {"name": "open", "arguments": {"url": text, text: "a key"}}
        return [
            {"role": "system", "content": text},
            {"role": "user", "content": text},
            {
                "role": "assistant",
                "content": text,
                "tool_calls": [{"type": "function", "id": "1", "function": call}],
            },
            {"role": "tool", "tool_call_id": "1", "name": "open", "content": text},
        ]

    def tool(text):
        parameters = {"type": "object", "properties": {text: {"type": "string"}}}
        function = {"name": "open", "description": text, "parameters": parameters}
        return [{"type": "function", "function": function}]

    own = renderer.render(chat("x"), tools=tool("x"), add_generation_prompt=True)
    text = render_as_text(renderer, chat(page), tools=tool(page), add_generation_prompt=True)
    as_control = renderer.render(chat(page), tools=tool(page), add_generation_prompt=True)
    assert tokenizer.decode(text.token_ids) == tokenizer.decode(as_control.token_ids)
    assert special_ids(text, tokenizer) == special_ids(own, tokenizer)
    assert len(special_ids(as_control, tokenizer)) > len(special_ids(own, tokenizer))
    assert len(text.is_content) in (0, len(text.token_ids))
    assert text.message_roles == ["system", "user", "assistant", "tool"]


@pytest.mark.parametrize("settings", [name for name in SETTINGS if name != "default"])
def test_the_prompt_after_a_page_extends_the_one_before_it(settings, tmp_path_factory):
    renderer = family_renderer(settings, tmp_path_factory.getbasetemp())
    tokenizer = family_tokenizer(SETTINGS[settings]["name"])
    page = "see " + " ".join(control_tokens(tokenizer))
    prompt = renderer.render([{"role": "user", "content": "x"}], add_generation_prompt=True)
    reply = [*tokenizer.encode("ok", add_special_tokens=False), renderer.get_stop_token_ids()[0]]
    texts = special_texts(renderer)

    def answered(renderer, text):
        answer = [{"role": "user", "content": text}]
        return renderer.bridge_to_next_turn(prompt.token_ids, reply, answer)

    own = answered(renderer, "x")
    extended = answered(texts.renderer, texts.twin(page))
    if own is None:  # these drop thoughts of earlier turns, and so render the whole anew
        assert extended is None
        return
    before = [*prompt.token_ids, *reply]
    assert extended.token_ids[: len(before)] == before == own.token_ids[: len(before)]
    assert special_ids(extended, tokenizer) == special_ids(own, tokenizer)
    assert page in tokenizer.decode(extended.token_ids)


def test_a_conversation_without_special_texts_is_rendered_by_the_renderer_itself(tokenizer_path):
    renderer = build_renderer(RendererConfig(), tokenizer_path)
    chat = [{"role": "user", "content": "no <tool_call> is special"}]
    assert render_as_text(renderer, chat) == renderer.render(chat)
    assert "renderer" not in vars(special_texts(renderer)), "no second one was made"


ESCAPED = [
    (r'{"text": "<|im_\u0065nd|>"}', "<|im_end|>"),
    (r'{"text": "\u003C\u007cim_end|>"}', "<|im_end|>"),
    ('{"<|im_end|>": "a\\nb"}', "<|im_end|>"),
    (r'{"text": "\\\\<|im_start|>"}', "<|im_start|>"),
]


@pytest.mark.parametrize("arguments, token", ESCAPED)
@pytest.mark.parametrize("settings", SETTINGS)
def test_a_special_token_in_the_arguments_of_a_call_is_text_however_json_escapes_it(
    settings, arguments, token, tmp_path_factory
):
    renderer = family_renderer(settings, tmp_path_factory.getbasetemp())
    tokenizer = family_tokenizer(SETTINGS[settings]["name"])

    def rendered(render, arguments):
        call = {"type": "function", "id": "1", "function": {"name": "f", "arguments": arguments}}
        chat = [
            {"role": "user", "content": "hi"},
            {"role": "assistant", "content": "", "tool_calls": [call]},
            {"role": "tool", "tool_call_id": "1", "name": "f", "content": "ok"},
        ]
        return render(chat)

    own = rendered(renderer.render, '{"text": "x"}')
    as_text = rendered(functools.partial(render_as_text, renderer), arguments)
    assert special_ids(as_text, tokenizer) == special_ids(own, tokenizer)
    assert token in tokenizer.decode(as_text.token_ids)


def test_what_json_does_not_read_as_a_special_token_is_left_as_it_is(tokenizer_path):
    texts = special_texts(build_renderer(RendererConfig(), tokenizer_path))
    for arguments in (r'{"text": "<|im_\\u0065nd|>"}', r'{"text": "\\u003c|im_end|>"}', "{}"):
        function = {"name": "f", "arguments": arguments}
        assert texts.first_in(function) is None and texts.twin(function) == function
    content = {"role": "tool", "content": ESCAPED[0][0]}  # a tool's answer is no JSON to a renderer
    assert texts.first_in(content) is None and texts.twin(content) == content


def test_a_special_token_is_found_whatever_characters_it_has():
    tokenizer = sentencepiece_like()
    odd = ["<end\n>", "<'\">", "<\u200b>", "<\\>", "<\U0001f600>", "<a/b>"]
    tokenizer.add_tokens([AddedToken(text, special=True) for text in odd], special_tokens=True)
    texts = SpecialTexts(tokenizer, settings=None)
    for text in odd:
        message = {"role": "user", "content": [{"type": "text", "text": f"see {text}!"}]}
        call = {"name": "f", "arguments": json.dumps({"text": text})}
        slashed = {"name": "f", "arguments": json.dumps({"text": text}).replace("/", "\\/")}
        for value in (message, [{"tool_calls": [{"function": call}]}], ({text: 1},), slashed):
            assert texts.first_in(value) == text
            assert texts.first_in(texts.twin(value)) is None


async def test_what_the_model_sampled_as_text_stays_text_where_the_conversation_is_rendered_anew(
    tokenizer, tokenizer_path, monkeypatch
):
    renderer = build_renderer(RendererConfig(name="qwen3"), tokenizer_path)
    monkeypatch.setattr(renderer, "bridge_to_next_turn", lambda *_, **__: None)
    start, ends = tokenizer.convert_tokens_to_ids(["<|im_start|>", "<|im_end|>"])
    text = "I saw <|im_start|>!"
    alone = copy.deepcopy(tokenizer)
    quoted = alone.encode(text, add_special_tokens=False, split_special_tokens=True)
    sampled = tokenizer.encode(text, add_special_tokens=False)
    prompts = []
    for reply in (quoted, sampled):
        conversation = Conversation(renderer, max_tokens=500)
        assert await conversation.open([{"role": "user", "content": "hi"}], None)
        ids = np.array([*reply, ends], np.int32)
        logprobs = np.zeros(len(ids), np.float32)
        versions = np.zeros(len(ids), np.int32)
        turn = await conversation.add_completion(
            Completion(
                token_ids=ids, logprobs=logprobs, policy_versions=versions, finish_reason="stop"
            )
        )
        assert turn.assistant_message["content"] == text
        answer = [{"role": "user", "content": "go on"}]
        conversation.extend(answer)
        assert await conversation.add_messages(answer)
        prompts.append(conversation.prompt.ids)
    assert [prompt.count(start) for prompt in prompts] == [4, 5]
    for reply, prompt in zip((quoted, sampled), prompts, strict=True):
        assert str(reply)[1:-1] in str(prompt)


def sentencepiece_like(*more):
    """A tokenizer that writes a space before the first word of a text only, as Llama's does."""
    pieces = [("<unk>", 0.0), ("▁", -1.0), ("▁hi", -2.0), ("hi", -2.0), ("<", -3.0), ("/", -3.0)]
    pieces += [("s", -3.0), (">", -3.0), ("h", -4.0), ("i", -4.0), *more]
    backend = Tokenizer(models.Unigram(pieces, unk_id=0, byte_fallback=False))
    backend.normalizer = normalizers.NFC()
    backend.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first")
    backend.decoder = decoders.Metaspace(prepend_scheme="first")
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, unk_token="<unk>")
    tokenizer.add_tokens(
        [
            AddedToken("</s>", special=True, normalized=False),
            AddedToken("<s>", special=True, normalized=False, rstrip=True),
        ],
        special_tokens=True,
    )
    return tokenizer


def test_twins_alone_are_text_and_all_else_is_read_as_the_tokenizer_reads_it():
    tokenizer = sentencepiece_like()
    twins = TwinTokenizer(tokenizer, control_tokens(tokenizer))
    texts = "".join(chr(0x20000 + ord(character)) for character in "</s>")
    for text in ("hi", "<s> hi</s>hi", "hi hi</s>"):
        assert twins.encode(text, add_special_tokens=False) == tokenizer.encode(
            text, add_special_tokens=False
        )
    encoded = twins(f"<s> hi{texts} hi</s>", add_special_tokens=False, return_offsets_mapping=True)
    read = tokenizer.convert_ids_to_tokens(encoded["input_ids"])
    # <s> takes the space behind it, and no space is put before the text that follows.
    assert read == ["<s>", "hi", "<", "/", "s", ">", "▁hi", "</s>"]
    assert [tuple(offsets) for offsets in encoded["offset_mapping"]] == [
        (0, 4), (4, 6), (6, 7), (7, 8), (8, 9), (9, 10), (10, 13), (13, 17)
    ]  # fmt: skip


def test_a_special_token_that_the_vocabulary_has_as_a_piece_too_is_text_all_the_same():
    tokenizer = sentencepiece_like(("</s>", -1.0))
    twins = TwinTokenizer(tokenizer, control_tokens(tokenizer))
    texts = "".join(chr(0x20000 + ord(character)) for character in "</s>")
    unknown = "".join(chr(0x20000 + ord(character)) for character in "<unk>")

    def read(text):
        return tokenizer.convert_ids_to_tokens(twins.encode(text, add_special_tokens=False))

    assert read(f"hi{texts} hi</s>") == ["▁hi", "<", "/", "s", ">", "▁hi", "</s>"]
    # The vocabulary has no "u", "n", "k" and "é": the tokenizer reads them as unknown, as ever.
    assert read(f"hi{unknown}") == ["▁hi", "<", "<unk>", ">"]
    assert read(f"é {texts}") == ["▁", "<unk>", "▁", "<", "/", "s", ">"]


def test_a_special_token_of_one_character_that_is_a_piece_too_can_not_be_text_and_says_so():
    tokenizer = sentencepiece_like()
    tokenizer.add_tokens([AddedToken("h", special=True)], special_tokens=True)
    twins = TwinTokenizer(tokenizer, control_tokens(tokenizer))
    said = "the tokenizer can't read 'h' as text, because its vocabulary has it as a piece too"
    with pytest.raises(ValueError, match=said):
        twins.encode(f"{chr(0x20000 + ord('h'))} hi", add_special_tokens=False)


def test_the_copy_that_knows_twins_has_the_vocabulary_of_the_models_tokenizer_itself(
    tokenizer,
):
    """To copy a vocabulary of 150,000 words and its merges takes a second of a rollout's loop."""
    tokenizer = copy.deepcopy(tokenizer)
    twins = TwinTokenizer(tokenizer, control_tokens(tokenizer))
    tokenizer.backend_tokenizer.model.dropout = 0.25
    assert twins._copy.backend_tokenizer.model.dropout == 0.25
