"""From a hub folder or a flavor to torchtitan's model: every field of config.json arrives, or is refused by name."""

import json
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torchtitan.models.common import ComplexRoPE, CosSinRoPE

from tests.fakes.engine import ScriptedEngineConfig
from tests.fakes.models import TINY_MODEL
from tests.unit.command_line import DEBUG, assert_one_line
from torchtitan.experiments.rl.errors import ConfigError
from torchtitan.experiments.rl.generation.vllm.engine import VLLMEngineConfig
from torchtitan.experiments.rl.models import policy as policy_module
from torchtitan.experiments.rl.models.experts import Experts
from torchtitan.experiments.rl.models.family import UNUSED_INIT
from torchtitan.experiments.rl.models.hub import HubConfig
from torchtitan.experiments.rl.models.llama3 import LLAMA3
from torchtitan.experiments.rl.models.policy import (
    FAMILIES,
    ModelConfig,
    family_of_flavor,
    parameter_count,
    policy_spec,
)
from torchtitan.experiments.rl.models.qwen3 import QWEN3, QWEN3_MOE

LLAMA_3_1 = {
    "architectures": ["LlamaForCausalLM"],
    "attention_bias": False,
    "hidden_act": "silu",
    "hidden_size": 48,
    "intermediate_size": 80,
    "max_position_embeddings": 4096,
    "mlp_bias": False,
    "model_type": "llama",
    "num_attention_heads": 6,
    "num_hidden_layers": 3,
    "num_key_value_heads": 2,
    "rms_norm_eps": 1e-05,
    "rope_scaling": {
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
        "rope_type": "llama3",
    },
    "rope_theta": 500000.0,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "vocab_size": 768,
}
"""As transformers 4 wrote it, with a small model's sizes."""

# Embedding and head, final norm; a layer: two norms, q and o of 48 x 48, k and v of 16 x 48, three of 80 x 48.
LLAMA_PARAMETERS = 2 * 768 * 48 + 48 + 3 * (2 * 48 + 2 * 48 * 48 + 2 * 16 * 48 + 3 * 80 * 48)


def folder_of(tmp_path: Path, values: dict, **changes) -> str:
    values = {name: value for name, value in (values | changes).items() if value is not ...}
    (tmp_path / "config.json").write_text(json.dumps(values))
    return str(tmp_path)


def spec_of(tmp_path: Path, values: dict = LLAMA_3_1, **changes):
    """``...`` as a value leaves the field out."""
    model = ModelConfig(hf_assets_path=folder_of(tmp_path, values, **changes))
    return policy_spec(model, device="cpu", max_seq_len=512)


def qwen3_config() -> dict:
    return json.loads((TINY_MODEL / "config.json").read_text())


def moe_config() -> dict:
    return json.loads((TINY_MODEL.with_name("tiny_qwen3_moe") / "config.json").read_text())


# ---- Llama 3 from its folder


def test_every_number_of_a_llama_folder_is_in_the_model(tmp_path):
    spec = spec_of(tmp_path)
    model, layer = spec.model, spec.model.layers[-1]
    assert spec.name == "llama3" and len(model.layers) == 3
    assert (model.dim, model.vocab_size, model.enable_weight_tying) == (48, 768, False)
    attention = layer.attention
    assert (attention.n_heads, attention.n_kv_heads, attention.head_dim, attention.qk_norm) == (
        6,
        2,
        8,
        None,
    )
    assert layer.feed_forward.w1.out_features == 80
    assert {layer.attention_norm.eps, layer.ffn_norm.eps, model.norm.eps} == {1e-5}
    scaled = dict(scaling="llama", scaling_factor=8, low_freq_factor=1, high_freq_factor=4)
    expected = ComplexRoPE.Config(
        dim=8, max_seq_len=512, theta=500000, original_max_position_embeddings=8192, **scaled
    )
    assert attention.rope == expected
    assert parameter_count(spec) == LLAMA_PARAMETERS
    assert (
        parameter_count(spec_of(tmp_path, tie_word_embeddings=True)) == LLAMA_PARAMETERS - 768 * 48
    )


def test_rotary_fields_are_read_as_transformers_5_writes_them(tmp_path):
    before = spec_of(tmp_path).model.layers[0].attention.rope
    rope = LLAMA_3_1["rope_scaling"] | {"rope_theta": 500000.0}
    after = spec_of(tmp_path, rope_scaling=..., rope_theta=..., rope_parameters=rope)
    assert after.model.layers[0].attention.rope == before


def test_what_a_llama_folder_leaves_out_is_what_transformers_takes(tmp_path):
    left_out = (
        "num_key_value_heads",
        "rope_scaling",
        "rope_theta",
        "tie_word_embeddings",
        "attention_bias",
        "mlp_bias",
    )
    model = spec_of(tmp_path, **dict.fromkeys(left_out, ...)).model
    attention = model.layers[0].attention
    assert (attention.n_kv_heads, attention.head_dim, model.enable_weight_tying) == (6, 8, False)
    assert attention.rope == ComplexRoPE.Config(dim=8, max_seq_len=512, theta=10000.0)
    assert spec_of(tmp_path, head_dim=32).model.layers[0].attention.head_dim == 32
    assert spec_of(tmp_path, head_dim=None).model.layers[0].attention.head_dim == 8


REFUSED = {
    "biased attention": (LLAMA_3_1, {"attention_bias": True}, "attention_bias = True"),
    "biased feed-forward": (LLAMA_3_1, {"mlp_bias": True}, "mlp_bias = True"),
    "another activation": (LLAMA_3_1, {"hidden_act": "gelu"}, "hidden_act = 'gelu'"),
    "another scaling": (
        LLAMA_3_1,
        {"rope_scaling": {"rope_type": "yarn", "factor": 4.0}},
        "rope_type = 'yarn'",
    ),
    "a scaling by its old name": (
        LLAMA_3_1,
        {"rope_scaling": {"type": "linear", "factor": 4.0}},
        "rope_type = 'linear'",
    ),
    "half a scaling": (LLAMA_3_1, {"rope_scaling": {"rope_type": "llama3"}}, "has no 'factor'"),
    "a field too few": (LLAMA_3_1, {"intermediate_size": ...}, "has no 'intermediate_size'"),
    "no architecture": (
        LLAMA_3_1,
        {"architectures": ...},
        "its architecture '' can't be trained here",
    ),
    "Qwen3 with scaling": (
        qwen3_config(),
        {"rope_parameters": {"rope_type": "yarn", "rope_theta": 1e6}},
        "rope_type = 'yarn'",
    ),
    "Qwen3 with a window": (
        qwen3_config(),
        {"use_sliding_window": True},
        "use_sliding_window = True",
    ),
    "experts in every second layer": (
        moe_config(),
        {"decoder_sparse_step": 2},
        "decoder_sparse_step = 2",
    ),
    "a layer without experts": (moe_config(), {"mlp_only_layers": [0]}, "mlp_only_layers = [0]"),
    "more chosen than there are": (
        moe_config(),
        {"num_experts_per_tok": 9},
        "num_experts_per_tok = 9, and 8 experts",
    ),
    "experts without a size": (
        moe_config(),
        {"moe_intermediate_size": ...},
        "has no 'moe_intermediate_size'",
    ),
}


@pytest.mark.parametrize("values, changes, message", REFUSED.values(), ids=REFUSED)
def test_a_model_that_would_be_computed_wrongly_is_refused_by_field(
    tmp_path, values, changes, message
):
    with pytest.raises(ConfigError, match="model.hf_assets_path") as error:
        spec_of(tmp_path, values, **changes)
    assert message in str(error.value) and str(tmp_path) in str(error.value)


def test_dtype_of_the_weights_is_read_under_either_name():
    assert HubConfig("", {"torch_dtype": "bfloat16"}).dtype == "bfloat16"
    assert HubConfig("", {"dtype": "float16"}).dtype == "float16"
    assert HubConfig("", {}).dtype == "float32"


def llama_weights() -> dict[str, torch.Tensor]:
    """LLAMA_3_1's, under the names that transformers gives them."""
    sizes = {"model.embed_tokens": (768, 48), "lm_head": (768, 48), "model.norm": (48,)}
    for layer in range(3):
        own = {
            "self_attn.q_proj": (48, 48),
            "self_attn.k_proj": (16, 48),
            "self_attn.v_proj": (16, 48),
        }
        own |= {
            "self_attn.o_proj": (48, 48),
            "mlp.gate_proj": (80, 48),
            "mlp.up_proj": (80, 48),
            "mlp.down_proj": (48, 80),
        }
        own |= {"input_layernorm": (48,), "post_attention_layernorm": (48,)}
        sizes |= {f"model.layers.{layer}.{name}": size for name, size in own.items()}
    return {
        f"{name}.weight": torch.zeros(size, dtype=torch.bfloat16) for name, size in sizes.items()
    }


def test_a_run_on_a_llama_folder_is_planned_before_anything_starts(command, tmp_path):
    folder = folder_of(tmp_path, LLAMA_3_1)
    for file in [*TINY_MODEL.glob("tokenizer*"), TINY_MODEL / "chat_template.jinja"]:
        shutil.copy(file, tmp_path)
    save_file(llama_weights(), tmp_path / "model.safetensors")
    code, out, err = command(*DEBUG, "--model.hf-assets-path", folder, "--dry-run")
    assert (code, err) == (0, "")
    assert f"{LLAMA_PARAMETERS / 1e6:.1f}M parameters" in out
    code, _, err = command(
        *DEBUG, "--model.hf-assets-path", folder, "--batcher.row-length", "8192", "--dry-run"
    )
    assert code == 2
    assert_one_line(err, "batcher.row_length = 8192", "4096 positions")


# ---- mixtures of experts


@pytest.mark.parametrize("name", ["num_experts", "num_local_experts"])
def test_every_number_of_a_mixture_is_in_the_model_by_either_version_of_transformers(
    tmp_path, name
):
    count = dict.fromkeys(("num_experts", "num_local_experts"), ...) | {name: 6}
    spec = spec_of(
        tmp_path,
        moe_config(),
        **count,
        num_experts_per_tok=3,
        moe_intermediate_size=40,
        norm_topk_prob=False,
    )
    moe = spec.model.layers[-1].moe
    inner, router, dispatcher = (
        moe.routed_experts.inner_experts,
        moe.router,
        moe.routed_experts.token_dispatcher,
    )
    assert (inner.num_experts, inner.dim, inner.hidden_dim) == (6, 128, 40)
    assert (router.num_experts, router.top_k, router.score_func, router.route_norm) == (
        6,
        3,
        "softmax",
        False,
    )
    assert (dispatcher.num_experts, dispatcher.top_k) == (6, 3)
    # Embedding and last norm; a layer: two norms of 128 and two of a head, attention, a router and six experts.
    attention = 2 * 128 * 128 + 2 * 64 * 128
    assert parameter_count(spec) == 768 * 128 + 128 + 4 * (
        2 * 128 + 2 * 32 + attention + 6 * 128 + 6 * 3 * 40 * 128
    )
    assert spec_of(tmp_path, moe_config()).model.layers[0].moe.router.route_norm


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_experts_compute_in_the_dtype_of_their_tokens(dtype):
    """Three experts, of which the second has no token; the sum over the hidden units written out."""
    experts = (
        Experts.Config(dim=8, hidden_dim=16, num_experts=3, param_init=UNUSED_INIT)
        .build()
        .to(dtype)
    )
    random = torch.Generator().manual_seed(0)
    for parameter in experts.parameters():
        torch.nn.init.normal_(parameter, generator=random)
    tokens = torch.randn(5, 8, generator=random, dtype=dtype)
    found = experts(tokens, torch.tensor([2, 0, 3]))
    for token, expert, own in zip(tokens, (0, 0, 2, 2, 2), found, strict=True):
        gate, up = (
            weight[expert].double() @ token.double() for weight in (experts.w1_EFD, experts.w3_EFD)
        )
        expected = experts.w2_EDF[expert].double() @ (gate / (1 + torch.exp(-gate)) * up)
        torch.testing.assert_close(
            own.double(), expected, rtol=0, atol=1e-4 if dtype == torch.float32 else 1e-12
        )


def test_experts_have_no_adapters_and_on_cpu_the_engine_serves_none_beside_them(command):
    words = ["--config", "rl_moe_qwen3_debug", "--trainer.lora.rank", "4", "--dry-run"]
    code, _, err = command(*words)
    assert code == 2
    assert_one_line(err, "trainer.lora.serve = 'served': set it to merged")
    code, out, _ = command(*words, "--trainer.lora.serve", "merged")
    # A and B of queries, keys with values, and the way out, in four layers.
    assert (
        code == 0 and f"adapters of rank 4: {4 * 4 * (3 * 128 + 2 * 128 + 128) / 1e6:.2f}M" in out
    )
    code, _, err = command(*words, "--trainer.lora.targets", "gate")
    assert code == 2
    assert_one_line(
        err, "gate names no matrix of this model's layers; choose among", "experts have no adapters"
    )


def test_router_replay_is_refused_where_nothing_is_routed_or_nobody_says_how(command):
    replay = ["--trainer.router-replay", "ids", "--dry-run"]
    mixture = ["--config", "rl_moe_qwen3_debug", *replay]
    assert command(*mixture)[0] == 0
    for words, line in (
        (
            ["--config", "rl_grpo_qwen3_debug", *replay],
            "trainer.router_replay = 'ids': the model is no mixture of experts",
        ),
        (
            [*mixture, "--generator.engine.no-enable-prefix-caching"],
            "generator.engine.enable_prefix_caching = False: set it to",
        ),
    ):
        code, _, err = command(*words)
        assert code == 2
        assert_one_line(err, line)
    engine = VLLMEngineConfig(args={"speculative_config": {"method": "ngram"}})
    with pytest.raises(
        ConfigError, match="generator.engine.args.speculative_config = .*: leave it out"
    ):
        engine.check_routes()
    with pytest.raises(
        ConfigError,
        match="router_replay = 'ids': ScriptedEngineConfig does not say which experts it took",
    ):
        ScriptedEngineConfig().check_routes()


def test_no_bias_balances_the_load_which_the_engine_would_not_have():
    spec = policy_spec(
        ModelConfig(hf_assets_path="/nowhere", flavor="30B-A3B"), device="cuda", max_seq_len=512
    )
    with torch.device("meta"):
        assert not any(
            "bias" in name for name, _ in spec.model.layers[0].moe.build().named_buffers()
        )


# ---- flavors


def test_a_flavor_is_found_by_its_full_name_by_the_folder_or_where_one_family_has_it(tmp_path):
    nowhere, llama = "/nowhere", folder_of(tmp_path, LLAMA_3_1)
    assert family_of_flavor("qwen3/8B", nowhere) == (QWEN3, "8B")
    assert family_of_flavor("llama3/8B", nowhere) == (LLAMA3, "8B")
    assert family_of_flavor("qwen3/8B", llama) == (QWEN3, "8B")
    assert family_of_flavor("8B", llama) == (LLAMA3, "8B")
    assert family_of_flavor("8B", str(TINY_MODEL)) == (QWEN3, "8B")
    assert family_of_flavor("0.6B", nowhere) == (QWEN3, "0.6B")
    assert family_of_flavor("qwen3/30B-A3B", nowhere) == (QWEN3_MOE, "30B-A3B")
    assert family_of_flavor("405B", str(TINY_MODEL)) == (LLAMA3, "405B")


@pytest.mark.parametrize(
    "flavor, message",
    [
        ("8B", "choose one of qwen3/8B, llama3/8B"),
        ("9B", "qwen3/0.6B"),
        ("llama3/1B", "llama3/8B"),
        ("llama3/0.6B", "qwen3/0.6B"),
    ],
)
def test_a_flavor_that_is_unknown_or_of_two_families_is_refused_with_those_there_are(
    flavor, message
):
    with pytest.raises(ConfigError, match="model.flavor") as error:
        policy_spec(
            ModelConfig(hf_assets_path="/nowhere", flavor=flavor), device="cpu", max_seq_len=512
        )
    assert message in str(error.value)


@pytest.mark.parametrize(
    "name, millions", [("qwen3/0.6B", 596.0), ("llama3/8B", 8030.3), ("30B-A3B", 30532.1)]
)
def test_a_flavor_has_the_parameters_its_model_card_says(name, millions):
    spec = policy_spec(
        ModelConfig(hf_assets_path="/nowhere", flavor=name), device="cuda", max_seq_len=512
    )
    assert round(parameter_count(spec) / 1e6, 1) == millions


def test_llama_flavors_that_are_left_out_still_have_the_wrong_rotary_scaling():
    from torchtitan.models.llama3 import llama3_configs

    for flavor in ("1B", "3B"):
        assert (
            llama3_configs[flavor](attn_backend="flex").layers[0].attention.rope.scaling_factor == 8
        )


# ---- a further family


def test_a_further_family_is_one_record_under_its_architecture(tmp_path, monkeypatch):
    monkeypatch.setitem(
        policy_module.FAMILIES, "OtherForCausalLM", replace(QWEN3, name="other", flavors=())
    )
    spec = spec_of(tmp_path, qwen3_config(), architectures=["OtherForCausalLM"])
    assert spec.name == "other" and isinstance(
        spec.model.layers[0].attention.rope, CosSinRoPE.Config
    )


@pytest.mark.parametrize("architecture", FAMILIES)
def test_every_family_gives_log_probabilities_of_the_needed_tokens(tmp_path, architecture):
    (values,) = (
        folder
        for folder in (qwen3_config(), moe_config(), LLAMA_3_1)
        if folder["architectures"] == [architecture]
    )
    spec = spec_of(tmp_path, values)
    model = spec.model.build()
    model.init_states(buffer_device=torch.device("cpu"))
    tokens, positions = torch.randint(768, (2, 7)), torch.arange(7).expand(2, 7)
    needed = positions > 3
    logprobs, entropy = model(tokens, positions, torch.ones(2, 7), needed)
    # The head is zeros: every token is as likely as any other.
    expected = torch.where(needed, -torch.log(torch.tensor(768.0)), 0.0)
    torch.testing.assert_close(logprobs, expected)
    torch.testing.assert_close(entropy, -expected)
