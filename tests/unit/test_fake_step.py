"""The learner's own step on a GPU config's rank, traced without memory (tests/fake_step.py), against the plan."""

import functools

import pytest
import torch

from tests import fake_step
from tests.fake_step import plan_of, traced
from torchtitan.experiments.rl import losses
from torchtitan.experiments.rl.command import checks
from torchtitan.experiments.rl.config_registry import (
    rl_grpo_qwen3_0_6b,
    rl_grpo_qwen3_8b,
    rl_grpo_qwen3_14b,
    rl_grpo_qwen3_30b_a3b,
)
from torchtitan.experiments.rl.models.lora import LoRA
from torchtitan.experiments.rl.models.policy import policy_spec
from torchtitan.experiments.rl.plan.costs import DEVICES, FLOPS_SHARE
from torchtitan.experiments.rl.training import learner


@pytest.fixture
def two_layers(monkeypatch):
    """The same matrices and ranks, in two layers: a whole model takes half a minute."""

    def short(model, **options):
        spec = policy_spec(model, **options)
        spec.model.layers = spec.model.layers[:2]
        return spec

    for module in (fake_step, checks):
        monkeypatch.setattr(module, "policy_spec", short)


# A rank that is alone, its head tied; four shards; two shards of two tensor-parallel ranks; a mixture in four shards.
CASES = [
    (rl_grpo_qwen3_0_6b, "full", 0),
    (rl_grpo_qwen3_8b, "none", 0),
    (rl_grpo_qwen3_14b, "full", 0),
]
ADAPTED = [(config, checkpointing, 16) for config, checkpointing, _ in CASES]
MIXTURE = [(rl_grpo_qwen3_30b_a3b, "full", 0)]


def slow(case):
    return pytest.param(*case, marks=pytest.mark.slow)


@pytest.mark.parametrize(
    "config, checkpointing, rank", [*CASES, ADAPTED[0], *map(slow, ADAPTED[1:]), *MIXTURE]
)
def test_a_step_takes_the_memory_and_the_operations_that_the_plan_says(
    config, checkpointing, rank, two_layers
):
    """Whole models: ``python -m tests.fake_step``."""
    config = config()
    config.trainer.lora = LoRA.Config(rank=rank) if rank else None
    config.trainer.activation_checkpoint = checkpointing
    plan, found = plan_of(config), traced(config, 4096)
    memory = plan.trainer_memory
    assert memory.tensors == pytest.approx(found.peak, rel=0.05)
    planned = (
        plan.balance.train_s
        * DEVICES["H100"].flops
        * FLOPS_SHARE
        * config.trainer.ranks
        / (512 * 4096)
        * 8192
    )
    shared = config.trainer.parallelism.tensor_parallel_degree
    near = dict(
        rel=0.02 if rank else 0.01
    )  # the input of the first layer has no gradient with adapters: one of two here
    assert (found.matrix_flops + found.attention_flops) * shared == pytest.approx(planned, **near)
    if checkpointing == "none":
        # The trainer's own count is without the logits that the head makes again. torchtitan counts that a token attends to
        # all of its sample, twice what it sees, and a backward pass of 4 products, where the kernel has 5.
        again = 2 * 151_936 * 4096 * 8192
        assert found.matrix_flops - again + found.attention_flops * 2 * 6 / 7 == pytest.approx(
            found.model_flops, **near
        )


WAITS = {"_local_scalar_dense", "nonzero", "_unique2", "unique_dim", "item"}
"""Operations that ask a GPU for a value, and so wait for all that it has to do."""


def test_a_microbatch_does_not_wait_for_its_gpu(two_layers, monkeypatch):
    """From the second microbatch's beginning to the last one's end. A copy to or from the GPU would be a wait too: on a GPU all
    of a step's batches are there before the first."""
    config, seen, microbatches = rl_grpo_qwen3_8b(), [], []
    known = fake_step.known_value

    def noted(func, args):
        name = func.overloadpacket.__name__
        if microbatches and (
            name in WAITS
            or (name == "index" and any(i is not None and i.dtype == torch.bool for i in args[1]))
        ):
            seen.append(name)
        return known(func, args)

    def mismatch(*given):
        microbatches.clear()
        return losses.MetricSums()

    monkeypatch.setattr(fake_step, "known_value", noted)
    monkeypatch.setattr(learner, "mismatch_metrics", mismatch)
    noting = functools.partial(learner.Learner, on_microbatch=lambda: microbatches.append(1))
    monkeypatch.setattr(learner, "Learner", noting)
    traced(config, 4096)
    assert seen == []
