"""A part of the run with a process of its own, which can be made again when that process ends."""

from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any

from monarch.actor import ProcMesh

from torchtitan.experiments.rl.process.lifetime import Lifetime


@dataclass(kw_only=True, slots=True)
class PartProcess:
    """One incarnation of a part."""

    procs: ProcMesh
    actor: Any
    """Of that process alone."""
    life: Lifetime


@dataclass(kw_only=True, slots=True)
class Part:
    name: str
    """What people call it: "generator 1"."""
    spawn: Callable[[str], tuple[ProcMesh, Any]]
    """Spawns the process and the actor in it, which Monarch is to know by the name that it gets."""
    set_up: Callable[[PartProcess], Awaitable[Any]]
    """Makes the actor ready to be connected."""
    connect: Callable[[PartProcess], Awaitable[None]]
    """Proves that it is up to date, and has it take work."""
    disconnect: Callable[[], None]
    """Has it take no more work: what it was doing is done elsewhere, or when it is connected again."""
    host: int = 0
    """Where its processes run: as in ``Place``."""
    blocks: bool = False
    """User code may hold up its event loop."""
    process: PartProcess | None = None
    """The incarnation that lives or lived last."""
    incarnation: int = 0
    """Its number: 1 is the first since the command began."""

    @property
    def label(self) -> str:
        """The name in metrics and in Monarch: "generator_1"."""
        return "".join(character if character.isalnum() else "_" for character in self.name).strip("_")
