"""Every shipped config with models that it was not made for: it runs, or says in one line what does not fit. Shapes only."""

import json
from pathlib import Path

import pytest
from tokenizers import pre_tokenizers
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from tests.fakes.models import CHATML, SMOLLM2, write_model
from tests.unit.command_line import assert_one_line
from torchtitan.experiments.rl.command.command_line import DEFAULT_MODULE, config_functions
from torchtitan.experiments.rl.command.teachers import difference

QWEN3_0_6B = {
    "architectures": ["Qwen3ForCausalLM"],
    "dtype": "bfloat16",
    "head_dim": 128,
    "hidden_act": "silu",
    "hidden_size": 1024,
    "intermediate_size": 3072,
    "max_position_embeddings": 40_960,
    "num_attention_heads": 16,
    "num_hidden_layers": 28,
    "num_key_value_heads": 8,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1_000_000.0,
    "tie_word_embeddings": True,
    "vocab_size": 151_936,
}
SHORT = SMOLLM2 | {"vocab_size": 2_048, "num_hidden_layers": 2, "max_position_embeddings": 256}
MODELS = {
    "no tools in its template": (SMOLLM2, CHATML),
    "a large vocabulary": (QWEN3_0_6B, None),
    "few positions": (SHORT, CHATML),
}
CONFIGS = [
    name for name in config_functions(DEFAULT_MODULE) if not name.startswith("rl_math_")
]  # its data is the hub's
GPU = ("rl_grpo_qwen3_", "rl_questions_qwen3", "rl_reasoning_gym_")
WIDE = ("rl_grpo_qwen3_14b", "rl_grpo_qwen3_30b_a3b", "rl_grpo_qwen3_32b")
TOO_LONG = "batcher.row_length = {}: the model has 256 positions; choose at most that"
ROLES = "has no effect, because the renderer does not say whose message a token belongs to"
REFUSED = {
    **{
        (
            f"rl_{name}_qwen3_debug",
            "no tools in its template",
        ): "renderer.name = 'default': tasks.calculator offers tools"
        for name in ("calculator", "agent_calculator", "agent_forks")
    },
    ("rl_echo_qwen3_debug", "no tools in its template"): ROLES,
    ("rl_mixed_qwen3_debug", "no tools in its template"): ROLES,
    ("rl_demonstrations_qwen3_debug", "no tools in its template"): ROLES,
    **{
        (name, "no tools in its template"): "9 attention heads"
        for name in CONFIGS
        if name.startswith(WIDE)
    },
    **{
        (
            "rl_grpo_qwen3_30b_a3b_16",
            model,
        ): "expert_parallel_degree = 8: the model is no mixture of experts"
        for model in MODELS
    },
    **{(name, "few positions"): TOO_LONG.format(8192) for name in CONFIGS if name.startswith(GPU)},
    **{(name, "few positions"): TOO_LONG.format(512) for name in CONFIGS if "_debug" in name},
    **{
        (name, "few positions"): TOO_LONG.format(1024)
        for name in CONFIGS
        if name.endswith("_smollm2")
    },
    ("rl_questions_qwen3_debug", "few positions"): TOO_LONG.format(1024),
}


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    folder = tmp_path_factory.mktemp("models")
    return {
        name: write_model(folder / name.replace(" ", "_"), config, template=template)
        for name, (config, template) in MODELS.items()
    }


def is_slow(name: str, model: str) -> bool:
    if (name, model) in REFUSED:
        return False
    if name.startswith("rl_reasoning_gym_"):
        return True
    is_second = model == "a large vocabulary" and (name, "no tools in its template") not in REFUSED
    return is_second and name != CONFIGS[0]


def pairs() -> list:
    """Each config with each model. Where it takes two, all but the first config's second are slow.

    So is what Reasoning Gym's config takes: it is that of the math tasks with tasks of another
    package, whose import takes seconds.
    """
    return [
        pytest.param(
            name,
            model,
            id=f"{name}-{model}",
            marks=pytest.mark.slow if is_slow(name, model) else (),
        )
        for name in CONFIGS
        for model in MODELS
    ]


@pytest.mark.usefixtures("one_scoring_server")
@pytest.mark.parametrize(("name", "model"), pairs())
def test_a_config_takes_another_model_or_says_what_does_not_fit(
    command, name, model, models, monkeypatch
):
    # It writes to the disk to learn how fast that is.
    monkeypatch.setattr(
        "torchtitan.experiments.rl.command.machine.checkpoint_seconds", lambda *arguments: None
    )
    # A try of a task that starts the scoring server waits for it, and the next task finds it there.
    limit = ("--user-code.preflight-timeout-s", "120")
    code, out, err = command("--config", name, "--model", str(models[model]), "--dry-run", *limit)
    if (name, model) in REFUSED:
        assert code == 2 and out == ""
        assert_one_line(err)
        assert REFUSED[name, model] in err
    else:
        assert code == 0 and out
        assert all(line.startswith("warning: ") for line in err.splitlines())
        rates = "trainer.optimizer.lr" in err
        assert rates == (name.endswith(("_debug", "_hosts")) and model != "few positions")


def test_a_teacher_with_another_tokenizer_is_refused_and_a_judge_may_have_any(
    refused, command, tmp_path
):
    other = write_model(tmp_path / "other", SHORT | {"max_position_embeddings": 1024})
    tokenizer = other / "tokenizer.json"
    tokens = json.loads(tokenizer.read_text())
    tokens["added_tokens"].append(tokens["added_tokens"][-1] | {"id": 768, "content": "<|more|>"})
    tokenizer.write_text(json.dumps(tokens))
    for name in ("rl_opd_qwen3_debug", "rl_sft_qwen3_debug"):
        err = refused("--config", name, "--model", str(other))
        assert "tasks.sum_digits.algorithm.teacher.path" in err
        assert "its tokenizer has another number of tokens; the policy's" in err
    code, _, err = command("--config", "rl_judge_qwen3_debug", "--model", str(other), "--dry-run")
    assert code == 0, err


def test_equal_vocabularies_that_divide_texts_otherwise_differ(tokenizer_path, tokenizer):
    other = AutoTokenizer.from_pretrained(str(tokenizer_path))
    assert difference(other, tokenizer) is None
    other.backend_tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    assert "into other tokens" in difference(other, tokenizer)


@pytest.mark.parametrize(
    ("change", "named"),
    [
        (
            lambda file: file["model"]["merges"].reverse(),
            "merges characters into tokens by other rules",
        ),
        (
            lambda file: file["added_tokens"][0].update(special=False),
            "treats other ids as special tokens",
        ),
    ],
)
def test_equal_vocabularies_with_other_rules_differ(
    change, named, tokenizer_path, tokenizer, tmp_path
):
    described = json.loads((Path(tokenizer_path) / "tokenizer.json").read_text())
    change(described)
    file = tmp_path / "tokenizer.json"
    file.write_text(json.dumps(described))
    other = PreTrainedTokenizerFast(tokenizer_file=str(file))
    assert named in difference(other, tokenizer)
