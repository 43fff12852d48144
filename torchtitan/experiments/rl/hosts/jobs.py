"""The kinds of jobs that a config can choose by name."""

from torchtitan.experiments.rl.hosts.job import JobConfig, ThisHostJob
from torchtitan.experiments.rl.hosts.kubernetes import KubernetesJob
from torchtitan.experiments.rl.hosts.process_job import ProcessJob
from torchtitan.experiments.rl.hosts.slurm import SlurmJob

__all__ = ["JobConfig", "KubernetesJob", "ProcessJob", "SlurmJob", "ThisHostJob"]
