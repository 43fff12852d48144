"""Generators whose completions have the experts of each token."""

import asyncio
import itertools
from typing import Any

import numpy as np
from monarch.actor import Channel

from tests.integration.deliveries import random_tokens
from tests.integration.learners import LAYERS, K, own_routes
from tests.integration.models import MOE_MODEL
from torchtitan.experiments.rl.generation.engine import GenerateRequest
from torchtitan.experiments.rl.rollouts.policy import SamplingConfig
from torchtitan.experiments.rl.rollouts.types import Completion
from torchtitan.experiments.rl.training.learner import Learner

MOE: dict[str, Any] = dict(model=str(MOE_MODEL), router_replay="ids")
"""Arguments of a learner of a mixture of experts that replays routes."""


class RoutedGenerator:
    """Client of a generator of one process or two."""

    def __init__(self, actor: Any):
        self.actor, self._ids = actor, itertools.count()

    async def begin(self) -> None:
        port, self._receiver = Channel.open()
        await self.actor.attach.call_one(0, port)

    def request(self, prompt: np.ndarray, tokens: int, **fields: Any) -> GenerateRequest:
        own = next(self._ids)
        sampling = SamplingConfig(max_tokens=tokens)
        return GenerateRequest(
            request_id=own,
            prompt_token_ids=prompt,
            sampling=sampling,
            **{"seed": own, "stop_token_ids": []} | fields,
        )

    async def answers(self, *requests: GenerateRequest) -> list[Completion]:
        self.actor.submit.broadcast(list(requests))
        return await self.wait(*requests)

    async def wait(self, *requests: GenerateRequest) -> list[Completion]:
        found: dict[int, Completion] = {}
        async with asyncio.timeout(240):
            while len(found) < len(requests):
                found |= {
                    result.request_id: result.completion for result in await self._receiver.recv()
                }
        return [found[request.request_id] for request in requests]


def assert_routes(found: np.ndarray, expected: np.ndarray) -> None:
    """Compare the experts of each token, in whatever order."""
    assert found.dtype == np.uint8 and found.shape == expected.shape
    assert (np.sort(found, -1) == np.sort(expected, -1)).all()


async def assert_completions_have_their_experts(
    generator: RoutedGenerator, learner: Learner
) -> None:
    await generator.begin()
    for length in (20, 100):  # less than a block, computed again; several, which are shared
        prompt = random_tokens(length, length)
        group = [generator.request(prompt, 12) for _ in range(3)]
        (first,) = await generator.answers(group[0])
        for completion in (first, *await generator.answers(*group[1:])):
            tokens = np.concatenate([prompt, completion.token_ids])
            assert completion.routes.shape == (length + 11, LAYERS, K)
            assert_routes(completion.routes, own_routes(learner, tokens)[:-1])
        history = np.concatenate([prompt, first.token_ids, random_tokens(5)])
        (second,) = await generator.answers(generator.request(history, 8, routes_from=length + 11))
        tokens = np.concatenate([history, second.token_ids])
        assert_routes(second.routes, own_routes(learner, tokens)[length + 11 : -1])
    usage = await generator.actor.usage.call_one()
    assert usage["prompts_cached"] > 0.4 and "routes_kept" not in usage
