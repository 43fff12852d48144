"""Adapters: which matrices have them, what they are outside of the trainer, and the folders that are read and written."""

import json
from dataclasses import replace

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from torchtitan.protocols.model_spec import ModelSpec
from transformers import AutoModelForCausalLM

from tests.integration.models import MODEL, llama_folder
from torchtitan.experiments.rl.errors import ConfigError
from torchtitan.experiments.rl.models.lora import (
    Adapters,
    LoRA,
    adapter_shapes,
    trained_state,
    write_adapter,
    write_merged,
)
from torchtitan.experiments.rl.models.policy import ModelConfig, policy_spec
from torchtitan.experiments.rl.training.checkpoints import BaseDigest

PATH = str(MODEL)
FOLDER = ModelConfig(hf_assets_path=PATH)
FUSED = ModelConfig(hf_assets_path=PATH, flavor="qwen3/debugmodel")


def built(
    lora: LoRA.Config, model: ModelConfig = FOLDER
) -> tuple[torch.nn.Module, ModelSpec, Adapters]:
    spec = spec_of(lora, model)
    with torch.device("meta"):
        made = spec.model.build()
    made.to_empty(device="cpu")
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        made.init_states(buffer_device=torch.device("cpu"))
        for parameter in made.parameters():
            parameter.normal_(0, 0.05, generator=generator)
    return made, spec, Adapters(made, spec, lora)


def spec_of(lora: LoRA.Config, model: ModelConfig = FOLDER) -> ModelSpec:
    if model is FUSED:  # the tiny folder's own sizes are not the flavor's
        from torchtitan.models.qwen3 import model_registry

        from torchtitan.experiments.rl.models.lora import with_lora

        return with_lora(model_registry("debugmodel", attn_backend="flex"), lora)
    return policy_spec(model, device="cpu", max_seq_len=16, lora=lora)


def test_only_adapters_are_trained_and_the_head_and_the_embedding_have_none():
    model, _, _ = built(LoRA.Config(rank=4))
    assert trained_state(model).keys() == {
        name for name, _ in model.named_parameters() if ".lora_" in name
    }
    assert not any(
        part in name
        for name in trained_state(model)
        for part in ("lm_head", "tok_embeddings", "norm")
    )
    assert {name.split(".")[-3] for name in trained_state(model)} == {
        "wq",
        "wk",
        "wv",
        "wo",
        "w1",
        "w2",
        "w3",
    }


def test_targets_choose_matrices():
    model, _, adapters = built(LoRA.Config(targets=("wq", "w2")))
    assert {name.split(".")[-3] for name in trained_state(model)} == {"wq", "w2"}
    assert {name.split(".")[-3] for name, _ in adapters.items()} == {"q_proj", "down_proj"}


@pytest.mark.parametrize("targets", [("wq", "q_proj"), ("lm_head",), ("tok_embeddings",), ()])
def test_a_target_that_names_no_matrix_of_a_layer_is_refused(targets):
    with pytest.raises(
        ConfigError, match="trainer.lora.targets.*(wkv, wo|nothing would be trained)"
    ):
        spec_of(LoRA.Config(targets=targets))


def test_the_first_b_is_zero_and_a_does_not_depend_on_what_else_is_drawn():
    torch.manual_seed(1)
    first = built(LoRA.Config(rank=4))[2]
    torch.manual_seed(2)
    second = built(LoRA.Config(rank=4, targets=("wq",)))[2]
    first.start()
    second.start()
    tensors, fewer = first.peft()[""], second.peft()[""]
    assert all(not tensor.any() for name, tensor in tensors.items() if "lora_B" in name)
    for name, tensor in fewer.items():
        torch.testing.assert_close(tensor, tensors[name], rtol=0, atol=0)
    a = next(tensor for name, tensor in tensors.items() if "lora_A" in name)
    assert a.abs().max() <= 1 / np.sqrt(a.shape[1]) and a.std() > 0.5 / np.sqrt(3 * a.shape[1])


@pytest.mark.parametrize("kind", ["folder", "llama", "fused"])
def test_an_adapter_by_hub_names_adds_to_the_hub_weights_what_the_model_computes(kind, tmp_path):
    """The hub's W + scale B A, with torchtitan's rows put into the hub's order, is the hub form of torchtitan's own."""
    llama = ModelConfig(hf_assets_path=llama_folder(tmp_path / "llama", num_key_value_heads=2))
    model = {"folder": FOLDER, "llama": llama, "fused": FUSED}[kind]
    lora = LoRA.Config(rank=3, alpha=7.5)
    made, spec, adapters = built(lora, model)
    to_hub = spec.state_dict_adapter(spec.model, None).to_hf

    def hub_weights() -> dict[str, torch.Tensor]:
        held = {
            name: tensor.clone()
            for name, tensor in made.state_dict().items()
            if ".lora_" not in name
        }
        return to_hub(held)

    before = hub_weights()
    with adapters.merged(made):
        merged = hub_weights()
    peft, scaled = adapters.peft()[""], dict(adapters.items())
    adapted = {name.removeprefix("base_model.model.").rpartition(".lora_")[0] for name in peft}
    assert len(adapted) == 7 * len(made.layers)
    for name, weight in before.items():
        module = name.removesuffix(".weight")
        expected = weight.double()
        if module in adapted:
            a, b = (peft[f"base_model.model.{module}.lora_{part}.weight"].double() for part in "AB")
            expected = expected + 2.5 * (b @ a)
            torch.testing.assert_close(
                scaled[f"base_model.model.{module}.lora_B.weight"].double(),
                2.5 * b,
                rtol=1e-6,
                atol=0,
            )
        torch.testing.assert_close(merged[name].double(), expected, rtol=0, atol=1e-6, msg=name)
    for name, weight in hub_weights().items():
        assert torch.equal(weight, before[name]), "the base comes back bit for bit"


def test_a_forward_pass_adds_scale_b_a_and_a_backward_pass_reaches_adapters_alone():
    made, _, adapters = built(LoRA.Config(rank=4, alpha=12))
    tokens = torch.arange(3, 11)[None]
    positions = torch.arange(8, dtype=torch.int32)[None]
    arguments = (tokens, positions, torch.ones(tokens.shape), positions != 0)
    with torch.no_grad(), adapters.merged(made):
        for name, parameter in trained_state(made).items():
            if "lora_b" in name:
                parameter.mul_(0)
        expected, _ = made(*arguments)
    made, _, adapters = built(LoRA.Config(rank=4, alpha=12))
    logprobs, _ = made(*arguments)
    torch.testing.assert_close(logprobs, expected, rtol=0, atol=1e-4)
    logprobs.sum().backward()
    assert all(
        (parameter.grad is not None) == parameter.requires_grad for parameter in made.parameters()
    )


def test_a_peft_folder_is_read_as_it_was_written(tmp_path):
    lora = LoRA.Config(rank=4, alpha=8)
    _, _, adapters = built(lora)
    tensors = adapters.peft()[""]
    write_adapter(tmp_path / "adapter", tensors, lora, base=PATH)
    config = json.loads((tmp_path / "adapter" / "adapter_config.json").read_text())
    assert (config["peft_type"], config["r"], config["lora_alpha"]) == ("LORA", 4, 8)
    assert set(config["target_modules"]) == {
        "q_proj",
        "k_proj",
        "v_proj",
        "o_proj",
        "gate_proj",
        "up_proj",
        "down_proj",
    }
    _, _, again = built(LoRA.Config(rank=4, alpha=8, init_from=str(tmp_path / "adapter")))
    again.start()
    for name, tensor in again.peft()[""].items():
        assert torch.equal(tensor, tensors[name]), name


def test_an_adapter_of_some_matrices_asks_for_these_as_targets(tmp_path):
    lora = LoRA.Config(rank=4)
    tensors = {
        name: tensor for name, tensor in built(lora)[2].peft()[""].items() if "q_proj" in name
    }
    write_adapter(tmp_path / "adapter", tensors, lora, base=PATH)
    whole = LoRA.Config(rank=4, init_from=str(tmp_path / "adapter"))
    with pytest.raises(
        ConfigError,
        match=r"lacks 48 of the 56 tensors.*train the matrices that it has: .*targets wq$",
    ):
        built(whole)[2].start()
    _, _, adapters = built(replace(whole, targets=("wq",)))
    adapters.start()
    started = adapters.peft()[""]
    assert started.keys() == tensors.keys() and all(
        torch.equal(started[name], tensors[name]) for name in tensors
    )


@pytest.mark.parametrize("kind", ["folder", "llama", "fused"])
@pytest.mark.parametrize("targets", ["all-linear", ("wo", "w1")])
def test_the_shapes_of_a_peft_folder_are_known_before_a_model_is_made(kind, targets, tmp_path):
    llama = ModelConfig(hf_assets_path=llama_folder(tmp_path / "llama", num_key_value_heads=2))
    model = {"folder": FOLDER, "llama": llama, "fused": FUSED}[kind]
    lora = LoRA.Config(rank=3, targets=targets)
    _, spec, adapters = built(lora, model)
    shapes = {
        name: shape
        for of_target in adapter_shapes(spec, lora).values()
        for name, shape in of_target.items()
    }
    assert shapes == {name: tuple(tensor.shape) for name, tensor in adapters.peft()[""].items()}


@pytest.mark.parametrize(
    ("change", "named"),
    [
        (dict(r=8), "trainer.lora.rank"),
        (dict(lora_alpha=1), "trainer.lora.alpha"),
        (dict(use_dora=True), "use_dora"),
        (dict(r=None), "no folder of PEFT"),
        (dict(rename=("q_proj", "x_proj")), "x_proj.*trainer.lora.targets"),
        (dict(cut="q_proj"), "does not fit"),
        (dict(torn=True), "is no readable safetensors file"),
    ],
)
def test_a_peft_folder_that_does_not_fit_is_refused_by_what_is_wrong(tmp_path, change, named):
    lora = LoRA.Config(rank=4)
    tensors = built(lora)[2].peft()[""]
    if "rename" in change:
        tensors = {name.replace(*change["rename"]): tensor for name, tensor in tensors.items()}
    if "cut" in change:
        tensors = {
            name: tensor[..., :-1] if change["cut"] in name else tensor
            for name, tensor in tensors.items()
        }
    write_adapter(tmp_path / "a", tensors, lora, base=PATH)
    file = tmp_path / "a" / "adapter_config.json"
    values = json.loads(file.read_text())
    file.write_text(
        json.dumps(
            values | {key: value for key, value in change.items() if key in (*values, "use_dora")}
        )
    )
    if "torn" in change:
        (tmp_path / "a" / "adapter_model.safetensors").write_bytes(b"torn")
    with pytest.raises(ConfigError, match=f"trainer.lora.init_from.*{named}"):
        built(LoRA.Config(rank=4, init_from=str(tmp_path / "a")))[2].start()


def test_three_adapters_do_not_fit_a_flavor_that_has_one_for_all(tmp_path):
    _, _, adapters = built(LoRA.Config(rank=2), FUSED)
    tensors = adapters.peft()[""]
    a = [
        tensor
        for name, tensor in tensors.items()
        if "layers.0.self_attn" in name and "lora_A" in name and "o_proj" not in name
    ]
    assert len(a) == 3 and all(torch.equal(a[0], other) for other in a), "they share one A"
    for name in tensors:
        if "k_proj.lora_A" in name:
            tensors[name] = tensors[name] + 1
    write_adapter(tmp_path / "a", tensors, LoRA.Config(rank=2), base=PATH)
    with pytest.raises(ConfigError, match="model.flavor"):
        built(LoRA.Config(rank=2, init_from=str(tmp_path / "a")), FUSED)[2].start()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_merged_folder_has_the_base_with_what_was_added_in_float32(tmp_path, dtype):
    lora = LoRA.Config(rank=4, alpha=2)
    base = tmp_path / "base"
    AutoModelForCausalLM.from_pretrained(PATH, dtype=dtype).save_pretrained(base)
    before = load_file(base / "model.safetensors")
    tensors = {name: tensor * 0.1 for name, tensor in built(lora)[2].peft()[""].items()}
    write_merged(tmp_path / "merged", tensors, lora, base=base)
    merged = load_file(tmp_path / "merged" / "model.safetensors")
    assert merged.keys() == before.keys()
    for name, weight in before.items():
        pair = [
            tensors.get(f"base_model.model.{name.removesuffix('.weight')}.lora_{part}.weight")
            for part in "AB"
        ]
        expected = (
            weight if pair[0] is None else (weight.float() + 0.5 * (pair[1] @ pair[0])).to(dtype)
        )
        assert torch.equal(merged[name], expected), name
    AutoModelForCausalLM.from_pretrained(tmp_path / "merged")
    save_file({}, base / "model.safetensors")
    with pytest.raises(ConfigError, match="model.layers.0"):
        write_merged(tmp_path / "again", tensors, lora, base=base)


def test_one_bit_of_the_base_changes_its_digest_and_a_step_of_the_adapters_does_not():
    model, _, _ = built(LoRA.Config(rank=4))
    first = BaseDigest(model).state_dict()["digest"]
    with torch.no_grad():
        for parameter in trained_state(model).values():
            parameter.add_(1)
    assert torch.equal(BaseDigest(model).state_dict()["digest"], first)
    with torch.no_grad():
        weight = model.tok_embeddings.weight
        weight.view(torch.int32)[3, 5] ^= 1
    assert not torch.equal(BaseDigest(model).state_dict()["digest"], first)
