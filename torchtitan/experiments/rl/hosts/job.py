"""Configs of the jobs that give a run its hosts.

The run's config has one of them (``provision.job``). Before there are hosts, it says how many there
will be and what they have, from which the placement follows. A job of a scheduler then hands the
command to it (``submit``), and the command that runs in the job takes the hosts (``start``).
"""

import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import ClassVar, TypeVar

from torchtitan.experiments.rl.bounds import NonNegativeInt, PositiveInt
from torchtitan.experiments.rl.errors import ConfigError
from torchtitan.experiments.rl.hosts.pool import HostPool
from torchtitan.experiments.rl.process.host import Device

_T = TypeVar("_T")


@dataclass(kw_only=True, slots=True)
class JobConfig:
    """Base of the configs of jobs. A subclass declares a name and the fields of its kind of job."""

    name: ClassVar[str] = ""
    """Name that ``--provision.job`` chooses the kind of job by."""
    by_name: ClassVar[dict[str, type["JobConfig"]]] = {}
    """Every kind of job that was imported, by its name."""
    files: ClassVar[tuple[str, ...]] = ()
    """Patterns of the files that a scheduler makes in the run's folder before the command runs."""

    def __init_subclass__(cls) -> None:
        if cls.name:
            JobConfig.by_name[cls.name] = cls

    @property
    def host_count(self) -> int | None:
        """Number of hosts; None if the job takes as many as the run needs."""
        return 1

    @property
    def has_gpus(self) -> bool | None:
        """True if the job's hosts have GPUs; None if they have them as this host does."""
        return None

    @property
    def memory(self) -> tuple[str, str, float] | None:
        """Memory that the scheduler is asked for on each host: field, its text, and GiB.

        None if the config does not say.
        """
        return None

    def devices(self, device: Device, hosts: int) -> list[list[int]] | None:
        """Return the cores, or the indices of the GPUs, of each host that is not there yet.

        Returns:
            None if the run has this host.

        Raises:
            ConfigError: the config has to say how many, and does not.
        """
        return None

    def script(self, words: Sequence[str], run_dir: str, hosts: int) -> str | None:
        """Return the script that a scheduler runs the command ``words`` by.

        Returns:
            None if the command runs here.
        """
        return None

    def plan(self, run_dir: str, hosts: int) -> str:
        """Return what ``start`` asks a scheduler for, for ``--dry-run``; "" without one."""
        return ""

    def seconds_left(self) -> float:
        """Return the seconds that are left after a signal of the scheduler; 0 if unknown."""
        return 0.0

    def submit(self, script: str, run_dir: str) -> Iterator[str]:
        """Hand the run to the scheduler.

        Yields:
            Lines for people: the job's id, how to follow, stop and resume it, its state.

        Raises:
            RunError: the scheduler refuses the job.
        """
        raise NotImplementedError

    def start(
        self, device: Device, hosts: int, run_dir: Path, stopped: Callable[[], bool]
    ) -> HostPool | None:
        """Take the hosts, before the first actor is made: this chooses Monarch's transport.

        Args:
            stopped: returns True if the run was stopped, and wants no hosts any more.

        Returns:
            None if the run has this host alone.

        Raises:
            RunError: the hosts do not come.
        """
        return None


@dataclass(kw_only=True, slots=True)
class ThisHostJob(JobConfig):
    """Job of a run that has the command's own host."""

    name: ClassVar[str] = "this_host"


@dataclass(kw_only=True, slots=True)
class ClusterJob(JobConfig):
    """Base of jobs whose hosts come from a scheduler, which is told what they have."""

    hosts: PositiveInt | None = None
    """Number of hosts. None takes as few as hold the run's GPUs."""
    gpus_per_host: NonNegativeInt = 8
    """Number of GPUs of each host; 0 for a run on CPU."""
    cores_per_host: PositiveInt | None = None
    """Number of cores of each host. None leaves it to the scheduler; a run on CPU has to say it."""

    @property
    def host_count(self) -> int | None:
        return self.hosts

    @property
    def has_gpus(self) -> bool:
        return self.gpus_per_host > 0

    def devices(self, device: Device, hosts: int) -> list[list[int]]:
        if device == "cuda":
            return [list(range(self.gpus_per_host)) for _ in range(hosts)]
        if self.cores_per_host is None:
            raise ConfigError(
                "provision.job.cores_per_host",
                None,
                "say how many cores of a host a run on CPU gets",
            )
        return [list(range(self.cores_per_host)) for _ in range(hosts)]


_UNITS = {
    "": 1,
    "k": 1e3,
    "M": 1e6,
    "G": 1e9,
    "T": 1e12,
    "Ki": 2**10,
    "Mi": 2**20,
    "Gi": 2**30,
    "Ti": 2**40,
}
"""Bytes of a unit of memory."""


def gib_of(quantity: str, *, binary: bool = False, unit: str = "") -> float | None:
    """Return a scheduler's quantity of memory in GiB; None if it is not written as one.

    Args:
        quantity: a text such as Kubernetes' "800Gi" or Slurm's "500G".
        binary: True if "G" is 2**30 bytes, as in Slurm.
        unit: the unit of a bare number.
    """
    match = re.fullmatch(r"(\d+(?:\.\d+)?)([kKMGT]i?)?", quantity)
    if match is None:
        return None
    name = match[2] or unit
    if binary:
        name = f"{name[:1].upper()}i"
    elif name == "K":
        name = "k"
    return float(match[1]) * _UNITS[name] / 2**30 if name in _UNITS else None


def contiguous_shares(items: Sequence[_T], shares: int) -> list[list[_T]]:
    """Divide ``items`` into contiguous, nearly equal shares.

    If there are more shares than items, several shares have the same item.
    """
    if shares >= len(items):
        return [[items[index % len(items)]] for index in range(shares)]
    bounds = [round(index * len(items) / shares) for index in range(shares + 1)]
    return [list(items[first:end]) for first, end in pairwise(bounds)]
