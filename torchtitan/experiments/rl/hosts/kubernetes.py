"""Hosts that are pods of a Kubernetes cluster with Monarch's operator.

The command runs in a pod too. It makes the hosts' pods, and removes them at the end of the run.
"""

import contextlib
import hashlib
import json
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, ClassVar

from annotated_types import Ge, Le

from torchtitan.experiments.rl.bounds import Matches, PositiveInt
from torchtitan.experiments.rl.compat.monarch import MONARCH_OUTPUT, printed_to
from torchtitan.experiments.rl.errors import RunError
from torchtitan.experiments.rl.hosts.job import ClusterJob, gib_of
from torchtitan.experiments.rl.hosts.pool import HostPool, TakenHosts
from torchtitan.experiments.rl.process.host import Device
from torchtitan.experiments.rl.process.modules import module_words

Label = Annotated[
    str,
    Matches(
        r"[a-z0-9]([-a-z0-9]{0,61}[a-z0-9])?", "a name of lower-case letters, digits and hyphens"
    ),
]
Taint = Annotated[
    str,
    Matches(
        r"[^=:\s]+(=[^=:\s]*)?:(NoSchedule|PreferNoSchedule|NoExecute)",
        'written as kubectl does, such as "nvidia.com/gpu:NoSchedule"',
    ),
]
PodPath = Annotated[str, Matches(r"/.*", "an absolute path in the pods")]


@dataclass(kw_only=True, slots=True)
class KubernetesJob(ClusterJob):
    """Job of a Kubernetes cluster."""

    name: ClassVar[str] = "kubernetes"
    namespace: Label = "default"
    image: Annotated[str, Matches(r"\S+", "the name of the container image that the pods run")] = ""
    """Image of the pods, which has this library's packages, and ``python`` on PATH."""
    work_dir: PodPath = "/workspace"
    """Working folder of the pods: the checkout, unless the library is installed in the image."""
    volume_claim: Label = ""
    """Persistent volume claim with the run folders and models, which every pod mounts."""
    mount_path: PodPath = "/shared"
    """Folder in the pods that the volume is mounted at."""
    shared_memory: Annotated[
        str, Matches(r"\d+(Ki|Mi|Gi|Ti)", 'written as Kubernetes does, such as "16Gi"')
    ] = "16Gi"
    """Limit of /dev/shm in each pod, for engines of several GPUs and for NCCL.

    Published weights and the copies of checkpoints are not there: they count in the memory of
    ``resources``.
    """
    port: Annotated[int, Ge(1024), Le(65535)] = 26600
    """Port of the agents."""
    resources: dict[str, str] = field(default_factory=dict)
    """Other resources that each pod asks for, such as {"memory": "800Gi", "rdma/hca": "1"}.

    The line "host memory" of a dry run says how much memory a pod needs. Without "memory" here a
    pod may take all that its node has.
    """
    env: dict[str, str] = field(default_factory=dict)
    """Environment variables of each pod, such as {"NCCL_IB_HCA": "mlx5"}."""
    capabilities: tuple[str, ...] = ()
    """Capabilities of each pod's container. Without IPC_LOCK, RDMA devices lock little memory."""
    tolerations: tuple[Taint, ...] = ()
    """Taints that the pods tolerate, as kubectl writes them, such as "pool=rl:NoExecute"."""
    node_selector: dict[str, str] = field(default_factory=dict)
    """Labels of the nodes that the pods may run on."""
    start_timeout_s: PositiveInt = 600
    """Limit in seconds for the pods to be ready, and for the agents to answer."""

    @property
    def memory(self) -> tuple[str, str, float] | None:
        text = self.resources.get("memory", "")
        gib = gib_of(text)
        return None if gib is None else ("resources.memory", text, gib)

    def pod_template(self) -> dict[str, Any]:
        """Return Kubernetes' V1PodTemplateSpec of a host."""
        counts = {"nvidia.com/gpu": self.gpus_per_host, "cpu": self.cores_per_host}
        resources = {name: str(count) for name, count in counts.items() if count} | self.resources
        # Monarch's job reads its agents' port there.
        env = {"MONARCH_PORT": str(self.port)} | self.env
        return {
            "spec": {
                "tolerations": [_toleration(taint) for taint in self.tolerations],
                "nodeSelector": self.node_selector,
                "containers": [
                    {
                        "name": "worker",
                        "image": self.image,
                        "workingDir": self.work_dir,
                        "command": [
                            "python",
                            *module_words("hosts.agent"),
                            "--port",
                            str(self.port),
                        ],
                        "env": [{"name": name, "value": value} for name, value in env.items()],
                        "ports": [{"containerPort": self.port}],
                        # Monarch attaches to ready pods, and loses those that do not listen yet.
                        "readinessProbe": {
                            "tcpSocket": {"port": self.port},
                            "periodSeconds": 2,
                            "failureThreshold": 10,
                        },
                        "securityContext": {"capabilities": {"add": list(self.capabilities)}},
                        "resources": {"requests": resources, "limits": resources},
                        "volumeMounts": [
                            {"name": "shared", "mountPath": self.mount_path},
                            {"name": "dev-shm", "mountPath": "/dev/shm"},
                        ],
                    }
                ],
                "volumes": [
                    {"name": "shared", "persistentVolumeClaim": {"claimName": self.volume_claim}},
                    {
                        "name": "dev-shm",
                        "emptyDir": {"medium": "Memory", "sizeLimit": self.shared_memory},
                    },
                ],
            }
        }

    def plan(self, run_dir: str, hosts: int) -> str:
        pods = {
            "mesh": _mesh_name(run_dir),
            "namespace": self.namespace,
            "replicas": hosts,
            "podTemplate": self.pod_template(),
        }
        return json.dumps(pods, indent=2)

    def start(
        self, device: Device, hosts: int, run_dir: Path, stopped: Callable[[], bool]
    ) -> HostPool:
        try:
            from monarch.job.kubernetes import KubernetesJob as MonarchKubernetesJob
        except (ImportError, RuntimeError):  # Monarch raises RuntimeError without the package
            raise RunError(
                "provision.job kubernetes needs the package kubernetes: pip install kubernetes"
            ) from None
        name = _mesh_name(str(run_dir))
        job = MonarchKubernetesJob(self.namespace, timeout=self.start_timeout_s)
        job.add_mesh(name, hosts, port=self.port, pod_template=self.pod_template())
        try:
            with printed_to(run_dir / MONARCH_OUTPUT):
                mesh = getattr(job.state(cached_path=None), name)
        except Exception as error:  # noqa: BLE001 - of Monarch, of kubernetes, or of its HTTP library
            with contextlib.suppress(Exception):  # the first error counts
                job.kill()
            raise RunError(
                f"the pods of {name} in namespace {self.namespace} did not come: {error}"
            ) from error
        taken = TakenHosts(
            mesh=mesh, environments=[{}] * hosts, on_gpus=device == "cuda", give_back=job.kill
        )
        return HostPool(taken, stopped=stopped, timeout_s=self.start_timeout_s)


def _toleration(taint: str) -> dict[str, str]:
    label, _, effect = taint.rpartition(":")
    key, equals, value = label.partition("=")
    operator = {"operator": "Equal", "value": value} if equals else {"operator": "Exists"}
    return {"key": key, "effect": effect} | operator


def _mesh_name(run_dir: str) -> str:
    """Return the run's name for its mesh. Monarch takes lower-case letters and digits."""
    return "rl" + hashlib.sha256(run_dir.encode()).hexdigest()[:12]
