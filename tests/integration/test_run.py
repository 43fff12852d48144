"""The command itself, in processes of its own: what it leaves behind, how it ends, and that it repeats itself."""

import getpass
import gzip
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from transformers import AutoModelForCausalLM, AutoTokenizer

from tests.integration.conftest import process_stat
from torchtitan.experiments.rl.checkpointing.folder import step_of, verify
from torchtitan.experiments.rl.observability.metrics import read_metrics, without_timing

ROOT = Path(__file__).resolve().parents[2]
MODULE = "torchtitan.experiments.rl.grpo"
SMALL = "--rollouts-per-step 32 --validation.examples 8".split()
PATIENCE_S = 240
"""How long to wait for what must come; nothing is claimed about how long it takes."""
SHARED_MEMORY = Path("/dev/shm")
COMPILED = os.environ.get("TORCHINDUCTOR_CACHE_DIR", f"{tempfile.gettempdir()}/torchinductor_{getpass.getuser()}")
"""Kept from run to run, where torch keeps it."""


class Run:
    """One run of the command, in a session of its own so that whatever it leaves alive can be found."""

    def __init__(self, folder: Path, *words: str, config: str = "rl_grpo_qwen3_debug", resume: Path | None = None):
        """``resume``: the run folder of an earlier run, which goes on."""
        self.folder = resume or folder / "run"
        self.temporary = folder / "tmp"
        self.temporary.mkdir()
        self._out, self._err = folder / "stdout", folder / "stderr"
        command = [sys.executable, "-m", MODULE, *words]
        if resume is None:
            command += ["--config", config, "--run-dir", str(self.folder), *SMALL]
        else:
            command += ["--resume", str(resume)]
        self.shared_memory_before = set(os.listdir(SHARED_MEMORY))
        with self._out.open("w") as out, self._err.open("w") as err:
            self._process = subprocess.Popen(
                command,
                cwd=ROOT,
                env=environment() | {"TMPDIR": str(self.temporary)},
                stdout=out,
                stderr=err,
                start_new_session=True,
            )

    @property
    def out(self) -> str:
        return self._out.read_text()

    @property
    def err(self) -> str:
        return self._err.read_text()

    @property
    def metrics(self) -> list[dict]:
        return read_metrics(self.folder / "metrics.jsonl")

    @property
    def steps(self) -> list[dict]:
        return self.metrics[1:]

    def wait(self) -> int:
        return self._process.wait(PATIENCE_S)

    def ended_well(self) -> "Run":
        assert self.wait() == 0, self.err + self.out
        return self

    def until_step(self, step: int) -> None:
        def ended_or_there() -> bool:
            path = self.folder / "metrics.jsonl"
            return self._process.poll() is not None or (path.exists() and len(read_metrics(path)) > step)

        wait_for(ended_or_there, f"step {step} did not come")
        assert self._process.poll() is None, self.err + self.out

    def send(self, number: int) -> None:
        """As a terminal does: to every process of the group."""
        os.killpg(self._process.pid, number)

    def alive(self) -> set[int]:
        """Processes of the run's session, itself included; zombies are not alive."""
        pids = (int(entry) for entry in os.listdir("/proc") if entry.isdigit())
        stats = {pid: process_stat(pid) for pid in pids}
        return {pid for pid, stat in stats.items() if stat and stat[2] == self._process.pid and stat[0] != "Z"}

    def worker(self, name: str, index: int = 0) -> int:
        """The process that holds the log file of this rank of the role."""
        log = str(self.folder / "logs" / f"{name}-{index}.jsonl")
        (pid,) = {pid for pid in self.alive() if log in map(os.path.realpath, Path(f"/proc/{pid}/fd").glob("*"))}
        return pid

    def assert_nothing_left(self) -> None:
        wait_for(lambda: not self.alive(), "processes left alive")
        wait_for(lambda: not self._shared_memory_left(), "shared memory left behind")
        wait_for(lambda: not list(self.temporary.iterdir()), "temporary files left behind")

    def _shared_memory_left(self) -> set[str]:
        """Files in shared memory that are new and that nobody maps; other runs on this machine map theirs."""
        new = set(os.listdir(SHARED_MEMORY)) - self.shared_memory_before
        return {name for name in new if not mapped_by_anyone(name)}

    def kill(self) -> None:
        for pid in self.alive():
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                pass
        self._process.wait()


def environment() -> dict[str, str]:
    return os.environ | {"WANDB_SILENT": "true", "TORCHINDUCTOR_CACHE_DIR": COMPILED}


def wait_for(condition: Callable[[], object], what: str = "nothing happened") -> None:
    deadline = time.monotonic() + PATIENCE_S
    while not condition():
        assert time.monotonic() < deadline, what
        time.sleep(0.1)


def mapped_by_anyone(name: str) -> bool:
    for maps in Path("/proc").glob("[0-9]*/maps"):
        try:
            if f"{SHARED_MEMORY}/{name}" in maps.read_text():
                return True
        except OSError:
            pass
    return False


@pytest.fixture(scope="module")
def start(tmp_path_factory) -> Iterator[Callable[..., Run]]:
    runs = []

    def start(*words: str, **options) -> Run:
        runs.append(Run(tmp_path_factory.mktemp("command"), *words, **options))
        return runs[-1]

    yield start
    for run in runs:
        run.kill()


def same_but_for_the_clock(left: Run, right: Run) -> None:
    assert len(left.metrics) == len(right.metrics)
    for ours, theirs in zip(left.metrics, right.metrics, strict=True):
        ours, theirs = without_timing(ours), without_timing(theirs)
        keys = ours.keys() | theirs.keys()
        assert {key: (ours.get(key), theirs.get(key)) for key in keys if ours.get(key) != theirs.get(key)} == {}


def assert_ledger_balances(record: dict) -> None:
    columns = {key: count for key, count in record.items() if key.startswith("ledger/sum_digits/")}
    dispatched = columns.pop("ledger/sum_digits/dispatched")
    assert sum(columns.values()) == dispatched and columns["ledger/sum_digits/trained"] == 32 * record["step"]


# ---- an asynchronous run


@pytest.fixture(scope="module")
def async_run(start) -> Run:
    return start("--steps", "5", "--validation.every", "2", "--metrics.wandb").ended_well()


def test_run_records_every_step_and_each_record_is_whole(async_run):
    assert [record["step"] for record in async_run.metrics] == [0, 1, 2, 3, 4, 5]
    wanted = """loss/total loss/rl train/grad_norm train/lr policy/entropy policy/version policy/age_max policy/age_mean
        rollout/reward_mean rollout/count rollout/status/completed batch/packing_efficiency batch/tokens mismatch_kl/all
        mismatch_kl/task/sum_digits rl/logprob_diff_max rl/ratio_mean time/step_s time/wait_s time/train_s
        perf/trained_tokens_per_s""".split()
    for record in async_run.steps:
        assert [key for key in wanted if record.get(key) is None] == []
        assert record["policy/version"] == record["step"] and record["rollout/count"] == 32
    # Evaluations end when they end; the first and the last are waited for.
    evaluated = [record["validation/step"] for record in async_run.metrics if "validation/reward" in record]
    assert evaluated[0] == 0 and evaluated[-1] == 5 and set(evaluated) <= {0, 2, 4, 5}
    for record in async_run.metrics:
        if "validation/reward" in record:
            assert record["validation/step"] <= record["validation/sum_digits/version_min"] <= record["step"]


def test_ledger_balances_at_every_step(async_run):
    for record in async_run.steps:
        assert_ledger_balances(record)
    assert async_run.steps[-1]["ledger/sum_digits/open"] == 0
    assert "160 sum_digits/trained" in async_run.out


def test_no_token_is_older_than_the_bound_and_on_policy_tokens_agree_with_the_trainer(async_run):
    ages = [record["policy/age_max"] for record in async_run.steps]
    assert ages[0] == 0 and max(ages) <= 1
    for record in async_run.steps:
        if record["policy/age_max"] == 0:
            assert record["rl/logprob_diff_max"] <= 1e-4
    # Of the newest version that every generator had answered for by then.
    canaries = [record["perf/sync_canary_max_diff"] for record in async_run.steps if "perf/sync_canary_max_diff" in record]
    assert canaries and max(canaries) <= 1e-4


def test_console_has_a_line_for_each_step_and_nothing_else_is_printed_by_libraries(async_run):
    lines = async_run.out.splitlines()
    assert [line.split()[0] for line in lines if re.match(r"\s+\d/5 ", line)] == [f"{step}/5" for step in range(1, 6)]
    assert any(line.startswith("steps") and "5 of 5" in line and "done" in line for line in lines)
    assert "Traceback" not in async_run.err and "error" not in async_run.err.lower()


def test_run_folder_has_config_logs_of_every_process_and_tensorboard(async_run):
    config = json.loads((async_run.folder / "config.json").read_text())
    assert config["steps"] == 5 and config["rollouts_per_step"] == 32 and config["tasks"]["sum_digits"]["group_size"] == 8
    assert sorted(path.name for path in (async_run.folder / "logs").iterdir()) == [
        "controller.jsonl",
        "generator-0.jsonl",
        "trainer-0.jsonl",
    ]
    for path in (async_run.folder / "logs").iterdir():
        records = [json.loads(line) for line in path.read_text().splitlines()]
        assert records and {"time", "level", "logger", "process", "message"} <= records[0].keys()
        assert not [record for record in records if record["level"] in ("ERROR", "CRITICAL")]
        assert not [record for record in records if "[actor=" in record["message"]], "the file says which process it is"
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(async_run.folder / "tensorboard"))
    events.Reload()
    rewards = {scalar.step: scalar.value for scalar in events.Scalars("rollout/reward_mean")}
    assert rewards == {record["step"]: pytest.approx(record["rollout/reward_mean"]) for record in async_run.steps}


def test_wandb_works_without_a_network(async_run):
    (folder,) = (async_run.folder / "wandb").glob("offline-run-*")
    assert list(folder.glob("*.wandb"))


def test_final_policy_is_a_hub_folder_that_transformers_loads(async_run):
    (folder,) = (async_run.folder / "checkpoint").iterdir()
    assert folder.name == "step-5"
    model, before = (AutoModelForCausalLM.from_pretrained(path) for path in (folder, ROOT / "assets" / "tiny_qwen3"))
    changed = [name for name, tensor in model.state_dict().items() if not tensor.equal(before.state_dict()[name])]
    assert "model.layers.0.mlp.up_proj.weight" in changed
    assert AutoTokenizer.from_pretrained(folder).encode("<|im_end|>")


def test_finished_run_leaves_no_process_and_no_shared_memory(async_run):
    async_run.assert_nothing_left()


# ---- synchronous runs repeat themselves


@pytest.fixture(scope="module")
def sync_runs(start) -> list[Run]:
    """Side by side, so that their timing differs."""
    words = "--max-offpolicy-steps 0 --seed 7 --steps 4 --validation.every 2 --trainer.no-save-final-model"
    words += " --checkpoint.interval 1 --checkpoint.keep 9"
    return [run.ended_well() for run in [start(*words.split()) for _ in range(2)]]


@pytest.fixture(scope="module")
def wide_runs(start) -> list[Run]:
    words = "--max-offpolicy-steps 0 --seed 7 --steps 3 --trainer.ranks 2 --generator.replicas 2 --trainer.no-save-final-model"
    return [run.ended_well() for run in [start(*words.split()) for _ in range(2)]]


def test_synchronous_runs_of_one_seed_have_the_same_metrics(sync_runs):
    same_but_for_the_clock(*sync_runs)
    assert any(record["train/grad_norm"] > 0 for record in sync_runs[0].steps)


def test_resumed_synchronous_run_has_the_metrics_of_the_uninterrupted_one(sync_runs, tmp_path_factory, start):
    # Files and checkpoints as if killed while the third checkpoint was written, after a weight update and an evaluation.
    folder = tmp_path_factory.mktemp("copied") / "run"
    shutil.copytree(sync_runs[0].folder, folder)
    for step in (3, 4):
        shutil.rmtree(folder / "checkpoints" / f"step-00000{step}")
    run = start(resume=folder).ended_well()
    assert "resumed from step 2" in run.out
    same_but_for_the_clock(run, sync_runs[0])
    for name in ("ledger.jsonl", "rollouts.jsonl.gz"):
        assert lines_of(folder / name) == lines_of(sync_runs[0].folder / name)
    assert [path.name for path in sorted((folder / "checkpoints").iterdir())] == [f"step-00000{step}" for step in (1, 2, 3, 4)]


def lines_of(path: Path) -> list:
    """The records of a file, in any order, without their seconds."""
    text = (gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes()).decode()
    return sorted(re.sub(r'"(generate|env)_s":[^,}]*', "", line) for line in text.splitlines())


def test_two_ranks_and_two_generators_repeat_themselves_too(wide_runs):
    same_but_for_the_clock(*wide_runs)
    assert {path.name for path in (wide_runs[0].folder / "logs").iterdir()} >= {
        "trainer-0.jsonl",
        "trainer-1.jsonl",
        "generator-0.jsonl",
        "generator-1.jsonl",
    }


@pytest.mark.parametrize("runs", ["sync_runs", "wide_runs"])
def test_synchronous_runs_are_on_policy_at_every_step(runs, request):
    (run, _) = request.getfixturevalue(runs)
    for record in run.steps:
        assert record["policy/age_max"] == 0 and record["rl/logprob_diff_max"] <= 1e-4
        assert record["rl/ratio_max"] == pytest.approx(1, abs=1e-3)
        assert_ledger_balances(record)
    run.assert_nothing_left()


def test_ranks_and_replicas_change_nothing_but_rounding(sync_runs, wide_runs):
    """The first step has the same rollouts, whoever samples them, and the same loss, however it is shared out."""
    one, two = sync_runs[0].steps[0], wide_runs[0].steps[0]
    assert one["rollout/reward_mean"] == two["rollout/reward_mean"] and one["batch/tokens"] == two["batch/tokens"]
    for key in ("loss/total", "train/grad_norm", "policy/entropy"):
        assert two[key] == pytest.approx(one[key], rel=1e-3, abs=1e-6)


# ---- runs that end early


ENDLESS = ["--steps", "100000", "--validation.every", "0"]


def test_ctrl_c_ends_the_run_after_its_step_with_a_summary_and_leaves_nothing(start):
    run = start(*ENDLESS)
    run.until_step(2)
    run.send(signal.SIGINT)
    assert run.wait() == 130, run.err
    assert "stopped by SIGINT" in run.out and "stopping after this step" in run.err and "Traceback" not in run.err
    for record in run.steps:
        assert_ledger_balances(record)
    run.assert_nothing_left()


def test_a_signal_to_every_process_of_the_job_ends_the_run_with_a_checkpoint_and_leaves_nothing(start):
    run = start(*ENDLESS, "--checkpoint.interval", "0", "--checkpoint.grace-s", str(PATIENCE_S))
    run.until_step(2)
    assert [path.name[:14] for path in run.temporary.iterdir()] == ["torchtitan-rl-"]
    run.send(signal.SIGTERM)
    assert run.wait() == 143, run.err
    (checkpoint,) = (run.folder / "checkpoints").iterdir()
    verify(checkpoint)
    assert step_of(checkpoint) == run.steps[-1]["step"]
    assert run.out.endswith(f"go on with  python -m {MODULE} --resume {run.folder}\n")
    run.assert_nothing_left()


def test_killed_trainer_ends_the_run_with_one_error_line_that_names_it(start):
    run = start(*ENDLESS)
    run.until_step(2)
    for record in run.steps:
        assert_ledger_balances(record)
    os.kill(run.worker("trainer"), signal.SIGKILL)
    assert run.wait() == 1, run.err
    (error,) = [line for line in run.err.splitlines() if line.startswith("error:")]
    assert "trainer rank 0 died: " in error and str(run.folder / "logs") in error
    assert "Traceback" not in run.err
    assert "stopped by an error" in run.out
    run.assert_nothing_left()


def test_run_goes_on_when_generators_and_a_rollout_worker_are_killed(start):
    """Both generators at once, so that requests have to wait, and the worker while they do."""
    run = start(*ENDLESS, "--rollout-workers", "1", "--generator.replicas", "2")
    run.until_step(2)
    killed = {("generator", 0): "generator 0", ("generator", 1): "generator 1", ("rollout_worker", 0): "rollout worker 0"}
    for name, index in killed:
        os.kill(run.worker(name, index), signal.SIGKILL)
    wait_for(lambda: all(f"{part} is back" in run.out for part in killed.values()), "a part did not come back")
    run.until_step(len(run.steps) + 3)
    run.send(signal.SIGINT)
    assert run.wait() == 130, run.err
    for part in killed.values():
        # Monarch waits for its children too, and who is second learns no signal.
        assert re.search(f"^{part} died: (killed by SIGKILL|its process ended); made again .1 of 3.$", run.out, re.MULTILINE)
        assert run.steps[-1][f"restarts/{part.replace(' ', '_')}"] == 1
    for record in run.steps:
        assert_ledger_balances(record)
        assert record["policy/age_max"] <= 1
    assert "Traceback" not in run.err
    run.assert_nothing_left()


HOPELESS = """
from torchtitan.experiments.rl.config_registry import rl_grpo_qwen3_debug
from torchtitan.experiments.rl.rollouts.filters import Filter
from torchtitan.experiments.rl.rubrics.rubric import RewardFn, Rubric


async def constant(rollout, env_input):
    return 0.5


class Nothing(Filter):
    def matches(self, group):
        return [True] * len(group.scored)


def ties():
    "Every reward is the same."
    config = rl_grpo_qwen3_debug()
    config.tasks["sum_digits"].rubric = Rubric.Config(reward_fns=[RewardFn(constant)])
    return config


def rejects():
    "A filter rejects everything."
    config = rl_grpo_qwen3_debug()
    config.pre_batch_filters = [Nothing.Config()]
    return config
"""


def test_runs_that_can_not_learn_end_with_an_error_that_says_why(start, tmp_path, monkeypatch):
    (tmp_path / "hopeless.py").write_text(HOPELESS)
    monkeypatch.setenv("PYTHONPATH", f"{ROOT}:{tmp_path}")
    words = ["--module", "hopeless", *ENDLESS, "--max-drops-in-a-row", "12"]
    runs = {name: start(*words, config=name) for name in ("ties", "rejects")}
    said = {name: (run.wait(), run.err.splitlines()[-1]) for name, run in runs.items()}
    assert {code for code, _ in said.values()} == {1}
    wanted = "error: none of the first 12 groups teaches anything: .* same reward .0.5 in 100%."
    assert re.match(wanted, said["ties"][1])
    wanted = "error: 12 groups in a row gave nothing to train on .rollouts: 96 filtered/pre/nothing; rewards"
    assert re.match(wanted, said["rejects"][1])
    for run in runs.values():
        assert "Traceback" not in run.err
        run.assert_nothing_left()


HOSTILE = """
import dataclasses
import sys

from torchtitan.experiments.rl.config_registry import rl_grpo_qwen3_debug
from torchtitan.experiments.rl.data.sampler import ShuffledCursor
from torchtitan.experiments.rl.rollouts.filters import ZeroAdvantage
from torchtitan.experiments.rl.rubrics.rubric import RewardFn, Rubric
from torchtitan.experiments.rl.tasks.sum_digits.task import SumDigitsTask


class SetUpBadly(SumDigitsTask):
    async def setup(self, policy):
        raise ValueError("no pool")

    async def close(self):
        print("closed", flush=True)
        self.pool.close()


class Exits(ShuffledCursor):
    "Not at once: the check of the config asks for one example."
    handed_out = 0

    def next(self):
        self.handed_out += 1
        return super().next() if self.handed_out < 20 else sys.exit(3)


SCORED = []


async def mastered_after_512(rollout, env_input):
    SCORED.append(rollout)
    return 1.0 if len(SCORED) > 512 else float(rollout.index_in_group % 2)


def with_task(cls):
    config = rl_grpo_qwen3_debug()
    old = config.tasks["sum_digits"]
    config.tasks["sum_digits"] = cls.Config(**{field.name: getattr(old, field.name) for field in dataclasses.fields(old)})
    return config


def set_up_badly():
    "A task whose setup raises."
    return with_task(SetUpBadly)


def exits():
    "A sampler that exits."
    config = rl_grpo_qwen3_debug()
    config.tasks["sum_digits"].sampler = Exits.Config()
    return config


def mastered():
    "A policy that has soon mastered its task, and a filter that drops what teaches nothing."
    config = rl_grpo_qwen3_debug()
    config.tasks["sum_digits"].rubric = Rubric.Config(reward_fns=[RewardFn(mastered_after_512)])
    config.pre_batch_filters = [ZeroAdvantage.Config()]
    return config
"""


def test_user_code_that_fails_outside_rollouts_ends_the_run_with_its_name_and_a_summary(start, tmp_path, monkeypatch):
    (tmp_path / "hostile.py").write_text(HOSTILE)
    monkeypatch.setenv("PYTHONPATH", f"{ROOT}:{tmp_path}")
    runs = {name: start("--module", "hostile", *ENDLESS, config=name) for name in ("set_up_badly", "exits")}
    wanted = {
        "set_up_badly": "error: task 'sum_digits': SetUpBadly.setup: ValueError: no pool",
        "exits": "error: task 'sum_digits': sampler Exits.next: SystemExit: 3",
    }
    for name, run in runs.items():
        assert run.wait() == 1
        assert run.err.splitlines()[-1].startswith(wanted[name])
        assert "stopped by an error (RunError)" in run.out and "closed" not in run.out and "Traceback" not in run.err
        run.assert_nothing_left()


def test_run_whose_task_is_mastered_ends_as_complete(start, tmp_path, monkeypatch):
    (tmp_path / "hostile.py").write_text(HOSTILE)
    monkeypatch.setenv("PYTHONPATH", f"{ROOT}:{tmp_path}")
    run = start("--module", "hostile", *ENDLESS, "--max-drops-in-a-row", "40", config="mastered").ended_well()
    assert "stopped by nothing left to learn: in the last 40 groups of each task all rewards tie" in run.out
    assert (run.folder / "checkpoint").is_dir()
    run.assert_nothing_left()


# ---- runs that never begin


MISTAKES = {
    "unknown config": ["--config", "rl_grpo_qwen3_debugg"],
    "unknown field": ["--stepz", "3"],
    "wrong type": ["--steps", "three"],
    "missing folder": ["--model.hf-assets-path", "/nowhere"],
    "group size that does not divide": ["--tasks.sum-digits.group-size", "7"],
    "sequence longer than the model": ["--batcher.row-length", "5000"],
}


def command(words: list[str], *, cwd: Path = ROOT, env: dict[str, str] | None = None) -> subprocess.CompletedProcess:
    return subprocess.run(
        [sys.executable, "-m", MODULE, *words],
        cwd=cwd,
        env=env or environment(),
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
        start_new_session=True,
    )


def test_mistakes_are_one_line_and_exit_code_2_and_start_nothing(tmp_path):
    def attempt(words: list[str]) -> subprocess.CompletedProcess:
        return command(["--config", "rl_grpo_qwen3_debug", "--output-dir", str(tmp_path / "outputs"), *words])

    with ThreadPoolExecutor(2) as pool:
        results = list(pool.map(attempt, MISTAKES.values()))
    for name, result in zip(MISTAKES, results, strict=True):
        assert result.returncode == 2, name
        assert re.fullmatch(r"error: [^\n]+\n", result.stderr), (name, result.stderr)
        assert result.stdout == "", name
    assert not (tmp_path / "outputs").exists()


def test_config_of_a_package_elsewhere_runs_from_anywhere(tmp_path):
    package = tmp_path / "my_package"
    package.mkdir()
    (package / "__init__.py").write_text("")
    (package / "configs.py").write_text(
        "from torchtitan.components.optimizer import LRSchedulersContainer\n"
        "from torchtitan.experiments.rl.config_registry import rl_grpo_qwen3_debug\n\n\n"
        "def my_run():\n"
        '    "Mine."\n'
        "    config = rl_grpo_qwen3_debug()\n"
        "    config.steps = 17\n"
        "    return config\n"
    )
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    env = environment() | {"PYTHONPATH": f"{ROOT}:{tmp_path}"}
    result = command(["--module", "my_package.configs", "--config", "my_run", "--dry-run"], cwd=elsewhere, env=env)
    assert result.returncode == 0 and result.stderr == ""
    assert "steps          17, each on 32 groups" in result.stdout
    assert list(elsewhere.iterdir()) == []
