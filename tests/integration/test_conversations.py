"""Conversations sampled by a real generator, recorded, read again: the trainer gives every sampled token the same probability.

One generator for all tests, one learner in this process, both on assets/tiny_qwen3 in float32.
"""

import asyncio
import itertools
import os
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch

from tests.fakes.contexts import context_of
from tests.integration.learners import learner_of
from tests.integration.models import MODEL
from torchtitan.experiments.rl.algorithms import GRPO
from torchtitan.experiments.rl.batching.batcher import Batcher
from torchtitan.experiments.rl.envs.renderer import RendererConfig, build_renderer
from torchtitan.experiments.rl.envs.renderer_env import RendererEnvConfig
from torchtitan.experiments.rl.fleet.spawn import shut_down, spawn_on
from torchtitan.experiments.rl.generation.client import GeneratorClient
from torchtitan.experiments.rl.generation.config import GeneratorConfig
from torchtitan.experiments.rl.generation.generator import Generator
from torchtitan.experiments.rl.models.decoder import batch_logprobs
from torchtitan.experiments.rl.plan.placement import Place
from torchtitan.experiments.rl.rollouts.policy import SamplingConfig
from torchtitan.experiments.rl.rollouts.recorder import RolloutRecorder, read_rollouts
from torchtitan.experiments.rl.rollouts.types import Rollout, RolloutGroup
from torchtitan.experiments.rl.tasks.examples.sum_digits import (
    SumDigitsRoundsDataset,
    SumDigitsRoundsTask,
)
from torchtitan.experiments.rl.training.learner import Learner

ROUNDS, GROUPS, GROUP_SIZE = 3, 8, 8


@pytest.fixture(scope="module")
def generator(tmp_path_factory) -> Iterator:
    config = GeneratorConfig()
    config.engine.max_model_len = 512
    procs = spawn_on(None, "generator", [Place(0, (max(os.sched_getaffinity(0)),))], "cpu")[0]

    async def build():
        run_dir = str(tmp_path_factory.mktemp("generator"))
        mesh = procs.spawn(
            "generator", Generator, config, model_path=str(MODEL), device="cpu", run_dir=run_dir
        )
        await mesh.setup.call()
        return mesh

    async def close(mesh) -> None:
        await shut_down([mesh], [procs])

    mesh = asyncio.run(build())
    yield mesh
    asyncio.run(close(mesh))


@pytest.fixture(scope="module")
def learner(one_rank, tmp_path_factory) -> Iterator[Learner]:
    learner = learner_of(tmp_path_factory.mktemp("learner"))
    yield learner
    learner.close()


async def conversations(
    generator, folder: Path, *, temperature: float, **renderer
) -> tuple[list[RolloutGroup], list[Rollout]]:
    """Groups as they were sampled and scored, and their rollouts as they are on disk."""
    task = SumDigitsRoundsTask.Config(
        algorithm=GRPO.Config(),
        dataset=SumDigitsRoundsDataset.Config(rounds=ROUNDS),
        env=RendererEnvConfig(max_turns=ROUNDS, max_rollout_tokens=400),
        sampling=SamplingConfig(max_tokens=16, temperature=temperature),
        group_size=GROUP_SIZE,
    ).build(name="rounds", context=context_of(build_renderer(RendererConfig(**renderer), MODEL)))
    client = GeneratorClient()
    await client.admit(0, generator)
    recorder = RolloutRecorder.Config().build(run_dir=folder)

    async def one_group(index: int) -> RolloutGroup:
        group = await task.run_group(
            task.dataset[index], client, group_id=f"rounds-{index}", seed=0
        )
        assert await task.score_group(group) is None
        recorder.record(group, {rollout.rollout_id: "trained" for rollout in group.rollouts})
        return group

    groups = await asyncio.wait_for(
        asyncio.gather(*(one_group(index) for index in range(GROUPS))), 120
    )
    client.close()
    recorder.close()
    return groups, [record.rollout for record in read_rollouts(folder)]


@torch.no_grad()
def largest_difference(learner: Learner, rollouts: list[Rollout]) -> float:
    """Between what the trainer says of the sampled tokens, in prefix trees beside others, and what their generator said."""
    plan = (
        Batcher.Config(row_length=512, rows_per_microbatch=4)
        .build()
        .plan([s for r in rollouts for s in r.samples], 1)
    )
    assert plan.shared_fraction > 0.1
    differences, tokens = [], 0
    for batch in itertools.chain(*plan.microbatches):
        logprobs, _ = batch_logprobs(learner.model, batch)
        differences.append(
            (logprobs - batch.generator_logprobs)[batch.loss_mask].abs().max().item()
        )
        tokens += int(batch.loss_mask.sum())
    assert tokens == sum(rollout.completion_tokens for rollout in rollouts)
    return max(differences)


def assert_recorded_as_sampled(groups: list[RolloutGroup], read: list[Rollout]) -> None:
    by_id = {rollout.rollout_id: rollout for rollout in read}
    for rollout in [rollout for group in groups for rollout in group.rollouts]:
        same = by_id.pop(rollout.rollout_id)
        for turn, turn_read in zip(rollout.turns, same.turns, strict=True):
            assert turn.prompt_token_ids.tolist() == turn_read.prompt_token_ids.tolist()
            assert turn.completion.token_ids.tolist() == turn_read.completion.token_ids.tolist()
            assert turn.completion.logprobs.tobytes() == turn_read.completion.logprobs.tobytes()
        sampled = np.concatenate([turn.completion.token_ids for turn in rollout.turns])
        trained = np.concatenate([sample.token_ids[sample.loss_mask] for sample in same.samples])
        assert trained.tolist() == sampled.tolist()
    assert not by_id


async def test_trainer_agrees_on_every_sampled_token_of_recorded_conversations(
    generator, learner, tmp_path
):
    groups, read = await conversations(generator, tmp_path, temperature=1.0)
    assert_recorded_as_sampled(groups, read)
    whole = [rollout for rollout in read if len(rollout.turns) == ROUNDS]
    assert len(whole) > len(read) / 2 and all(len(rollout.samples) == 1 for rollout in read)
    assert largest_difference(learner, read) < 1e-4

    (sample,) = whole[0].samples
    scored = learner.score(sample.token_ids)
    np.testing.assert_allclose(
        scored[sample.loss_mask], sample.generator_logprobs[sample.loss_mask], rtol=0, atol=1e-4
    )
    # The comparison can fail: one token further, it does.
    assert np.abs(scored[1:] - np.roll(scored, 1)[1:]).max() > 0.1


async def test_trainer_agrees_where_history_is_rendered_anew_and_samples_fork(
    generator, learner, tmp_path
):
    # This hot, the model says things that are not tokenised as it said them, when the next turn renders them anew.
    groups, read = await conversations(
        generator, tmp_path, temperature=1.8, enable_thinking=True, thinking_retention="tool_cycle"
    )
    assert_recorded_as_sampled(groups, read)
    assert any(len(rollout.samples) > 1 for rollout in read), "no conversation forked"
    assert {sample.temperature for rollout in read for sample in rollout.samples} == {1.8}
    assert largest_difference(learner, read) < 1e-4
