"""One model in a real trainer and in a real generator: what tests ask of the two."""

import asyncio
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from monarch.actor import Channel

from tests.integration.learners import samples_of
from torchtitan.experiments.rl.batching.batcher import Batcher
from torchtitan.experiments.rl.generation.engine import GenerateRequest, GeneratorFailed
from torchtitan.experiments.rl.rollouts.policy import SamplingConfig
from torchtitan.experiments.rl.training.client import pickled

NEVER: list[int] = []
"""No stop token: every completion is as long as it may be."""
CANARY = np.random.default_rng(0).integers(0, 96, 48).astype(np.int32)


@dataclass
class Pair:
    """One model in a trainer and in a generator, and the port the generator answers on."""

    path: str
    vocabulary: int
    version: int
    """Published last. Versions are unique over all pairs: they share a store."""
    updated: bool = False
    """Whether its weights are others than the folder's."""
    trainer: Any = None
    generator: Any = None
    ids: Iterator[int] = field(default_factory=lambda: iter(range(10**6)))

    async def attach(self) -> None:
        port, self._receiver = Channel.open()
        await self.generator.attach.call_one(0, port)

    def prompt(self, length: int, seed: int = 0) -> np.ndarray:
        return np.random.default_rng(seed).integers(3, self.vocabulary, length).astype(np.int32)

    def request(
        self, prompt, *, seed=0, max_tokens=8, temperature=1.0, stop=NEVER, texts=()
    ) -> GenerateRequest:
        sampling = SamplingConfig(max_tokens=max_tokens, temperature=temperature, stop=list(texts))
        return GenerateRequest(
            request_id=next(self.ids),
            prompt_token_ids=prompt,
            sampling=sampling,
            seed=seed,
            stop_token_ids=stop,
        )

    def submit(self, *requests) -> None:
        self.generator.submit.broadcast(list(requests))

    async def messages(self, count: int) -> list:
        """The next messages, in the order in which they came: ``count`` of them, and what came with the last."""

        async def collect() -> list:
            results: list = []
            while len(results) < count:
                results += await self._receiver.recv()
            return results

        return await asyncio.wait_for(collect(), 120)

    async def answers(self, count: int) -> list:
        """The next ``count`` results, in the order in which they came."""
        results = await self.messages(count)
        assert len(results) == count
        assert not any(isinstance(result, GeneratorFailed) for result in results), results
        return results

    async def run(self, *requests) -> list:
        """Submit together; results in the order of the requests."""
        self.submit(*requests)
        by_id = {result.request_id: result for result in await self.answers(len(requests))}
        return [by_id[request.request_id] for request in requests]

    async def complete(self, prompt, **options):
        (result,) = await self.run(self.request(prompt, **options))
        return result.completion

    async def train(self) -> None:
        """One step that changes the policy clearly."""
        samples = samples_of(8, vocabulary=self.vocabulary, seed=self.version)
        plan = Batcher.Config(row_length=512).build().plan(samples, 1)
        rows = pickled(plan.microbatches[0])
        await self.trainer.forward_backward.call_one(rows, self.version)
        await self.trainer.optim_step.call_one()

    async def publish(self) -> np.ndarray:
        """Put the trainer's weights into the store as the next version; returns the trainer's canary."""
        self.version += 1
        self.updated = True
        await self.trainer.copy_weights.call_one(self.version, CANARY, False)
        await self.trainer.proof.call_one()
        return await self.trainer.score.call_one(CANARY)

    async def set_up(self) -> None:
        await self.generator.setup.call()

    async def update(self):
        return await self.generator.update_weights.call_one(self.version, CANARY)

    async def trained_logprobs(self, prompt, completion) -> np.ndarray:
        """The trainer's log-probabilities of the completion's tokens, at temperature 1."""
        scored = await self.trainer.score.call_one(np.concatenate([prompt, completion.token_ids]))
        return scored[len(prompt) :]
