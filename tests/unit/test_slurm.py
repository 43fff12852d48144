"""Submission to Slurm, with stand-ins for its commands on PATH: the script, the calls, and what a signal does. No cluster."""

import os
import signal
import subprocess
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest

from tests.fakes.waiting import wait_until
from tests.unit.command_line import assert_one_line
from torchtitan.experiments.rl.bounds import check_fields
from torchtitan.experiments.rl.command.start import Ready
from torchtitan.experiments.rl.errors import ConfigError, RunError
from torchtitan.experiments.rl.hosts import slurm
from torchtitan.experiments.rl.hosts.jobs import JobConfig, SlurmJob
from torchtitan.experiments.rl.process.lifetime import descendants

SLURM = (
    "--provision.job",
    "slurm",
    "--provision.job.gpus-per-host",
    "0",
    "--provision.job.cores-per-host",
    "4",
)


@pytest.fixture
def programs(tmp_path, monkeypatch):
    """Makes programs that come first on PATH."""
    folder = tmp_path / "bin"
    folder.mkdir()
    monkeypatch.setenv("PATH", f"{folder}{os.pathsep}{os.environ['PATH']}")

    def make(name: str, text: str) -> Path:
        path = folder / name
        path.write_text(f"#!/bin/bash\n{text}\n")
        path.chmod(0o755)
        return path

    return make


@pytest.fixture(autouse=True)
def queue(programs) -> None:
    """squeue, of which tests say otherwise where they mean it."""
    programs("squeue", "exit 1")


def test_the_command_submits_itself_and_says_how_to_follow_stop_and_resume(
    command, programs, tmp_path
):
    programs("sbatch", f'echo "$@" > {tmp_path}/arguments; echo "4242;cluster"')
    run = tmp_path / "run"
    words = (
        "--config",
        "rl_grpo_qwen3_debug",
        "--steps",
        "7",
        *SLURM,
        "--provision.job.partition",
        "cpu",
    )
    code, out, err = command(*words, "--run-dir", str(run))
    assert (code, err) == (0, "")
    assert out.splitlines() == [
        f"submitted   Slurm job 4242: {run}/job.sh",
        f"follow      tail -F {run}/slurm-4242.log",
        "stop        scancel --batch --signal=TERM 4242  (after the step, with a checkpoint; plain scancel: at once)",
        f"go on       the same command with --resume {run}, when the job has ended",
        "state       squeue --job 4242",
    ]
    assert (tmp_path / "arguments").read_text().split() == ["--parsable", f"{run}/job.sh"]
    assert sorted(file.name for file in run.iterdir()) == ["job.sh"]
    script = (run / "job.sh").read_text().splitlines()
    assert script[0] == "#!/bin/bash"
    assert {line for line in script if line.startswith("#SBATCH")} == {
        "#SBATCH --job-name=run",
        "#SBATCH --nodes=1",
        "#SBATCH --ntasks-per-node=1",
        f"#SBATCH --output={run}/slurm-%j.log",
        "#SBATCH --open-mode=append",
        "#SBATCH --signal=B:TERM@300",
        "#SBATCH --partition=cpu",
        "#SBATCH --cpus-per-task=4",
        "#SBATCH --no-requeue",
        "#SBATCH --exclusive",
    }
    agents, started = (line for line in script if " -m torchtitan." in line)
    assert agents == (
        f"srun --ntasks-per-node=1 --cpu-bind=none --cpus-per-task=4 {sys.executable} "
        "-m torchtitan.experiments.rl.hosts.agent --port 22222 &"
    )
    assert (
        started
        == f"{sys.executable} -m torchtitan.experiments.rl.train {' '.join(words)} --run-dir {run} &"
    )


def test_the_script_names_an_installed_library_by_its_package(monkeypatch):
    monkeypatch.setitem(sys.modules, "torchtitan_rl", ModuleType("torchtitan_rl"))
    script = SlurmJob(hosts=1).script(["--config", "NAME"], "/shared/run", 1)
    assert f" {sys.executable} -m torchtitan_rl hosts.agent --port 22222 &\n" in script
    assert f"\n{sys.executable} -m torchtitan_rl train --config NAME &\n" in script


def test_a_dry_run_prints_the_script_and_leaves_nothing(command, tmp_path):
    words = (
        "--config",
        "rl_grpo_qwen3_32b_32",
        "--provision.job",
        "slurm",
        "--provision.job.time-limit",
        "1-12:00:00",
    )
    code, out, _ = command(*words, "--dry-run", "--run-dir", str(tmp_path / "run"))
    assert code == 0 and not (tmp_path / "run").exists()
    assert "host 3         generator 4-7 on GPUs 0-7" in out
    for line in (
        "#SBATCH --nodes=4",
        "#SBATCH --gpus-per-node=8",
        "#SBATCH --time=1-12:00:00",
        "wait $agents",
    ):
        assert f"\n{line}\n" in out
    assert "--dry-run" not in out


def test_the_command_in_the_allocation_takes_the_folder_of_its_submission(
    command, programs, tmp_path, monkeypatch
):
    programs("sbatch", "echo 4242")
    run, taken = tmp_path / "run", []
    words = ("--config", "rl_grpo_qwen3_debug", *SLURM, "--run-dir", str(run))
    assert command(*words)[0] == 0
    (run / "slurm-4242.log").touch()
    monkeypatch.setenv(slurm.HOSTS_VARIABLE, "node7 ")
    monkeypatch.setattr(
        "torchtitan.experiments.rl.train._run", lambda config, start, name: taken.append(start) or 0
    )
    assert command(*words)[0] == 0
    assert isinstance(taken[0], Ready)
    assert taken[0].run_dir == str(run) and taken[0].plan.hosts == 1


def test_a_submission_that_resumes_names_the_run_and_no_new_folder(command):
    from torchtitan.experiments.rl.command.command_line import parse_command

    given = parse_command(["--resume", "outputs/run", "--steps", "9", "--dry-run", *SLURM])
    assert given.words_in("/elsewhere", resumes=True) == [
        "--steps",
        "9",
        *SLURM,
        "--resume",
        os.path.abspath("outputs/run"),
    ]
    newest = parse_command(["--config", "x", "--resume=auto"])
    assert newest.words_in("/runs/x-1", resumes=True) == ["--config", "x", "--resume", "/runs/x-1"]


def test_a_submission_that_finds_no_run_to_resume_names_a_new_folder(command, tmp_path):
    words = ("--config", "rl_grpo_qwen3_32b_32", "--provision.job", "slurm", "--resume", "auto")
    code, out, _ = command(*words, "--output-dir", str(tmp_path), "--dry-run")
    assert code == 0 and "has a checkpoint: a new run starts" in out
    (started,) = (line for line in out.splitlines() if line.endswith(" &") and ".train " in line)
    assert f" --run-dir {tmp_path}/rl_grpo_qwen3_32b_32-" in started and "--resume" not in started


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (
            "echo 'sbatch: error: invalid partition' >&2; exit 1",
            "sbatch refuses the job: sbatch: error: invalid partition",
        ),
        ("exit 3", "sbatch refuses the job: exit code 3"),
        ("echo hello", "sbatch refuses the job: hello"),
    ],
)
def test_a_refusal_of_sbatch_is_one_line(command, programs, tmp_path, text, said):
    programs("sbatch", text)
    code, out, err = command(
        "--config", "rl_grpo_qwen3_debug", *SLURM, "--run-dir", str(tmp_path / "run")
    )
    assert (code, out) == (1, "")
    assert_one_line(err, said)


QUEUE = """
echo "$@" >> {folder}/asked
sed -n "$(wc -l < {folder}/asked)p" {folder}/answers
"""
"""Answers the nth call with the nth line."""


@pytest.fixture
def answers(programs, tmp_path, monkeypatch):
    monkeypatch.setattr(slurm, "POLL_S", 0.0)
    programs("sbatch", "echo 4242")
    programs("squeue", QUEUE.format(folder=tmp_path))

    def say(*lines: str) -> Path:
        (tmp_path / "answers").write_text("\n".join(lines) + "\n")
        return tmp_path / "asked"

    return say


def states(out: str) -> list[str]:
    return [line.strip() for line in out.partition("squeue --job 4242\n")[2].splitlines()]


def test_a_submission_says_why_the_job_waits(command, answers, tmp_path):
    asked = answers("PENDING Priority", "PENDING Resources")
    code, out, err = command(
        "--config", "rl_grpo_qwen3_debug", *SLURM, "--run-dir", str(tmp_path / "run")
    )
    assert (code, err, states(out)) == (0, "", ["PENDING (Priority)"])
    assert asked.read_text() == "--job 4242 --noheader --format=%T %r\n"


def test_a_command_that_waits_says_each_reason_once_until_the_job_starts(answers, tmp_path):
    asked = answers(
        *["PENDING None"] * 2,
        *["PENDING Priority"] * 3,
        "CONFIGURING None",
        "RUNNING None",
        "RUNNING None",
    )
    lines = list(SlurmJob(wait=True).submit("", str(tmp_path)))
    assert [line.strip() for line in lines[5:]] == [
        "PENDING",
        "PENDING (Priority)",
        "CONFIGURING",
        "RUNNING",
    ]
    assert len(asked.read_text().splitlines()) == 7


def test_a_job_that_is_taken_out_of_the_queue_ends_the_wait(answers, tmp_path):
    answers("PENDING QOSMaxJobsPerUserLimit")
    lines = list(SlurmJob(wait=True).submit("", str(tmp_path)))
    gone = "UNKNOWN (squeue does not know the job any more)"
    assert [line.strip() for line in lines[5:]] == ["PENDING (QOSMaxJobsPerUserLimit)", gone]


def test_ctrl_c_while_waiting_leaves_the_job_in_the_queue(command, answers, monkeypatch, tmp_path):
    def interrupted(seconds: float) -> None:
        raise KeyboardInterrupt

    answers("PENDING Priority")
    monkeypatch.setattr(
        slurm, "time", SimpleNamespace(sleep=interrupted)
    )  # other threads sleep too
    words = (
        "--config",
        "rl_grpo_qwen3_debug",
        *SLURM,
        "--provision.job.wait",
        "--run-dir",
        str(tmp_path / "run"),
    )
    code, out, err = command(*words)
    assert (code, err, states(out)) == (130, "", ["PENDING (Priority)"])


def test_a_machine_without_slurm_is_named(monkeypatch, tmp_path):
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(RunError, match="there is no sbatch here: submit from a login node"):
        next(SlurmJob().submit("", str(tmp_path)))


@pytest.mark.parametrize(
    ("field", "value", "cure"),
    [
        ("partition", "a b", "must be one word"),
        ("account", "x\n#SBATCH --uid=0", "must be one word"),
        ("time_limit", "two hours", "HH:MM:SS or D-HH:MM:SS"),
        ("sbatch_options", ("constraint=h100",), r"must be an option of sbatch"),
        ("setup", "module load cuda\nrm -r x", "must be one line of bash"),
    ],
)
def test_bad_values_are_refused_by_field_value_and_cure(field, value, cure):
    with pytest.raises(ConfigError, match=cure) as error:
        check_fields(SlurmJob(**{field: value}), field="provision.job")
    assert f"provision.job.{field}" in str(error.value) and "\n" not in str(error.value)


def test_unknown_jobs_and_fields_are_refused_in_one_line(command):
    names = sorted(JobConfig.by_name)
    assert names == ["kubernetes", "process", "slurm", "this_host"]
    code, _, err = command("--config", "rl_grpo_qwen3_debug", "--provision.job", "slrum")
    assert code == 2
    assert_one_line(err, "provision.job = 'slrum': name one of", *names)
    code, _, err = command("--config", "rl_grpo_qwen3_debug", *SLURM, "--provision.job.nodes", "2")
    assert code == 2
    assert_one_line(err, "--provision.job.nodes")
    code, _, err = command("--config", "rl_grpo_qwen3_debug", *SLURM, "--provision.job.port", "80")
    assert code == 2
    assert_one_line(err, "provision.job.port = 80: must be at least 1024")
    code, _, err = command("--config", "rl_grpo_qwen3_debug", *SLURM[:4])
    assert code == 2
    assert_one_line(err, "provision.job.cores_per_host = None: say how many cores of a host")


def test_an_allocation_of_another_size_is_named():
    with pytest.raises(RunError, match=r"the Slurm job has 1 host\(s\), and the run needs 2"):
        slurm._allocation({slurm.HOSTS_VARIABLE: "node1 "}, 2)


PYTHON = """
if [[ "$*" == *hosts.agent* ]]; then exec sleep 600; fi
echo "$TORCHTITAN_RL_SLURM_HOSTS" > {folder}/hosts
trap 'echo TERM > {folder}/signal; exit 143' TERM
touch {folder}/started
while true; do sleep 0.05; done
"""


def test_a_signal_to_the_script_reaches_the_run_alone_and_its_exit_code_is_the_jobs(
    programs, tmp_path, monkeypatch
):
    """As Slurm sends it: ``scancel --batch --signal=TERM``, or before the time limit."""
    programs("scontrol", "echo node1; echo node2")
    programs("srun", 'while [[ "$1" == --* ]]; do shift; done; exec "$@"')
    monkeypatch.setattr(
        sys, "executable", str(programs("python-of-the-run", PYTHON.format(folder=tmp_path)))
    )
    script = SlurmJob(gpus_per_host=0, cores_per_host=2).script(["--config", "x"], str(tmp_path), 2)
    (tmp_path / "job.sh").write_text(script)
    job = subprocess.Popen(["bash", str(tmp_path / "job.sh")])
    try:
        wait_until((tmp_path / "started").exists)
        job.send_signal(signal.SIGTERM)
        assert job.wait(timeout=60) == 143
    finally:
        job.kill()
        job.wait()
    assert (tmp_path / "signal").read_text() == "TERM\n"
    assert (tmp_path / "hosts").read_text().split() == ["node1", "node2"]
    assert not [
        pid for pid in descendants() if b"sleep\x00600" in Path(f"/proc/{pid}/cmdline").read_bytes()
    ]


def test_a_signalled_run_has_the_time_until_its_allocation_ends(monkeypatch):
    job = SlurmJob(stop_before_s=300)
    monkeypatch.delenv("SLURM_JOB_END_TIME", raising=False)
    assert job.seconds_left() == 285.0, "a Slurm that does not say when the job ends"
    monkeypatch.setattr(slurm.time, "time", lambda: 1000.0)
    monkeypatch.setenv("SLURM_JOB_END_TIME", "1290")
    assert job.seconds_left() == 275.0
    monkeypatch.setenv("SLURM_JOB_END_TIME", "8200")
    assert job.seconds_left() == 7185.0, "scancel --signal, hours before the limit"
