"""A reply ends at every token that the tokenizer, the generation config or the chat template names as the end."""

import json
import shutil

import pytest
from tokenizers.processors import TemplateProcessing
from transformers import AutoTokenizer

from tests.fakes.models import CHATML
from tests.unit.command_line import DRY_OR_NOT
from torchtitan.experiments.rl.config_registry import TINY_MODEL
from torchtitan.experiments.rl.envs.renderer import RendererConfig, build_renderer
from torchtitan.experiments.rl.envs.stop_tokens import template_turn_end, with_stop_texts
from torchtitan.experiments.rl.errors import ConfigError
from torchtitan.experiments.rl.rollouts.policy import SamplingConfig

IM_START, IM_END, END_OF_TEXT = 760, 761, 759
TEXT = "{% for m in messages %}{{ m['role'] + ': ' + m['content'] + '\n' }}{% endfor %}"
"""A template that ends a turn with no token."""


def edit(file, **changes):
    values = json.loads(file.read_text())
    for name, value in changes.items():
        values.pop(name, None)
        if value is not None:
            values[name] = value
    file.write_text(json.dumps(values))


def model(folder, *, template=CHATML, eos="<|endoftext|>", generation=()):
    """The tiny model with a plain template, and by default the end token that its base had.

    Args:
        generation: eos_token_id of generation_config.json; empty: no file, and no such field in config.json.
    """
    shutil.copytree(TINY_MODEL, folder)
    if template is not None:
        (folder / "chat_template.jinja").write_text(template)
    edit(folder / "tokenizer_config.json", eos_token=eos)
    edit(folder / "config.json", eos_token_id=None)
    if generation == ():
        (folder / "generation_config.json").unlink()
    else:
        edit(folder / "generation_config.json", eos_token_id=generation)
    return folder


@pytest.fixture
def ids(tokenizer):
    return lambda text: tokenizer.encode(text, add_special_tokens=False)


@pytest.mark.parametrize("name", ["auto", "default"])
@pytest.mark.parametrize(
    ("options", "stops"),
    [
        ({}, [IM_END, END_OF_TEXT]),  # the report's: only the template writes <|im_end|>
        ({"generation": [IM_END, END_OF_TEXT]}, [IM_END, END_OF_TEXT]),
        ({"template": TEXT}, [END_OF_TEXT]),
        ({"template": TEXT, "generation": IM_END}, [END_OF_TEXT, IM_END]),
        ({"template": TEXT, "generation": [7, IM_END], "eos": None}, [7, IM_END]),
        ({"eos": None}, [IM_END]),
    ],
)
def test_a_turn_ends_at_every_token_that_the_folder_names(tmp_path, ids, name, options, stops):
    renderer = build_renderer(
        RendererConfig(name=name, thinking_retention=None), model(tmp_path / "model", **options)
    )
    assert renderer.get_stop_token_ids() == stops
    for stop in stops:
        reply = [*ids("42"), stop, *ids("7")]
        assert renderer.parse_response(reply).content == "42"


def test_config_json_says_the_ends_where_there_is_no_generation_config(tmp_path):
    folder = model(tmp_path / "model", template=TEXT)
    edit(folder / "config.json", eos_token_id=[IM_END])
    assert build_renderer(RendererConfig(), folder).get_stop_token_ids() == [END_OF_TEXT, IM_END]
    edit(folder / "config.json", eos_token_id=None)
    (folder / "config.json").unlink()  # a folder with nothing but a tokenizer
    assert build_renderer(RendererConfig(), folder).get_stop_token_ids() == [END_OF_TEXT]


def test_a_familys_renderer_ends_a_turn_at_the_folders_ids_too(tmp_path, ids):
    folder = model(tmp_path / "model", template=None, generation=[IM_END, END_OF_TEXT, 7])
    renderer = build_renderer(RendererConfig(), folder)
    assert renderer.config.name == "qwen3" and renderer.supports_tools
    assert renderer.get_stop_token_ids() == [IM_END, END_OF_TEXT, 7]
    assert renderer.parse_response([*ids("42"), 7]).content == "42"
    question = [{"role": "user", "content": "6 * 7?"}]
    prompt = renderer.render(question, add_generation_prompt=True).token_ids
    assert renderer.render_ids(question, add_generation_prompt=True) == prompt
    whole = [*ids("42"), IM_END]
    bridged = renderer.bridge_to_next_turn(prompt, whole, question)
    assert bridged.token_ids[: len(prompt) + len(whole)] == prompt + whole


def test_the_shipped_model_keeps_its_familys_renderer(tokenizer_path):
    renderer = build_renderer(RendererConfig(), tokenizer_path)
    assert type(renderer).__name__ == "Qwen3Renderer" and renderer.get_stop_token_ids() == [
        IM_END,
        END_OF_TEXT,
    ]


TEMPLATES = {
    "ChatML": (CHATML, IM_END),
    "the end of a turn and of the text": (
        CHATML.replace("<|im_end|>", "<|im_end|><|endoftext|>"),
        IM_END,
    ),
    "the next header alone": (
        "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' + m['content'] }}{% endfor %}",
        IM_START,
    ),
    "another end for the last turn": (
        "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' + m['content'] }}"
        "{{ '<|endoftext|>' if loop.last else '<|im_end|>' }}{% endfor %}",
        END_OF_TEXT,
    ),
    "text": (TEXT, None),
    "a token that the tokenizer lacks": (
        CHATML.replace("<|im_end|>", "<|eot|>").replace("<|im_start|>", "##"),
        None,
    ),
    "no conversation with a reply": (
        "{{ raise_exception('no') if messages|length > 1 else messages[0]['content'] }}",
        None,
    ),
    "the reply left out": ("{{ messages[0]['content'] + '<|im_end|>' }}", None),
}


@pytest.mark.parametrize(("template", "end"), TEMPLATES.values(), ids=TEMPLATES)
def test_the_end_of_a_turn_is_the_first_control_token_after_the_reply(
    tokenizer_path, template, end
):
    tokenizer = AutoTokenizer.from_pretrained(str(tokenizer_path))
    tokenizer.chat_template = template
    assert template_turn_end(tokenizer) == end


@DRY_OR_NOT
def test_a_model_whose_end_nothing_names_is_refused(refused, tmp_path, dry_run):
    folder = model(tmp_path / "model", template=TEXT, eos=None)
    err = refused("--config", "rl_grpo_qwen3_debug", "--model", str(folder), *dry_run)
    assert (
        f"model.hf_assets_path = '{folder}': nothing in it says which token ends the model's turn"
        in err
    )
    assert "eos_token_id of its generation_config.json" in err


@pytest.mark.parametrize(
    ("generation", "fault"),
    [
        (
            "</s>",
            "its generation_config.json has eos_token_id = '</s>', want an id or a list of ids",
        ),
        ([True], "has eos_token_id = [True]"),
        ([IM_END, 5000], "it ends a turn at the id 5000, and the model has 768 ids"),
    ],
)
def test_ids_that_are_none_of_the_models_are_refused(refused, tmp_path, generation, fault):
    folder = model(tmp_path / "model", generation=generation)
    assert fault in refused("--config", "rl_grpo_qwen3_debug", "--model", str(folder), "--dry-run")


@pytest.mark.parametrize("text", ["{", "[]"])
def test_a_generation_config_that_is_none_is_refused(tmp_path, text):
    folder = model(tmp_path / "model")
    (folder / "generation_config.json").write_text(text)
    with pytest.raises(ConfigError, match="its generation_config.json can't be read"):
        build_renderer(RendererConfig(), folder)


def test_the_dry_run_says_where_a_turn_ends(command, tmp_path):
    words = (
        "--config",
        "rl_grpo_qwen3_debug",
        "--model",
        str(model(tmp_path / "model")),
        "--dry-run",
    )
    code, out, err = command(*words, "--tasks.sum-digits.sampling.stop-token-ids", "7")
    assert (code, err) == (0, "")
    assert "\nturn ends      at <|im_end|> (761), <|endoftext|> (759)\n" in out
    assert "\nturn ends      of sum_digits at 7 too\n" in out


def test_a_template_that_ends_a_turn_with_text_is_refused_unless_a_stop_is_named(
    command, refused, tmp_path
):
    folder = str(model(tmp_path / "model", template=TEXT))
    words = ("--config", "rl_grpo_qwen3_debug", "--model", folder, "--dry-run")
    line = refused(*words)
    assert "the chat template ends the model's turn with no token of the tokenizer" in line
    assert "tasks.sum_digits.sampling.stop" in line
    for stop in (("stop", "user:"), ("stop-token-ids", "7")):
        code, _, err = command(*words, f"--tasks.sum-digits.sampling.{stop[0]}", stop[1])
        assert (code, err) == (0, "")


# ---- templates that a config gives


def test_a_base_model_answers_a_plain_question_up_to_the_next_one(command, tmp_path, ids):
    folder = model(tmp_path / "model", template=None)
    (folder / "chat_template.jinja").unlink()
    renderer = build_renderer(RendererConfig(template="plain"), folder)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    conversation = [
        {"role": "system", "content": "Use digits."},
        {"role": "user", "content": "6 * 7?"},
        {"role": "assistant", "content": " It is\n42"},  # as it was sampled
        {"role": "user", "content": "And 6 * 8?"},
    ]
    prompt = renderer.render_ids(conversation, add_generation_prompt=True)
    assert tokenizer.decode(prompt) == (
        "Use digits.\nQuestion: 6 * 7?\nAnswer: It is\n42\nQuestion: And 6 * 8?\nAnswer:"
    )
    assert renderer.get_stop_token_ids() == [END_OF_TEXT]
    reply = ids(" 6 * 8 is\n48\nQuestion: And")
    assert renderer.parse_response(reply).content.strip() == "6 * 8 is\n48"

    words = ("--config", "rl_grpo_qwen3_debug", "--model", str(folder), "--dry-run")
    code, out, err = command(*words, "--renderer.template", "plain")
    assert (code, err) == (0, "")
    assert "turn ends      at <|endoftext|> (759), '\\nQuestion:'\n" in out


def test_a_plain_prompt_begins_with_the_token_that_the_tokenizer_begins_texts_with(tmp_path):
    folder = model(tmp_path / "model", template=None)
    edit(folder / "tokenizer_config.json", bos_token="<|im_start|>")
    question = [{"role": "user", "content": "6 * 7?"}]

    def prompt():
        renderer = build_renderer(RendererConfig(template="plain"), folder)
        return renderer.render_ids(question, add_generation_prompt=True)

    plain = prompt()
    assert plain[0] != IM_START  # a token by that name, with which its texts do not begin
    tokenizer = AutoTokenizer.from_pretrained(folder)
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(
        single="<|im_start|> $A", special_tokens=[("<|im_start|>", IM_START)]
    )
    tokenizer.backend_tokenizer.save(str(folder / "tokenizer.json"))
    assert prompt() == [IM_START, *plain]


async def test_a_rollout_is_sampled_up_to_the_texts_that_end_its_turn(tmp_path):
    folder = model(tmp_path / "model", template=None)
    renderer = build_renderer(RendererConfig(template="plain"), folder)
    sampling = SamplingConfig(stop=["!"])
    assert with_stop_texts(sampling, renderer).stop == ["!", "\nQuestion:"]
    plain = build_renderer(RendererConfig(), model(tmp_path / "other"))
    assert with_stop_texts(sampling, plain) is sampling


def test_a_file_takes_the_place_of_the_tokenizers_template(tmp_path):
    file = tmp_path / "mine.jinja"
    file.write_text(TEXT)
    renderer = build_renderer(RendererConfig(template=str(file)), model(tmp_path / "model"))
    prompt = renderer.render_ids([{"role": "user", "content": "hi"}], add_generation_prompt=True)
    assert AutoTokenizer.from_pretrained(tmp_path / "model").decode(prompt) == "user: hi\n"


def test_a_template_that_is_none_is_refused_by_its_field(refused, tmp_path):
    wrong = tmp_path / "wrong.jinja"
    wrong.write_text("{% for m in messages %}")
    for words, cure in [
        (("--renderer.template", str(tmp_path / "absent.jinja")), 'or "plain"'),
        (("--renderer.template", str(wrong)), "renders no message: Unexpected end of template"),
        (("--renderer.template", "plain", "--renderer.name", "qwen3"), "a template of its own"),
    ]:
        line = refused("--config", "rl_grpo_qwen3_debug", *words, "--dry-run")
        assert "renderer.template" in line and cure in line
    folder = model(tmp_path / "base", template=None)
    (folder / "chat_template.jinja").unlink()
    line = refused("--config", "rl_grpo_qwen3_debug", "--model", str(folder), "--dry-run")
    assert 'set renderer.template to "plain"' in line
