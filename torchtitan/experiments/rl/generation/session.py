"""One rollout's side of the GeneratorClient: the seeds, limits and cache scope of its requests."""

from dataclasses import replace
from typing import Any, Protocol

import numpy as np

from torchtitan.experiments.rl.generation.messages import GenerateRequest
from torchtitan.experiments.rl.rollouts.policy import SamplingConfig
from torchtitan.experiments.rl.rollouts.types import Completion


class Sender(Protocol):
    """What a session needs of its client: ``GeneratorClient`` describes each."""

    lockstep: bool

    def next_id(self) -> int: ...

    async def send(self, request: GenerateRequest, *, tokens: int, last_replica: int | None, group: str) -> tuple[Any, int]: ...

    def session_closed(self, group: str) -> None: ...


class GeneratorSession:
    """Implements rollouts.policy.PolicySession."""

    def __init__(self, client: Sender, *, rollout_id: str, seed: int, sampling: SamplingConfig, stop_token_ids: list[int]):
        self._client = client
        self.group, self._seed = rollout_id.rpartition("/")[0], seed
        self._sampling, self._stop_token_ids = sampling, stop_token_ids
        self._turn = 0
        self._last_replica: int | None = None
        self._closed = False

    async def generate(self, prompt_token_ids: np.ndarray, *, max_tokens: int) -> Completion:
        sampling = self._sampling
        if max_tokens < sampling.max_tokens:
            sampling = replace(sampling, max_tokens=max_tokens)
        request = GenerateRequest(
            request_id=self._client.next_id(),
            prompt_token_ids=np.asarray(prompt_token_ids, np.int32),
            sampling=sampling,
            # Each turn has its own stream of random numbers. vLLM takes 63 bits.
            seed=(self._seed + self._turn * 0x9E3779B97F4A7C15) % 2**63,
            stop_token_ids=self._stop_token_ids,
            # Whether a prefix is read from the cache or computed changes the last bits. What is cached must not depend on what
            # ran before, in this process or in one that the run was resumed from.
            cache_scope=self.group if self._client.lockstep else "",
        )
        self._turn += 1
        tokens = len(request.prompt_token_ids) + sampling.max_tokens
        result, self._last_replica = await self._client.send(
            request, tokens=tokens, last_replica=self._last_replica, group=self.group
        )
        return replace(result.completion, replica=self._last_replica)

    def close(self) -> None:
        if not self._closed:
            self._closed = True
            self._client.session_closed(self.group)
