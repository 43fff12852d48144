"""Delivers a learner's weights to a generator, and samples from that generator."""

import asyncio
import itertools
from collections.abc import Awaitable, Callable
from typing import Any

import numpy as np
import torch
from monarch.actor import Channel, endpoint

from torchtitan.experiments.rl.compat import vllm as compat
from torchtitan.experiments.rl.generation.engine import GenerateRequest
from torchtitan.experiments.rl.generation.generator import Generator
from torchtitan.experiments.rl.process.host import host_identity
from torchtitan.experiments.rl.rollouts.policy import SamplingConfig
from torchtitan.experiments.rl.training.learner import Learner
from torchtitan.experiments.rl.weights.publisher import SnapshotPublisher
from torchtitan.experiments.rl.weights.snapshot import WeightReceipt

LENGTH = 300
"""Tokens of a prompt: many times as long as the Llama's unscaled rotary frequencies reach."""


def random_tokens(count: int, seed: int = 0) -> np.ndarray:
    """Return token ids ``[count]`` int32 of the tiny models' vocabulary."""
    return np.random.default_rng(seed).integers(0, 768, count).astype(np.int32)


async def sampler(
    generator: Any, max_tokens: int = 40
) -> Callable[..., Awaitable[tuple[np.ndarray, np.ndarray, set[int]]]]:
    """Return a function that samples a completion by seed, adapter and length of the prompt.

    It returns the prompt with its completion, the engine's log-probabilities of the completion, and the versions on its tokens.
    """
    port, receiver = Channel.open()
    await generator.attach.call_one(0, port)
    ids = itertools.count()

    async def sample(
        seed: int, adapter: str = "", length: int = LENGTH
    ) -> tuple[np.ndarray, np.ndarray, set[int]]:
        prompt = random_tokens(length, seed)
        request = GenerateRequest(
            request_id=next(ids),
            prompt_token_ids=prompt,
            sampling=SamplingConfig(max_tokens=max_tokens),
            seed=seed,
            stop_token_ids=[],
            adapter=adapter,
        )
        generator.submit.broadcast([request])
        async with asyncio.timeout(60):
            (result,) = await receiver.recv()
        completion = result.completion
        return (
            np.concatenate([prompt, completion.token_ids]),
            completion.logprobs,
            set(completion.policy_versions.tolist()),
        )

    return sample


class ReloadingGenerator(Generator):
    """A generator that can be told to load versions as engines on GPUs do."""

    @endpoint
    async def reload_layer_by_layer(self) -> None:
        """Have vLLM itself reload every version from now on, layer by layer."""
        compat.copying_suffices = lambda model, weights, names: False


async def deliver(
    learner: Learner, generator: Any, version: int, canary: np.ndarray
) -> WeightReceipt:
    """Publish the learner's weights as ``version`` and have the generator take them. Returns the generator's receipt."""
    publisher = SnapshotPublisher(rank=0, host=host_identity(), dtype=torch.float32)
    publisher.write(version, learner.hub_tensors)
    await publisher.announce(False)
    await publisher.prove()
    return await generator.update_weights.call_one(version, canary)
