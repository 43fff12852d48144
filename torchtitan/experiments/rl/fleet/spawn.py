"""Spawns processes on chosen hosts, cores and GPUs, and shuts actors and processes down."""

import asyncio
import logging
import os
import re
from collections.abc import Awaitable, Callable, Collection, Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from monarch.actor import Point, ProcMesh, default_bootstrap_cmd, this_host

from torchtitan.experiments.rl.hosts.pool import HostPool
from torchtitan.experiments.rl.plan.placement import Place
from torchtitan.experiments.rl.process.host import Device
from torchtitan.experiments.rl.process.setup import launch_environment, set_up_spawned_process
from torchtitan.experiments.rl.weights.reader import start_store

logger = logging.getLogger(__name__)
T = TypeVar("T")

SHUTDOWN_TIMEOUT_S = 20.0
"""Seconds that each actor, and then each process, may take to stop: a run that ends must end."""
_INDEX_AND_INCARNATION = re.compile(r"_(\d+)_\d+$")


def spawn_on(
    hosts: HostPool | None,
    name: str,
    places: Sequence[Place],
    device: Device,
    *,
    run_dir: Path | None = None,
    environment: Mapping[str, str] | None = None,
) -> tuple[ProcMesh, ProcMesh]:
    """Spawn one process per place, with threads for its own cores, or seeing its own GPUs alone.

    Args:
        hosts: None for this host alone.
        name: name of the processes in Monarch. If it ends with an index and the number of the
            incarnation, as "generator_0_2" does, all incarnations print to one file.
        places: the same number on each host, hosts in a row.
        run_dir: run whose logs/ gets what the processes print, beside the log of the same name;
            None to print to the terminal.
        environment: variables of these processes, besides those of every process.

    Returns:
        The processes as a mesh of one dimension, "procs", and the mesh to stop them by.
    """
    output = None
    if run_dir is not None:
        output = str(run_dir.resolve() / "logs" / _INDEX_AND_INCARNATION.sub(r"-\1", name))
    first = places[0].host
    last = places[-1].host

    own = dict(environment or {})

    def launch_command(point: Point) -> Any:  # noqa: ANN401 - Monarch's, without a public type
        place = places[point.rank]
        if hosts is None:
            variables = launch_environment(place.devices, device, None) | own
            return default_bootstrap_cmd().with_env(variables)
        host = hosts.hosts[place.host]
        variables = launch_environment(place.devices, device, host.gpus) | own
        variables |= dict(host.environment)
        if "PYTHONPATH" in os.environ:
            # The command may have added the folder of the user's modules.
            variables["PYTHONPATH"] = os.environ["PYTHONPATH"]
        return default_bootstrap_cmd().with_env(variables)

    if hosts is None:
        mesh = this_host()
    else:
        mesh = hosts.mesh.slice(hosts=first if first == last else slice(first, last + 1))
    procs = mesh.spawn_procs(
        per_host={"procs": len(places) // (last - first + 1)},
        bootstrap=partial(
            set_up_spawned_process, tuple(place.devices for place in places), device, output
        ),
        name=name,
        bootstrap_command=launch_command,
    )
    return procs if first == last else procs.flatten("procs"), procs


async def start_trainer(procs: ProcMesh, trainer: Any) -> set[str]:  # noqa: ANN401 - Monarch's
    """Set up the store and the trainer's process group.

    Returns:
        Identities of the trainer's hosts.
    """
    await start_store(procs.slice(procs=0))
    points = list((await trainer.meeting_points.call()).values())
    hosts = {host for host, _, _ in points}
    _, port, file = points[0]
    await trainer.setup.call(file if len(hosts) == 1 else port)
    return hosts


async def shut_down(actors: Collection[Any], procs: Iterable[ProcMesh]) -> list[str]:
    """Shut the actors down side by side, then stop the processes, whatever state they are in.

    Returns:
        A line for each fault of the user's code that an actor reports.
    """
    reports = await asyncio.gather(
        *(_within_limit(f"shutdown of {actor}", actor.shutdown.call) for actor in actors)
    )
    await asyncio.gather(
        *(_within_limit(f"end of {actor}", actor.may_be_stopped.call) for actor in actors)
    )
    await asyncio.gather(*(_within_limit(f"stopping {mesh}", mesh.stop) for mesh in procs))
    faults: list[str] = []
    for report in reports:
        for lines in report.values() if report is not None else ():
            faults += lines or ()
    return faults


async def _within_limit(what: str, ask: Callable[[], Awaitable[T]]) -> T | None:
    """Return the answer; None, with a line in the log, if an error or the time limit came first."""
    try:
        async with asyncio.timeout(SHUTDOWN_TIMEOUT_S):
            return await ask()
    except Exception as error:  # noqa: BLE001 - a dead or busy actor must not keep others from ending
        logger.info("%s: %s", what, error)
        return None
