"""The private API of transformers that the library uses does what the library needs. An upgrade that breaks one fails here."""

import pytest
import torch
from torch import nn
from transformers import AutoModelForCausalLM

from tests.fakes.hub_families import FAMILIES, tiny_config
from torchtitan.experiments.rl.compat.transformers import fill_buffers, with_modules


def buffers(model):
    """Return the buffers that a checkpoint does not hold."""
    saved = model.state_dict()
    return {name: buffer for name, buffer in model.named_buffers() if name not in saved}


@pytest.mark.parametrize("family", FAMILIES)
def test_buffers_without_values_get_those_of_transformers_and_parameters_keep_theirs(family):
    expected = buffers(AutoModelForCausalLM.from_config(tiny_config(family)))
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(tiny_config(family), dtype=torch.bfloat16)
    model.to_empty(device="cpu")
    for tensor in [*model.parameters(), *buffers(model).values()]:
        tensor.detach().fill_(7)
    fill_buffers(model.base_model, torch.device("cpu"))
    found = buffers(model)
    assert found.keys() == expected.keys()
    for name, buffer in found.items():
        assert buffer.dtype == torch.float32
        torch.testing.assert_close(buffer, expected[name], rtol=0, atol=0, msg=name)
    assert all((parameter == 7).all() for parameter in model.parameters())


def test_a_buffer_that_transformers_does_not_fill_is_named():
    model = AutoModelForCausalLM.from_config(tiny_config("olmo2"))
    model.base_model.norm.register_buffer("table", torch.ones(2), persistent=False)
    with pytest.raises(RuntimeError, match="transformers does not fill norm.table"):
        fill_buffers(model.base_model, None)


def test_a_copy_with_a_stand_in_leaves_the_model_as_it_was():
    model = AutoModelForCausalLM.from_config(tiny_config("olmo2"))
    head = model.lm_head
    changed = with_modules(model, lm_head=nn.Identity())
    tokens = torch.zeros(1, 2, dtype=torch.long)
    hidden = model.base_model(input_ids=tokens).last_hidden_state
    assert model.lm_head is head and changed.base_model is model.base_model
    assert torch.equal(changed(input_ids=tokens).logits, hidden)
    assert torch.equal(model(input_ids=tokens).logits, head(hidden))
