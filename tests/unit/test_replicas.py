"""Rollout workers hear of each replica that comes or goes, in an order that they can follow."""

import asyncio
from types import SimpleNamespace

from tests.fakes.waiting import iterations
from torchtitan.experiments.rl.fleet.replicas import Replicas
from torchtitan.experiments.rl.fleet.role import SpawnedProcess
from torchtitan.experiments.rl.process.lifetime import Lifetime


class Worker:
    """Notes what it is told. ``may_answer`` holds its answers back."""

    def __init__(self):
        self.told: list[tuple[str, int]] = []
        self.may_answer = asyncio.Event()
        self.may_answer.set()
        self.admit = SimpleNamespace(call_one=self._admit)
        self.lose = SimpleNamespace(
            broadcast=lambda model, index: self.told.append(("lose", index))
        )

    async def _admit(self, model, index, actor):
        self.told.append(("admit", index))
        await self.may_answer.wait()


class Client:
    async def admit(self, index, actor, life):
        pass

    def lose(self, index):
        pass


def process_of(actor: object) -> SpawnedProcess:
    return SpawnedProcess(procs=None, actor=actor, life=Lifetime("process"))


async def test_a_new_worker_is_not_told_of_a_replica_that_dies_meanwhile():
    replicas, worker = Replicas({"": Client()}), Worker()
    for index in (0, 1):
        await replicas.announce("", index, process_of(SimpleNamespace()))
    worker.may_answer.clear()
    adding = asyncio.create_task(replicas.add_worker(process_of(worker)))
    await iterations()
    replicas.lose("", 1)
    worker.may_answer.set()
    await adding
    assert worker.told == [("admit", 0), ("lose", 1)]


async def test_a_worker_hears_of_each_replica_that_comes_and_goes_until_it_is_gone():
    replicas, worker = Replicas({"": Client()}), Worker()
    process = process_of(worker)
    await replicas.add_worker(process)
    await replicas.announce("", 0, process_of(SimpleNamespace()))
    replicas.lose("", 0)
    replicas.remove_worker(process)
    await replicas.announce("", 0, process_of(SimpleNamespace()))
    assert worker.told == [("admit", 0), ("lose", 0)]
