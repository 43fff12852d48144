"""Parameters by hub name, a part of the model at a time, and a mixture's experts as stacks."""

import weakref
from typing import Any

import pytest
import torch

from tests.integration.learners import assert_same, by_hub_name
from tests.integration.models import MOE_MODEL
from torchtitan.experiments.rl.models.policy import ModelConfig, policy_spec
from torchtitan.experiments.rl.training.hub_tensors import HubTensors
from torchtitan.experiments.rl.weights.publisher import SnapshotPublisher
from torchtitan.experiments.rl.weights.snapshot import stack_name


def model_and_adapter(config: ModelConfig) -> tuple[Any, Any]:
    """Build a model with random parameters, and what gives them their names in the hub."""
    spec = policy_spec(config, device="cpu", max_seq_len=64)
    model = spec.model.build()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_()
    return model, spec.state_dict_adapter(spec.model, None)


@pytest.mark.parametrize("flavor", ["qwen3/debugmodel", "llama3/debugmodel"])
def test_they_are_what_the_whole_state_dict_gives_and_only_one_part_is_converted_at_a_time(flavor):
    model, adapter = model_and_adapter(ModelConfig(hf_assets_path="/nowhere", flavor=flavor))
    converted = []

    def to_hub(state):
        converted.append(sorted(state))
        return adapter.to_hf(state)

    tensors = HubTensors(model, to_hub)
    expected = adapter.to_hf(model.state_dict())
    assert [name for name, _ in tensors.items()] == list(expected)
    converted.clear()
    for name, tensor in tensors.items():
        torch.testing.assert_close(tensor, expected[name], rtol=0, atol=0)
    parts = 3 + len(model.layers)  # embedding, norm and head beside the layers
    assert len(converted) == parts and max(map(len, converted)) < len(expected) / 2
    with torch.no_grad():
        linear = model.layers["0"].attention.qkv_linear
        linear.get_parameter("wqkv.weight").zero_()
    assert not dict(tensors.items())["model.layers.0.self_attn.q_proj.weight"].any(), (
        "an old value was kept"
    )


def test_experts_are_three_stacks_a_layer_that_share_the_models_memory():
    model, adapter = model_and_adapter(ModelConfig(hf_assets_path=str(MOE_MODEL)))
    expected = adapter.to_hf(model.state_dict())
    found = dict(HubTensors(model, adapter.to_hf).items())
    assert len(expected) == 4 * (9 + 3 * 8) + 2, (
        "four layers of eight experts, the embedding and the last norm"
    )
    assert len(found) == 4 * (9 + 3) + 2
    assert_same(by_hub_name(found), expected, rtol=0, atol=0)
    stack = found["model.layers.2.mlp.experts.*.up_proj.weight"]
    weight = model.layers["2"].moe.routed_experts.inner_experts.w3_EFD
    assert stack.shape == (8, 64, 128) and stack.data_ptr() == weight.data_ptr()


def test_a_stack_has_a_star_in_place_of_its_experts_number_and_no_other_name_changes():
    last = "model.layers.47.mlp.experts.127.down_proj.weight"
    assert stack_name(last) == "model.layers.47.mlp.experts.*.down_proj.weight"
    assert stack_name("model.layers.47.mlp.gate.weight") == "model.layers.47.mlp.gate.weight"


@pytest.mark.parametrize("flavor", ["qwen3/debugmodel", "llama3/debugmodel"])
def test_no_publish_keeps_what_was_gathered_for_one_part_when_it_comes_to_the_next(flavor):
    """On ranks these tensors are gathered, in float32: of all layers 13 GB at 32B."""
    model, adapter = model_and_adapter(ModelConfig(hf_assets_path="/nowhere", flavor=flavor))
    made: list[weakref.ref[torch.Tensor]] = []
    alive: list[int] = []

    def to_hub(state: dict[str, Any]) -> dict[str, Any]:
        gathered = [tensor for name, tensor in state.items() if "qkv_linear.w" in name]
        made.extend(weakref.ref(tensor.untyped_storage()) for tensor in gathered)
        return adapter.to_hf(state)

    for part in (*model.layers.values(), model.norm, model.lm_head):
        part.register_state_dict_pre_hook(
            lambda *_: alive.append(sum(storage() is not None for storage in made))
        )
    publisher = SnapshotPublisher(rank=0, host="here", dtype=torch.float32)
    for version in (1, 2):  # the first also lays out the buffers
        publisher.write(version, HubTensors(model, to_hub))
    assert len(made) == 3 * len(model.layers) * 3, "queries, keys and values, read three times"
    assert alive == [0] * 3 * (len(model.layers) + 2)
