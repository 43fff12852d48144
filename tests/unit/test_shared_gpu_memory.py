"""A trainer leaves the engine on its GPU the memory that the plan gives it; torch.cuda is scripted."""

import inspect
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from tests.fakes.gpus import fake_gpus
from torchtitan.experiments.rl import config_registry
from torchtitan.experiments.rl.command.checks import plan_run
from torchtitan.experiments.rl.plan.plan import GIB, RunPlan
from torchtitan.experiments.rl.process.setup import TRAINER_ENVIRONMENT, trainer_environment
from torchtitan.experiments.rl.training import trainer as trainer_module
from torchtitan.experiments.rl.training.trainer import PolicyTrainer, leave_memory


def shared_plan(**fields) -> RunPlan:
    config = config_registry.rl_grpo_qwen3_0_6b_1gpu()
    config.generator.engine = replace(config.generator.engine, **fields)
    if fields.get("sleep"):
        config.max_offpolicy_steps = 0
    return plan_run(config, device="cuda", available=[0])


@pytest.fixture
def events(monkeypatch) -> list:
    """Calls of torch.cuda that bound or free memory, and of what a trainer builds, in order."""
    found: list = []
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(
        torch.cuda,
        "set_per_process_memory_fraction",
        lambda fraction, device: found.append(("bound", fraction)),
    )
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: found.append("empty"))
    return found


@pytest.mark.parametrize("gib", [22.0, 23.5, 80.0])
def test_the_bound_leaves_the_engines_share_on_every_gpu_and_holds_the_trainers_tensors(
    monkeypatch, events, gib
):
    fake_gpus(monkeypatch, 1, memory_gib=gib)
    plan = shared_plan()
    engine = 2 * 596_049_920 / GIB + 3 + 2.6  # bfloat16 weights, keys and values, vLLM's own
    leave_memory(plan.shared_gpu.left)
    ((_, fraction),) = events
    allowed = fraction * gib
    assert allowed == pytest.approx(gib - engine - 1)  # and CUDA's own of the trainer
    assert allowed > plan.trainer_memory.tensors / GIB + 2


def test_a_gpu_that_is_smaller_than_what_is_left_bounds_the_trainer_to_nothing(monkeypatch, events):
    fake_gpus(monkeypatch, 1, memory_gib=4)
    leave_memory(6 * GIB)
    assert events == [("bound", 0.0)]


def test_beside_an_engine_that_sleeps_a_step_may_take_what_the_engine_gives_back():
    awake, sleeping = shared_plan(), shared_plan(sleep=True)
    assert awake.shared_gpu.left == awake.shared_gpu.engine + GIB
    assert sleeping.shared_gpu.left == pytest.approx(3.6 * GIB)


@pytest.mark.parametrize(
    "options, wanted",
    [
        ({}, ["join", "learner"]),
        ({"leaves_bytes": 5.5 * GIB}, ["join", ("bound", 0.75), "learner"]),
        (
            {"leaves_bytes": 5.5 * GIB, "yields_memory": True},
            ["join", ("bound", 0.75), "learner", "empty"],
        ),
    ],
)
async def test_a_trainer_is_bounded_before_its_model_is_there(
    monkeypatch, events, tmp_path, options, wanted
):
    """Compilation takes memory too, and an engine starts at the same time."""
    fake_gpus(monkeypatch, 1, memory_gib=22)
    stand_ins = {
        "current_rank": lambda: SimpleNamespace(rank=0),
        "current_size": lambda: {"procs": 1},
        "set_up_logging": lambda *_: None,
        "init_process_group": lambda **_: events.append("join"),
        "Learner": lambda *_, **__: events.append("learner"),
        "SnapshotPublisher": lambda **_: None,
    }
    for name, stand_in in stand_ins.items():
        monkeypatch.setattr(trainer_module, name, stand_in)
    trainer = PolicyTrainer(
        SimpleNamespace(),
        device="cuda",
        run_dir=str(tmp_path),
        generator_dtype=torch.bfloat16,
        **options,
    )
    setup = inspect.unwrap(PolicyTrainer.setup._method)  # without Monarch's ports
    await setup(trainer, "file:///nowhere")
    assert events == wanted


@pytest.mark.parametrize("name", ["PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"])
def test_the_allocators_segments_grow_unless_engines_open_them_or_the_user_says_otherwise(
    monkeypatch, name
):
    monkeypatch.delenv("PYTORCH_ALLOC_CONF", raising=False)
    monkeypatch.delenv("PYTORCH_CUDA_ALLOC_CONF", raising=False)
    assert trainer_environment("cuda", weights_on_devices=False) == TRAINER_ENVIRONMENT
    assert trainer_environment("cuda", weights_on_devices=True) == {}
    assert trainer_environment("cpu", weights_on_devices=False) == {}
    monkeypatch.setenv(name, "max_split_size_mb:512")
    assert trainer_environment("cuda", weights_on_devices=False) == {}
