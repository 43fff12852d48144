"""A second model family, Llama 3: trainer, engine and transformers agree on it, before a step and after.

One generator for all tests, one learner in this process, both on a tiny random model in float32.
"""

import asyncio
import itertools
import os
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
import torchstore
from monarch.actor import Channel

from tests.integration.learners import learner_of, samples_of
from torchtitan.experiments.rl.batching.batcher import Batcher
from torchtitan.experiments.rl.controller.provision import spawn
from torchtitan.experiments.rl.generation.config import GeneratorConfig
from torchtitan.experiments.rl.generation.generator import Generator
from torchtitan.experiments.rl.generation.messages import GenerateRequest
from torchtitan.experiments.rl.process.host_identity import host_identity
from torchtitan.experiments.rl.rollouts.policy import SamplingConfig
from torchtitan.experiments.rl.weights.publisher import SnapshotPublisher
from torchtitan.experiments.rl.weights.store import start_store

LENGTH = 300
"""Tokens of a prompt: many times as long as the model's unscaled rotary frequencies reach."""


@pytest.fixture(scope="module")
def generator(llama_model, tmp_path_factory) -> Iterator[Any]:
    config = GeneratorConfig()
    config.engine.max_model_len = 512
    procs = spawn(None, "generator", ((max(os.sched_getaffinity(0)),),), "cpu")

    async def build() -> Any:
        run_dir = str(tmp_path_factory.mktemp("generator"))
        mesh = procs.spawn("generator", Generator, config, model_path=llama_model, device="cpu", run_dir=run_dir)
        await start_store(procs.slice(procs=0))
        await mesh.setup.call()
        return mesh

    async def close(mesh: Any) -> None:
        await mesh.shutdown.call()
        await torchstore.shutdown()  # a process has one store at a time
        await procs.stop()

    mesh = asyncio.run(build())
    yield mesh
    asyncio.run(close(mesh))


def random_tokens(count: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 768, count).astype(np.int32)


async def test_engine_trainer_and_transformers_agree_before_and_after_a_published_step(
    generator,
    one_rank,
    llama_model,
    reference,
    tmp_path,
):
    learner = learner_of(tmp_path, model=llama_model, lr=0.02)
    port, receiver = Channel.open()
    await generator.slice(procs=0).attach.call_one(0, port)
    ids = itertools.count()

    async def sample(seed: int) -> tuple[np.ndarray, np.ndarray, set[int]]:
        """Prompt with completion, the engine's log-probabilities of the completion, and the versions on its tokens."""
        prompt = random_tokens(LENGTH, seed)
        request = GenerateRequest(
            request_id=next(ids),
            prompt_token_ids=prompt,
            sampling=SamplingConfig(max_tokens=40),
            seed=seed,
            stop_token_ids=[],
        )
        generator.submit.broadcast([request])
        async with asyncio.timeout(60):
            (result,) = await receiver.recv()
        completion = result.completion
        return np.concatenate([prompt, completion.token_ids]), completion.logprobs, set(completion.policy_versions.tolist())

    tokens, sampled, versions = await sample(seed=1)
    expected = reference(llama_model, tokens)[LENGTH:]
    assert versions == {0} and len(sampled) == 40 and np.ptp(expected) > 1
    np.testing.assert_allclose(learner.score(tokens)[LENGTH:], expected, rtol=0, atol=1e-4)
    np.testing.assert_allclose(sampled, expected, rtol=0, atol=1e-4)

    plan = Batcher.Config(row_length=512).build().plan(samples_of(8), 1)
    learner.forward_backward(plan.microbatches[0], 0)
    learner.optim_step()
    trained = learner.score(tokens)[LENGTH:]
    assert np.abs(trained - expected).max() > 0.1, "the step changed nothing"
    publisher = SnapshotPublisher(rank=0, host=host_identity(), dtype=torch.float32)
    publisher.write(1, learner.hub_tensors())
    await publisher.publish(1, remote_readers=False)
    canary = random_tokens(8)
    receipt = await generator.slice(procs=0).update_weights.call_one(1, canary)
    np.testing.assert_allclose(receipt.canary_logprobs, learner.score(canary), rtol=0, atol=1e-4)

    tokens, sampled, versions = await sample(seed=1)
    assert versions == {1}
    np.testing.assert_allclose(sampled, learner.score(tokens)[LENGTH:], rtol=0, atol=1e-4)
    assert np.abs(sampled - reference(llama_model, tokens)[LENGTH:]).max() > 0.1, "the engine has its old weights"

    # What is saved at the end is a folder that transformers reads as the trained policy.
    folder = learner.save_final(1)
    learner.close()
    np.testing.assert_allclose(reference(str(folder), tokens)[LENGTH:], sampled, rtol=0, atol=1e-4)
