"""Metrics are of tokens over the whole step, whatever the microbatches and ranks they came from."""

import math

import pytest
import torch
import torch.distributed as dist

from tests.unit.loss_batches import ONE, batch_of, random_batch
from torchtitan.experiments.rl.losses import (
    LossConfig,
    MetricSums,
    PPOClip,
    compute_loss,
    mismatch_metrics,
)
from torchtitan.experiments.rl.types import LossDenominators, TrainingBatch

torch.set_num_threads(1)

ALL = torch.ones(2, dtype=torch.bool)


def test_a_merged_mean_is_of_tokens_not_of_averages():
    first, second = MetricSums(), MetricSums()
    first.add_mean("x", torch.tensor([1.0, 2.0, 3.0]), torch.tensor([True, True, True]))
    second.add_mean("x", torch.tensor([10.0, 999.0]), torch.tensor([True, False]))
    first.merge(second)
    assert first.compute() == {"x": 4.0}  # the average of averages is 6


def test_sums_add_up_and_maxima_are_kept():
    first, second = MetricSums(), MetricSums()
    for metrics, values in ((first, [-3.0, -1.0]), (second, [-2.0, 7.0])):
        metrics.add_sum("sum", torch.tensor(values).sum())
        metrics.add_max("max", torch.tensor(values), torch.tensor([True, False]))
    first.merge(second)
    assert first.compute() == {"max": -2.0, "sum": 1.0}


def test_what_lies_outside_the_mask_may_be_anything_and_no_token_gives_no_number():
    metrics = MetricSums()
    values = torch.tensor([math.nan, math.inf])
    metrics.add_mean("mean", values, ~ALL)
    metrics.add_max("max", values, ~ALL)
    metrics.add_max("empty", torch.zeros(0), torch.zeros(0, dtype=torch.bool))
    assert metrics.compute() == {}
    assert MetricSums().compute() == {}
    metrics.add_mean("mean", torch.tensor([5.0, math.nan]), torch.tensor([True, False]))
    assert metrics.compute() == {"mean": 5.0}


def test_a_nan_among_the_tokens_is_seen():
    metrics = MetricSums()
    metrics.add_max("max", torch.tensor([math.nan, 1.0]), ALL)
    metrics.add_mean("mean", torch.tensor([math.nan, 1.0]), ALL)
    assert all(math.isnan(value) for value in metrics.compute().values())


def test_sums_are_float64_so_a_step_of_many_tokens_loses_none():
    metrics = MetricSums()
    for _ in range(3):
        metrics.add_mean(
            "x", torch.full((2,), 2**24, dtype=torch.float32) + torch.tensor([0.0, 2.0]), ALL
        )
    assert metrics.compute() == {"x": 2**24 + 1}


def test_one_name_is_one_kind_of_metric():
    metrics = MetricSums()
    metrics.add_sum("x", 1.0)
    with pytest.raises(ValueError, match="metric 'x' is a sum and can't also be a max"):
        metrics.add_max("x", torch.zeros(2), ALL)


def test_ranks_that_hold_different_names_end_with_the_same_numbers(monkeypatch):
    ranks = [MetricSums(), MetricSums(), MetricSums()]
    ranks[0].add_mean("x", torch.tensor([1.0, 3.0]), ALL)
    ranks[0].add_mean("only/0", torch.tensor([2.0, 2.0]), ALL)
    ranks[1].add_mean("x", torch.tensor([8.0, 0.0]), torch.tensor([True, False]))
    ranks[2].add_max("only/2", torch.tensor([4.0, 9.0]), ALL)
    sent = []

    def record(received, mine, group):
        sent.append(mine)
        received[:] = [mine] * len(received)

    def answer(received, mine, group):
        received[:] = sent

    monkeypatch.setattr(dist, "is_initialized", lambda: True)
    monkeypatch.setattr(dist, "get_world_size", lambda group: 3)
    monkeypatch.setattr(dist, "all_gather_object", record)
    for metrics in ranks:
        shadow = MetricSums()
        shadow.merge(metrics)
        shadow.all_reduce()
    monkeypatch.setattr(dist, "all_gather_object", answer)
    for metrics in ranks:
        metrics.all_reduce()
        assert metrics.compute() == {"x": 4.0, "only/0": 2.0, "only/2": 9.0}


def test_reducing_in_a_real_group_of_one_and_in_no_group_changes_nothing(tmp_path):
    metrics = MetricSums()
    metrics.add_mean("x", torch.tensor([1.0, 2.0]), ALL)
    metrics.add_max("y", torch.tensor([1.0, 2.0]), ALL)
    metrics.all_reduce()
    before = metrics.compute()
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    try:
        metrics.all_reduce()
    finally:
        dist.destroy_process_group()
    assert metrics.compute() == before == {"x": 1.5, "y": 2.0}


# ------------------------------------------------------------------ what compute_loss reports


def test_rl_metrics_of_three_tokens_worked_out_on_paper():
    # Ratios 2, 1 and 0.5; the fourth token is no member.
    generator = torch.tensor([[-2.0, -1.0, -0.5, -9.0]], dtype=torch.float64)
    logprobs = generator + torch.tensor(
        [[math.log(2), 0.0, -math.log(2), 50.0]], dtype=torch.float64
    )
    batch = batch_of(
        (1, 4),
        loss_mask=[[True, True, True, False]],
        rl_weights=[[1.0, 2.0, 1.0, 1.0]],
        ce_weights=[[0.0, 3.0, 1.0, 0.0]],
        advantages=[[1.0, 1.0, 1.0, 1.0]],
    )
    batch.generator_logprobs = generator
    _, metrics = compute_loss(
        logprobs, batch, LossDenominators(rl=3, ce=2, ref_kl=1), LossConfig(rl=PPOClip.Config())
    )
    found = metrics.compute()
    assert {name.partition("/")[0] for name in found} == {
        "loss",
        "rl",
        "ce",
    }  # no ref_kl member: no ref_kl number
    log2 = math.log(2)
    expected = {
        "rl/loss": (-1.2 - 2 - 0.5) / 3,
        "rl/ratio_mean": 3.5 / 3,
        "rl/ratio_max": 2.0,
        "rl/masked_fraction": 1 / 3,
        "rl/logprob_diff_mean": 2 * log2 / 3,
        "rl/logprob_diff_max": log2,
        "rl/mismatch_kl": ((2 - 1 - log2) + 0 + (0.5 - 1 + log2)) / 3,
        "loss/rl": (-1.2 - 2 - 0.5) / 3,
        "ce/nll": (1.0 + 0.5 + log2) / 2,
        "ce/loss": (3 * 1.0 + 0.5 + log2) / 2,
        "loss/ce": (3 * 1.0 + 0.5 + log2) / 2,
    }
    assert {name: found[name] for name in expected} == pytest.approx(expected, rel=1e-12)


def test_ref_kl_reports_how_far_the_policy_is_from_the_reference():
    batch = batch_of(
        (1, 2),
        generator_logprobs=[[-1.0, -1.0]],
        ref_logprobs=[[-0.5, -3.0]],
        loss_mask=[[1, 1]],
        ref_kl_weights=[[1.0, 1.0]],
    )
    found = compute_loss(torch.tensor([[-1.0, -1.0]]), batch, ONE, LossConfig())[1].compute()
    assert found["ref_kl/kl"] == pytest.approx((-0.5 + 2.0) / 2)
    assert found["ref_kl/ratio_mean"] == 1
    assert "rl/loss" not in found


def test_metrics_of_rows_merged_one_by_one_are_those_of_the_whole_batch():
    logprobs, batch = random_batch(3, rows=4)
    denominators = LossDenominators(rl=50, ce=60, ref_kl=70)
    loss, whole = compute_loss(logprobs, batch, denominators, LossConfig())
    merged, total = MetricSums(), 0.0
    for row in range(4):
        streams = {name: getattr(batch, name) for name in batch.__slots__}
        part = TrainingBatch(
            **{
                n: v[row : row + 1] if isinstance(v, torch.Tensor) else v
                for n, v in streams.items()
            }
        )
        part_loss, metrics = compute_loss(logprobs[row : row + 1], part, denominators, LossConfig())
        merged.merge(metrics)
        total += part_loss.item()
    assert merged.compute() == pytest.approx(whole.compute(), rel=1e-12)
    assert [merged.compute()["loss/total"], total] == pytest.approx([loss.item()] * 2, rel=1e-12)


# ------------------------------------------------------------------ mismatch


def test_mismatch_is_reported_by_task_and_by_the_age_of_the_weights_that_sampled():
    generator = torch.full((2, 3), -1.0, dtype=torch.float64)
    lr = torch.tensor([[0.0, 0.1, -0.2], [0.3, 5.0, 0.0]], dtype=torch.float64)
    batch = batch_of(
        (2, 3),
        loss_mask=[[True, True, True], [True, False, True]],
        policy_versions=[[7, 7, 6], [4, -1, -1]],
        task_ids=[[0, 0, 0], [1, 1, 1]],
    )
    batch.generator_logprobs, batch.task_names = generator, ("sort", "sum_digits", "unseen")
    found = mismatch_metrics(generator + lr, batch, policy_version=7).compute()

    def k3(x: float) -> float:
        return math.exp(x) - 1 - x

    # The last token was sampled by a frozen model (version -1), the one before it by nobody: neither counts.
    assert found == pytest.approx(
        {
            "mismatch_kl/all": (k3(0.1) + k3(-0.2) + k3(0.3)) / 4,
            "mismatch_kl/task/sort": (k3(0.1) + k3(-0.2)) / 3,
            "mismatch_kl/task/sum_digits": k3(0.3),
            "mismatch_kl/age/0": k3(0.1) / 2,
            "mismatch_kl/age/1": k3(-0.2),
            "mismatch_kl/age/3": k3(0.3),
        },
        rel=1e-9,
    )


def test_the_distance_to_a_reference_model_is_reported_by_task():
    batch = batch_of(
        (2, 2),
        task_ids=[[0, 0], [1, 1]],
        ref_kl_weights=[[1, 0.5], [0, 1]],
        ref_logprobs=[[-1, -2], [9, -1]],
    )
    batch.task_names = ("taught", "both", "unseen")
    policy = torch.tensor([[-1.5, -1.0], [-3.0, -1.25]], dtype=torch.float64)
    found = mismatch_metrics(policy, batch, policy_version=0).compute()
    # Whatever its weight, a token counts once; the third has none.
    kl = {"ref_kl/kl/task/taught": (-0.5 + 1.0) / 2, "ref_kl/kl/task/both": -0.25}
    assert {
        name: value for name, value in found.items() if name.startswith("ref_kl/")
    } == pytest.approx(kl, abs=1e-12)


def test_distances_are_reported_by_the_replica_and_the_age_that_sampled():
    batch = batch_of(
        (2, 3),
        loss_mask=[[1, 1, 1], [1, 1, 0]],
        policy_versions=[[7, 7, 6], [7, 7, -1]],
        replicas=[[0, 0, 0], [1, -1, -1]],
    )
    lr = torch.tensor([[0.1, -0.2, 0.3], [-0.4, 9.0, 9.0]])
    found = mismatch_metrics(batch.generator_logprobs + lr, batch, policy_version=7).compute()
    expected = {"replica/0/age/0": 0.15, "replica/0/age/1": 0.3, "replica/1/age/0": 0.4}
    assert {
        name: value for name, value in found.items() if name.startswith("mismatch/")
    } == pytest.approx({f"mismatch/{name}": value for name, value in expected.items()}, abs=1e-7)


def test_mismatch_estimates_the_kl_from_generator_to_trainer_without_bias():
    generator, trainer = torch.tensor([[0.2, 0.5, 0.3], [0.4, 0.35, 0.25]], dtype=torch.float64)
    kl = (generator * (generator / trainer).log()).sum().item()
    counts = (generator * 10).round().long()  # tokens in exactly the generator's proportions
    tokens = torch.repeat_interleave(torch.arange(3), counts)[None]
    batch = batch_of((1, 10), loss_mask=torch.ones(1, 10), policy_versions=torch.zeros(1, 10))
    batch.generator_logprobs = generator[tokens].log()
    found = mismatch_metrics(trainer[tokens].log(), batch, policy_version=0).compute()
    assert found["mismatch_kl/all"] == pytest.approx(kl, rel=1e-12)
