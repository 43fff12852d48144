"""From hosts to processes: takes a run's hosts, says who runs where, on which cores and GPUs, spawns them and shuts them down.

Hosts are taken before the first actor is made, and it is checked that each sees the files that all share.
"""

import asyncio
import logging
import os
import re
import secrets
from collections.abc import Callable, Collection, Iterable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from monarch.actor import Point, ProcMesh, default_bootstrap_cmd, this_host

from torchtitan.experiments.rl.config.machine import memory_lacks
from torchtitan.experiments.rl.config.placement import Place, Placement, place
from torchtitan.experiments.rl.config.plan import RunPlan, host_memory
from torchtitan.experiments.rl.config.run_config import RunConfig
from torchtitan.experiments.rl.config.start import Ready
from torchtitan.experiments.rl.errors import RunError
from torchtitan.experiments.rl.generation.references import hosted_models
from torchtitan.experiments.rl.hosts.pool import HostPool, text_of
from torchtitan.experiments.rl.process.host import Device
from torchtitan.experiments.rl.process.setup import (
    launch_environment,
    quiet_libraries,
    set_up_spawned_process,
)
from torchtitan.experiments.rl.weights.reader import start_store

logger = logging.getLogger(__name__)

SHUTDOWN_TIMEOUT_S = 20.0
"""For each part: a run that ends must end."""
_INCARNATION = re.compile(r"_(\d+)_\d+$")
MARK_FILE = ".shared"


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
    reports = await asyncio.gather(
        *(_within_limit(f"shutdown of {actor}", actor.shutdown.call()) for actor in actors)
    )
    await asyncio.gather(
        *(_within_limit(f"end of {actor}", actor.may_be_stopped.call()) for actor in actors)
    )
    await asyncio.gather(*(_within_limit(f"stopping {mesh}", mesh.stop()) for mesh in procs))
    return [
        fault
        for report in reports
        if report is not None
        for faults in report.values()
        for fault in faults or ()
    ]


async def _within_limit(what: str, future: Any) -> Any:
    try:
        async with asyncio.timeout(SHUTDOWN_TIMEOUT_S):
            return await future
    except Exception as error:  # a part that is dead or busy must not keep the others from ending
        logger.info("%s: %s", what, error)
        return None


def place_run(plan: RunPlan, hosts: HostPool | None) -> Placement:
    """The placement, by what the hosts themselves have counted.

    Raises:
        ConfigError: they have less than the plan took them to have.
    """
    if hosts is None:
        return plan.placement
    cores = [host.cores for host in hosts.hosts]
    devices = (
        cores if plan.device == "cpu" else [tuple(range(len(host.gpus))) for host in hosts.hosts]
    )
    placement = place(
        plan.config,
        plan.device,
        parameters=plan.sizes.parameters,
        hosts=devices,
        worker_cores=cores,
    )
    logger.info("hosts: %s; placement: %s", [host.name for host in hosts.hosts], placement)
    return placement


def check_host_memory(plan: RunPlan, placement: Placement, hosts: HostPool | None) -> None:
    """Compare the memory that a run on GPUs needs on each host with what the host says that it has.

    The command has checked this host itself before.

    Raises:
        RunError: names the first host that has too little.
    """
    if hosts is None or plan.device == "cpu":
        return
    for number, needed in host_memory(plan, placement).items():
        host = hosts.hosts[number]
        if (cause := memory_lacks(needed, host.memory_gib)) is not None:
            raise RunError(f"{host.name} has {host.memory_gib:.1f} GiB of memory: {cause}")


def spawn_on(
    hosts: HostPool | None,
    name: str,
    places: Sequence[Place],
    device: Device,
    *,
    run_dir: Path | None = None,
) -> tuple[ProcMesh, ProcMesh]:
    """One process per place, each with threads for its own cores, or seeing only its own GPUs.

    Args:
        hosts: None: this host alone.
        places: the same number on each host, hosts in a row.
        name: of a part it ends with the part's index and incarnation, as in "generator_0_2".
        run_dir: what the processes print is in its logs/, beside the log that is named alike. None: it goes to the terminal.

    Returns:
        Its mesh, of one dimension "procs", and the mesh to stop.
    """
    output = (
        None
        if run_dir is None
        else str(run_dir.resolve() / "logs" / _INCARNATION.sub(r"-\1", name))
    )
    first, last = places[0].host, places[-1].host

    def launch_command(point: Point) -> Any:
        place, gpus, own = places[point.rank], None, {}
        if hosts is not None:
            gpus, own = hosts.hosts[place.host].gpus, dict(hosts.hosts[place.host].environment)
            if (
                "PYTHONPATH" in os.environ
            ):  # of the user's modules, which the command may have added
                own["PYTHONPATH"] = os.environ["PYTHONPATH"]
        return default_bootstrap_cmd().with_env(
            launch_environment(place.devices, device, gpus) | own
        )

    named = first if first == last else slice(first, last + 1)
    mesh = this_host() if hosts is None else hosts.mesh.slice(hosts=named)
    procs = mesh.spawn_procs(
        per_host={"procs": len(places) // (last - first + 1)},
        bootstrap=partial(
            set_up_spawned_process, tuple(place.devices for place in places), device, output
        ),
        name=name,
        bootstrap_command=launch_command,
    )
    return procs if first == last else procs.flatten("procs"), procs


def take_hosts(config: RunConfig, start: Ready, *, stopped: Callable[[], bool]) -> HostPool | None:
    """None: the run has this host alone.

    Args:
        stopped: whether the person has stopped the run meanwhile.

    Raises:
        RunError: hosts do not come, or one does not see the run's folder or a model.
    """
    run_dir = Path(start.run_dir)
    with quiet_libraries():  # there is no log yet
        pool = config.provision.job.start(start.plan.device, start.plan.hosts, run_dir, stopped)
    if pool is not None:
        try:
            check_shared_files(pool, config, run_dir)
        except BaseException:
            pool.close()
            raise
    return pool


def check_shared_files(pool: Any, config: RunConfig, run_dir: Path) -> None:
    """
    Args:
        pool: answers ``read``.

    Raises:
        RunError: names the first host and the folder that it does not see as this one does.
    """
    mark = run_dir.resolve() / MARK_FILE
    mark.write_text(secrets.token_hex(16))
    models = [
        config.model.hf_assets_path,
        *(model.path for model in hosted_models(config.tasks).values()),
    ]
    files = {mark: "--run-dir"} | {
        Path(model).resolve() / "config.json": "model.hf_assets_path" for model in models
    }
    try:
        for file, field in files.items():
            here = text_of(file)
            for host, there in pool.read(file).items():
                if here not in (None, there):
                    cure = f"name one that all hosts share ({field})"
                    raise RunError(
                        f"{host} does not see the folder {file.parent} as this host does: {cure}"
                    )
    finally:
        mark.unlink(missing_ok=True)
