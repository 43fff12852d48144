"""The configs of the real model, and the script that gets it or another."""

import importlib.util
import sys
from pathlib import Path

import pytest
import torch

from torchtitan.experiments.rl.config_registry.smollm2 import (
    HELD_OUT,
    LARGEST,
    last_number_is_answer,
    number_in_a_box,
    right_number_in_a_box,
    sums,
)

SCRIPT = Path(__file__).parents[2] / "scripts" / "get_model.py"


@pytest.fixture(scope="module")
def script():
    spec = importlib.util.spec_from_file_location("get_model", SCRIPT)
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # where its dataclasses are looked up
    spec.loader.exec_module(module)
    yield module
    del sys.modules[spec.name]


def test_rotated_pairs_of_each_head_are_taken_apart_into_halves(script):
    # Two heads of width 4: GGUF has rows (first 0, second 0, first 1, second 1) of each head.
    pairs = torch.tensor([[0.0], [2.0], [1.0], [3.0], [10.0], [12.0], [11.0], [13.0]])
    assert script.halves(pairs, heads=2).flatten().tolist() == [0, 1, 2, 3, 10, 11, 12, 13]


def test_each_tensor_of_a_file_has_a_name_of_the_hub(script):
    smollm2, gemma3 = (script.REAL_MODELS[name].parts for name in ("smollm2", "gemma3"))
    embedding = ("model.embed_tokens.weight", "token_embd")
    assert script.hub_name("token_embd.weight", smollm2) == embedding
    assert script.hub_name("blk.29.attn_k.weight", smollm2) == (
        "model.layers.29.self_attn.k_proj.weight",
        "attn_k",
    )
    name = "blk.0.ffn_norm.weight"
    layer = "model.layers.0"
    assert script.hub_name(name, smollm2)[0] == f"{layer}.post_attention_layernorm.weight"
    assert script.hub_name(name, gemma3)[0] == f"{layer}.pre_feedforward_layernorm.weight"


def test_a_norm_of_gemma_is_one_less_on_the_hub(script):
    weight = torch.tensor([1.5, 0.0])
    for part in ("output_norm", "attn_norm", "attn_q_norm", "post_ffw_norm"):
        assert script.gemma3_weight(weight, part, None).tolist() == [0.5, -1.0]
    assert script.gemma3_weight(weight, "attn_q", None) is weight


def test_gemma_is_got_only_when_its_terms_are_accepted(script, monkeypatch):
    got = []
    monkeypatch.setattr(script, "get", lambda model, folder, source: got.append(model.repository))
    monkeypatch.setattr("sys.argv", ["get_model.py", "gemma3"])
    with pytest.raises(SystemExit, match="https://ai.google.dev/gemma/terms.*--accept-gemma-terms"):
        script.main()
    assert got == []
    monkeypatch.setattr("sys.argv", ["get_model.py", "gemma3", "--accept-gemma-terms"])
    monkeypatch.setattr(script, "MODELS", Path("nowhere"))
    script.main()
    assert got == ["google/gemma-3-270m"]


def test_sums_are_all_there_once_and_none_is_trained_and_held_out():
    training, held_out = sums()
    assert (
        len(held_out) == HELD_OUT
        and len({row["question"] for row in training + held_out}) == LARGEST**2
    )
    assert len(training) == LARGEST**2 - HELD_OUT
    assert {"question": "What is 7 + 8?", "answer": 15} in training + held_out


@pytest.mark.parametrize(
    ("completion", "right"),
    [
        ("15", True),
        ("7 + 8 = 15.", True),
        ("15 is 7 + 8", False),
        ("fifteen", False),
        ("", False),
        ("7 + 8 = 15\n", True),
    ],
)
def test_the_last_number_is_the_answer(completion, right):
    assert last_number_is_answer(completion, {"answer": 15}) is right


@pytest.mark.parametrize(
    ("completion", "boxed", "right"),
    [
        ("7 + 8 = \\boxed{15}.", True, True),
        ("\\boxed{14}", True, False),
        ("\\boxed{7 + 8}", False, False),
        ("15", False, False),
        ("\\boxed{}", False, False),
    ],
)
def test_a_box_counts_with_any_number_and_again_with_the_right_one(completion, boxed, right):
    assert number_in_a_box(completion, {"answer": 15}) is boxed
    assert right_number_in_a_box(completion, {"answer": 15}) is right
