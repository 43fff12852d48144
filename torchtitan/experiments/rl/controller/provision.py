"""From a host or a Monarch job to process meshes: who runs where, on which cores and GPUs."""

import asyncio
import logging
from collections.abc import Sequence
from functools import partial
from typing import Any, Literal

from monarch.actor import HostMesh, Point, ProcMesh, default_bootstrap_cmd, this_host

from torchtitan.experiments.rl.config.placement import Placement
from torchtitan.experiments.rl.process.setup import launch_environment, set_up_spawned_process
from torchtitan.experiments.rl.weights.store import start_store

logger = logging.getLogger(__name__)

SHUTDOWN_TIMEOUT_S = 20.0
"""For each part: a run that ends must end."""


class RunMeshes:
    """The processes of one run, and the actors in them."""

    def __init__(self, placement: Placement, device: Literal["cpu", "cuda"], *, host: HostMesh | None = None):
        self.trainer_procs = spawn(host, "trainer", placement.trainer, device)
        self.generator_procs = spawn(host, "generator", placement.generators, device)
        self.hosted_procs = [spawn(host, f"hosted_{index}", shares, device) for index, shares in enumerate(placement.hosted)]
        self.rollout_worker_procs = (
            spawn(host, "rollout_worker", placement.rollout_workers, "cpu") if placement.rollout_workers else None
        )
        self.actor_names = {"trainer", "generator", "rollout_worker", *(f"hosted_{i}" for i in range(len(placement.hosted)))}
        """What the actors in these processes are spawned as."""
        self._actors: list[Any] = []

    async def start(self, trainer: Any, generators: Any, hosted: Sequence[Any] = ()) -> int:
        """Set up spawned actors side by side: the store, the trainer's process group, the engines.

        Returns:
            Hosts other than the trainer's first that hold a generator: they can't map its shared memory.
        """
        self._actors = [trainer, generators, *hosted]

        async def start_trainer() -> str:
            await start_store(self.trainer_procs.slice(procs=0))
            addresses = list((await trainer.address.call()).values())
            host, port = addresses[0]
            await trainer.setup.call(f"{host}:{port}", len({name for name, _ in addresses}) == 1)
            return host

        async def start_generators() -> set[str]:
            return set((await generators.setup.call()).values())

        async def start_hosted() -> None:
            await asyncio.gather(*(_done(model.setup.call()) for model in hosted))

        trainer_host, generator_hosts, _ = await asyncio.gather(start_trainer(), start_generators(), start_hosted())
        return len(generator_hosts - {trainer_host})

    def add(self, actors: Any) -> None:
        """Actors that ``close`` has to shut down too; before the others, which they use."""
        self._actors.insert(0, actors)

    async def close(self) -> list[str]:
        """Shut the actors down, then stop the processes, whatever state they are in.

        Returns:
            What actors report to have gone wrong in the user's code, a line each.
        """
        reports = await asyncio.gather(
            *(_within_limit(f"shutdown of {actor}", actor.shutdown.call()) for actor in self._actors)
        )
        procs = [self.trainer_procs, self.generator_procs, *self.hosted_procs]
        if self.rollout_worker_procs is not None:
            procs.append(self.rollout_worker_procs)
        await asyncio.gather(*(_within_limit(f"stopping {mesh}", mesh.stop()) for mesh in procs))
        return [fault for report in reports if report is not None for faults in report.values() for fault in faults or ()]


async def _done(future: Any) -> Any:
    """Monarch's futures can be awaited, and asyncio wants coroutines."""
    return await future


async def _within_limit(what: str, future: Any) -> Any:
    try:
        return await asyncio.wait_for(_done(future), SHUTDOWN_TIMEOUT_S)
    except Exception as error:  # a part that is dead or busy must not keep the others from ending
        logger.info("%s: %s", what, error)
        return None


def spawn(host: HostMesh | None, name: str, shares: tuple[tuple[int, ...], ...], device: Literal["cpu", "cuda"]) -> ProcMesh:
    """One process per share, each seeing only its own cores or GPUs."""

    def launch_command(point: Point) -> Any:
        return default_bootstrap_cmd().with_env(launch_environment(shares[point.rank], device))

    return (host or this_host()).spawn_procs(
        per_host={"procs": len(shares)},
        bootstrap=partial(set_up_spawned_process, shares, device),
        name=name,
        bootstrap_command=launch_command,
    )
