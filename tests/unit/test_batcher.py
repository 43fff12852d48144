"""From samples to every rank's microbatches, and back."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.unit.batches import STREAMS, unpack
from tests.unit.batches import random_sample as sample
from torchtitan.experiments.rl.batching.batcher import Batcher, BatchPlan
from torchtitan.experiments.rl.losses import (
    DPPO,
    GSPO,
    LossConfig,
    compute_loss,
    count_denominators,
)
from torchtitan.experiments.rl.types import LossDenominators

torch.set_num_threads(1)


def plan_of(samples, row_length=32, rows_per_microbatch=2, ranks=1) -> BatchPlan:
    return (
        Batcher.Config(row_length=row_length, rows_per_microbatch=rows_per_microbatch)
        .build()
        .plan(samples, ranks)
    )


@settings(deadline=None, max_examples=60)
@given(
    lengths=st.lists(st.integers(1, 32), max_size=25),
    rows_per_microbatch=st.integers(1, 4),
    ranks=st.integers(1, 5),
)
def test_every_token_comes_back_once_with_all_its_streams(lengths, rows_per_microbatch, ranks):
    samples = [sample(length, seed) for seed, length in enumerate(lengths)]
    plan = plan_of(samples, rows_per_microbatch=rows_per_microbatch, ranks=ranks)
    batches = [batch for rank in plan.microbatches for batch in rank]

    assert len(plan.microbatches) == ranks
    assert len({len(rank) for rank in plan.microbatches}) == 1 and len(plan.microbatches[0]) >= 1
    assert all(1 <= batch.token_ids.shape[0] <= rows_per_microbatch for batch in batches)
    assert all(1 <= (batch.trees or batch).token_ids.shape[1] <= 32 for batch in batches)

    def key(token_ids, temperature, advantages) -> tuple:
        return (*token_ids.tolist(), temperature, *advantages.tolist())

    expected = {key(s.token_ids, s.temperature, s.advantages): s for s in samples}
    found = 0
    for batch in batches:
        pieces, paddings = unpack(batch)
        found += len(pieces)
        for piece in pieces:
            original = expected.pop(
                key(piece["token_ids"], piece["temperatures"][0].item(), piece["advantages"])
            )
            for name in STREAMS:
                np.testing.assert_array_equal(piece[name], getattr(original, name), err_msg=name)
            assert set(piece["temperatures"].tolist()) == {original.temperature}
            assert {batch.task_names[index] for index in piece["task_ids"].tolist()} == {
                original.task_name
            }
        for padding in paddings:
            assert not padding["loss_mask"].any()
            assert not any(
                padding[name].any() for name in ("rl_weights", "ce_weights", "ref_kl_weights")
            )
            assert set(padding["policy_versions"].tolist()) == {-1} and set(
                padding["temperatures"].tolist()
            ) == {1.0}
    assert not expected and found == len(samples)
    placed = list(
        plan.of_samples([[batch.token_ids.numpy() for batch in rank] for rank in plan.microbatches])
    )
    assert sorted(id(one) for one, _ in placed) == sorted(map(id, samples))
    assert all(values.tolist() == one.token_ids.tolist() for one, values in placed)

    assert plan.tokens == sum(lengths)
    computed = plan.tokens - round(
        plan.shared_fraction * plan.tokens
    )  # a few begin with the same token
    assert plan.efficiency == computed / sum(
        (batch.trees or batch).token_ids.numel() for batch in batches
    )
    filled = [(batch.task_ids >= 0).any(1).sum().item() for batch in batches]
    assert plan.rows == sum(filled)


def test_streams_have_the_dtypes_of_the_contract():
    batch = plan_of([sample(5)]).microbatches[0][0]
    dtypes = {
        name: getattr(batch, name).dtype
        for name in batch.__slots__
        if name not in ("task_names", "adapter", "trees", "conditioned")
    }
    ints = ("token_ids", "positions", "policy_versions", "task_ids")
    assert all(dtypes.pop(name) == torch.int32 for name in ints)
    assert dtypes.pop("loss_mask") == torch.bool and dtypes.pop("role_ids") == torch.int8
    assert dtypes.pop("replicas") == torch.int16 and dtypes.pop("routes") == torch.uint8
    assert set(dtypes.values()) == {torch.float32}


def test_absent_streams_read_as_the_contract_says():
    bare = sample(4, loss_mask=np.array([False, True, False, True]), **dict.fromkeys(STREAMS[7:]))
    batch = plan_of([bare]).microbatches[0][0]
    assert batch.rl_weights[0, :4].tolist() == [0, 1, 0, 1]
    for name in ("ce_weights", "ref_kl_weights", "ref_logprobs"):
        assert not getattr(batch, name).any()
    silent = sample(4, loss_mask=np.zeros(4, bool), **dict.fromkeys(STREAMS[6:]))
    assert not plan_of([silent]).microbatches[0][0].advantages.any()


def test_the_same_samples_give_the_same_plan():
    samples = [sample(1 + seed % 20, seed) for seed in range(40)]
    first, second = plan_of(samples, ranks=3), plan_of(samples, ranks=3)
    for a, b in zip(sum(first.microbatches, []), sum(second.microbatches, []), strict=True):
        assert all(
            torch.equal(getattr(a, name), getattr(b, name))
            for name in [*STREAMS, "positions", "task_ids"]
        )


def test_rows_are_no_longer_than_their_microbatch_needs():
    plan = plan_of([sample(9, 0), sample(3, 1)], row_length=2048)
    assert plan.microbatches[0][0].token_ids.shape == (
        1,
        16,
    )  # 12 tokens, rounded up to a multiple of 8
    assert plan.efficiency == 12 / 16


def test_a_rank_with_nothing_to_do_gets_one_short_row_of_padding():
    plan = plan_of([sample(20)], ranks=3)
    assert [[tuple(batch.token_ids.shape) for batch in rank] for rank in plan.microbatches] == [
        [(1, 24)],
        [(1, 8)],
        [(1, 8)],
    ]
    assert count_denominators(plan.microbatches[2][0], ["members"] * 3).tolist() == [0, 0, 0]
    nothing = plan_of([], ranks=2)
    assert (nothing.efficiency, nothing.rows, nothing.tokens) == (0, 0, 0)
    assert [len(rank) for rank in nothing.microbatches] == [1, 1]


def test_samples_spread_over_ranks_that_would_otherwise_wait():
    plan = plan_of([sample(8, seed) for seed in range(4)], ranks=4)  # one full row, if packed
    assert [tuple(rank[0].token_ids.shape) for rank in plan.microbatches] == [(1, 8)] * 4
    assert plan.efficiency == 1


def test_microbatches_of_a_rank_are_of_even_size():
    plan = plan_of([sample(32, seed) for seed in range(9)], rows_per_microbatch=8)
    assert [batch.token_ids.shape[0] for batch in plan.microbatches[0]] == [5, 4]


# ------------------------------------------------------------------ refusals


def test_fits_is_asked_before_because_nothing_is_ever_truncated():
    batcher = Batcher.Config(row_length=10).build()
    assert batcher.fits(sample(10)) and not batcher.fits(sample(11))
    assert not batcher.oversized([sample(10), sample(1)])
    assert batcher.oversized([sample(10), sample(11)])
    short = Batcher.Config(row_length=10).build(positions=4)
    assert short.fits(sample(4)) and not short.fits(sample(5))
    with pytest.raises(ValueError, match="rollout 'group4/0' has 11 tokens and a row takes 10"):
        batcher.plan([sample(3), sample(11, 4)], 1)


def test_what_a_reference_scores_lies_in_rows_of_its_own_and_each_sampled_token_knows_its_place():
    masks = {length: np.arange(length) >= 3 for length in (5, 6)}
    samples = [
        sample(length, length, loss_mask=mask, ref_kl_weights=None)
        for length, mask in masks.items()
    ]
    samples.append(sample(4, 1, ref_kl_weights=None))
    for entry, before in zip(samples[:2], ([7], [7, 8, 9, 10]), strict=True):
        entry.reference_ids = np.concatenate([np.array(before, np.int32), entry.token_ids[3:]])
        entry.temperature = 1.0
    (batches,) = plan_of(samples, row_length=8, rows_per_microbatch=2).microbatches
    found = {}
    for batch in batches:
        rows = batch.conditioned
        assert rows.slots.shape == batch.token_ids.shape and rows.token_ids.shape[1] <= 8
        placed = rows.slots >= 0
        assert torch.equal(rows.token_ids.flatten()[rows.slots[placed]], batch.token_ids[placed])
        assert torch.equal(placed & batch.loss_mask, placed)
        for slot in rows.slots[placed].tolist():
            found[int(rows.token_ids.flatten()[slot]), slot] = int(rows.positions.flatten()[slot])
    # Behind one token and behind four: each counts from the start of its own row.
    assert sorted(found.values()) == [1, 2, 4, 5, 6]
    assert all(batch.conditioned is None for batch in plan_of([sample(4, 1)]).microbatches[0])
    batcher = Batcher.Config(row_length=6).build()
    assert batcher.fits(samples[0]) and not batcher.fits(samples[1])


# ------------------------------------------------------------------ packing changes nothing


def step(samples, theta: torch.Tensor, config: LossConfig, **layout) -> tuple[float, torch.Tensor]:
    """Loss and gradient of one optimizer step, all ranks and microbatches in turn. A token's log-probability depends on its id,
    its position and its temperature, through every entry of ``theta`` [50, 2]."""
    batches = [batch for rank in plan_of(samples, **layout).microbatches for batch in rank]
    rl, ce, ref_kl = (
        sum(count_denominators(batch, ["members"] * 3) for batch in batches).clamp(min=1).tolist()
    )
    theta = theta.clone().requires_grad_()
    total = 0.0
    for batch in batches:
        scores = theta[batch.token_ids.long()]
        logits = scores[..., 0] + scores[..., 1] * torch.sin(batch.positions.double())
        logprobs = -torch.nn.functional.softplus(logits / batch.temperatures)
        loss, _ = compute_loss(
            logprobs, batch, LossDenominators(rl=rl, ce=ce, ref_kl=ref_kl), config
        )
        loss.backward()
        total += loss.item()
    return total, theta.grad


LAYOUTS = [
    dict(row_length=32, rows_per_microbatch=1),
    dict(row_length=32, rows_per_microbatch=2, ranks=2),
    dict(row_length=100, rows_per_microbatch=3, ranks=5),
    dict(row_length=777, rows_per_microbatch=8, ranks=4),
    dict(row_length=64, rows_per_microbatch=8, ranks=50),
]


PACKED_LOSSES = {
    "dppo": DPPO.Config(),
    "gspo": GSPO.Config(clip_low=0.3, clip_high=0.3),
    "dppo-capped": DPPO.Config(ratio_max=1.2),
    "gspo-capped": GSPO.Config(clip_low=0.3, clip_high=0.3, ratio_max=1.2),
}


@pytest.mark.parametrize("rl", PACKED_LOSSES.values(), ids=PACKED_LOSSES)
def test_loss_and_gradient_do_not_depend_on_row_length_microbatch_size_or_rank_count(rl):
    samples = [sample(1 + seed * 7 % 32, seed) for seed in range(40)]
    theta = torch.randn(50, 2, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    loss, gradient = step(
        samples, theta, LossConfig(rl=rl), row_length=2048, rows_per_microbatch=64
    )
    if rl.ratio_max < 100:  # the cap acts: without it the gradient is another
        uncapped = replace(rl, ratio_max=None)
        _, other = step(
            samples, theta, LossConfig(rl=uncapped), row_length=2048, rows_per_microbatch=64
        )
        assert not torch.allclose(other, gradient)
    assert gradient.abs().max() > 1e-3
    for layout in LAYOUTS:
        other_loss, other_gradient = step(samples, theta, LossConfig(rl=rl), **layout)
        assert other_loss == pytest.approx(loss, rel=1e-9), layout
        torch.testing.assert_close(other_gradient, gradient, rtol=1e-9, atol=1e-12, msg=str(layout))
