"""Clients of a run's frozen models: one for each distinct model, however many tasks name it."""

import asyncio
import dataclasses
import functools
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from torchtitan.experiments.rl.errors import RunError
from torchtitan.experiments.rl.generation.client import GeneratorClient
from torchtitan.experiments.rl.generation.endpoint import EndpointClient
from torchtitan.experiments.rl.generation.references import FrozenModel, HostedModel, ModelReference
from torchtitan.experiments.rl.rollouts.policy import ModelClient


class FrozenClients:
    """Reached through ``policy.frozen``. Whoever makes it admits the replicas of the hosted models to ``generators``."""

    def __init__(
        self,
        hosted: Mapping[str, HostedModel],
        *,
        on_stopped: Callable[[str, int, str], None] = lambda path, replica, cause: None,
        **options: Any,
    ):
        """
        Args:
            hosted: by path, what the run hosts.
            on_stopped: as GeneratorClient's; called with the path first.
            options: others of GeneratorClient's.
        """
        self.generators: dict[str, GeneratorClient] = {
            path: HostedClient(model, on_stopped=functools.partial(on_stopped, path), **options)
            for path, model in hosted.items()
        }
        """Clients of what the run hosts, by path."""
        self._endpoints: dict[tuple, EndpointClient] = {}

    def find(self, model: ModelReference) -> ModelClient:
        if isinstance(model, FrozenModel):
            key = dataclasses.astuple(model)
            if key not in self._endpoints:
                self._endpoints[key] = EndpointClient(model)
            return self._endpoints[key]
        if isinstance(model, HostedModel) and model.path in self.generators:
            return self.generators[model.path]
        if isinstance(model, HostedModel):
            raise RunError(f"the run does not host {model.path!r}: it hosts what fields of a task's config name")
        raise RunError(f"{type(model).__name__} is no frozen model: name a FrozenModel or a HostedModel")

    def fail(self, failure: RunError) -> None:
        """Answer every open and future request to a hosted model with ``failure``."""
        for client in self.generators.values():
            client.fail(failure)

    async def close(self) -> None:
        for client in self.generators.values():
            client.close()
        await asyncio.gather(*(client.close() for client in self._endpoints.values()))


class HostedClient(GeneratorClient):
    """Implements rollouts.policy.ModelClient over a Generator mesh that stays at its checkpoint, which is no version of the
    policy."""

    is_frozen = True

    def __init__(self, model: HostedModel, **options: Any):
        super().__init__(**options)
        self.model = model
        self._places = asyncio.Semaphore(model.max_concurrency)

    async def score(self, token_ids: np.ndarray, adapter: str = "") -> np.ndarray:
        async with self._places:
            try:
                return await super().score(np.asarray(token_ids, np.int32))
            except RunError as error:
                raise RunError(f"hosted model {self.model.path!r}: {error}") from error
