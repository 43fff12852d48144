"""Microbatches that the trainer's client sends to each rank, and the log-probabilities that it gets back."""

import asyncio
import pickle
from dataclasses import fields
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from tests.fakes.trainer import TrainerMesh
from tests.fakes.waiting import settle
from torchtitan.experiments.rl.batching.batcher import Batcher, BatchPlan
from torchtitan.experiments.rl.process.lifetime import Lifetime
from torchtitan.experiments.rl.training.client import TrainerClient, pickled
from torchtitan.experiments.rl.types import TrainingSample


class KeepingRank:
    """Of coordinate ``coordinate``: the log-probability of token t of row r of microbatch m is its coordinate, m, r and t."""

    def __init__(self, coordinate: int):
        self.forward_backward = SimpleNamespace(choose=self._forward_backward)
        self.optim_step = SimpleNamespace(choose=self._optim_step)
        self.logprobs = SimpleNamespace(choose=self._logprobs)
        self._coordinate = coordinate

    async def _optim_step(self):
        return {}

    async def _forward_backward(self, microbatches, version):
        self._kept = [
            np.array(
                [
                    [-(1000 * self._coordinate + 100 * m + 10 * r + t) for t in range(8)]
                    for r in range(2)
                ],
                np.float32,
            )
            for m in range(2)
        ]
        return {}

    async def _logprobs(self):
        return self._kept


def sample_of(length: int) -> TrainingSample:
    ids = np.arange(length, dtype=np.int32)
    streams = dict(
        token_ids=ids,
        loss_mask=ids >= 0,
        generator_logprobs=-ids.astype(np.float32),
        policy_versions=ids,
    )
    return TrainingSample(**streams, task_name="t", rollout_id="t-0/0")


def plan_of(*microbatches) -> BatchPlan:
    return BatchPlan(microbatches=list(microbatches), efficiency=1.0, rows=1, tokens=1)


async def connected(mesh: TrainerMesh, folder) -> TrainerClient:
    client = TrainerClient(mesh, run_dir=folder, life=Lifetime("trainer"))
    await client.connect()
    return client


async def take_step(client: TrainerClient, plan: BatchPlan, step: int) -> dict[str, float]:
    return await client.optim_step(await client.forward_backward(plan, step))


async def test_of_ranks_that_share_a_coordinate_the_first_is_sent_the_rows(tmp_path):
    mesh = TrainerMesh(0, 0, 1, 1, size=2)
    client = await connected(mesh, tmp_path)
    assert client.data_parallel_size == 2
    metrics = await take_step(client, plan_of(["first"], ["second"]), 3)
    assert mesh.sent == {0: (["first"], 2), 1: (None, 2), 2: (["second"], 2), 3: (None, 2)}
    assert metrics == {"loss/total": 0.5, "train/lr": 0.3}


async def test_coordinates_need_not_follow_the_order_of_the_ranks(tmp_path):
    mesh = TrainerMesh(1, 0, 1, 0, size=2)
    client = await connected(mesh, tmp_path)
    await take_step(client, plan_of(["first"], ["second"]), 1)
    assert [mesh.sent[rank][0] for rank in range(4)] == [["second"], ["first"], None, None]


async def test_samples_get_the_log_probabilities_of_their_tokens(tmp_path, monkeypatch):
    mesh = TrainerMesh(1, 1, 0, 0, size=2)
    client = TrainerClient(mesh, run_dir=tmp_path, life=Lifetime("trainer"), keep_logprobs=True)
    await client.connect()
    monkeypatch.setattr(client, "_ranks", [KeepingRank(coordinate) for coordinate in (1, 1, 0, 0)])
    a, b, c, replayed, demonstration = (sample_of(length) for length in (3, 2, 4, 2, 3))
    replayed.trainer_logprobs = known = np.zeros(2, np.float32)
    demonstration.loss_mask[:] = False
    plan = plan_of(["x", "y"], ["z", "padding"])
    plan.samples = [
        [[[a, b], [replayed]], [[demonstration, c]]],
        [[[sample_of(1), sample_of(8)]], []],
    ]
    await take_step(client, plan, 1)
    assert a.trainer_logprobs.tolist() == [0, -1, -2] and b.trainer_logprobs.tolist() == [-3, -4]
    assert c.trainer_logprobs.tolist() == [-103, -104, -105, -106]
    assert replayed.trainer_logprobs is known and demonstration.trainer_logprobs is None
    assert plan.samples[1][0][0][0].trainer_logprobs.tolist() == [-1000]


def test_batches_that_are_pickled_are_the_same_to_the_last_bit():
    samples = [sample_of(length) for length in (3, 2, 7, 300)]
    for sample in samples:
        sample.advantages = sample.token_ids * np.float32(0.1)
        sample.rl_weights = (sample.token_ids > 0).astype(np.float32)
    # They begin alike, and become a tree.
    (batches,) = (
        Batcher.Config(row_length=512, rows_per_microbatch=1).build().plan(samples, 1).microbatches
    )
    for sent, batch in zip(pickle.loads(pickled(batches)), batches, strict=True):
        assert sent.trees is not None and sent.task_names == ("t",)
        for ours, theirs in ((batch, sent), (batch.trees, sent.trees)):
            for field in fields(ours):
                value, other = getattr(ours, field.name), getattr(theirs, field.name)
                if isinstance(value, torch.Tensor):
                    assert torch.equal(value, other) and value.dtype == other.dtype


@pytest.mark.parametrize("planned", [1, 4])
async def test_rows_planned_for_another_number_of_data_parallel_ranks_are_not_sent(
    tmp_path, planned
):
    mesh = TrainerMesh(0, 0, 1, 1, size=2)
    client = await connected(mesh, tmp_path)
    with pytest.raises(
        ValueError, match=f"planned for {planned} data-parallel ranks, and the trainer has 2"
    ):
        await take_step(client, plan_of(*([["rows"]] * planned)), 1)
    assert not mesh.sent


async def test_a_batch_on_which_a_rank_fails_is_kept(tmp_path):
    client = await connected(TrainerMesh(0, 0, 1, 1, size=2, broken=3), tmp_path)
    with pytest.raises(RuntimeError, match="rank 3 is broken"):
        await take_step(client, plan_of(["first"], ["second"]), 7)
    assert client.failed_batch == tmp_path / "failed-batch-7.pt"
    assert torch.load(client.failed_batch) == [["first"], ["second"]]


async def test_a_batch_that_can_not_be_written_hides_nothing_of_the_failure(tmp_path, caplog):
    client = await connected(TrainerMesh(0, 0, 1, 1, size=2, broken=3), tmp_path / "gone")
    with pytest.raises(RuntimeError, match="^rank 3 is broken$"):
        await take_step(client, plan_of(["first"], ["second"]), 7)
    assert client.failed_batch is None
    assert "the batch of step 7 can't be written" in caplog.text


async def test_the_optimizer_is_asked_while_the_gradient_is_computed(tmp_path):
    """A rank goes from its gradient to its optimizer without the controller."""
    mesh, asked, computed = TrainerMesh(), [], asyncio.Event()
    client = await connected(mesh, tmp_path)
    (rank,) = client._ranks

    async def forward_backward(microbatches, version):
        asked.append("gradient")
        await computed.wait()
        return {"loss/total": 0.5}

    async def optim_step():
        asked.append("optimizer")
        return {"train/lr": 0.3}

    rank.forward_backward = SimpleNamespace(choose=forward_backward)
    rank.optim_step = SimpleNamespace(choose=optim_step)
    gradient = await client.forward_backward(plan_of(["rows"]), 1)
    step = asyncio.create_task(client.optim_step(gradient))
    await settle()
    assert asked == ["gradient", "optimizer"] and not step.done()
    computed.set()
    assert await step == {"loss/total": 0.5, "train/lr": 0.3}


@pytest.mark.parametrize("broken_optimizer", [3, None])
async def test_a_step_whose_gradient_fails_fails_for_that_and_for_nothing_that_follows(
    tmp_path, broken_optimizer
):
    mesh = TrainerMesh(0, 0, 1, 1, size=2, broken=3, broken_optimizer=broken_optimizer)
    client = await connected(mesh, tmp_path)
    with pytest.raises(RuntimeError, match="^rank 3 is broken$"):
        await take_step(client, plan_of(["first"], ["second"]), 7)
    assert client.failed_batch == tmp_path / "failed-batch-7.pt"


async def test_a_batch_on_which_an_optimizer_fails_is_kept(tmp_path):
    client = await connected(TrainerMesh(0, 1, size=2, broken_optimizer=1), tmp_path)
    with pytest.raises(RuntimeError, match="the optimizer of rank 1 is broken"):
        await take_step(client, plan_of(["first"], ["second"]), 2)
    assert torch.load(tmp_path / "failed-batch-2.pt") == [["first"], ["second"]]


async def test_a_step_that_is_cancelled_waits_for_no_rank(tmp_path):
    client = await connected(TrainerMesh(), tmp_path)
    (rank,) = client._ranks
    ended = []

    async def hang(*args):
        try:
            await asyncio.Event().wait()
        finally:
            ended.append(args)

    rank.forward_backward = rank.optim_step = SimpleNamespace(choose=hang)
    gradient = await client.forward_backward(plan_of(["rows"]), 1)
    step = asyncio.create_task(client.optim_step(gradient))
    await settle()
    step.cancel()
    await asyncio.wait([step])
    await settle()
    assert step.cancelled() and len(ended) == 2 and client.failed_batch is None
