"""The kinds of jobs that a config can choose by name.

The job whose hosts are processes of this machine is defined here.
"""

import contextlib
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

from torchtitan.experiments.rl.bounds import PositiveInt
from torchtitan.experiments.rl.compat.monarch import MONARCH_OUTPUT
from torchtitan.experiments.rl.errors import ConfigError
from torchtitan.experiments.rl.hosts.job import JobConfig, ThisHostJob, contiguous_shares
from torchtitan.experiments.rl.hosts.kubernetes import KubernetesJob
from torchtitan.experiments.rl.hosts.pool import HostPool, TakenHosts, attach
from torchtitan.experiments.rl.hosts.slurm import SlurmJob
from torchtitan.experiments.rl.process.host import (
    HOST_VARIABLE,
    Device,
    host_identity,
    mask_of,
    own_cores,
    visible_gpus,
)
from torchtitan.experiments.rl.process.lifetime import descendants, kill
from torchtitan.experiments.rl.process.modules import module_words
from torchtitan.experiments.rl.process.temporary import HOSTS_PREFIX

__all__ = ["JobConfig", "KubernetesJob", "ProcessJob", "SlurmJob", "ThisHostJob"]
START_TIMEOUT_S = 120.0
"""Limit in seconds for the agents to listen and answer."""


@dataclass(kw_only=True, slots=True)
class ProcessJob(JobConfig):
    """Job whose hosts are processes of this machine, to try on one machine what several do.

    Each host has a share of the machine's cores or GPUs and an identity of its own: two hosts share
    nothing that real hosts don't share.
    """

    name: ClassVar[str] = "process"
    hosts: PositiveInt = 2
    """Number of hosts."""

    @property
    def host_count(self) -> int:
        return self.hosts

    def devices(self, device: Device, hosts: int) -> list[list[int]]:
        if device == "cuda" and len(visible_gpus()) < hosts:
            raise ConfigError(
                "provision.job.hosts",
                hosts,
                f"each needs a GPU, and there are {len(visible_gpus())} here",
            )
        return contiguous_shares(visible_gpus() if device == "cuda" else own_cores(), hosts)

    def start(
        self, device: Device, hosts: int, run_dir: Path, stopped: Callable[[], bool]
    ) -> HostPool:
        devices: list[list[Any]] = self.devices(device, hosts)
        if device == "cuda":
            devices = [[mask_of([gpu]) for gpu in share] for share in devices]
        sockets = tempfile.mkdtemp(prefix=HOSTS_PREFIX)
        names = [f"hosts_{index}" for index in range(hosts)]
        paths = [f"{sockets}/{name}" for name in names]
        agents = [_start_agent(name, path) for name, path in zip(names, paths, strict=True)]

        def end() -> None:
            kill([pid for agent in agents for pid in [*descendants(agent.pid), agent.pid]])
            for agent in agents:
                agent.wait()
            shutil.rmtree(sockets, ignore_errors=True)

        with contextlib.ExitStack() as on_error:
            on_error.callback(end)
            mesh = attach(
                [f"ipc://{path}" for path in paths],
                paths,
                timeout_s=START_TIMEOUT_S,
                stopped=stopped,
                printed=run_dir / MONARCH_OUTPUT,
            )
            on_error.pop_all()
        identity = host_identity()
        taken = TakenHosts(
            mesh=mesh,
            on_gpus=device == "cuda",
            one_machine=True,
            environments=[
                {HOST_VARIABLE: f"{identity}/process host {index}"} for index in range(hosts)
            ],
            devices=devices,
            give_back=end,
        )
        return HostPool(taken, stopped=stopped, timeout_s=START_TIMEOUT_S)


def _start_agent(name: str, path: str) -> subprocess.Popen:
    return subprocess.Popen(
        [sys.executable, *module_words("hosts.agent"), "--socket", path],
        env=os.environ | {"HYPERACTOR_PROCESS_NAME": name},
        start_new_session=True,  # Ctrl-C is for the command
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
