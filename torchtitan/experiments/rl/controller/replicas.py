"""Tells every client which replicas take requests: the clients of this process, and those of each rollout worker."""

from collections.abc import Mapping
from contextlib import suppress

from torchtitan.experiments.rl.controller.part import PartProcess
from torchtitan.experiments.rl.generation.client import GeneratorClient
from torchtitan.experiments.rl.process.lifetime import ProcessLost


class Replicas:
    """Of the policy and of each hosted model, by the name of the model; the policy's is ""."""

    def __init__(self, clients: Mapping[str, GeneratorClient]):
        self._clients = clients
        self._live: dict[tuple[str, int], PartProcess] = {}
        self._workers: list[PartProcess] = []

    async def admit(self, model: str, index: int, process: PartProcess) -> None:
        """This process's client sends requests to a replica from now on. Then ``announce`` it.

        Raises:
            ProcessLost: its process ended first.
        """
        await self._clients[model].admit(index, process.actor, process.life)

    async def announce(self, model: str, index: int, process: PartProcess) -> None:
        """The workers' clients send requests to it too."""
        self._live[model, index] = process
        for worker in list(self._workers):
            with suppress(ProcessLost):  # of the worker; the next one is told when it starts
                await worker.life.call(worker.actor.admit.call_one(model, index, process.actor))

    def lose(self, model: str, index: int) -> None:
        """A replica is gone, for every client."""
        self._live.pop((model, index), None)
        self._clients[model].lose(index)
        for worker in self._workers:
            worker.actor.lose.broadcast(model, index)

    async def tell(self, worker: PartProcess) -> None:
        """A worker is there: it learns of the replicas that live, and of all changes from now on."""
        self._workers.append(worker)
        for (model, index), process in list(self._live.items()):
            await worker.actor.admit.call_one(model, index, process.actor)

    def forget(self, worker: PartProcess | None) -> None:
        """A worker is gone."""
        self._workers = [other for other in self._workers if other is not worker]
