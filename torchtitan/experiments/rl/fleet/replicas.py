"""Tells every client of generators which replicas are there.

The controller's clients and those of the rollout workers send requests to the same replicas. A
worker hears of the replicas that live when it starts, and of each change afterwards.
"""

from collections.abc import Mapping
from contextlib import suppress

from torchtitan.experiments.rl.fleet.role import SpawnedProcess
from torchtitan.experiments.rl.generation.client import GeneratorClient
from torchtitan.experiments.rl.process.lifetime import ProcessLost


class Replicas:
    """Replicas of the policy and of each hosted model, by the model's path; the policy's is ""."""

    def __init__(self, clients: Mapping[str, GeneratorClient]):
        """Serve the clients of this process, by model."""
        self._clients = clients
        self._live: dict[tuple[str, int], SpawnedProcess] = {}
        self._workers: list[SpawnedProcess] = []

    async def admit(self, model: str, index: int, process: SpawnedProcess) -> None:
        """Have this process's client send requests to a replica from now on. Then `announce` it.

        Raises:
            ProcessLost: the replica's process ended first.
        """
        await self._clients[model].admit(index, process.actor, process.life)

    async def announce(self, model: str, index: int, process: SpawnedProcess) -> None:
        """Have the workers' clients send requests to a replica too."""
        self._live[model, index] = process
        for worker in list(self._workers):
            with suppress(ProcessLost):  # of the worker; the next one is told when it starts
                await worker.life.call(worker.actor.admit.call_one(model, index, process.actor))

    def lose(self, model: str, index: int) -> None:
        """Have every client send the requests of a replica elsewhere: it is gone."""
        self._live.pop((model, index), None)
        self._clients[model].lose(index)
        for worker in self._workers:
            worker.actor.lose.broadcast(model, index)

    async def add_worker(self, worker: SpawnedProcess) -> None:
        """Tell a new worker which replicas live, and from now on of all changes."""
        self._workers.append(worker)
        for (model, index), process in list(self._live.items()):
            # One that has died meanwhile: `lose` has told this worker too.
            if self._live.get((model, index)) is process:
                await worker.actor.admit.call_one(model, index, process.actor)

    def remove_worker(self, worker: SpawnedProcess) -> None:
        """Tell a worker that is gone nothing any more."""
        self._workers = [other for other in self._workers if other is not worker]
