"""Where a learner's parameters and buffers come to lie. The meta device stands in for a GPU."""

import pytest
import torch

from torchtitan.experiments.rl.models.policy import ModelConfig, policy_spec
from torchtitan.experiments.rl.training.model import materialize


@pytest.mark.parametrize("offload, parameters_on", [(False, "meta"), (True, "cpu")])
def test_offloaded_parameters_lie_in_the_hosts_memory_and_buffers_where_they_are_used(
    tokenizer_path, offload, parameters_on
):
    spec = policy_spec(
        ModelConfig(hf_assets_path=str(tokenizer_path)), device="cuda", max_seq_len=64
    )
    with torch.device("meta"):
        model = spec.model.build()
    materialize(model, torch.device("meta"), parameters_on_cpu=offload)
    assert {parameter.device.type for parameter in model.parameters()} == {parameters_on}
    buffers = dict(model.named_buffers())
    assert buffers and {buffer.device.type for buffer in buffers.values()} == {"meta"}
