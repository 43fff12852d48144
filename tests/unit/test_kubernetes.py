"""Requests of the command to Kubernetes, recorded by a stand-in for its package. No cluster."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from torchtitan.experiments.rl.bounds import check_fields
from torchtitan.experiments.rl.errors import ConfigError
from torchtitan.experiments.rl.hosts.jobs import KubernetesJob

ROOT = Path(__file__).resolve().parents[2]
JOB = dict(image="registry/trainer:1", namespace="ml", volume_claim="runs")

PACKAGE = """
import sys
from unittest.mock import MagicMock

class ApiException(Exception):
    status = 500

class CustomObjectsApi:
    def __init__(self, *arguments): pass
    def create_namespaced_custom_object(self, **arguments): print("create", json.dumps(arguments))
    def delete_namespaced_custom_object(self, **arguments): print("delete", json.dumps(arguments))

class ApiClient:
    def sanitize_for_serialization(self, part): return part

class CoreV1Api:
    def __init__(self, *arguments): raise RuntimeError("no pods here")

import json
package = MagicMock()
package.client.CustomObjectsApi, package.client.ApiClient, package.client.CoreV1Api = CustomObjectsApi, ApiClient, CoreV1Api
package.client.rest.ApiException = ApiException
package.config.ConfigException = package.config.config_exception.ConfigException = type("ConfigException", (Exception,), {})
config = [".config", ".config.kube_config", ".config.config_exception", ".config.exec_provider"]
for name in ["", ".client", ".client.rest", *config]:
    part = package
    for word in filter(None, name.split(".")):
        part = getattr(part, word)
    sys.modules["kubernetes" + name] = part
"""

START = """
from pathlib import Path
from torchtitan.experiments.rl.errors import RunError
from torchtitan.experiments.rl.hosts.jobs import KubernetesJob
job = KubernetesJob(image="registry/trainer:1", namespace="ml", volume_claim="runs", gpus_per_host=4)
try:
    job.start("cuda", 2, Path("/shared/run"), lambda: False)
except RunError as error:
    print("error", error)
"""


def started(code: str) -> list[str]:
    """Lines of a process of its own: Monarch's job changes the transport of the whole process."""
    done = subprocess.run(
        [sys.executable, "-c", code + START], cwd=ROOT, capture_output=True, text=True, timeout=240
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


def test_the_pods_are_asked_for_with_their_gpus_and_volumes_and_removed_if_they_do_not_come():
    created, error, deleted = sorted(
        started(PACKAGE), key=lambda line: ("create", "error", "delete").index(line.split()[0])
    )
    asked = json.loads(created.removeprefix("create "))
    name = asked["body"]["metadata"]["name"]
    assert (asked["group"], asked["plural"], asked["namespace"]) == (
        "monarch.pytorch.org",
        "monarchmeshes",
        "ml",
    )
    assert asked["body"]["kind"] == "MonarchMesh" and asked["body"]["spec"]["replicas"] == 2
    pod = asked["body"]["spec"]["podTemplate"]["spec"]
    (worker,) = pod["containers"]
    assert worker["command"] == [
        "python",
        "-m",
        "torchtitan.experiments.rl.hosts.agent",
        "--port",
        "26600",
    ]
    assert worker["image"] == "registry/trainer:1" and worker["workingDir"] == "/workspace"
    assert worker["resources"] == {
        "requests": {"nvidia.com/gpu": "4"},
        "limits": {"nvidia.com/gpu": "4"},
    }
    assert worker["volumeMounts"][0] == {"name": "shared", "mountPath": "/shared"}
    assert pod["volumes"][0] == {"name": "shared", "persistentVolumeClaim": {"claimName": "runs"}}
    assert pod["volumes"][1] == {
        "name": "dev-shm",
        "emptyDir": {"medium": "Memory", "sizeLimit": "16Gi"},
    }
    assert error == f"error the pods of {name} in namespace ml did not come: no pods here"
    assert json.loads(deleted.removeprefix("delete "))["name"] == name
    assert name.isalnum() and name.islower()


def test_without_its_package_one_line_says_so():
    absent = "import sys\nsys.modules['kubernetes'] = None\n"
    assert started(absent) == [
        "error provision.job kubernetes needs the package kubernetes: pip install kubernetes"
    ]


def test_a_dry_run_prints_the_manifest(command, tmp_path):
    words = [
        word
        for name, value in JOB.items()
        for word in (f"--provision.job.{name.replace('_', '-')}", value)
    ]
    code, out, _ = command(
        "--config",
        "rl_grpo_qwen3_32b_32",
        "--provision.job",
        "kubernetes",
        *words,
        "--dry-run",
        "--run-dir",
        str(tmp_path / "r"),
    )
    assert (
        code == 0
        and '"replicas": 4' in out
        and '"claimName": "runs"' in out
        and '"nvidia.com/gpu": "8"' in out
    )


@pytest.mark.parametrize(
    ("field", "value", "cure"),
    [
        ("image", "", "the container image"),
        ("namespace", "My Space", "must be a name of lower-case letters"),
        ("volume_claim", "", "must be a name of lower-case letters"),
        ("mount_path", "shared", "must be an absolute path"),
        ("shared_memory", "16 GB", 'such as "16Gi"'),
        ("tolerations", ("gpu",), 'such as "nvidia.com/gpu:NoSchedule"'),
    ],
)
def test_bad_values_are_refused_by_field_value_and_cure(field, value, cure):
    with pytest.raises(ConfigError, match=cure) as error:
        check_fields(KubernetesJob(**{**JOB, field: value}), field="provision.job")
    assert f"provision.job.{field}" in str(error.value)


def test_a_pod_is_ready_when_its_agent_listens_and_asks_for_what_the_config_says():
    job = KubernetesJob(
        **JOB,
        port=4000,
        resources={"memory": "800Gi", "rdma/hca": "8"},
        env={"NCCL_IB_HCA": "mlx5"},
        capabilities=("IPC_LOCK",),
        tolerations=("nvidia.com/gpu:NoSchedule", "pool=rl:NoExecute"),
        node_selector={"gpu": "h100"},
    )
    check_fields(job, field="provision.job")
    pod = job.pod_template()["spec"]
    (worker,) = pod["containers"]
    assert worker["readinessProbe"]["tcpSocket"] == {"port": 4000}
    assert worker["command"][-2:] == ["--port", "4000"]
    assert worker["env"][0] == {"name": "MONARCH_PORT", "value": "4000"}, (
        "where Monarch's job reads it"
    )
    assert worker["env"][1:] == [{"name": "NCCL_IB_HCA", "value": "mlx5"}]
    assert worker["resources"]["limits"] == {
        "nvidia.com/gpu": "8",
        "memory": "800Gi",
        "rdma/hca": "8",
    }
    assert worker["securityContext"] == {"capabilities": {"add": ["IPC_LOCK"]}}
    assert pod["nodeSelector"] == {"gpu": "h100"}
    assert pod["tolerations"] == [
        {"key": "nvidia.com/gpu", "effect": "NoSchedule", "operator": "Exists"},
        {"key": "pool", "effect": "NoExecute", "operator": "Equal", "value": "rl"},
    ]


def test_what_a_pod_asks_for_can_be_said_on_the_command_line(command, tmp_path):
    words = [
        word
        for name, value in JOB.items()
        for word in (f"--provision.job.{name.replace('_', '-')}", value)
    ]
    more = [
        "--provision.job.env",
        "NCCL_IB_HCA",
        "mlx5",
        "--provision.job.resources",
        "rdma/hca",
        "8",
    ]
    more += [
        "--provision.job.capabilities",
        "IPC_LOCK",
        "--provision.job.tolerations",
        "gpu:NoSchedule",
    ]
    folder = ["--dry-run", "--run-dir", str(tmp_path / "r")]
    code, out, err = command(
        "--config", "rl_grpo_qwen3_32b_32", "--provision.job", "kubernetes", *words, *more, *folder
    )
    assert code == 0, err
    assert (
        '"value": "mlx5"' in out
        and '"rdma/hca": "8"' in out
        and '"IPC_LOCK"' in out
        and '"effect": "NoSchedule"' in out
    )
