"""Losses and their gradients against formulas differentiated by hand, token by token, in Python floats."""

import math
from dataclasses import dataclass

import pytest
import torch

from tests.unit.loss_batches import ONE, batch_of, random_batch
from tests.unit.loss_variants import reinforce
from torchtitan.experiments.rl.bounds import check_fields
from torchtitan.experiments.rl.errors import ConfigError
from torchtitan.experiments.rl.losses import (
    CISPO,
    DPPO,
    GSPO,
    CustomRLLoss,
    LossConfig,
    PPOClip,
    RefKL,
    TruncatedImportance,
    compute_loss,
)
from torchtitan.experiments.rl.losses.loss import sequence_ids
from torchtitan.experiments.rl.losses.variants import clipped_surrogate
from torchtitan.experiments.rl.types import LossDenominators

torch.set_num_threads(1)

# ------------------------------------------------------------------ the formulas, differentiated by hand
# Each gives (ℓ, dℓ/dlogp) of one token.


def clip(ratio: float, low: float, high: float) -> float:
    return min(max(ratio, 1 - low), 1 + high)


@dataclass
class Token:
    p: float
    """logp"""
    q: float
    """generator_logp"""
    a: float
    """advantage"""
    s: float
    """geometric mean of the sequence's ratios"""


def cap(ratio: float, ratio_max: float | None) -> tuple[float, float]:
    """The ratio that the loss computes with, and its derivative by logp."""
    if ratio_max is not None and ratio > ratio_max:
        return ratio_max, 0.0
    return ratio, ratio


def by_hand_dppo(c: DPPO.Config, t: Token) -> tuple[float, float]:
    moved = math.exp(t.p) - math.exp(t.q)
    dropped = moved > c.mask_high if t.a > 0 else moved < -c.mask_low
    ratio, slope = cap(math.exp(t.p - t.q), c.ratio_max)
    gain = 0 if dropped else c.adv_tau * t.a
    return -gain * ratio + c.kl_tau * (t.p - t.q) ** 2, -gain * slope + 2 * c.kl_tau * (t.p - t.q)


def by_hand_surrogate(
    uncapped: float, a: float, low: float, high: float, ratio_max: float | None
) -> tuple[float, float]:
    ratio, slope = cap(uncapped, ratio_max)
    plain, clipped = ratio * a, clip(ratio, low, high) * a
    return -min(plain, clipped), -slope * a if plain <= clipped else 0.0


def by_hand_ppo(c: PPOClip.Config, t: Token) -> tuple[float, float]:
    return by_hand_surrogate(math.exp(t.p - t.q), t.a, c.clip_low, c.clip_high, c.ratio_max)


def by_hand_cispo(c: CISPO.Config, t: Token) -> tuple[float, float]:
    weight = clip(math.exp(t.p - t.q), c.clip_low, c.clip_high)
    return -weight * t.a * t.p, -weight * t.a


def by_hand_gspo(c: GSPO.Config, t: Token) -> tuple[float, float]:
    return by_hand_surrogate(t.s, t.a, c.clip_low, c.clip_high, c.ratio_max)


def by_hand_reinforce(_: CustomRLLoss.Config, t: Token) -> tuple[float, float]:
    return -t.a * t.p, -t.a


def by_hand_ref_kl(c: RefKL.Config, p: float, q: float, ref: float) -> tuple[float, float]:
    dropped = math.exp(p) - math.exp(q) < -c.mask_low
    ratio, slope = cap(math.exp(p - q), c.ratio_max)
    gain = 0 if dropped else ref - p  # a constant in the backward pass
    return -gain * ratio + c.kl_tau * (p - q) ** 2, -gain * slope + 2 * c.kl_tau * (p - q)


def by_hand(logprobs, batch, denominators, config, by_hand_rl) -> tuple[float, list[list[float]]]:
    """The whole loss and its gradient, token by token."""
    rows, length = logprobs.shape
    p, q = logprobs.tolist(), batch.generator_logprobs.tolist()
    mask, a, positions = (
        batch.loss_mask.tolist(),
        batch.advantages.tolist(),
        batch.positions.tolist(),
    )
    rl, ce, kl = batch.rl_weights.tolist(), batch.ce_weights.tolist(), batch.ref_kl_weights.tolist()
    ref = batch.ref_logprobs.tolist()

    ratios: dict[tuple[int, int], list[float]] = {}
    start = 0
    owner = [[None] * length for _ in range(rows)]
    for b in range(rows):
        for t in range(length):
            start = t if positions[b][t] == 0 else start
            owner[b][t] = (b, start)
            if mask[b][t] and rl[b][t]:
                ratios.setdefault((b, start), []).append(p[b][t] - q[b][t])

    loss, gradient = 0.0, [[0.0] * length for _ in range(rows)]
    for b in range(rows):
        for t in range(length):
            parts = []
            if mask[b][t] and rl[b][t]:
                lr = ratios[owner[b][t]]
                token = Token(p[b][t], q[b][t], a[b][t], math.exp(sum(lr) / len(lr)))
                parts.append((rl[b][t] / denominators.rl, by_hand_rl(config.rl, token)))
            if ce[b][t]:
                parts.append((ce[b][t] / denominators.ce, (-p[b][t], -1.0)))
            if kl[b][t]:
                value = by_hand_ref_kl(config.ref_kl, p[b][t], q[b][t], ref[b][t])
                parts.append((kl[b][t] / denominators.ref_kl, value))
            loss += sum(weight * value for weight, (value, _) in parts)
            gradient[b][t] = sum(weight * slope for weight, (_, slope) in parts)
    return loss, gradient


VARIANTS = [
    pytest.param(DPPO.Config(), by_hand_dppo, id="dppo"),
    pytest.param(
        DPPO.Config(mask_high=0.05, mask_low=0.1, adv_tau=0.7, kl_tau=0.3),
        by_hand_dppo,
        id="dppo-tight",
    ),
    pytest.param(PPOClip.Config(), by_hand_ppo, id="ppo"),
    pytest.param(PPOClip.Config(clip_low=0.2, clip_high=0.28), by_hand_ppo, id="dapo"),
    pytest.param(CISPO.Config(), by_hand_cispo, id="cispo"),
    pytest.param(CISPO.Config(clip_low=0.3, clip_high=0.2), by_hand_cispo, id="cispo-two-bounds"),
    pytest.param(GSPO.Config(clip_low=0.05, clip_high=0.08), by_hand_gspo, id="gspo"),
    pytest.param(DPPO.Config(ratio_max=1.3), by_hand_dppo, id="dppo-capped"),
    pytest.param(PPOClip.Config(ratio_max=1.5), by_hand_ppo, id="ppo-capped"),
    pytest.param(PPOClip.Config(ratio_max=1.1), by_hand_ppo, id="ppo-capped-below-the-clip"),
    pytest.param(
        GSPO.Config(clip_low=0.05, clip_high=0.08, ratio_max=1.1), by_hand_gspo, id="gspo-capped"
    ),
    pytest.param(CustomRLLoss.Config(function=reinforce), by_hand_reinforce, id="custom"),
]


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("rl, by_hand_rl", VARIANTS)
def test_loss_and_gradient_are_the_formulas_over_the_members_of_each_component(
    rl, by_hand_rl, seed
):
    logprobs, batch = random_batch(seed)
    overlaps = (
        batch.loss_mask
        & (batch.rl_weights != 0)
        & (batch.ce_weights != 0)
        & (batch.ref_kl_weights != 0)
    )
    assert overlaps.any()
    config = LossConfig(rl=rl, ref_kl=RefKL.Config(mask_low=0.1, kl_tau=0.2, ratio_max=1.4))
    denominators = LossDenominators(rl=31, ce=17, ref_kl=23)
    logprobs.requires_grad_()
    loss, _ = compute_loss(logprobs, batch, denominators, config)
    loss.backward()
    expected_loss, expected_gradient = by_hand(logprobs, batch, denominators, config, by_hand_rl)
    assert loss.item() == pytest.approx(expected_loss, rel=1e-9, abs=1e-9)
    torch.testing.assert_close(
        logprobs.grad, torch.tensor(expected_gradient, dtype=torch.float64), rtol=1e-9, atol=1e-9
    )


def test_every_variant_masks_or_clips_something_in_the_comparison_above():
    for variant in VARIANTS[:-1]:
        rl = variant.values[0]
        logprobs, batch = random_batch(0)
        fraction = compute_loss(logprobs, batch, ONE, LossConfig(rl=rl))[1].compute()[
            "rl/masked_fraction"
        ]
        assert 0 < fraction < 1 or isinstance(rl, CISPO.Config), variant.id


def test_default_rl_loss_of_four_tokens_worked_out_on_paper():
    # Probabilities 0.5 when sampled; now 0.6, 0.75, 0.45 and 0.25. Advantages 1, 1, -2, -2: the second and fourth are dropped.
    logprobs = torch.tensor([[0.6, 0.75, 0.45, 0.25]], dtype=torch.float64).log()
    batch = batch_of(
        (1, 4),
        loss_mask=[[True] * 4],
        rl_weights=[[1.0] * 4],
        advantages=[[1.0, 1.0, -2.0, -2.0]],
    )
    batch.generator_logprobs = torch.full((1, 4), 0.5, dtype=torch.float64).log()
    loss, metrics = compute_loss(
        logprobs, batch, LossDenominators(rl=4, ce=1, ref_kl=1), LossConfig()
    )
    squares = sum(math.log(ratio) ** 2 for ratio in (1.2, 1.5, 0.9, 0.5))
    assert loss.item() == pytest.approx((-1.2 + 2 * 0.9 + 1e-3 * squares) / 4, rel=1e-12)
    assert metrics.compute()["rl/masked_fraction"] == 0.5


def test_a_token_may_belong_to_all_three_components_each_with_its_own_weight_and_denominator():
    logprobs = torch.tensor([[-0.7]], dtype=torch.float64, requires_grad=True)
    batch = batch_of(
        (1, 1), loss_mask=[[True]], rl_weights=[[2.0]], ce_weights=[[0.5]], ref_kl_weights=[[4.0]]
    )
    batch.generator_logprobs = logprobs.detach().clone()
    batch.advantages = torch.tensor([[3.0]])
    batch.ref_logprobs = torch.tensor([[-0.2]], dtype=torch.float64)
    loss, metrics = compute_loss(
        logprobs, batch, LossDenominators(rl=8, ce=5, ref_kl=10), LossConfig()
    )
    rl, ce, ref_kl = 2 * -3 / 8, 0.5 * 0.7 / 5, 4 * -0.5 / 10
    assert loss.item() == pytest.approx(rl + ce + ref_kl, rel=1e-12)
    found = metrics.compute()
    parts = [found[f"loss/{name}"] for name in ("rl", "ce", "ref_kl", "total")]
    assert parts == pytest.approx([rl, ce, ref_kl, rl + ce + ref_kl], rel=1e-12)
    loss.backward()
    assert logprobs.grad.item() == pytest.approx(rl - 0.5 / 5 + ref_kl, rel=1e-12)


# ------------------------------------------------------------------ sequences


def test_sequences_are_what_lies_between_restarts_of_positions():
    positions = torch.tensor([[0, 1, 2, 0, 1], [0, 0, 1, 2, 0]])
    assert sequence_ids(positions).tolist() == [[0, 0, 0, 1, 1], [2, 3, 3, 3, 4]]


def test_gspo_gradient_is_the_sequence_level_one_where_advantages_agree_within_a_sequence():
    g = torch.Generator().manual_seed(0)
    lengths, advantages = [5, 3, 4], [1.0, -0.5, 2.0]
    positions = torch.cat([torch.arange(n) for n in lengths])[None]
    per_token = torch.cat([torch.full((n,), a) for n, a in zip(lengths, advantages, strict=True)])[
        None
    ]
    generator = -torch.rand(1, 12, generator=g) - 0.5
    mask = torch.tensor(
        [[False, True, True, False, True, False, True, True, False, True, True, True]]
    )
    batch = batch_of(
        (1, 12),
        positions=positions,
        generator_logprobs=generator,
        loss_mask=mask,
        rl_weights=torch.ones(1, 12),
        advantages=per_token,
    )
    values = generator.double() + 0.02 * torch.randn(1, 12, generator=g)
    config = LossConfig(rl=GSPO.Config(clip_low=0.5, clip_high=0.5))

    attached = values.clone().requires_grad_()
    loss, _ = compute_loss(attached, batch, ONE, config)
    loss.backward()

    reference = values.clone().requires_grad_()
    total = 0
    for start, n, a in zip([0, 5, 8], lengths, advantages, strict=True):
        members = mask[0, start : start + n]
        lr = (reference - generator.double())[0, start : start + n][members]
        total = (
            total - members.sum() * lr.mean().exp() * a
        )  # each sequence times its tokens: all tokens count the same
    total.backward()
    assert loss.item() == pytest.approx(total.item(), rel=1e-12)
    torch.testing.assert_close(attached.grad, reference.grad, rtol=1e-12, atol=0)


def test_gspo_keeps_ratios_near_one_in_float32():
    # The paper's bounds are 3e-4: a log ratio rounded like logp itself, here to 4e-6, would be clipped or not by accident.
    batch = batch_of(
        (1, 3),
        generator_logprobs=[[-60.0] * 3],
        loss_mask=[[True] * 3],
        rl_weights=[[1.0] * 3],
        advantages=[[1.0] * 3],
    )
    logprobs = torch.tensor([[-60.0 + 2**-12, -60.0, -60.0]])  # exact in float32
    loss, metrics = compute_loss(
        logprobs, batch, LossDenominators(rl=3, ce=1, ref_kl=1), LossConfig(rl=GSPO.Config())
    )
    assert loss.item() == pytest.approx(-math.exp(2**-12 / 3), rel=2e-7)
    assert metrics.compute()["rl/masked_fraction"] == 0


# ------------------------------------------------------------------ the cap on the ratio

CAPPED_AT_100 = [DPPO.Config(), PPOClip.Config(), GSPO.Config()]
"""Variants with a ``ratio_max``, each with its default."""


def one_token(now: float, sampled: float, advantage: float):
    """Log-probability (differentiable) and batch of a token that had probability ``sampled`` and has ``now``."""
    logprobs = torch.tensor([[math.log(now)]], dtype=torch.float64, requires_grad=True)
    batch = batch_of((1, 1), loss_mask=[[True]], rl_weights=[[1.0]], advantages=[[advantage]])
    batch.generator_logprobs = torch.tensor([[math.log(sampled)]], dtype=torch.float64)
    return logprobs, batch


def test_a_token_that_passes_the_test_of_differences_with_a_ratio_of_1e5_is_capped():
    # d = 0.1 - 1e-6 is below 0.2, and the ratio is 1e5. lr = ln 1e5 = 11.5129.
    lr = math.log(1e5)
    logprobs, batch = one_token(0.1, 1e-6, advantage=2.0)
    loss, metrics = compute_loss(logprobs, batch, ONE, LossConfig())
    loss.backward()
    assert loss.item() == pytest.approx(-2.0 * 100 + 1e-3 * lr**2, rel=1e-12)
    # min(ρ, 100) is constant above 100: what is left is the pull back to the generator, 2·kl_tau·lr.
    assert logprobs.grad.item() == pytest.approx(2e-3 * lr, rel=1e-12)
    found = metrics.compute()
    assert found["rl/ratio_capped_fraction"] == found["rl/masked_fraction"] == 1
    assert found["rl/ratio_max"] == pytest.approx(1e5)

    logprobs, batch = one_token(0.1, 1e-6, advantage=2.0)
    loss, metrics = compute_loss(logprobs, batch, ONE, LossConfig(rl=DPPO.Config(ratio_max=None)))
    loss.backward()
    assert loss.item() == pytest.approx(-2e5 + 1e-3 * lr**2, rel=1e-9)
    assert logprobs.grad.item() == pytest.approx(-2e5 + 2e-3 * lr, rel=1e-9)
    found = metrics.compute()
    assert found["rl/ratio_capped_fraction"] == found["rl/masked_fraction"] == 0


@pytest.mark.parametrize("rl", CAPPED_AT_100, ids=lambda rl: type(rl).__qualname__)
def test_every_capped_variant_bounds_a_ratio_of_negative_advantage(rl):
    logprobs, batch = one_token(0.1, 1e-6, advantage=-2.0)
    loss, metrics = compute_loss(logprobs, batch, ONE, LossConfig(rl=rl))
    loss.backward()
    pull = 1e-3 if isinstance(rl, DPPO.Config) else 0.0
    assert loss.item() == pytest.approx(200 + pull * math.log(1e5) ** 2, rel=1e-12)
    assert logprobs.grad.item() == pytest.approx(2 * pull * math.log(1e5), abs=1e-12)
    assert metrics.compute()["rl/ratio_capped_fraction"] == 1


@pytest.mark.parametrize(
    "rl", [DPPO.Config(), PPOClip.Config()], ids=lambda rl: type(rl).__qualname__
)
def test_what_mask_or_clip_takes_does_not_count_as_capped(rl):
    # d = 0.9 and the ratio is 9e5: both the test and the cap say no, and the test is first.
    logprobs, batch = one_token(0.9, 1e-6, advantage=2.0)
    found = compute_loss(logprobs, batch, ONE, LossConfig(rl=rl))[1].compute()
    assert found["rl/masked_fraction"] == 1 and found["rl/ratio_capped_fraction"] == 0


def test_a_gain_of_distillation_is_capped_too():
    logprobs, batch = one_token(0.1, 1e-6, advantage=0.0)
    batch.rl_weights.zero_()
    batch.ref_kl_weights = torch.ones(1, 1)
    batch.ref_logprobs = logprobs.detach() - 3
    loss, metrics = compute_loss(logprobs, batch, ONE, LossConfig())
    loss.backward()
    assert loss.item() == pytest.approx(3 * 100 + 1e-3 * math.log(1e5) ** 2, rel=1e-12)
    assert logprobs.grad.item() == pytest.approx(2e-3 * math.log(1e5), rel=1e-12)
    found = metrics.compute()
    assert found["ref_kl/ratio_capped_fraction"] == found["ref_kl/masked_fraction"] == 1
    assert "rl/ratio_capped_fraction" not in found  # no rl token, no share of them


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("rl", [DPPO, PPOClip, GSPO], ids=lambda rl: rl.__name__)
def test_the_default_cap_changes_no_bit_of_a_batch_whose_ratios_are_below_it(rl, seed):
    results = []
    for changes in ({}, {"ratio_max": None}, {"ratio_max": math.inf}):
        logprobs, batch = random_batch(seed)
        attached = logprobs.float().requires_grad_()
        config = LossConfig(rl=rl.Config(**changes), ref_kl=RefKL.Config(**changes))
        loss, metrics = compute_loss(
            attached, batch, LossDenominators(rl=31, ce=17, ref_kl=23), config
        )
        loss.backward()
        results.append((loss.item(), attached.grad.tolist(), metrics.compute()))
    assert results[0] == results[1] == results[2]
    found = results[0][2]
    assert found["rl/ratio_capped_fraction"] == found["ref_kl/ratio_capped_fraction"] == 0


@pytest.mark.parametrize("rl", [DPPO, PPOClip, GSPO], ids=lambda rl: rl.__name__)
def test_a_capped_ratio_that_would_overflow_leaves_loss_and_gradient_finite(rl):
    logprobs = torch.tensor([[-1.0, -0.5]], requires_grad=True)
    batch = batch_of(
        (1, 2),
        positions=[[0, 0]],
        generator_logprobs=[[-900.0, -0.5]],
        loss_mask=[[True, True]],
        rl_weights=[[1.0, 1.0]],
        advantages=[[-1.0, 1.0]],
    )
    config = LossConfig(rl=rl.Config())
    loss, _ = compute_loss(logprobs, batch, ONE, config)
    loss.backward()
    pull = 2e-3 * 899 if rl is DPPO else 0.0
    assert math.isfinite(loss.item()) and logprobs.grad[0].tolist() == pytest.approx(
        [pull, -1.0], rel=1e-5
    )


def test_a_correction_with_the_ratio_in_it_leaves_the_variants_cap_nothing_to_do():
    logprobs, batch = one_token(0.1, 1e-6, advantage=2.0)
    config = LossConfig(corrections=[TruncatedImportance.Config(cap=3.0)])
    loss, metrics = compute_loss(logprobs, batch, ONE, config)
    loss.backward()
    assert loss.item() == pytest.approx(-6.0) and logprobs.grad.item() == pytest.approx(-6.0)
    assert metrics.compute()["rl/ratio_capped_fraction"] == 0


@pytest.mark.parametrize("component", ["rl", "ref_kl"])
@pytest.mark.parametrize("value", [0, -5.0, 1.0])
def test_a_cap_that_is_not_above_1_is_refused(component, value):
    config = LossConfig()
    getattr(config, component).ratio_max = value
    with pytest.raises(
        ConfigError, match=f"{component}.ratio_max = {value}: must be above 1; .*None sets no cap"
    ):
        check_fields(config)
    getattr(config, component).ratio_max = None
    check_fields(config)


def test_a_cap_that_is_infinite_is_refused_with_the_way_to_have_none():
    with pytest.raises(
        ConfigError,
        match="rl.ratio_max = inf: must be a finite number and above 1; .*None sets no cap",
    ):
        check_fields(LossConfig(rl=DPPO.Config(ratio_max=math.inf)))


@pytest.mark.parametrize(("clip_low", "clip_high"), [(0.2, 0.28), (0.5, 1.0)])
def test_a_ratio_that_meets_its_clip_exactly_is_not_clipped(clip_low, clip_high):
    at_bounds = torch.tensor([math.log1p(clip_high), math.log1p(-clip_low)], dtype=torch.float64)
    loss, clipped, _ = clipped_surrogate(
        at_bounds, torch.tensor([1.0, -1.0], dtype=torch.float64), clip_low, clip_high, None
    )
    assert clipped.tolist() == [False, False]
    assert loss.tolist() == pytest.approx([-(1 + clip_high), 1 - clip_low])
