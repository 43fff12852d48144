"""Losses survive or refuse by name: no members, values that are not finite, devices, users' own variants."""

import math
import pickle
from dataclasses import dataclass

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from tests.unit.loss_batches import ONE, batch_of, random_batch
from tests.unit.loss_variants import VARIANTS, reinforce
from torchtitan.experiments.rl.losses import (
    DPPO,
    CustomRLLoss,
    LossConfig,
    PPOClip,
    RefKL,
    RLLoss,
    compute_loss,
    count_denominators,
)
from torchtitan.experiments.rl.types import TrainingBatch

torch.set_num_threads(1)


def test_membership_is_mask_and_weight_for_rl_and_weight_alone_for_the_others():
    batch = batch_of(
        (1, 5),
        loss_mask=[[False, True, True, False, True]],
        rl_weights=[[1.0, 1.0, 0.0, 0.5, -1.0]],
        ce_weights=[[0.0, 0.1, 0.0, 0.1, -0.1]],
        ref_kl_weights=[[0.0, 0.0, 0.0, 1.0, 0.0]],
    )
    counts = count_denominators(batch, ["members"] * 3)
    assert counts.tolist() == [2, 3, 1]


@pytest.mark.parametrize("rl", VARIANTS, ids=lambda rl: type(rl).__qualname__)
@pytest.mark.parametrize("bad", [math.inf, -math.inf, math.nan])
def test_without_members_the_loss_is_zero_attached_and_its_gradient_zero_whatever_the_logprobs(
    rl, bad
):
    logprobs = torch.tensor([[bad, -1.0, bad]], dtype=torch.float64, requires_grad=True)
    batch = batch_of(
        (1, 3), generator_logprobs=[[bad] * 3], advantages=[[bad] * 3], ref_logprobs=[[bad] * 3]
    )
    loss, metrics = compute_loss(logprobs, batch, ONE, LossConfig(rl=rl))
    assert loss.item() == 0 and loss.requires_grad
    loss.backward()
    assert logprobs.grad.tolist() == [[0.0, 0.0, 0.0]]
    assert metrics.compute() == {
        "loss/total": 0.0,
        "loss/rl": 0.0,
        "loss/ce": 0.0,
        "loss/ref_kl": 0.0,
    }


@pytest.mark.parametrize("rl", VARIANTS, ids=lambda rl: type(rl).__qualname__)
@pytest.mark.parametrize("bad", [math.inf, math.nan])
def test_what_non_members_hold_changes_neither_loss_nor_gradient_nor_metrics(rl, bad):
    logprobs, batch = random_batch(1)
    outside = ~(
        (batch.loss_mask & (batch.rl_weights != 0))
        | (batch.ce_weights != 0)
        | (batch.ref_kl_weights != 0)
    )
    assert outside.any()
    results = []
    for value in (-1.0, bad):
        streams = {name: getattr(batch, name) for name in batch.__slots__}
        for name in ("generator_logprobs", "advantages", "ref_logprobs"):
            streams[name] = torch.where(outside, value, streams[name])
        attached = torch.where(outside, value, logprobs).requires_grad_()
        loss, metrics = compute_loss(attached, TrainingBatch(**streams), ONE, LossConfig(rl=rl))
        loss.backward()
        assert (attached.grad[outside] == 0).all()
        results.append((loss.item(), attached.grad.tolist(), metrics.compute()))
    assert results[0] == results[1]


@pytest.mark.parametrize("rl", [DPPO.Config(), PPOClip.Config()])
def test_an_overflowing_ratio_that_is_dropped_leaves_a_finite_gradient(rl):
    logprobs = torch.tensor([[-0.01, -0.5]], requires_grad=True)
    batch = batch_of(
        (1, 2),
        generator_logprobs=[[-200.0, -0.5]],
        loss_mask=[[True, True]],
        rl_weights=[[1.0, 1.0]],
        advantages=[[1.0, 1.0]],
    )
    loss, _ = compute_loss(logprobs, batch, ONE, LossConfig(rl=rl))
    loss.backward()
    assert logprobs.grad.isfinite().all()
    assert logprobs.grad[0, 1].item() == pytest.approx(-1)


@pytest.mark.parametrize("rl", VARIANTS, ids=lambda rl: type(rl).__qualname__)
def test_without_advantage_an_overflowing_ratio_leaves_loss_and_gradient_finite(rl):
    # The policy finds likely what the generator found nearly impossible: the ratio is exp(899), infinite in float64.
    logprobs = torch.tensor([[-2.0, -1.0, -0.5]], dtype=torch.float64, requires_grad=True)
    batch = batch_of(
        (1, 3),
        loss_mask=[[False, True, True]],
        generator_logprobs=[[0.0, -900.0, -0.5]],
        advantages=[[0.0, 0.0, 0.0]],
        rl_weights=[[0.0, 1.0, 1.0]],
    )
    loss, _ = compute_loss(logprobs, batch, ONE, LossConfig(rl=rl))
    loss.backward()
    assert math.isfinite(loss.item()) and torch.isfinite(logprobs.grad).all()


def test_where_policy_and_reference_agree_an_overflowing_ratio_leaves_loss_and_gradient_finite():
    logprobs = torch.tensor([[-2.0, -1.0]], dtype=torch.float64, requires_grad=True)
    batch = batch_of(
        (1, 2),
        loss_mask=[[False, True]],
        generator_logprobs=[[0.0, -900.0]],
        ref_logprobs=[[0.0, -1.0]],
        ref_kl_weights=[[0.0, 1.0]],
        rl_weights=[[0.0, 0.0]],
    )
    loss, _ = compute_loss(logprobs, batch, ONE, LossConfig())
    loss.backward()
    assert loss.item() == pytest.approx(1e-3 * 899**2) and logprobs.grad.tolist() == [
        [0.0, pytest.approx(2e-3 * 899)]
    ]


def test_the_loss_is_computed_in_the_dtype_of_the_logprobs():
    logprobs, batch = random_batch(2)
    for dtype in (torch.float32, torch.float64):
        assert compute_loss(logprobs.to(dtype), batch, ONE, LossConfig())[0].dtype == dtype


@pytest.mark.parametrize("rl", VARIANTS, ids=lambda rl: type(rl).__qualname__)
def test_computing_the_loss_never_waits_for_the_device(rl):
    # A fake tensor has no data: reading one back, or a shape that depends on data, raises.
    logprobs, batch = random_batch(0)
    with FakeTensorMode(allow_non_fake_inputs=True) as mode:
        fake = {name: getattr(batch, name) for name in batch.__slots__}
        fake = {
            name: mode.from_tensor(v) if isinstance(v, torch.Tensor) else v
            for name, v in fake.items()
        }
        attached = mode.from_tensor(logprobs).requires_grad_()
        loss, _metrics = compute_loss(attached, TrainingBatch(**fake), ONE, LossConfig(rl=rl))
        loss.backward()
        assert attached.grad.shape == logprobs.shape


# ------------------------------------------------------------------ a user's own


class Squared(RLLoss):
    """A variant as a user would write it, with no setting of its own beyond one."""

    @dataclass(kw_only=True, slots=True)
    class Config(RLLoss.Config):
        scale: float = 1.0

    def per_token(self, tokens):
        return self.config.scale * tokens.logprobs**2, tokens.logprobs < -1


def test_a_users_variant_works_without_touching_the_library():
    batch = batch_of((1, 2), loss_mask=[[False, True]], rl_weights=[[1.0, 1.0]])
    logprobs = torch.tensor([[-5.0, -3.0]], dtype=torch.float64)
    loss, metrics = compute_loss(logprobs, batch, ONE, LossConfig(rl=Squared.Config(scale=2.0)))
    assert loss.item() == 18
    assert metrics.compute()["rl/masked_fraction"] == 1


class Half(RLLoss):
    """As a user would write it: no Config of its own."""

    def per_token(self, tokens):
        return tokens.logprobs / 2, tokens.member


def test_a_variant_without_a_config_builds_itself():
    batch = batch_of((1, 2), loss_mask=[[False, True]], rl_weights=[[1.0, 1.0]])
    loss, _ = compute_loss(torch.tensor([[-5.0, -3.0]]), batch, ONE, LossConfig(rl=Half.Config()))
    assert loss.item() == -1.5


def test_a_custom_function_that_sums_is_refused_by_name():
    def summed(tokens):
        return tokens.logprobs.sum()

    batch = batch_of((1, 2), loss_mask=[[True, True]], rl_weights=[[1.0, 1.0]])
    with pytest.raises(
        ValueError, match="'summed' returned shape \\(\\) for tokens of shape \\(1, 2\\)"
    ):
        compute_loss(
            torch.zeros(1, 2), batch, ONE, LossConfig(rl=CustomRLLoss.Config(function=summed))
        )


def test_a_custom_function_whose_losses_have_no_gradient_is_refused_by_name():
    def detached(tokens):
        return -tokens.logprobs.detach()

    batch = batch_of((1, 2), loss_mask=[[True, True]], rl_weights=[[1.0, 1.0]])
    logprobs = torch.zeros(1, 2, requires_grad=True)
    with pytest.raises(ValueError, match="'detached' returned losses without a gradient"):
        compute_loss(logprobs, batch, ONE, LossConfig(rl=CustomRLLoss.Config(function=detached)))


def test_loss_configs_travel_between_processes():
    config = LossConfig(
        rl=CustomRLLoss.Config(function=reinforce), ref_kl=RefKL.Config(mask_low=0.3)
    )
    assert pickle.loads(pickle.dumps(config)) == config
    assert LossConfig() == LossConfig(
        rl=DPPO.Config(mask_high=0.2, mask_low=0.2, adv_tau=1.0, kl_tau=1e-3)
    )
