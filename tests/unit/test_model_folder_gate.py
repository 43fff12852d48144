"""A model folder whose config, weights and tokenizer are not of one model is refused before anything is spawned."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.fakes.models import broken_folder, edit_config
from tests.unit.command_line import DEBUG, DRY_OR_NOT
from torchtitan.experiments.rl.config_registry import TINY_TEACHER

# ---- the model's folder


def rewrite_weights(change):
    def rewrite(folder):
        tensors = load_file(folder / "model.safetensors")
        change(tensors)
        save_file(tensors, folder / "model.safetensors")

    return rewrite


def cut(folder):
    whole = (folder / "model.safetensors").read_bytes()
    (folder / "model.safetensors").write_bytes(whole[:-1000])


def header(values: object):
    def write(folder):
        text = json.dumps(values).encode()
        (folder / "model.safetensors").write_bytes(len(text).to_bytes(8, "little") + text)

    return write


def index(values: object):
    return lambda folder: (folder / "model.safetensors.index.json").write_text(json.dumps(values))


def tokens_beyond_the_model(folder):
    tokenizer = json.loads((folder / "tokenizer.json").read_text())
    tokenizer["added_tokens"].append(
        dict(
            id=768,
            content="<extra>",
            single_word=False,
            lstrip=False,
            rstrip=False,
            normalized=False,
            special=True,
        )
    )
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer))


Q = "model.layers.0.self_attn.q_proj.weight"
NORM = "model.norm.weight"

FOLDERS = {
    "rubbish": (
        lambda f: (f / "model.safetensors").write_bytes(b"no weights at all"),
        "is no readable safetensors file",
    ),
    "empty": (
        lambda f: (f / "model.safetensors").write_bytes(b""),
        "is no readable safetensors file",
    ),
    "a pointer in their place": (
        lambda f: (f / "model.safetensors").write_text(
            "version https://git-lfs.github.com/spec/v1\noid sha256:0\n"
        ),
        "is no readable safetensors file",
    ),
    "a folder in their place": (
        lambda f: ((f / "model.safetensors").unlink(), (f / "model.safetensors").mkdir()),
        "is no readable safetensors file",
    ),
    "cut off": (cut, "is no readable safetensors file", "not fully covered", "download it again"),
    "a list for a header": (header([1, 2]), "is no readable safetensors file"),
    "a tensor without a shape": (
        header({NORM: {"dtype": "F32", "data_offsets": [0, 0]}}),
        "is no readable safetensors",
    ),
    "quantized": (
        header({NORM: {"dtype": "F8_E4M3", "shape": [0], "data_offsets": [0, 0]}}),
        "has dtype F8_E4M3",
    ),
    "a tensor too few": (rewrite_weights(lambda w: w.pop(NORM)), f"have no {NORM!r}"),
    "a tensor of another shape": (
        rewrite_weights(lambda w: w.update({Q: torch.zeros(64, 128)})),
        f"{Q!r} has shape [64, 128] in its weights, and config.json asks for [128, 128]",
    ),
    "a layer more": (
        rewrite_weights(
            lambda w: w.update({"model.layers.4.input_layernorm.weight": torch.zeros(128)})
        ),
        "its weights have 'model.layers.4.input_layernorm.weight'",
    ),
    "an index of another model": (
        index({"weight_map": {NORM: "part-2.safetensors"}}),
        "has no part-2.safetensors",
    ),
    "an index that is none": (index([]), "model.safetensors.index.json can't be read"),
    "fewer layers": (
        edit_config(num_hidden_layers=3),
        "which the model of its config.json does not",
    ),
    "more layers": (edit_config(num_hidden_layers=5), "have no 'model.layers.4."),
    "another width": (edit_config(intermediate_size=256), "has shape [384, 128] in its weights"),
    "no layers": (
        edit_config(num_hidden_layers=0),
        "num_hidden_layers = 0, want a whole number above 0",
    ),
    "layers without end": (
        edit_config(num_hidden_layers=10**12),
        "num_hidden_layers = 1000000000000, want at most",
    ),
    "negative heads": (edit_config(num_attention_heads=-4), "num_attention_heads = -4"),
    "heads in words": (edit_config(num_attention_heads="four"), "num_attention_heads = 'four'"),
    "heads that do not divide": (
        edit_config(num_key_value_heads=3),
        "num_key_value_heads = 3 does not divide",
    ),
    "odd heads": (edit_config(head_dim=33), "heads of size 33, want an even one"),
    "half a width": (edit_config(hidden_size=128.5), "hidden_size = 128.5"),
    "a norm without a bound": (edit_config(rms_norm_eps="small"), "rms_norm_eps = 'small'"),
    "rotary rubbish": (edit_config(rope_parameters=[1]), "has rotary parameters [1]"),
    "a dtype of its own": (edit_config(dtype="float8"), "dtype = 'float8'"),
    "an architecture that is a number": (
        edit_config(architectures=3),
        "its architecture '' can't be trained here",
    ),
    "a list for a config": (lambda f: (f / "config.json").write_text("[]"), "holds a list"),
    "a config that is no text": (
        lambda f: (f / "config.json").write_bytes(b"\xff\xfe\x00"),
        "no readable config.json",
    ),
    "a broken tokenizer": (lambda f: (f / "tokenizer.json").write_text("{"), "tokenizer"),
    "a tokenizer that is a list": (lambda f: (f / "tokenizer.json").write_text("[]"), "tokenizer"),
    "a larger tokenizer": (tokens_beyond_the_model, "has the id 768", "a vocab_size of 768"),
}


@pytest.mark.parametrize(
    "change, parts", [(change, parts) for change, *parts in FOLDERS.values()], ids=FOLDERS
)
def test_a_folder_whose_files_do_not_make_one_model_is_refused(refused, tmp_path, change, parts):
    folder = broken_folder(tmp_path, change)
    for words in ([], ["--dry-run"]):
        err = refused(*DEBUG, "--model.hf-assets-path", folder, *words)
        for part in ("error: model.hf_assets_path = ", folder, *parts):
            assert part in err


def test_a_file_or_a_name_too_long_is_no_model_folder(refused, tmp_path):
    (tmp_path / "file").write_text("")
    for path in (str(tmp_path / "file"), "/" + "x" * 5000, "/proc/self/mem", "nul\0character"):
        assert "model.hf_assets_path = " in refused(
            *DEBUG, "--model.hf-assets-path", path, "--dry-run"
        )


def test_the_shipped_folders_are_read_without_a_false_alarm(command):
    for name in (
        "rl_grpo_qwen3_debug",
        "rl_opd_qwen3_debug",
        "rl_opsd_qwen3_debug",
        "rl_calculator_qwen3_debug",
    ):
        code, out, err = command("--config", name, "--dry-run")
        assert code == 0 and err == "" and "before a run" not in out


@DRY_OR_NOT
def test_a_hosted_models_folder_is_read_like_the_policys(refused, tmp_path, dry_run, config_module):
    folder = broken_folder(tmp_path, edit_config(intermediate_size=256))
    name, _ = config_module(
        "from torchtitan.experiments.rl.config_registry import rl_opd_qwen3_debug\n"
        "def taught():\n"
        "    config = rl_opd_qwen3_debug()\n"
        f"    config.tasks['sum_digits'].algorithm.teacher.path = {folder!r}\n"
        "    return config\n"
    )
    err = refused("--module", name, "--config", "taught", *dry_run)
    assert (
        f"error: tasks.sum_digits.algorithm.teacher.path = {folder!r}" in err
        and "has shape [384, 128]" in err
    )


def test_a_hosted_model_with_too_few_positions_is_refused(refused, config_module):
    assert (
        json.loads((Path(TINY_TEACHER) / "config.json").read_text())["max_position_embeddings"]
        == 2048
    )
    name, _ = config_module(
        "from torchtitan.experiments.rl.config_registry import rl_opd_qwen3_debug\n"
        "def taught():\n"
        "    config = rl_opd_qwen3_debug()\n"
        "    config.tasks['sum_digits'].algorithm.teacher.engine.max_model_len = 4096\n"
        "    return config\n"
    )
    err = refused("--module", name, "--config", "taught", "--dry-run")
    assert (
        "error: tasks.sum_digits.algorithm.teacher.engine.max_model_len = 4096: the model has 2048 positions"
        in err
    )
