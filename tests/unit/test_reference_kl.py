"""The distance to a reference model, by hand and against an independent float64 implementation."""

import math

import numpy as np
import pytest
import torch

from tests.unit.loss_batches import ONE, batch_of, random_batch
from torchtitan.experiments.rl.command.checks import check
from torchtitan.experiments.rl.config_registry import rl_opsd_ema_qwen3_debug
from torchtitan.experiments.rl.errors import ConfigError
from torchtitan.experiments.rl.losses import reference_kl
from torchtitan.experiments.rl.types import LossDenominators


def test_the_term_and_its_metrics_by_hand():
    batch = batch_of(
        (2, 3),
        loss_mask=[[1, 1, 0], [1, 1, 1]],
        rl_weights=[[1, -2, 1], [1, 0, 1]],
        task_ids=[[0] * 3, [1] * 3],
    )
    batch.task_names = ("a", "b", "unseen")
    policy = torch.tensor(
        [[-1.0, -2.0, -3.0], [-1.0, -1.0, -2.0]], dtype=torch.float64, requires_grad=True
    )
    reference = torch.tensor([[-1.0, -1.5, 99.0], [-2.0, math.nan, -2.0]], dtype=torch.float64)
    loss, metrics = reference_kl(
        policy, reference, batch, LossDenominators(rl=8.0, ce=1.0, ref_kl=1.0), 0.25
    )
    # Members: both of the first row (d = 0 and 0.5), the first and last of the second (d = -1 and 0).
    up, down = math.exp(0.5) - 1.5, math.exp(-1)
    assert loss.item() == pytest.approx(0.25 * (up + down) / 8, rel=1e-12)
    found = metrics.compute()
    assert found == pytest.approx(
        {
            "loss/reference_kl": loss.item(),
            "loss/total": loss.item(),
            "reference/kl": (up + down) / 4,
            "reference/bounded": 0,
            "reference/kl/task/a": up / 2,
            "reference/kl/task/b": down / 2,
        }
    )
    loss.backward()
    # dℓ/dlogp = 1 - exp(d).
    wanted = [[0, 1 - math.exp(0.5), 0], [1 - math.exp(-1), 0, 0]]
    assert policy.grad.tolist() == [
        pytest.approx([0.25 / 8 * value for value in row]) for row in wanted
    ]


def test_one_token_that_the_reference_finds_far_likelier_adds_a_bounded_term_and_no_gradient():
    batch = batch_of((1, 3), loss_mask=torch.ones(1, 3), rl_weights=torch.ones(1, 3))
    policy = torch.tensor([[-15.0, -200.0, -3.5]], dtype=torch.float32, requires_grad=True)
    loss, metrics = reference_kl(
        policy,
        torch.tensor([[0.0, 0.0, -1.0]]),
        batch,
        LossDenominators(rl=1.0, ce=1.0, ref_kl=1.0),
        1.0,
    )
    below = math.exp(2.5) - 3.5
    assert loss.item() == pytest.approx(10 + 10 + below) and metrics.compute()[
        "reference/bounded"
    ] == pytest.approx(2 / 3)
    loss.backward()
    assert policy.grad.tolist() == [[0, 0, pytest.approx(1 - math.exp(2.5))]]


@pytest.mark.parametrize("seed", range(3))
def test_the_term_is_that_of_a_plain_loop_in_float64(seed):
    policy, batch = random_batch(seed)
    reference = policy + 0.3 * torch.randn(
        policy.shape, generator=torch.Generator().manual_seed(seed), dtype=policy.dtype
    )
    loss, _ = reference_kl(policy, reference, batch, ONE, 0.1)
    total = 0.0
    for row, column in np.ndindex(*policy.shape):
        if batch.loss_mask[row, column] and batch.rl_weights[row, column] != 0:
            ratio = math.exp(float(reference[row, column])) / math.exp(float(policy[row, column]))
            total += ratio - math.log(ratio) - 1
    assert loss.item() == pytest.approx(0.1 * total, rel=1e-9) and total > 0


def test_an_algorithm_that_leaves_its_reference_to_a_trainer_without_one_is_refused():
    config = rl_opsd_ema_qwen3_debug()
    check(config)
    config.trainer.reference = None
    with pytest.raises(
        ConfigError,
        match="tasks.sum_digits.algorithm.reference = 'trainer': .*set trainer.reference",
    ):
        check(config)


def test_samples_of_the_policy_estimate_the_kl_without_bias():
    policy, reference = torch.tensor([[0.2, 0.5, 0.3], [0.4, 0.35, 0.25]], dtype=torch.float64)
    counts = (policy * 10).round().long()  # tokens in exactly the policy's proportions
    tokens = torch.repeat_interleave(torch.arange(3), counts)[None]
    batch = batch_of((1, 10), loss_mask=torch.ones(1, 10), rl_weights=torch.ones(1, 10))
    _, metrics = reference_kl(policy.log()[tokens], reference.log()[tokens], batch, ONE, 0.0)
    kl = (policy * (policy / reference).log()).sum().item()
    assert metrics.compute()["reference/kl"] == pytest.approx(kl, rel=1e-12)
