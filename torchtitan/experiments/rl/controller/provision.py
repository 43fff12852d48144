"""From a host or a Monarch job to processes: who runs where, on which cores and GPUs, and how they are shut down."""

import asyncio
import logging
from collections.abc import Collection, Iterable
from functools import partial
from typing import Any, Literal

from monarch.actor import HostMesh, Point, ProcMesh, default_bootstrap_cmd, this_host

from torchtitan.experiments.rl.process.setup import launch_environment, set_up_spawned_process
from torchtitan.experiments.rl.weights.store import start_store

logger = logging.getLogger(__name__)

SHUTDOWN_TIMEOUT_S = 20.0
"""For each part: a run that ends must end."""


async def start_trainer(procs: ProcMesh, trainer: Any) -> set[str]:
    """Set up the store and the trainer's process group. Returns the identities of its hosts."""
    await start_store(procs.slice(procs=0))
    points = list((await trainer.meeting_points.call()).values())
    hosts = {host for host, _, _ in points}
    _, port, file = points[0]
    await trainer.setup.call(file if len(hosts) == 1 else port)
    return hosts


async def shut_down(actors: Collection[Any], procs: Iterable[ProcMesh]) -> list[str]:
    """Shut the actors down, side by side, then stop the processes, whatever state they are in.

    Returns:
        What actors report to have gone wrong in the user's code, a line each.
    """
    reports = await asyncio.gather(*(_within_limit(f"shutdown of {actor}", actor.shutdown.call()) for actor in actors))
    await asyncio.gather(*(_within_limit(f"end of {actor}", actor.may_be_stopped.call()) for actor in actors))
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
