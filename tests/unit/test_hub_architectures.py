"""Models of the hub are trained by torchtitan's or by transformers' modules, or refused in a line that says why."""

import contextlib
import json
import shutil

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from tests.fakes.hub_families import FAMILIES, SIZES, tiny_config
from tests.fakes.models import TINY_MODEL, write_weights
from tests.unit.command_line import DEBUG
from torchtitan.experiments.rl.errors import ConfigError
from torchtitan.experiments.rl.models import transformers_decoder
from torchtitan.experiments.rl.models.hub import HubConfig
from torchtitan.experiments.rl.models.policy import (
    ModelConfig,
    decoder_shape,
    hub_shapes,
    is_of_transformers,
    parameter_count,
    policy_spec,
)
from torchtitan.experiments.rl.training.model import materialize


@pytest.fixture
def folder_of(tmp_path):
    """Return a function: a hub folder with this config.json and the tiny model's tokenizer.

    Of its weights there is nothing but their shapes, and these only if it can be trained.
    """

    def make(config):
        folder = tmp_path / "model"
        shutil.copytree(
            TINY_MODEL, folder, ignore=shutil.ignore_patterns("*.safetensors", "config.json")
        )
        (folder / "config.json").write_text(json.dumps(config))
        with contextlib.suppress(ConfigError):
            model = ModelConfig(hf_assets_path=str(folder), trained_by=trained_by(config))
            shapes = hub_shapes(policy_spec(model, device="cpu", max_seq_len=512))
            write_weights(folder, shapes, dtype="F32", bytes_each=4)
        return str(folder)

    return make


def trained_by(config):
    return "transformers" if config.get("use_sliding_window") else "auto"


def config_of(name, **changes):
    """Return what config.json says of a tiny model of transformers."""
    if name in FAMILIES:
        return tiny_config(name, **changes).to_dict() | {"dtype": "float32"}
    config = AutoConfig.for_model(name, **(SIZES | changes)).to_dict()
    architecture = MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[name]
    return config | {"architectures": [architecture], "dtype": "float32"}


@pytest.mark.parametrize("family", FAMILIES)
def test_a_decoder_of_transformers_is_planned_with_its_own_sizes(command, folder_of, family):
    folder = folder_of(config_of(family))
    model = ModelConfig(hf_assets_path=folder)
    assert is_of_transformers(model)
    spec = policy_spec(model, device="cpu", max_seq_len=512)
    shape = decoder_shape(spec)
    assert (shape.vocab_size, shape.dim, shape.layers) == (768, 128, 4)
    assert (shape.heads, shape.kv_heads, shape.head_dim) == (4, 2, 32)
    assert (shape.experts, shape.chosen) == ((4, 2) if family == "gpt_oss" else (1, 1))
    code, out, err = command(*DEBUG, "--model", folder, "--dry-run")
    if family == "gpt_oss":
        assert code == 2 and "engines load no versions of its experts" in err
        return
    line = f"model          {parameter_count(spec) / 1e6:,.1f}M parameters"
    assert code == 0 and line in out and "trained by transformers' modules" in out


@pytest.mark.parametrize("family", FAMILIES)
def test_buffers_are_those_of_transformers_whatever_the_precision(folder_of, family):
    """Rotary angles of frequencies in bfloat16 would be radians off after a thousand tokens."""
    model = ModelConfig(hf_assets_path=folder_of(config_of(family)))
    policy = policy_spec(model, device="cpu", max_seq_len=512).model.build().to(torch.bfloat16)
    materialize(policy, torch.device("cpu"), parameters_on_cpu=False)
    expected = dict(AutoModelForCausalLM.from_config(tiny_config(family)).named_buffers())
    assert {name.rpartition(".")[2] for name in expected} >= {"inv_freq"} or family == "gemma3_text"
    assert dict(policy.named_buffers()).keys() == expected.keys()
    for name, buffer in expected.items():
        torch.testing.assert_close(policy.get_buffer(name), buffer, rtol=0, atol=0)


@pytest.mark.parametrize("family", FAMILIES)
def test_a_gpu_has_the_same_parameters_and_a_tokens_work_leaves_out_idle_experts(folder_of, family):
    model = ModelConfig(hf_assets_path=folder_of(config_of(family)))
    of_cpu, of_gpu = (
        policy_spec(model, device=device, max_seq_len=512) for device in ("cpu", "cuda")
    )
    assert parameter_count(of_cpu) == parameter_count(of_gpu)
    policy = of_gpu.model.build()
    parameters, flops = of_gpu.model.get_nparams_and_flops(policy, 512)
    assert parameters == parameter_count(of_cpu)
    shape = of_gpu.model.shape
    experts = sum(p.numel() for name, p in policy.named_parameters() if ".experts." in name)
    embedding = 0 if shape.tied else 768 * 128
    attention = 4 * 4 * 2 * 32 * 512  # layers, heads, two products, their size, places
    assert flops == 6 * (parameters - embedding - experts // 2 + attention)


LOGITS = {"gemma2": (1.0, 3.0), "granite": (0.25, None), "cohere2": (0.25, None)}


@pytest.mark.parametrize("family", [*FAMILIES, "hyperclovax"])
def test_what_a_model_does_to_its_logits_is_found_by_trying(folder_of, family):
    """Granite divides by ``logits_scaling``, and HyperCLOVA X multiplies by it."""
    config = config_of(family, **({"logits_scaling": 4.0} if family == "hyperclovax" else {}))
    spec = policy_spec(ModelConfig(hf_assets_path=folder_of(config)), device="cpu", max_seq_len=512)
    expected = {"hyperclovax": (4.0, None)} | LOGITS
    found = (spec.model.logit_scale, spec.model.logit_softcap)
    assert found == expected.get(family, (1.0, None))


REFUSED = {
    "an architecture that nobody knows": (
        config_of("qwen2") | {"architectures": ["FooForCausalLM"]},
        "its architecture 'FooForCausalLM' can't be trained here: it is no causal language model of transformers",
    ),
    "code of the folder": (
        config_of("qwen2")
        | {"architectures": ["MineForCausalLM"], "auto_map": {"AutoModelForCausalLM": "m.Mine"}},
        "it is code of the folder, which is not executed",
    ),
    "an encoder": (
        {"architectures": ["BertForMaskedLM"], "model_type": "bert", "vocab_size": 768},
        "it is no causal language model of transformers",
    ),
    "a model of images": (
        {"architectures": ["Qwen2VLForConditionalGeneration"], "model_type": "qwen2_vl"},
        "it is no causal language model of transformers",
    ),
    "a model of text and images": (
        {
            "architectures": ["Gemma3ForConditionalGeneration"],
            "model_type": "gemma3",
            "vision_config": {},
        },
        "it takes images too, and only models of text alone are trained",
    ),
    "quantized weights": (
        config_of("qwen2") | {"quantization_config": {"quant_method": "gptq", "bits": 4}},
        "its weights are quantized: take the model's folder in bfloat16",
    ),
    "layers of another name": (config_of("gpt2"), "its layers are not a list called layers"),
    "a head of another name in the hub": (
        config_of("gpt_neox"),
        "transformers holds its weights in another form than the hub",
    ),
    "a head with a bias": (config_of("phi"), "its head has a bias"),
    "angles that depend on the length": (
        config_of(
            "qwen2", rope_parameters={"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}
        ),
        "its rotary angles ('dynamic') depend on the longest of the samples",
    ),
    "attention in both directions": (
        config_of("gemma3_text", use_bidirectional_attention=True),
        "its layers see what comes after a token",
    ),
    "convolutions": (
        config_of("lfm2", layer_types=["conv", "full_attention"] * 2),
        "its layers mix tokens by convolutions too",
    ),
    "masks of its own": (config_of("doge"), "its layers make a mask of their own"),
    "attention of its own": (
        config_of("gptj"),
        "its layers do not call transformers' attention interface",
    ),
    "two attentions a layer": (
        config_of("diffllama"),
        "not each of its layers calls transformers' attention interface once",
    ),
    "weights that are buffers": (config_of("apertus"), "its weights have a buffer"),
    "a bias that engines drop": (
        config_of("ernie4_5", use_bias=True),
        "its config.json has use_bias = true, which the engine ignores for a Ernie4_5ForCausalLM",
    ),
    "a layer of another form in engines": (
        config_of("stablelm", use_parallel_residual=True),
        "its config.json has use_parallel_residual = true, which the engine ignores",
    ),
    "norms that engines drop": (
        config_of("stablelm", qk_layernorm=True),
        "its config.json has qk_layernorm = true, which the engine ignores",
    ),
    "experts in another form": (
        config_of("mixtral"),
        "transformers holds its weights in another form than the hub",
    ),
}


@pytest.mark.parametrize(("config", "cause"), REFUSED.values(), ids=REFUSED)
def test_a_model_that_can_not_be_trained_is_refused_before_anything_is_loaded(
    refused, folder_of, config, cause
):
    folder = folder_of(config)
    for words in ([], ["--dry-run"]):
        line = refused(*DEBUG, "--model", folder, *words)
        assert "error: model.hf_assets_path = " in line and cause in line


@pytest.mark.parametrize(
    ("config", "names"),
    [
        (config_of("granite", attention_dropout=0.1), {"attention_dropout"}),
        (
            config_of(
                "starcoder2", attention_dropout=0.1, residual_dropout=0.1, embedding_dropout=0.1
            ),
            {"attention_dropout", "residual_dropout", "embedding_dropout"},
        ),
    ],
    ids=["of attention", "of other names"],
)
def test_dropout_is_turned_off(command, folder_of, config, names):
    folder = folder_of(config)
    assert command(*DEBUG, "--model", folder, "--dry-run")[0] == 0
    spec = policy_spec(ModelConfig(hf_assets_path=folder), device="cpu", max_seq_len=512)
    policy = spec.model.build()
    rates = {
        name: value
        for module in policy.modules()
        for name, value in vars(module).items()
        if "dropout" in name
    }
    assert rates == dict.fromkeys(names, 0.0)


@pytest.mark.parametrize(
    ("change", "cause"),
    [
        (
            lambda decoder: decoder.register_parameter("extra", torch.nn.Parameter(torch.ones(1))),
            "it has a parameter beside its layers, extra",
        ),
        (
            lambda decoder: decoder.norm.register_buffer("table", torch.ones(2), persistent=False),
            "its buffers can't be computed again: transformers does not fill norm.table",
        ),
    ],
)
def test_what_could_not_be_published_or_filled_again_is_refused(
    monkeypatch, folder_of, change, cause
):
    folder = folder_of(config_of("olmo2"))
    build = transformers_decoder.causal_model

    def build_changed(*args, **kwargs):
        causal = build(*args, **kwargs)
        change(causal.base_model)
        return causal

    monkeypatch.setattr(transformers_decoder, "causal_model", build_changed)
    transformers_decoder._checked_model.cache_clear()
    with pytest.raises(ConfigError, match=cause):
        transformers_decoder.checked_model(HubConfig.read(folder))


def test_a_run_longer_than_a_window_that_the_engine_makes_wider_is_refused(
    command, refused, folder_of
):
    """vLLM shows Cohere 2 one more token in its window than transformers does."""
    folder = folder_of(config_of("cohere2", sliding_window=300))
    words = [*DEBUG, "--model", folder, "--dry-run", "--generator.engine.max-model-len"]
    line = refused(*words, "301")
    assert "generator.engine.max_model_len = 301: " in line and "at most 300" in line
    assert command(*words, "300")[0] == 0


@pytest.mark.parametrize(
    ("words", "line"),
    [
        (
            ["--trainer.ranks", "2", "--trainer.parallelism.tensor-parallel-degree", "2"],
            "tensor_parallel_degree = 2: the",
        ),
        (["--trainer.router-replay", "ids"], "trainer.router_replay = 'ids': "),
        (["--model.trained-by", "torchtitan"], "'Qwen2ForCausalLM'; torchtitan trains Qwen3"),
        (
            ["--model.trained-by", "transformers", "--model.flavor", "qwen3/8B"],
            "model.trained_by = 'transformers': a flavor is torchtitan's",
        ),
    ],
)
def test_what_only_torchtitans_models_can_do_is_refused(refused, folder_of, words, line):
    folder = folder_of(config_of("qwen2"))
    assert line in refused(*DEBUG, "--model", folder, *words, "--dry-run")


def test_adapters_of_fused_matrices_are_merged_because_the_engine_serves_none(
    command, refused, folder_of
):
    words = [*DEBUG, "--model", folder_of(config_of("phi3")), "--dry-run"]
    words += ["--trainer.lora.rank", "2"]
    line = refused(*words)
    assert "trainer.lora.serve = 'served': the engine serves no adapter of gate_up_proj" in line
    assert command(*words, "--trainer.lora.serve", "merged")[0] == 0
    assert command(*words, "--trainer.lora.targets", "o_proj")[0] == 0


def test_a_variant_that_torchtitan_does_not_have_is_left_to_transformers(
    command, refused, folder_of
):
    config = json.loads((TINY_MODEL / "config.json").read_text()) | {"use_sliding_window": True}
    words = [*DEBUG, "--model", folder_of(config), "--dry-run"]
    line = refused(*words)
    assert "use_sliding_window = True" in line
    assert 'set model.trained_by to "transformers"' in line
    code, out, _ = command(*words, "--model.trained-by", "transformers")
    assert code == 0 and "trained by transformers' modules" in out
