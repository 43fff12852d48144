"""Hosts that are pods of a Kubernetes cluster with Monarch's operator. The command, in a pod too, makes and removes them."""

import hashlib
import json
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, ClassVar

from annotated_types import Ge, Le

from torchtitan.experiments.rl.bounds import PositiveInt
from torchtitan.experiments.rl.errors import ConfigError, RunError
from torchtitan.experiments.rl.hosts.job import ClusterJob, Device
from torchtitan.experiments.rl.hosts.pool import HostPool

_LABEL = re.compile(r"[a-z0-9]([-a-z0-9]{0,61}[a-z0-9])?")
_SIZE = re.compile(r"\d+(Ki|Mi|Gi|Ti)")


@dataclass(kw_only=True, slots=True)
class KubernetesJob(ClusterJob):
    name: ClassVar[str] = "kubernetes"
    namespace: str = "default"
    image: str = ""
    """Of the pods: this checkout's packages, and ``python`` on PATH."""
    work_dir: str = "/workspace"
    """Folder of the checkout in the pods."""
    volume_claim: str = ""
    """Persistent volume claim that every pod mounts, the command's too: run folders and models are in it."""
    mount_path: str = "/shared"
    """Where it is mounted."""
    shared_memory: str = "16Gi"
    """Of each pod, at /dev/shm."""
    port: Annotated[int, Ge(1024), Le(65535)] = 26600
    """Of the agents."""
    start_timeout_s: PositiveInt = 600
    """How long pods may take until they are ready, and agents until they answer."""

    def validate(self, *, field: str) -> None:
        for name in ("namespace", "volume_claim"):
            if not _LABEL.fullmatch(value := getattr(self, name)):
                raise ConfigError(f"{field}.{name}", value, "must be a name of lower-case letters, digits and hyphens")
        if not self.image or re.search(r"\s", self.image):
            raise ConfigError(f"{field}.image", self.image, "name the container image that the pods run")
        for name in ("work_dir", "mount_path"):
            if not Path(value := getattr(self, name)).is_absolute():
                raise ConfigError(f"{field}.{name}", value, "must be an absolute path in the pods")
        if not _SIZE.fullmatch(self.shared_memory):
            raise ConfigError(f"{field}.shared_memory", self.shared_memory, 'write it as Kubernetes does, such as "16Gi"')

    def pod_template(self) -> dict[str, Any]:
        """Kubernetes' V1PodTemplateSpec of a host."""
        resources: dict[str, str] = {}
        if self.gpus_per_host:
            resources["nvidia.com/gpu"] = str(self.gpus_per_host)
        if self.cores_per_host is not None:
            resources["cpu"] = str(self.cores_per_host)
        return {
            "spec": {
                "containers": [
                    {
                        "name": "worker",
                        "image": self.image,
                        "workingDir": self.work_dir,
                        "command": ["python", "-m", "torchtitan.experiments.rl.hosts.agent", "--port", str(self.port)],
                        "resources": {"requests": resources, "limits": resources},
                        "volumeMounts": [
                            {"name": "shared", "mountPath": self.mount_path},
                            {"name": "dev-shm", "mountPath": "/dev/shm"},
                        ],
                    }
                ],
                "volumes": [
                    {"name": "shared", "persistentVolumeClaim": {"claimName": self.volume_claim}},
                    {"name": "dev-shm", "emptyDir": {"medium": "Memory", "sizeLimit": self.shared_memory}},
                ],
            }
        }

    def plan(self, run_dir: str, hosts: int) -> str:
        manifest = {
            "mesh": _mesh_name(run_dir),
            "namespace": self.namespace,
            "replicas": hosts,
            "podTemplate": self.pod_template(),
        }
        return json.dumps(manifest, indent=2)

    def start(self, device: Device, hosts: int, run_dir: Path, stopped: Callable[[], bool]) -> HostPool:
        try:
            from monarch.job.kubernetes import KubernetesJob as MonarchKubernetesJob
        except (ImportError, RuntimeError):  # Monarch raises RuntimeError where it is not installed
            raise RunError("provision.job kubernetes needs the package kubernetes: pip install kubernetes") from None
        name = _mesh_name(str(run_dir))
        job = MonarchKubernetesJob(self.namespace, timeout=self.start_timeout_s)
        job.add_mesh(name, hosts, port=self.port, pod_template=self.pod_template())
        try:
            mesh = getattr(job.state(cached_path=None), name)
        except Exception as error:
            _remove(job)
            raise RunError(f"the pods of {name} in namespace {self.namespace} did not come: {error}") from error
        return HostPool(
            mesh,
            on_gpus=device == "cuda",
            one_machine=False,
            environments=[{}] * hosts,
            stopped=stopped,
            timeout_s=self.start_timeout_s,
            end_job=job.kill,
        )


def _mesh_name(run_dir: str) -> str:
    """Lower-case letters and digits, as Monarch wants it; another for each run."""
    return "rl" + hashlib.sha256(run_dir.encode()).hexdigest()[:12]


def _remove(job: Any) -> None:
    try:
        job.kill()
    except Exception:  # the first error counts
        pass
