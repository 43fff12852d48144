"""A place in a run that one process fills, and the process that fills it.

    spawn -> set_up -> connect -> (works) -> dies -> disconnect -> spawn -> ...

The supervisor calls these methods, in this order. The concrete roles are in `roles.py`.
"""

import re
from abc import ABC, abstractmethod
from dataclasses import dataclass, field
from typing import Any, ClassVar

from monarch.actor import Actor, ProcMesh

from torchtitan.experiments.rl.fleet.context import RunContext
from torchtitan.experiments.rl.fleet.spawn import spawn_on
from torchtitan.experiments.rl.plan.placement import Place
from torchtitan.experiments.rl.process.host import Device
from torchtitan.experiments.rl.process.lifetime import Lifetime


@dataclass(kw_only=True, slots=True)
class SpawnedProcess:
    """One process with one actor, until it dies."""

    procs: ProcMesh
    actor: Any
    """Mesh of that one actor."""
    life: Lifetime


@dataclass(kw_only=True, eq=False)
class Role(ABC):
    """A place in the run that is filled by one process at a time."""

    actor_class: ClassVar[type[Actor]]
    runs_user_code: ClassVar[bool] = False
    """True if user code may hold up the event loop of the process, so that it answers late."""

    name: str
    """Name for people: "generator 1"."""
    context: RunContext
    place: Place
    """Host, and cores or GPUs, of the process."""
    process: SpawnedProcess = field(init=False)
    """Process that fills the role, or filled it last. The supervisor sets it."""
    spawned_as: str = field(default="", init=False)
    """Name by which Monarch knows that process: the label and a number, "generator_1_2"."""

    @property
    def label(self) -> str:
        """Name in metrics and in Monarch: "generator_1"."""
        return re.sub(r"\W", "_", self.name).strip("_")

    @property
    def device(self) -> Device:
        """Device that the actor computes on."""
        return "cpu"

    @abstractmethod
    def arguments(self) -> dict[str, Any]:
        """Return the arguments of the actor but for ``run_dir``, which every actor has."""

    def spawn(self, name: str) -> tuple[ProcMesh, Any]:
        """Spawn the process, and the actor in it.

        Args:
            name: name by which Monarch is to know them.
        """
        context = self.context
        procs, _ = spawn_on(context.hosts, name, [self.place], self.device, run_dir=context.run_dir)
        run_dir = str(context.run_dir)
        return procs, procs.spawn(name, self.actor_class, run_dir=run_dir, **self.arguments())

    async def set_up(self, process: SpawnedProcess) -> Any:  # noqa: ANN401 - the actor's answer
        """Make the actor ready to be connected."""
        return await process.actor.setup.call_one()

    @abstractmethod
    async def connect(self, process: SpawnedProcess) -> None:
        """Prove that the process is up to date, and give it work from now on."""

    @abstractmethod
    def disconnect(self) -> None:
        """Give the process no more work: it died.

        What it was doing is done elsewhere, or once the role is filled again.
        """
