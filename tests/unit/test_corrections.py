"""Corrections of the rl loss against their formulas in Python floats, with every variant."""

import math

import pytest
import torch

from tests.unit.loss_batches import ONE, batch_of, random_batch
from tests.unit.loss_variants import VARIANTS
from torchtitan.experiments.rl.bounds import check_fields
from torchtitan.experiments.rl.errors import ConfigError
from torchtitan.experiments.rl.losses import (
    GeometricMask,
    IcePop,
    LossConfig,
    PPOClip,
    ProbabilityMask,
    SequenceMask,
    TruncatedImportance,
    check_corrections,
    compute_loss,
)
from torchtitan.experiments.rl.losses.loss import rl_members, sequence_ids
from torchtitan.experiments.rl.types import LossDenominators

torch.set_num_threads(1)


CORRECTIONS = [
    TruncatedImportance.Config(cap=1.1),
    IcePop.Config(low=0.7, high=1.3),
    SequenceMask.Config(low=0.6, high=1.5),
    GeometricMask.Config(low=0.9, high=1.1),
    ProbabilityMask.Config(least=0.2),
]
SIX = LossDenominators(rl=6, ce=1, ref_kl=1)


def six_tokens():
    """Two samples of three tokens. All had probability 0.2; now ρ is 1.5, 1, 0.5 in the first and 1.1, 1, 0.1 in the second."""
    logprobs = torch.tensor([[0.3, 0.2, 0.1, 0.22, 0.2, 0.02]], dtype=torch.float64).log()
    batch = batch_of(
        (1, 6),
        positions=[[0, 1, 2, 0, 1, 2]],
        loss_mask=[[True] * 6],
        rl_weights=[[1.0] * 6],
        advantages=[[1.0, -1.0, 2.0, 1.0, 1.0, 1.0]],
    )
    batch.generator_logprobs = torch.full((1, 6), 0.2, dtype=torch.float64).log()
    return logprobs.requires_grad_(), batch


@pytest.mark.parametrize(
    ("correction", "weights"),
    [
        (TruncatedImportance.Config(cap=1.2), [1.2, 1.0, 0.5, 1.1, 1.0, 0.1]),
        (IcePop.Config(low=0.4, high=1.2), [0, 1.0, 0.5, 1.1, 1.0, 0]),
        # Products 0.75 and 0.11; geometric means 0.909 and 0.479. The variant's own ratio stays.
        (SequenceMask.Config(low=0.5, high=2.0), [1.5, 1.0, 0.5, 0, 0, 0]),
        (GeometricMask.Config(low=0.9, high=1.1), [1.5, 1.0, 0.5, 0, 0, 0]),
        (ProbabilityMask.Config(least=0.15), [1.5, 1.0, 0, 1.1, 1.0, 0]),
    ],
)
def test_gradient_of_six_tokens_worked_out_on_paper(correction, weights):
    logprobs, batch = six_tokens()
    unclipped = PPOClip.Config(clip_low=1.0, clip_high=100.0)
    loss, metrics = compute_loss(
        logprobs, batch, SIX, LossConfig(rl=unclipped, corrections=[correction])
    )
    loss.backward()
    advantages = [1.0, -1.0, 2.0, 1.0, 1.0, 1.0]
    expected = [
        -w * a / 6 for w, a in zip(weights, advantages, strict=True)
    ]  # the denominator stays the member count
    assert logprobs.grad[0].tolist() == pytest.approx(expected, rel=1e-6)
    assert loss.item() == pytest.approx(sum(expected), rel=1e-6)
    (name,) = [name for name in metrics.compute() if name.startswith("rl/left_out/")]
    assert metrics.compute()[name] == pytest.approx(weights.count(0) / 6)


def by_hand_weights(correction, logprobs, batch) -> tuple[list[list[float]], bool]:
    """The factor of each token, and whether ρ is in it."""
    p, q, member = (
        logprobs.tolist(),
        batch.generator_logprobs.double().tolist(),
        rl_members(batch).tolist(),
    )
    ids = sequence_ids(batch.positions).tolist()
    logs: dict[int, list[float]] = {}
    for b, row in enumerate(ids):
        for t, own in enumerate(row):
            if member[b][t]:
                logs.setdefault(own, []).append(p[b][t] - q[b][t])

    def weight(b: int, t: int) -> float:
        ratio, lr = math.exp(p[b][t] - q[b][t]), logs.get(ids[b][t], [0.0])
        if isinstance(correction, TruncatedImportance.Config):
            return min(ratio, correction.cap)
        if isinstance(correction, IcePop.Config):
            return ratio if correction.low <= ratio <= correction.high else 0.0
        if isinstance(correction, SequenceMask.Config):
            return float(correction.low <= math.exp(sum(lr)) <= correction.high)
        if isinstance(correction, GeometricMask.Config):
            return float(correction.low <= math.exp(sum(lr) / len(lr)) <= correction.high)
        return float(math.exp(p[b][t]) >= correction.least)

    factors = [[weight(b, t) for t in range(len(row))] for b, row in enumerate(ids)]
    return factors, isinstance(correction, TruncatedImportance.Config | IcePop.Config)


@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize("rl", VARIANTS, ids=lambda rl: type(rl).__qualname__)
@pytest.mark.parametrize("correction", CORRECTIONS, ids=lambda entry: type(entry).__qualname__)
def test_a_corrected_loss_is_the_factor_times_the_variants_of_the_tokens_left(correction, rl, seed):
    logprobs, batch = random_batch(seed)
    batch.ce_weights.zero_()
    batch.ref_kl_weights.zero_()
    member = rl_members(batch)
    factors, has_ratio = by_hand_weights(correction, logprobs, batch)
    factors = torch.tensor(factors, dtype=torch.float64)
    kept = member & (factors != 0)
    assert kept.any() and (
        isinstance(correction, TruncatedImportance.Config) or (member & ~kept).any()
    )

    attached = logprobs.clone().requires_grad_()
    found, _ = compute_loss(attached, batch, ONE, LossConfig(rl=rl, corrections=[correction]))
    found.backward()

    # The same by way of the streams: who is left out has no weight, the factor is a weight, and ρ moves from loss to factor.
    plain = batch_of(
        tuple(batch.loss_mask.shape), positions=batch.positions, loss_mask=batch.loss_mask
    )
    plain.advantages, plain.generator_logprobs = (
        batch.advantages,
        logprobs.clone() if has_ratio else batch.generator_logprobs,
    )
    plain.rl_weights = torch.where(kept, batch.rl_weights.double() * factors, 0)
    reference = logprobs.clone().requires_grad_()
    expected, _ = compute_loss(reference, plain, ONE, LossConfig(rl=rl))
    expected.backward()
    assert found.item() == pytest.approx(expected.item(), rel=1e-9, abs=1e-12)
    torch.testing.assert_close(attached.grad, reference.grad, rtol=1e-9, atol=1e-12)
    assert (attached.grad[~kept] == 0).all()


@pytest.mark.parametrize("correction", CORRECTIONS[1:4], ids=lambda entry: type(entry).__qualname__)
def test_a_ratio_that_overflows_is_left_out_and_leaves_the_gradient_finite(correction):
    batch = batch_of(
        (1, 2),
        positions=[[0, 0]],
        loss_mask=[[True] * 2],
        rl_weights=[[1.0] * 2],
        advantages=[[-1.0, 1.0]],
    )
    batch.generator_logprobs = torch.tensor([[-2000.0, -1.0]])
    logprobs = torch.tensor([[-1.0, -1.0]], requires_grad=True)
    loss, _ = compute_loss(
        logprobs, batch, ONE, LossConfig(rl=PPOClip.Config(), corrections=[correction])
    )
    loss.backward()
    assert logprobs.grad.tolist() == [[0.0, -1.0]]


def test_masks_combine_and_two_factors_with_the_ratio_are_refused():
    both = [IcePop.Config(low=0.4, high=1.2), ProbabilityMask.Config(least=0.15)]
    logprobs, batch = six_tokens()
    compute_loss(logprobs, batch, SIX, LossConfig(corrections=both))[0].backward()
    assert (logprobs.grad[0] != 0).tolist() == [False, True, False, True, True, False]
    check_corrections(both, field="c")
    with pytest.raises(
        ConfigError,
        match="c = 'TruncatedImportance, IcePop': each has the importance ratio.*name one",
    ):
        check_corrections([TruncatedImportance.Config(), IcePop.Config()], field="c")
    with pytest.raises(ConfigError, match=r"c\[0\].low = 3: must be at most high = 2.0"):
        check_fields([SequenceMask.Config(low=3)], field="c")
    with pytest.raises(ConfigError, match="corrections.*cap = 0: must be above 0"):
        check_fields(LossConfig(corrections=[TruncatedImportance.Config(cap=0)]))
