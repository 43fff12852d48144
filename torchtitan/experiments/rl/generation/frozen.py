"""Clients of a run's frozen models: one for each distinct model, however many tasks name it."""

import asyncio
import dataclasses
import functools
from collections.abc import Callable, Mapping

import numpy as np

from torchtitan.experiments.rl.errors import RunError
from torchtitan.experiments.rl.generation.client import GeneratorClient
from torchtitan.experiments.rl.generation.endpoint import EndpointClient
from torchtitan.experiments.rl.generation.references import FrozenModel, HostedModel, ModelReference
from torchtitan.experiments.rl.generation.session import GeneratorSession
from torchtitan.experiments.rl.rollouts.policy import ModelClient, SamplingConfig
from torchtitan.experiments.rl.rollouts.types import Completion


class FrozenClients:
    """Reached through ``policy.frozen``. Whoever makes it admits the replicas of the hosted models to ``generators``."""

    def __init__(
        self,
        hosted: Mapping[str, HostedModel],
        *,
        lockstep: bool,
        client_id: int = 0,
        on_failure: Callable[[RunError], None] = lambda failure: None,
        on_stopped: Callable[[str, int, str], None] | None = None,
    ):
        """
        Args:
            hosted: by path, what the run hosts.
            lockstep, client_id, on_failure: as GeneratorClient's.
            on_stopped: as GeneratorClient's; called with the path first.
        """
        self._hosted = {
            path: HostedClient(
                model,
                GeneratorClient(
                    client_id=client_id,
                    lockstep=lockstep,
                    on_failure=on_failure,
                    on_stopped=functools.partial(on_stopped, path) if on_stopped else None,
                ),
            )
            for path, model in hosted.items()
        }
        self._endpoints: dict[tuple, EndpointClient] = {}

    @property
    def generators(self) -> dict[str, GeneratorClient]:
        """Clients of what the run hosts, by path."""
        return {path: client.generators for path, client in self._hosted.items()}

    def find(self, model: ModelReference) -> ModelClient:
        """See PolicyClient.frozen."""
        if isinstance(model, FrozenModel):
            key = dataclasses.astuple(model)
            if key not in self._endpoints:
                self._endpoints[key] = EndpointClient(model)
            return self._endpoints[key]
        if isinstance(model, HostedModel) and model.path in self._hosted:
            return self._hosted[model.path]
        if isinstance(model, HostedModel):
            raise RunError(f"the run does not host {model.path!r}: it hosts what fields of a task's config name")
        raise RunError(f"{type(model).__name__} is no frozen model: name a FrozenModel or a HostedModel")

    def fail(self, failure: RunError) -> None:
        """Answer every open and future request to a hosted model with ``failure``."""
        for client in self._hosted.values():
            client.generators.fail(failure)

    async def close(self) -> None:
        for client in self._hosted.values():
            client.generators.close()
        await asyncio.gather(*(client.close() for client in self._endpoints.values()))


class HostedClient:
    """Implements rollouts.policy.ModelClient over a Generator mesh that stays at its checkpoint."""

    def __init__(self, model: HostedModel, generators: GeneratorClient):
        self.model, self.generators = model, generators
        self._places = asyncio.Semaphore(model.max_concurrency)

    def session(self, *, rollout_id: str, seed: int, sampling: SamplingConfig, stop_token_ids: list[int]) -> "HostedSession":
        session = self.generators.session(rollout_id=rollout_id, seed=seed, sampling=sampling, stop_token_ids=stop_token_ids)
        return HostedSession(session)

    async def score(self, token_ids: np.ndarray) -> np.ndarray:
        async with self._places:
            try:
                return await self.generators.score(np.asarray(token_ids, np.int32))
            except RunError as error:
                raise RunError(f"hosted model {self.model.path!r}: {error}") from error


class HostedSession:
    """Implements rollouts.policy.PolicySession. The engine calls its checkpoint version 0; it is no version of the policy."""

    def __init__(self, session: GeneratorSession):
        self._session = session

    async def generate(self, prompt_token_ids: np.ndarray, *, max_tokens: int) -> Completion:
        completion = await self._session.generate(prompt_token_ids, max_tokens=max_tokens)
        return dataclasses.replace(completion, policy_versions=np.full(len(completion.token_ids), -1, np.int32), replica=-1)

    def close(self) -> None:
        self._session.close()
