"""Flex attention gets smaller blocks where torch's own do not fit a GPU, and nothing anywhere else."""

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from torchtitan.models.common.attention import FlexAttention

from tests.fakes.gpus import SHARED_MEMORY, fake_gpus
from torchtitan.experiments.rl.command import machine
from torchtitan.experiments.rl.command.checks import plan_run
from torchtitan.experiments.rl.config_registry import rl_grpo_qwen3_0_6b
from torchtitan.experiments.rl.models.attention import SMALL_BLOCKS, shared_memory
from torchtitan.experiments.rl.models.transformers_attention import MaskedRows, Scores

SMALL = {(8, 6), (8, 9), (12, 0)}
"""Capabilities with 99 KiB of shared memory a block: A10 and RTX A6000, L4 and L40S, RTX 5090."""


@pytest.mark.parametrize("capability", SHARED_MEMORY, ids=str)
@pytest.mark.parametrize("head_dim", [64, 96, 128, 256])
def test_only_heads_of_256_on_gpus_of_little_shared_memory_get_other_blocks(
    monkeypatch, capability, head_dim
):
    fake_gpus(monkeypatch, 1, capability=capability)
    given = []

    def compute(q, k, v, *, kernel_options, **options):
        given.append(kernel_options)
        return q, SimpleNamespace(lse=None)

    monkeypatch.setattr(FlexAttention, "compiled_flex_attn", compute)
    available = shared_memory(torch.device("cuda", 0))
    rows = MaskedRows(masks={None: None}, context=None, shared_memory=available)
    q = torch.zeros(1, 2, 4, head_dim)
    rows.attend(q, q, q, Scores(scaling=None, window=None, softcap=None, sinks_N=None))
    assert given == [SMALL_BLOCKS if capability in SMALL and head_dim == 256 else {}]


def test_a_cpu_has_no_shared_memory_to_fit():
    assert shared_memory(torch.device("cpu")) is None


@pytest.mark.parametrize(
    "heads, dtype, lack",
    [
        (
            128,
            "float32",
            "trainer.mixed_precision_param = 'float32': attention in float32 with heads of 128 needs "
            "more than 101,376 bytes of shared memory a block, as on GPUs of capability 8.6, 8.9, "
            "12.0: set it to bfloat16",
        ),
        (
            256,
            "bfloat16",
            "model.trained_by = 'auto': torchtitan's attention with heads of 256 needs more than "
            "101,376 bytes of shared memory a block, as on GPUs of capability 8.6, 8.9, 12.0: set it "
            "to transformers",
        ),
        (128, "bfloat16", ""),
        (64, "float32", ""),
    ],
)
def test_attention_that_can_not_be_made_to_fit_is_refused_with_the_cure(
    monkeypatch, heads, dtype, lack
):
    plan = plan_run(rl_grpo_qwen3_0_6b(), device="cuda", available=[*range(8)])
    trainer = replace(plan.config.trainer, mixed_precision_param=dtype)
    plan = replace(
        plan,
        config=replace(plan.config, trainer=trainer),
        sizes=replace(plan.sizes, head_width=heads),
    )
    for capability in SHARED_MEMORY:
        fake_gpus(monkeypatch, 8, capability=capability)
        found = machine.shortages(plan, "outputs", field="output_dir")
        fields = ("trainer.mixed_precision_param", "model.trained_by")
        told = [str(shortage) for shortage in found if shortage.field in fields]
        assert told == ([lack] if lack and capability in SMALL else [])


@pytest.mark.parametrize("heads, refused", [(256, False), (257, True), (512, True)])
@pytest.mark.parametrize("runs_here", [True, False])
def test_heads_that_fit_no_gpu_are_refused_on_every_host_of_the_command(
    monkeypatch, heads, refused, runs_here
):
    """On capability 9.0 heads of 512 need 263,168 of 232,448 bytes of shared memory."""
    plan = plan_run(rl_grpo_qwen3_0_6b(), device="cuda", available=[*range(8)])
    plan = replace(plan, sizes=replace(plan.sizes, head_width=heads))
    fake_gpus(monkeypatch, 8, capability=(9, 0))
    found = machine.shortages(plan, "outputs", field="output_dir", runs_here=runs_here)
    lack = (
        f"model.hf_assets_path = {plan.config.model.hf_assets_path!r}: its heads of {heads} need "
        "more shared memory than a GPU has: take a model with heads of 256 or less"
    )
    told = [str(shortage) for shortage in found if shortage.field == "model.hf_assets_path"]
    assert told == ([lack] if refused else [])


def test_heads_of_512_train_on_cpus():
    plan = plan_run(rl_grpo_qwen3_0_6b(), device="cuda", available=[*range(8)])
    plan = replace(plan, device="cpu", sizes=replace(plan.sizes, head_width=512))
    found = machine.shortages(plan, "outputs", field="output_dir")
    assert not [lack for lack in found if lack.field == "model.hf_assets_path"]
