"""Routers and the counts of a mixture of experts."""

import pytest
import torch

from torchtitan.experiments.rl.models.experts import RouterGate


@pytest.fixture
def gate():
    gate = RouterGate.Config(in_features=64, out_features=8).build()
    torch.nn.init.normal_(gate.weight, generator=torch.Generator().manual_seed(0))
    return gate


def test_a_router_rounds_its_product_as_the_engine_does_and_nothing_after_it(gate):
    gate = gate.bfloat16()
    x = torch.randn(2, 5, 64, generator=torch.Generator().manual_seed(1)).bfloat16()
    exact = x.double() @ gate.weight.double().T
    scores = gate(x)
    assert scores.dtype == torch.float32
    # Values of bfloat16 have 8 bits: the nearest is at most 1/256 of the value away.
    torch.testing.assert_close(scores.double(), exact, rtol=1 / 256, atol=1e-3)
    assert torch.equal(scores, scores.bfloat16().float())


def test_a_router_scores_alike_whether_or_not_the_device_has_autocast(gate):
    """torchtitan calls it under autocast. A CPU has none to float32, so bfloat16 stands in."""
    x = torch.randn(2, 5, 64, generator=torch.Generator().manual_seed(1))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        scores = gate(x)
    assert torch.equal(scores, gate(x)) and not torch.equal(scores, scores.bfloat16().float())


def test_a_router_of_a_float64_run_stays_in_float64(gate):
    assert gate.double()(torch.zeros(1, 1, 64, dtype=torch.float64)).dtype == torch.float64
