"""Hosts of a Slurm cluster.

The command submits itself. In the allocation it runs on the first host, and an agent on each host.

The batch script is this library's own. Monarch's script ends the hosts as soon as Slurm signals the
job, so that no checkpoint could be taken. It also keeps its state in a file of the working folder,
which two runs would share.
"""

import os
import shlex
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, ClassVar

from annotated_types import Ge, Le

from torchtitan.experiments.rl.bounds import Matches, PositiveFloat, PositiveInt
from torchtitan.experiments.rl.compat.monarch import MONARCH_OUTPUT
from torchtitan.experiments.rl.errors import RunError
from torchtitan.experiments.rl.hosts.job import ClusterJob, gib_of
from torchtitan.experiments.rl.hosts.pool import HostPool, TakenHosts, attach
from torchtitan.experiments.rl.process.host import Device, network_address
from torchtitan.experiments.rl.process.modules import module_words

HOSTS_VARIABLE = "TORCHTITAN_RL_SLURM_HOSTS"
"""Environment variable that the batch script sets: names of the allocation's hosts."""
SCRIPT_FILE = "job.sh"
LOG_FILE = "slurm-{job}.log"
ENDING_S = 15.0
"""Seconds of the time that Slurm leaves which the command and its agents take to end."""
_TIME = r"\d+(:\d\d){0,2}|\d+-\d\d?(:\d\d){0,2}"
Word = Annotated[str, Matches(r"[^\s#]+", "one word, as sbatch takes it")]
POLL_S = 10.0
"""Seconds between two questions for the state of a job."""
WAITING = ("PENDING", "CONFIGURING")
"""States of a job that has not started."""


def job_states(job: str, *, wait: bool) -> Iterator[str]:
    """Yield the state of a job in Slurm's words, such as "PENDING (Resources)".

    The states end if squeue is not there, fails, or does not know the job any more.

    Args:
        wait: True to go on until the job starts, and yield each state that differs from the last.
    """
    last = None
    while current := _job_state(job):
        if current != last:
            yield current
        if not wait or not current.startswith(WAITING):
            return
        last = current
        time.sleep(POLL_S)
    if last is not None:
        yield "UNKNOWN (squeue does not know the job any more)"


def _job_state(job: str) -> str:
    words = ["squeue", "--job", job, "--noheader", "--format=%T %r"]
    try:
        answer = subprocess.run(
            words, capture_output=True, text=True, stdin=subprocess.DEVNULL, timeout=60
        )
    except (OSError, subprocess.TimeoutExpired):
        return ""
    state, _, reason = answer.stdout.strip().partition("\n")[0].partition(" ")
    if answer.returncode:
        return ""
    return state if reason.strip() in ("", "None") else f"{state} ({reason.strip()})"


@dataclass(kw_only=True, slots=True)
class SlurmJob(ClusterJob):
    """Job of a Slurm cluster."""

    name: ClassVar[str] = "slurm"
    files: ClassVar[tuple[str, ...]] = (SCRIPT_FILE, LOG_FILE.format(job="*"))
    memory_per_host: Word | None = None
    """Memory of each host as sbatch takes it, such as "500G"; "0" is all that it has."""
    partition: Word | None = None
    account: Word | None = None
    qos: Word | None = None
    time_limit: Annotated[str, Matches(_TIME, "written as HH:MM:SS or D-HH:MM:SS")] | None = None
    """Time limit of the job, as HH:MM:SS or D-HH:MM:SS. The run ends ``stop_before_s`` earlier."""
    stop_before_s: PositiveInt = 300
    """Seconds before the time limit at which the run is told to take a checkpoint and end.

    A step and a checkpoint have to fit into them; ``--dry-run`` says how long a checkpoint takes.
    """
    exclusive: bool = True
    """True if no other job may have processes on the run's hosts."""
    sbatch_options: tuple[
        Annotated[str, Matches(r"-.*", "an option of sbatch, such as --constraint=h100")], ...
    ] = ()
    """Other options of sbatch, such as "--constraint=h100"."""
    setup: Annotated[str, Matches(r".*\S.*", "one line of bash")] | None = None
    """Line of bash that the batch script runs first, such as "module load cuda"."""
    port: Annotated[int, Ge(1024), Le(65535)] = 22222
    """Port of the agents. Two runs that share a host need two ports."""
    wait: bool = False
    """True if the command stays until the job starts, and says why the job waits.

    Ctrl-C then leaves the job in the queue.
    """
    start_timeout_s: PositiveFloat = 600.0
    """Limit in seconds for the agents to answer once the allocation is there."""

    @property
    def memory(self) -> tuple[str, str, float] | None:
        gib = gib_of(self.memory_per_host or "", binary=True, unit="M")
        if not gib:  # "0" is all that a host has
            return None
        return "memory_per_host", str(self.memory_per_host), gib

    def script(self, words: Sequence[str], run_dir: str, hosts: int) -> str | None:
        if HOSTS_VARIABLE in os.environ:  # this is the command in the allocation
            return None
        from monarch.job import (
            SERVICE_PROC_IDS_ENV,
            new_service_proc_id,
            serialize_service_proc_ids,
        )

        options = {
            "job-name": Path(run_dir).name,
            "nodes": str(hosts),
            "ntasks-per-node": "1",
            "output": f"{run_dir}/{LOG_FILE.format(job='%j')}",
            "open-mode": "append",
            # Slurm signals the script alone, which passes the signal to the command.
            "signal": f"B:TERM@{self.stop_before_s}",
            "partition": self.partition,
            "account": self.account,
            "qos": self.qos,
            "time": self.time_limit,
            "gpus-per-node": str(self.gpus_per_host) if self.gpus_per_host else None,
            "cpus-per-task": None if self.cores_per_host is None else str(self.cores_per_host),
            "mem": self.memory_per_host,
        }
        lines = [f"--{name}={value}" for name, value in options.items() if value is not None]
        lines += [
            "--no-requeue",
            *(["--exclusive"] if self.exclusive else []),
            *self.sbatch_options,
        ]
        cores = "" if self.cores_per_host is None else f" --cpus-per-task={self.cores_per_host}"
        agent, run = (
            shlex.join([sys.executable, *module_words(module)])
            for module in ("hosts.agent", "train")
        )
        names = """$(scontrol show hostnames "$SLURM_JOB_NODELIST" | tr '\\n' ' ')"""
        identities = serialize_service_proc_ids([new_service_proc_id() for _ in range(hosts)])
        return "\n".join(
            [
                "#!/bin/bash",
                *(f"#SBATCH {line}" for line in lines),
                f"cd {shlex.quote(os.getcwd())} || exit 1",
                *([self.setup] if self.setup is not None else []),
                f"export PYTHONPATH={shlex.quote(os.pathsep.join(_import_folders()))}",
                f"export {SERVICE_PROC_IDS_ENV}={shlex.quote(identities)}",
                f'export {HOSTS_VARIABLE}="{names}"',
                f"srun --ntasks-per-node=1 --cpu-bind=none{cores} {agent} --port {self.port} &",
                "agents=$!",
                "# The run ends with a checkpoint. A signal ends wait, not the run.",
                "trap 'kill -TERM $run' TERM",
                f"{run} {shlex.join(words)} &",
                "run=$!",
                "while kill -0 $run 2>/dev/null; do wait $run; code=$?; done",
                "kill -KILL $agents 2>/dev/null",
                "wait $agents",
                "exit $code",
                "",
            ]
        )

    def seconds_left(self) -> float:
        end = os.environ.get("SLURM_JOB_END_TIME", "")
        return (float(end) - time.time() if end.isdigit() else float(self.stop_before_s)) - ENDING_S

    def submit(self, script: str, run_dir: str) -> Iterator[str]:
        if shutil.which("sbatch") is None:
            raise RunError(
                "there is no sbatch here: submit from a login node of the Slurm cluster, "
                "or name another job (--provision.job)"
            )
        path = Path(run_dir) / SCRIPT_FILE
        path.write_text(script)
        answer = subprocess.run(
            ["sbatch", "--parsable", str(path)],
            capture_output=True,
            text=True,
            stdin=subprocess.DEVNULL,
        )
        job = answer.stdout.strip().partition(";")[0]
        if answer.returncode or not job.isdigit():
            said = (
                " ".join((answer.stderr or answer.stdout).split())
                or f"exit code {answer.returncode}"
            )
            raise RunError(f"sbatch refuses the job: {said}")
        log = Path(run_dir) / LOG_FILE.format(job=job)
        yield f"submitted   Slurm job {job}: {path}"
        yield f"follow      tail -F {shlex.quote(str(log))}"
        yield (
            f"stop        scancel --batch --signal=TERM {job}  "
            "(after the step, with a checkpoint; plain scancel: at once)"
        )
        resume = f"--resume {shlex.quote(run_dir)}"
        yield f"go on       the same command with {resume}, when the job has ended"
        yield f"state       squeue --job {job}"
        for state in job_states(job, wait=self.wait):
            yield f"            {state}"

    def start(
        self, device: Device, hosts: int, run_dir: Path, stopped: Callable[[], bool]
    ) -> HostPool:
        from monarch.actor import enable_transport
        from monarch.job import (
            SERVICE_PROC_IDS_ENV,
            deserialize_service_proc_ids,
            service_proc_addrs,
        )

        names = _allocation(os.environ, hosts)
        # Monarch would take the address of the host's name, which may be the loopback interface.
        enable_transport(f"tcp://{network_address()}:0")
        addresses = [f"tcp://{name}:{self.port}" for name in names]
        identities = deserialize_service_proc_ids(os.environ[SERVICE_PROC_IDS_ENV])
        mesh = attach(
            service_proc_addrs(addresses, identities),
            [(name, self.port) for name in names],
            timeout_s=self.start_timeout_s,
            stopped=stopped,
            printed=run_dir / MONARCH_OUTPUT,
        )
        taken = TakenHosts(mesh=mesh, environments=[{}] * hosts, on_gpus=device == "cuda")
        return HostPool(taken, stopped=stopped, timeout_s=self.start_timeout_s)


def _allocation(environment: Mapping[str, str], hosts: int) -> list[str]:
    """Return the names of the allocation's hosts.

    Raises:
        RunError: the allocation has another number of hosts than the run needs.
    """
    names = environment.get(HOSTS_VARIABLE, "").split()
    if len(names) != hosts:
        raise RunError(
            f"the Slurm job has {len(names)} host(s), and the run needs {hosts}: submit it again"
        )
    return names


def _import_folders() -> list[str]:
    """Return the folders that this process imports from beside site-packages.

    They hold the library, or the checkout, and the user's modules.
    """
    inherited = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    return list(dict.fromkeys([os.getcwd(), *filter(None, inherited)]))
