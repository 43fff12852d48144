"""Takes the hosts of a run, and decides which process runs where on them.

Hosts are taken before the first actor is spawned, and each is asked whether it sees the files that
all processes share.
"""

import logging
import secrets
from collections.abc import Callable
from pathlib import Path
from typing import Protocol

from torchtitan.experiments.rl.command.machine import memory_shortage
from torchtitan.experiments.rl.command.start import Ready
from torchtitan.experiments.rl.config.run_config import RunConfig
from torchtitan.experiments.rl.errors import RunError
from torchtitan.experiments.rl.generation.references import hosted_models
from torchtitan.experiments.rl.hosts.pool import HostPool, text_of
from torchtitan.experiments.rl.plan.placement import Placement, place
from torchtitan.experiments.rl.plan.plan import RunPlan, host_memory
from torchtitan.experiments.rl.process.logs import quiet_libraries

logger = logging.getLogger(__name__)

MARK_FILE = ".shared"
"""File in the run's folder that every host has to see."""


class FileReader(Protocol):
    """Reads a file as each host of a run sees it."""

    def read(self, file: Path) -> dict[str, str | None]:
        """Return the text of the file by host; None where a host does not see it."""


def take_hosts(config: RunConfig, start: Ready, *, stopped: Callable[[], bool]) -> HostPool | None:
    """Take the hosts that the config asks for, and check that they share the run's files.

    Args:
        stopped: returns True once the person has stopped the run.

    Returns:
        The hosts, or None if the run has this host alone.

    Raises:
        RunError: hosts do not come, or one does not see the run's folder or a model.
    """
    run_dir = Path(start.run_dir)
    with quiet_libraries():  # there is no log yet
        pool = config.provision.job.start(start.plan.device, start.plan.hosts, run_dir, stopped)
    if pool is not None:
        try:
            check_shared_files(pool, config, run_dir)
        except BaseException:  # also Ctrl-C: the hosts are given back whatever ends the check
            pool.close()
            raise
    return pool


def check_shared_files(pool: FileReader, config: RunConfig, run_dir: Path) -> None:
    """Raise if a host sees other files than this host does.

    Raises:
        RunError: names the first host and the folder that it does not see as this one does.
    """
    mark = run_dir.resolve() / MARK_FILE
    mark.write_text(secrets.token_hex(16))
    models = [
        config.model.hf_assets_path,
        *(model.path for model in hosted_models(config.tasks).values()),
    ]
    fields = {mark: "--run-dir"}
    for model in models:
        fields[Path(model).resolve() / "config.json"] = "model.hf_assets_path"
    try:
        for file, field in fields.items():
            here = text_of(file)  # None for a model that other hosts alone have: nothing to compare
            for host, there in pool.read(file).items():
                if here is not None and there != here:
                    cure = f"name one that all hosts share ({field})"
                    raise RunError(
                        f"{host} does not see the folder {file.parent} as this host does: {cure}"
                    )
    finally:
        mark.unlink(missing_ok=True)


def place_run(plan: RunPlan, hosts: HostPool | None) -> Placement:
    """Return which process runs where, by the cores and GPUs that the hosts themselves count.

    Raises:
        ConfigError: the hosts have less than the plan assumed.
    """
    if hosts is None:
        return plan.placement
    cores = [host.cores for host in hosts.hosts]
    gpus = [tuple(range(len(host.gpus))) for host in hosts.hosts]
    placement = place(
        plan.config,
        plan.device,
        parameters=plan.sizes.parameters,
        hosts=cores if plan.device == "cpu" else gpus,
        worker_cores=cores,
    )
    logger.info("hosts: %s; placement: %s", [host.name for host in hosts.hosts], placement)
    return placement


def check_host_memory(plan: RunPlan, placement: Placement, hosts: HostPool | None) -> None:
    """Raise if a host has less memory than a run on GPUs needs there.

    A run on this host alone was checked by the command.

    Raises:
        RunError: names the first host that has too little.
    """
    if hosts is None or plan.device == "cpu":
        return
    for number, needed in host_memory(plan, placement).items():
        host = hosts.hosts[number]
        cause = memory_shortage(needed, host.memory_gib)
        if cause is not None:
            raise RunError(f"{host.name} has {host.memory_gib:.1f} GiB of memory: {cause}")
