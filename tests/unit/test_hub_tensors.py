"""Parameters by hub name, a part of the model at a time."""

import pytest
import torch

from torchtitan.experiments.rl.models.policy import ModelConfig, policy_spec
from torchtitan.experiments.rl.training.learner import HubTensors


@pytest.mark.parametrize("flavor", ["qwen3/debugmodel", "llama3/debugmodel"])
def test_they_are_what_the_whole_state_dict_gives_and_only_one_part_is_converted_at_a_time(flavor):
    spec = policy_spec(ModelConfig(hf_assets_path="/nowhere", flavor=flavor), device="cpu", max_seq_len=64)
    model = spec.model.build()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_()
    adapter = spec.state_dict_adapter(spec.model, None)
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
    assert not dict(tensors.items())["model.layers.0.self_attn.q_proj.weight"].any(), "an old value was kept"
