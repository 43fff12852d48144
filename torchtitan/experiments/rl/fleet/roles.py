"""The roles of a run, and what follows when a process of each dies.

    role            processes                 connected once            when one dies
    --------------  ------------------------  ------------------------  ------------------------
    trainer rank    each rank                 (takes no requests)       the run goes on from its
                                                                        newest checkpoint
    generator       each replica of the       it holds the trainer's    restarted; requests go
                    policy                    weights                   elsewhere meanwhile
    hosted model    each replica of a frozen  it is set up              restarted, likewise
                    model
    weight reader   each host that generates  it is set up              restarted; it reads the
                    and lacks weights                                   version again
    rollout worker  ``rollout_workers``       its tasks are set up      restarted; its groups
                                                                        run again, elsewhere

Trainer ranks are one Monarch mesh, which `fleet.py` spawns. Each other role is a class here.
"""

import os
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from torchtitan.experiments.rl.fleet.context import RunContext
from torchtitan.experiments.rl.fleet.replicas import Replicas
from torchtitan.experiments.rl.fleet.role import Role, SpawnedProcess
from torchtitan.experiments.rl.fleet.rollout_workers import RolloutWorker, WorkerRunner
from torchtitan.experiments.rl.fleet.weight_readers import WeightReaders
from torchtitan.experiments.rl.generation.config import GeneratorConfig
from torchtitan.experiments.rl.generation.generator import Generator
from torchtitan.experiments.rl.plan.placement import Place
from torchtitan.experiments.rl.process.host import Device
from torchtitan.experiments.rl.weights.reader import WeightReader
from torchtitan.experiments.rl.weights.sync import WeightSync


@dataclass(kw_only=True, eq=False)
class ReplicaRole(Role):
    """A replica that keeps its weights: of a hosted model, or of a policy that is only measured."""

    actor_class = Generator

    replicas: Replicas
    index: int
    """Number of the replica among those of its model."""
    generator: GeneratorConfig
    model: str = ""
    """Hub folder of the hosted model; "" for the policy."""
    log_name: str = "generator"
    """Beginning of its log's name, before the index."""

    @property
    def device(self) -> Device:
        return self.context.plan.device

    def arguments(self) -> dict[str, Any]:
        return {
            "config": self.generator,
            "model_path": self.model or self.context.config.model.hf_assets_path,
            "device": self.device,
            "role": self.log_name,
            "index": self.index,
            "adapters": None,
            "routes": False,
        }

    async def connect(self, process: SpawnedProcess) -> None:
        await self.replicas.admit(self.model, self.index, process)
        await self.replicas.announce(self.model, self.index, process)

    def disconnect(self) -> None:
        self.replicas.lose(self.model, self.index)


@dataclass(kw_only=True, eq=False)
class GeneratorRole(ReplicaRole):
    """A replica of the policy that is trained, whose weights follow the trainer's."""

    weights: WeightSync = field(init=False)
    """Source of its weights. The fleet sets it once the trainer is up, before `connect`."""

    def arguments(self) -> dict[str, Any]:
        config = self.context.config
        return super().arguments() | {
            "adapters": config.served,
            "routes": config.trainer.router_replay != "off",
        }

    async def connect(self, process: SpawnedProcess) -> None:
        take_requests = partial(self.replicas.admit, self.model, self.index, process)
        await self.weights.admit(self.index, process.actor, take_requests)
        await self.replicas.announce(self.model, self.index, process)


@dataclass(kw_only=True, eq=False)
class WeightReaderRole(Role):
    """The process that reads each version of the weights into the memory of a host."""

    actor_class = WeightReader

    readers: WeightReaders
    index: int

    @property
    def host(self) -> str:
        """Name of the host, for people."""
        return host_name(self.place)

    def arguments(self) -> dict[str, Any]:
        return {"index": self.index}

    async def connect(self, process: SpawnedProcess) -> None:
        await self.readers.admit(self.host, process)

    def disconnect(self) -> None:
        self.readers.lose(self.host)


@dataclass(kw_only=True, eq=False)
class RolloutWorkerRole(Role):
    """A process that runs groups, because envs need more than one event loop."""

    actor_class = RolloutWorker
    runs_user_code = True

    replicas: Replicas
    runner: WorkerRunner
    index: int
    client_ids: Iterator[int]
    """Ids for the workers' clients of generators. The controller's client has id 0."""

    def arguments(self) -> dict[str, Any]:
        config = self.context.config
        return {
            "tasks": config.tasks,
            "renderer": config.renderer,
            "tokenizer_path": config.model.hf_assets_path,
            "seed": config.seed,
            "limits": config.user_code,
            "index": self.index,
            "client_id": next(self.client_ids),
            "stops_at_texts": config.generator.engine.stops_at_texts,
        }

    async def set_up(self, process: SpawnedProcess) -> None:
        await self.replicas.add_worker(process)
        await process.actor.setup.call_one()

    async def connect(self, process: SpawnedProcess) -> None:
        self.runner.admit(self.index, process.actor, process.life)

    def disconnect(self) -> None:
        self.runner.lose(self.index)
        self.replicas.remove_worker(self.process)


def host_name(place: Place) -> str:
    """Return the name of a place's host, for people and for logs."""
    return f"host_{place.host}"


def cores_at(place: Place, context: RunContext) -> Place:
    """Return the place as cores, for a process that does not compute on the place's GPUs."""
    if context.plan.device == "cpu":
        return place
    if context.hosts is None:
        return Place(place.host, tuple(sorted(os.sched_getaffinity(0))))
    return Place(place.host, context.hosts.hosts[place.host].cores)
