"""What a config says about the job that gives a run its hosts."""

import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

from torchtitan.experiments.rl.bounds import NonNegativeInt, PositiveInt
from torchtitan.experiments.rl.errors import ConfigError
from torchtitan.experiments.rl.hosts.pool import HostPool
from torchtitan.experiments.rl.process.host import Device


@dataclass(kw_only=True, slots=True)
class JobConfig:
    """A kind of job extends it and declares its fields. ``--provision.job NAME`` chooses it by ``name``."""

    name: ClassVar[str] = ""
    by_name: ClassVar[dict[str, type["JobConfig"]]] = {}
    """The kinds of jobs that are imported."""

    files: ClassVar[tuple[str, ...]] = ()
    """Patterns of the files that a scheduler makes in the run's folder before the command runs."""

    def __init_subclass__(cls) -> None:
        if cls.name:
            JobConfig.by_name[cls.name] = cls

    @property
    def host_count(self) -> int | None:
        """None: as many as the run needs."""
        return 1

    @property
    def has_gpus(self) -> bool | None:
        """Whether its hosts have GPUs; None: as this host."""
        return None

    @property
    def memory(self) -> tuple[str, str, float] | None:
        """Memory that the scheduler is asked for on each host: field, its text, and GiB.

        None if the config does not say.
        """
        return None

    def devices(self, device: Device, hosts: int) -> list[list[int]] | None:
        """Cores or indices of GPUs of each host, as far as they are known before it is there. None: those of this host.

        Raises:
            ConfigError: they have to be said, and are not.
        """
        return None

    def script(self, words: Sequence[str], run_dir: str, hosts: int) -> str | None:
        """What a scheduler is given to run the command ``words``. None: the command runs here."""
        return None

    def plan(self, run_dir: str, hosts: int) -> str:
        """What ``start`` asks the scheduler for, as text for ``--dry-run``; "" where there is none."""
        return ""

    def seconds_left(self) -> float:
        """How long the run may go on after a signal of the scheduler, by what that says. 0: nothing is known."""
        return 0.0

    def submit(self, script: str, run_dir: str) -> Iterator[str]:
        """Hand the run to the scheduler. Gives lines for people: its id, how to follow, stop and resume it, its state.

        Raises:
            RunError: the scheduler refuses.
        """
        raise NotImplementedError

    def start(
        self, device: Device, hosts: int, run_dir: Path, stopped: Callable[[], bool]
    ) -> HostPool | None:
        """Take the hosts. Call it before the first actor is made: Monarch takes its transport from it. None: this host alone.

        Args:
            stopped: whether nobody wants them any more.

        Raises:
            RunError: they do not come.
        """
        return None


@dataclass(kw_only=True, slots=True)
class ThisHostJob(JobConfig):
    """The run has the host that the command runs on."""

    name: ClassVar[str] = "this_host"


@dataclass(kw_only=True, slots=True)
class ClusterJob(JobConfig):
    """A job for whose hosts a scheduler is asked: what they have is in the config before they are there."""

    hosts: PositiveInt | None = None
    """None: as few as hold the run's GPUs."""
    gpus_per_host: NonNegativeInt = 8
    """0: a run on CPU."""
    cores_per_host: PositiveInt | None = None
    """Asked of the scheduler for each host. None: not asked; a run on CPU has to say it."""

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


def gib_of(quantity: str, *, binary: bool = False, unit: str = "") -> float | None:
    """Return a scheduler's quantity of memory in GiB, or None where it is not written so.

    Args:
        quantity: Such as Kubernetes' "800Gi" or Slurm's "500G".
        binary: True if "G" is 2**30 bytes, as in Slurm.
        unit: Unit of a bare number.
    """
    found = re.fullmatch(r"(\d+(?:\.\d+)?)([kKMGT]i?)?", quantity)
    if found is None:
        return None
    name = found[2] or unit
    if binary:
        name = f"{name[:1].upper()}i"
    elif name == "K":
        name = "k"
    return float(found[1]) * _UNITS[name] / 2**30 if name in _UNITS else None


def contiguous_shares(things: Sequence[Any], parts: int) -> list[list[Any]]:
    """Contiguous, nearly equal shares; with more parts than things, several parts have the same one."""
    if parts >= len(things):
        return [[things[i % len(things)]] for i in range(parts)]
    bounds = [round(i * len(things) / parts) for i in range(parts + 1)]
    return [list(things[a:b]) for a, b in zip(bounds, bounds[1:], strict=False)]
