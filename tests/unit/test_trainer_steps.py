"""Calls of a trainer rank: a gradient, and the optimizer's step behind it. The learner is a stand-in."""

import asyncio
import inspect
import math
import pickle
from types import SimpleNamespace

import pytest
import torch

from torchtitan.experiments.rl.errors import RunError
from torchtitan.experiments.rl.losses import LossConfig
from torchtitan.experiments.rl.training import trainer as trainer_module
from torchtitan.experiments.rl.training.trainer import PolicyTrainer

ROWS = pickle.dumps([])


class StubLearner:
    """Stand-in that returns given losses, and counts the optimizer steps."""

    def __init__(self, losses):
        self._losses = iter(losses)
        self.config = SimpleNamespace(loss=LossConfig())
        self.stepped = 0

    def broadcast_rows(self, content):
        return content

    def forward_backward(self, rows, policy_version):
        loss = next(self._losses)
        if loss is None:
            raise ValueError("samples lack the routes")
        return SimpleNamespace(compute=lambda: {"loss/total": loss})

    def optim_step(self):
        self.stepped += 1
        return {"train/lr": 0.3}


@pytest.fixture
def rank(monkeypatch, tmp_path):
    """Return a function that makes a rank whose gradients have the given losses."""
    monkeypatch.setattr(trainer_module, "current_rank", lambda: SimpleNamespace(rank=0))
    monkeypatch.setattr(trainer_module, "current_size", lambda: {"procs": 1})
    monkeypatch.setattr(trainer_module, "set_up_logging", lambda *_: None)

    def make(*losses):
        config, dtype = SimpleNamespace(), torch.float32
        trainer = PolicyTrainer(config, device="cpu", run_dir=str(tmp_path), generator_dtype=dtype)
        trainer._learner = StubLearner(losses)
        return trainer

    return make


def call(trainer, endpoint, *args):
    """Call an endpoint as Monarch does, without its ports."""
    method = inspect.unwrap(getattr(PolicyTrainer, endpoint)._method)
    return asyncio.ensure_future(method(trainer, *args))


async def test_a_step_that_is_asked_for_at_once_is_taken_behind_its_gradient(rank):
    trainer = rank(0.5, 0.25)
    calls = []
    for version in range(2):
        calls.append(call(trainer, "forward_backward", ROWS, version))
        calls.append(call(trainer, "optim_step"))
    metrics = await asyncio.gather(*calls)
    assert metrics == [{"loss/total": 0.5}, {"train/lr": 0.3}, {"loss/total": 0.25}, metrics[1]]
    assert trainer._learner.stepped == 2


@pytest.mark.parametrize(
    "loss, cause", [(math.nan, "loss is nan: the step was not taken"), (None, "lack the routes")]
)
async def test_a_rank_whose_gradient_has_failed_takes_no_step(rank, loss, cause):
    trainer = rank(0.5, loss)
    await call(trainer, "forward_backward", ROWS, 0)
    await call(trainer, "optim_step")
    gradient = call(trainer, "forward_backward", ROWS, 1)
    step = call(trainer, "optim_step")
    with pytest.raises((RunError, ValueError), match=cause):
        await gradient
    with pytest.raises(RunError, match="there is no gradient for the optimizer"):
        await step
    assert trainer._learner.stepped == 1


async def test_a_gradient_is_stepped_with_once(rank):
    trainer = rank(0.5)
    await call(trainer, "forward_backward", ROWS, 0)
    await call(trainer, "optim_step")
    with pytest.raises(RunError, match="there is no gradient for the optimizer"):
        await call(trainer, "optim_step")
