"""Losses of one's own in each component, and metrics that they return."""

from dataclasses import dataclass

import pytest
import torch

from tests.unit.loss_batches import ONE, random_batch
from tests.unit.loss_variants import reinforce
from torchtitan.experiments.rl.losses import (
    CrossEntropy,
    CustomRLLoss,
    LossConfig,
    MetricSums,
    RefKL,
    RLLoss,
    compute_loss,
)
from torchtitan.experiments.rl.losses.loss import ce_members, ref_kl_members, rl_members


class Focal(CrossEntropy):
    """-(1 - p)^gamma·logp"""

    @dataclass(kw_only=True, slots=True)
    class Config(CrossEntropy.Config):
        gamma: float = 2.0

    def per_token(self, logprobs):
        p = logprobs.exp()
        return -((1 - p) ** self.config.gamma) * logprobs, {"p": p}


class Doubled(RefKL):
    def per_token(self, logprobs, generator_logprobs, ref_logprobs):
        losses, masked = super().per_token(logprobs, generator_logprobs, ref_logprobs)
        return 2 * losses, masked, {"gap": ref_logprobs - logprobs}


class Plain(RLLoss):
    def per_token(self, tokens):
        return (
            -tokens.advantages * tokens.logprobs,
            torch.zeros_like(tokens.member),
            {"a": tokens.advantages},
        )


def reinforce_with_metrics(tokens):
    return -tokens.advantages * tokens.logprobs, {"a": tokens.advantages}


OWN = LossConfig(rl=Plain.Config(), ce=Focal.Config(gamma=1.5), ref_kl=Doubled.Config())


def test_each_component_takes_a_loss_of_ones_own():
    logprobs, batch = random_batch(0)
    found = compute_loss(logprobs, batch, ONE, OWN)[1].compute()
    plain = compute_loss(
        logprobs, batch, ONE, LossConfig(rl=CustomRLLoss.Config(function=reinforce))
    )[1].compute()
    assert found["loss/rl"] == plain["loss/rl"] and found["loss/ref_kl"] == pytest.approx(
        2 * plain["loss/ref_kl"], rel=1e-12
    )
    focal = sum(
        w * -((1 - torch.tensor(p).exp().item()) ** 1.5) * p
        for w, p in zip(
            batch.ce_weights.flatten().tolist(), logprobs.flatten().tolist(), strict=True
        )
    )
    assert found["loss/ce"] == pytest.approx(focal, rel=1e-6) and found["ce/nll"] == plain["ce/nll"]


def test_their_metrics_are_means_over_the_components_tokens_of_the_step():
    sums, values = MetricSums(), {"rl/own/a": [], "ce/own/p": [], "ref_kl/own/gap": []}
    for seed, shape in ((0, (3, 40)), (1, (1, 9))):
        logprobs, batch = random_batch(seed, *shape)
        sums.merge(compute_loss(logprobs, batch, ONE, OWN)[1])
        values["rl/own/a"] += batch.advantages[rl_members(batch)].tolist()
        values["ce/own/p"] += logprobs.exp()[ce_members(batch)].tolist()
        values["ref_kl/own/gap"] += (batch.ref_logprobs.double() - logprobs)[
            ref_kl_members(batch)
        ].tolist()
    found = sums.compute()
    for name, expected in values.items():
        assert found[name] == pytest.approx(sum(expected) / len(expected), rel=1e-9), name


def test_a_function_returns_metrics_too_and_a_wrong_one_is_named():
    logprobs, batch = random_batch(2)
    found = compute_loss(
        logprobs, batch, ONE, LossConfig(rl=CustomRLLoss.Config(function=reinforce_with_metrics))
    )[1].compute()
    assert found["rl/own/a"] == pytest.approx(
        batch.advantages[rl_members(batch)].double().mean().item(), rel=1e-9
    )
    for wrong, shown in ((torch.ones(3), r"shape \(3,\)"), (1.5, "a float")):

        def bad(tokens, wrong=wrong):
            return reinforce(tokens), {"a": wrong}

        with pytest.raises(
            ValueError, match=f"metric rl/own/a has {shown}: want a tensor of shape"
        ):
            compute_loss(logprobs, batch, ONE, LossConfig(rl=CustomRLLoss.Config(function=bad)))
