"""What a config says about hosts and devices."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Literal, TypeVar

import torch

from torchtitan.experiments.rl.bounds import NonNegativeInt
from torchtitan.experiments.rl.errors import ConfigError
from torchtitan.experiments.rl.hosts.jobs import JobConfig, ThisHostJob

MOST_HOSTS = 256
"""That a job which counts its hosts itself asks for."""
T = TypeVar("T")


@dataclass(kw_only=True, slots=True)
class ProvisionConfig:
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """auto takes CUDA where torch sees a GPU, or where the job's hosts have GPUs."""
    job: JobConfig = field(default_factory=ThisHostJob)
    """What gives the run its hosts. The command line names it: this_host, process, slurm, kubernetes."""
    trainer_hosts: tuple[NonNegativeInt, ...] = ()
    """Hosts of the trainer's ranks, counted from 0, the same number on each. Empty: the first, as few as hold them."""
    generator_hosts: tuple[NonNegativeInt, ...] = ()
    """Hosts of generators and hosted models. Empty: where devices are left."""
    rollout_worker_hosts: tuple[NonNegativeInt, ...] = ()
    """Hosts of the rollout workers, in turn. Empty: all."""
    share_cores: bool | None = None
    """CPU only. True: trainer and generators of a host have as many threads each as it has cores, so that none is idle while
    the other side computes. False: half as many. None: True for models of at least 10 million parameters. Smaller ones do not
    gain by more threads."""
    share_gpus: bool = False
    """Generators stand on the trainer's GPUs, from its first on, so that a run fits one GPU. Either both hold their memory all
    the time, or the engines sleep while the trainer steps (``generator.engine.sleep``). On CPU it means ``share_cores``."""

    def resolve(self) -> Literal["cpu", "cuda"]:
        elsewhere = self.job.has_gpus
        if self.device == "cuda" and elsewhere is False:
            raise ConfigError("provision.device", "cuda", "the job's hosts have no GPUs (provision.job.gpus_per_host = 0)")
        if elsewhere is not None:
            return "cuda" if elsewhere and self.device != "cpu" else "cpu"
        if self.device == "cuda" and torch.version.cuda is None:
            cure = f"torch {torch.__version__} here is a build without CUDA; install requirements/gpu.txt, or use cpu or auto"
            raise ConfigError("provision.device", "cuda", cure)
        if self.device == "cuda" and not torch.cuda.is_available():
            raise ConfigError("provision.device", "cuda", "torch sees no GPU here; use cpu or auto")
        if self.device == "auto":
            return "cuda" if torch.cuda.is_available() else "cpu"
        return self.device

    def validate(self) -> None:
        """
        Raises:
            ConfigError: the job's own check, or a host named twice.
        """
        self.job.validate(field="provision.job")
        for name in ("trainer_hosts", "generator_hosts"):
            hosts = getattr(self, name)
            if len(set(hosts)) < len(hosts):
                raise ConfigError(f"provision.{name}", hosts, "names a host twice")
        if self.job.host_count is not None:
            self.check_hosts(self.job.host_count)

    def check_hosts(self, hosts: int) -> None:
        """
        Raises:
            ConfigError: a role is to stand on a host that the job has not.
        """
        for name in ("trainer_hosts", "generator_hosts", "rollout_worker_hosts"):
            for host in getattr(self, name):
                if host >= hosts:
                    cure = f"the job has {hosts} host(s), counted from 0: name others, or raise provision.job.hosts"
                    raise ConfigError(f"provision.{name}", getattr(self, name), cure)

    def fitting(self, device: Literal["cpu", "cuda"], place: Callable[[list[list[int]] | None], T]) -> T:
        """What ``place`` makes of the cores or GPUs of each host. A job that counts its hosts itself gets as few as fit.

        Args:
            place: None: those of this host. Raises ConfigError where the run does not fit.
        """
        if self.job.host_count is not None:
            return place(self.job.devices(device, self.job.host_count))
        for hosts in range(1, MOST_HOSTS + 1):
            try:
                return place(self.job.devices(device, hosts))
            except ConfigError as error:
                last = error
        raise last
