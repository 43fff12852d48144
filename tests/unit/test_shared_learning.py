"""Loss, gradient, metrics and entropy of shared prefixes against the same samples apart, in float64."""

import json
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.unit.tree_samples import random_tree, tree_sample, trees_of_samples
from torchtitan.experiments.rl.batching.batcher import Batcher
from torchtitan.experiments.rl.losses import (
    CISPO,
    DPPO,
    GSPO,
    LossConfig,
    MetricSums,
    PPOClip,
    compute_loss,
    count_denominators,
    mismatch_metrics,
)
from torchtitan.experiments.rl.models import attention, decoder
from torchtitan.experiments.rl.models.decoder import batch_logprobs
from torchtitan.experiments.rl.models.policy import ModelConfig, policy_spec
from torchtitan.experiments.rl.types import LossDenominators

torch.set_num_threads(1)

CAP = 1.5
"""A ``ratio_max`` that acts on the samples of these tests."""
VARIANTS = [
    DPPO.Config(),
    PPOClip.Config(),
    CISPO.Config(),
    GSPO.Config(clip_low=0.3, clip_high=0.3),
    DPPO.Config(mask_high=1.0, ratio_max=CAP),
    PPOClip.Config(ratio_max=CAP),
    GSPO.Config(clip_low=0.3, clip_high=0.3, ratio_max=CAP),
]

SIZES = dict(
    vocab_size=64,
    hidden_size=16,
    intermediate_size=24,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=8,
    max_position_embeddings=64,
    rms_norm_eps=1e-6,
    hidden_act="silu",
    rope_theta=1e4,
    tie_word_embeddings=True,
    architectures=["Qwen3ForCausalLM"],
)


@pytest.fixture(scope="module")
def policy(tmp_path_factory):
    """A random policy, in float64; its distributions are far from flat. torchtitan turns queries and keys in float32, and
    rounds their gradient to it: ``float`` means float64 here."""
    patch = pytest.MonkeyPatch()
    patch.setattr(torch.Tensor, "float", torch.Tensor.double)
    folder = tmp_path_factory.mktemp("policy")
    (folder / "config.json").write_text(json.dumps(SIZES))
    model = (
        policy_spec(ModelConfig(hf_assets_path=str(folder)), device="cpu", max_seq_len=64)
        .model.build()
        .double()
    )
    model.init_states(buffer_device=torch.device("cpu"))
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(
                torch.randn(parameter.shape, generator=generator, dtype=torch.float64) * 0.4
            )
    yield model
    patch.undo()


def step(
    policy,
    samples,
    rl=VARIANTS[0],
    *,
    share: bool,
    row_length=48,
    rows_per_microbatch=2,
    ranks=1,
    seen=None,
):
    """Metrics, entropy among them, and gradient of one optimizer step, all ranks and microbatches in turn."""
    config = Batcher.Config(
        row_length=row_length, rows_per_microbatch=rows_per_microbatch, share_prefixes=share
    )
    plan = config.build().plan(samples, ranks)
    batches = [batch for rank in plan.microbatches for batch in rank]
    rl_count, ce, ref_kl = (
        sum(count_denominators(batch, ["members"] * 3) for batch in batches).clamp(min=1).tolist()
    )
    sums = MetricSums()
    policy.zero_grad()
    for batch in batches:
        logprobs, entropy = batch_logprobs(policy, batch)
        loss, metrics = compute_loss(
            logprobs, batch, LossDenominators(rl=rl_count, ce=ce, ref_kl=ref_kl), LossConfig(rl=rl)
        )
        loss.backward()
        metrics.add_mean("policy/entropy", entropy, batch.loss_mask)
        sums.merge(metrics)
        sums.merge(mismatch_metrics(logprobs.detach(), batch, 3))
    if seen is not None:
        seen.append(plan.shared_fraction)
    return sums.compute(), torch.cat(
        [parameter.grad.flatten() for parameter in policy.parameters()]
    )


def assert_same(shared, apart) -> None:
    (metrics, gradient), (expected, expected_gradient) = shared, apart
    assert metrics.keys() == expected.keys()
    assert metrics == pytest.approx(expected, rel=1e-9, abs=1e-12)
    scale = expected_gradient.abs().max()
    assert (gradient - expected_gradient).abs().max() <= 1e-9 * scale + 1e-15


@settings(max_examples=40)
@given(
    samples=trees_of_samples(),
    rl=st.sampled_from(VARIANTS),
    row_length=st.integers(20, 64),
    rows_per_microbatch=st.integers(1, 4),
    ranks=st.integers(1, 3),
)
def test_sharing_changes_neither_loss_nor_gradient_nor_any_metric(
    policy, samples, rl, row_length, rows_per_microbatch, ranks
):
    layout = dict(row_length=row_length, rows_per_microbatch=rows_per_microbatch, ranks=ranks)
    assert_same(
        step(policy, samples, rl, share=True, **layout), step(policy, samples, rl, share=False)
    )


def forked(count: int = 40):
    """One tree of every kind of sample, which the tests below break in turn."""
    return [tree_sample(tokens, seed) for seed, tokens in enumerate(random_tree(5, count, 20))]


@pytest.mark.parametrize("rl", VARIANTS, ids=lambda rl: type(rl).__qualname__)
def test_every_variant_on_forks_of_forks(policy, rl):
    seen: list[float] = []
    shared = step(policy, forked(), rl, share=True, row_length=64, seen=seen)
    assert seen[0] > 0.4
    names = {
        "rl/loss",
        "ce/loss",
        "ref_kl/loss",
        "policy/entropy",
        "mismatch_kl/age/2",
        "mismatch_kl/task/task1",
        "ce/user/nll",
    }
    assert names <= shared[0].keys()
    assert_same(shared, step(policy, forked(), rl, share=False))
    if getattr(rl, "ratio_max", None) == CAP:
        assert shared[0]["rl/ratio_capped_fraction"] > 0


def test_identical_samples_and_a_sample_that_begins_another_count_each(policy):
    samples = [
        tree_sample([1, 2, 3, 4, 5], 0),
        tree_sample([1, 2, 3, 4, 5], 1),
        tree_sample([1, 2, 3], 2),
        tree_sample([1], 3),
    ]
    seen: list[float] = []
    shared = step(policy, samples, share=True, seen=seen)
    assert seen == [pytest.approx(1 - 5 / 14)]
    assert_same(shared, step(policy, samples, share=False))


def test_the_same_token_may_be_sampled_in_one_sample_and_an_envs_in_another(policy):
    tokens, role = [1, 2, 3, 4], 2
    first = tree_sample(tokens, 0, ce_weights=None, ref_kl_weights=None)
    second = tree_sample(
        tokens, 1, loss_mask=torch.zeros(4, dtype=torch.bool).numpy(), ref_kl_weights=None
    )
    second.ce_weights[1:], second.role_ids[:] = 1, role
    shared, apart = (step(policy, [first, second], share=share) for share in (True, False))
    assert_same(shared, apart)
    assert shared[0]["ce/user/nll"] == pytest.approx(
        step(policy, [second], share=False)[0]["ce/user/nll"]
    )


# ---- what these tests would catch


def see_siblings(patch):
    original = attention.subtree_ends

    def ends(positions):
        wrong = original(positions).clone()
        wrong[positions > 0] += 1  # a token's next sibling sees it too
        return wrong

    patch.setattr(attention, "subtree_ends", ends)


def lose_an_ancestor(patch):
    original = attention.subtree_ends
    patch.setattr(attention, "subtree_ends", lambda positions: original(positions).clamp(max=40))


def predict_from_the_left(patch):
    def left(positions):
        return torch.arange(-1, positions.shape[1] - 1).expand(positions.shape)

    patch.setattr(decoder, "parent_columns", left)


def change_trees(change):
    def patched(patch):
        build = Batcher.plan

        def plan(self, samples, ranks):
            made = build(self, samples, ranks)
            for batch in sum(made.microbatches, []):
                if batch.trees is not None:
                    batch.trees = replace(batch.trees, **change(batch.trees))
            return made

        patch.setattr(Batcher, "plan", plan)

    return patched


MUTATIONS = {
    "a sibling is seen": see_siblings,
    "an ancestor is not seen": lose_an_ancestor,
    "a branch is predicted from the token to its left": predict_from_the_left,
    "a slot is its neighbour's": change_trees(
        lambda trees: dict(slots=trees.slots - (trees.slots > 9).long())
    ),
    "a temperature is another": change_trees(
        lambda trees: dict(temperatures=trees.temperatures + 0.01 * (trees.positions == 5))
    ),
}


@pytest.mark.parametrize("mutate", MUTATIONS.values(), ids=MUTATIONS)
def test_a_mistake_in_the_tree_is_seen(policy, mutate, monkeypatch):
    apart = step(policy, forked(), share=False)
    mutate(monkeypatch)
    with pytest.raises(AssertionError):
        assert_same(step(policy, forked(), share=True, row_length=64), apart)


def test_a_wrong_position_is_seen(policy, monkeypatch):
    """Positions of branches that restart, as a row of whole samples would have them, with attention as it should be."""
    apart = step(policy, forked(), share=False)
    hidden = type(policy).hidden_states

    def restarted(self, tokens, positions, masks):
        columns = torch.arange(positions.shape[1])
        branches = torch.cat([positions[:, :1] == 0, positions.diff() != 1], 1)
        starts = torch.where(branches, columns, 0).cummax(1).values
        return hidden(self, tokens, columns - starts, masks)

    monkeypatch.setattr(type(policy), "hidden_states", restarted)
    with pytest.raises(AssertionError):
        assert_same(step(policy, forked(), share=True, row_length=64), apart)


def test_the_step_is_compared_on_numbers_that_are_not_zero(policy):
    metrics, gradient = step(policy, forked(), share=True)
    assert gradient.abs().max() > 1e-3 and abs(metrics["loss/total"]) > 1e-3
