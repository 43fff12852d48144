"""Tasks in one batch do nothing to each other."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from tests.integration.learners import compute_in_float64, full, learner_of
from torchtitan.experiments.rl.batching.batcher import Batcher
from torchtitan.experiments.rl.training.learner import Learner
from torchtitan.experiments.rl.types import LossDenominators, TrainingSample

DENOMINATORS = LossDenominators(rl=200, ce=100, ref_kl=150)


def samples_of(task: str, seed: int, count: int = 6) -> list[TrainingSample]:
    """Samples that feed ``task``'s component: sampled in their second half."""
    random = np.random.default_rng(seed)
    samples = []
    for index in range(count):
        length = int(random.integers(8, 40))
        sampled = np.arange(length) >= length // 2
        weights = {
            name: np.zeros(length, np.float32)
            for name in ("rl_weights", "ce_weights", "ref_kl_weights")
        }
        weights[f"{task}_weights"] = sampled.astype(np.float32)
        samples.append(
            TrainingSample(
                token_ids=random.integers(0, 768, length).astype(np.int32),
                loss_mask=sampled,
                generator_logprobs=np.where(sampled, random.normal(-8, 1, length), 0).astype(
                    np.float32
                ),
                policy_versions=np.where(sampled, 0, -1).astype(np.int32),
                advantages=np.where(sampled, random.normal(), 0).astype(np.float32),
                ref_logprobs=np.where(sampled, random.normal(-7, 1, length), 0).astype(np.float32),
                task_name=task,
                rollout_id=f"{task}-{index}",
                **weights,
            )
        )
    return samples


@pytest.fixture
def learner(one_rank, tmp_path, monkeypatch) -> Learner:
    compute_in_float64(monkeypatch.setattr)
    learner = learner_of(tmp_path, dtype=torch.float64)
    monkeypatch.setattr(learner, "_denominators", lambda microbatches: DENOMINATORS)
    return learner


def gradient(
    learner: Learner, samples: list[TrainingSample]
) -> tuple[torch.Tensor, dict[str, float]]:
    """Of all parameters, in a row, and the metrics; the learner's own gradient is cleared."""
    plan = Batcher.Config(row_length=256, rows_per_microbatch=4).build().plan(samples, 1)
    metrics = learner.forward_backward(plan.microbatches[0], 0).compute()
    flat = torch.cat([full(parameter.grad).flatten() for parameter in learner.model.parameters()])
    learner.trained[""].optimizers.zero_grad()
    return flat, metrics


def test_a_tasks_gradient_does_not_depend_on_what_it_is_packed_with(learner):
    groups = {task: samples_of(task, seed) for seed, task in enumerate(("rl", "ce", "ref_kl"))}
    alone = {task: gradient(learner, samples)[0] for task, samples in groups.items()}
    for task, samples in groups.items():
        others = [sample for other in groups if other != task for sample in groups[other]]
        silent = [
            replace(
                sample, **{f"{name}_weights": np.zeros(len(sample), np.float32) for name in groups}
            )
            for sample in others
        ]
        mixed = [sample for pair in zip(samples, silent, strict=False) for sample in pair] + silent[
            len(samples) :
        ]
        packed, _ = gradient(learner, mixed)
        scale = alone[task].abs().max()
        assert scale > 1e-4
        torch.testing.assert_close(packed, alone[task], rtol=0, atol=1e-6 * float(scale))
    together, _ = gradient(learner, [sample for samples in groups.values() for sample in samples])
    torch.testing.assert_close(
        together, sum(alone.values()), rtol=0, atol=1e-6 * float(together.abs().max())
    )


def test_echos_observation_tokens_leave_the_rl_term_as_it_is(learner):
    plain = samples_of("rl", 3)
    echoing = []
    for sample in plain:
        answered = ~sample.loss_mask & (np.arange(len(sample)) > 2)
        echoing.append(replace(sample, ce_weights=np.where(answered, 0.1, 0).astype(np.float32)))
    before, after = (gradient(learner, samples)[1] for samples in (plain, echoing))
    assert (
        after["loss/rl"] == pytest.approx(before["loss/rl"], rel=1e-12)
        and before["loss/ce"] == 0 < after["loss/ce"]
    )
