"""Runs of the command that end because of a user's code, and those that never begin."""

import re
import subprocess
from concurrent.futures import ThreadPoolExecutor

import pytest

from tests.integration.command_runs import ENDLESS, ROOT, command, environment
from torchtitan.experiments.rl.checkpointing.folder import checkpoints, verify
from torchtitan.experiments.rl.command.history import read_history

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
    config.tasks["sum_digits"].rubric = Rubric.Config(reward_fns=[RewardFn(constant, takes="rollout")])
    return config


def rejects():
    "A filter rejects everything."
    config = rl_grpo_qwen3_debug()
    config.pre_batch_filters = [Nothing.Config()]
    return config
"""


@pytest.mark.slow
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
from torchtitan.experiments.rl.tasks.examples.sum_digits import SumDigitsTask


class SetUpBadly(SumDigitsTask):
    "Not the first time: the command tries each task once before the run."
    times = 0

    async def setup(self, policy):
        SetUpBadly.times += 1
        if SetUpBadly.times > 1:
            raise ValueError("no pool")

    async def close(self):
        if SetUpBadly.times > 1:
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
    config.tasks["sum_digits"].rubric = Rubric.Config(reward_fns=[RewardFn(mastered_after_512, takes="rollout")])
    config.pre_batch_filters = [ZeroAdvantage.Config()]
    return config
"""


@pytest.mark.parametrize(
    ("name", "error"),
    [
        ("exits", "error: task 'sum_digits': sampler Exits.next: SystemExit: 3"),
        pytest.param(
            "set_up_badly",
            "error: task 'sum_digits': SetUpBadly.setup: ValueError: no pool",
            marks=pytest.mark.slow,
        ),
    ],
)
def test_user_code_that_fails_outside_rollouts_ends_the_run_with_its_name_and_a_summary(
    start, tmp_path, monkeypatch, name, error
):
    (tmp_path / "hostile.py").write_text(HOSTILE)
    monkeypatch.setenv("PYTHONPATH", f"{ROOT}:{tmp_path}")
    run = start("--module", "hostile", *ENDLESS, config=name)
    assert run.wait() == 1
    assert run.err.splitlines()[-1].startswith(error)
    assert "stopped by an error (RunError)" in run.out and "closed" not in run.out
    end = read_history(run.folder).end  # which the report shows
    assert end is not None and run.err.splitlines()[-1].startswith(f"error: {end.why} (logs in ")
    files = {line.split('"')[1] for line in run.err.splitlines() if line.startswith('  File "')}
    assert files == {str(tmp_path / "hostile.py")}, "the frames are those of the user's code alone"
    run.assert_nothing_left()


@pytest.mark.slow
def test_run_whose_task_is_mastered_ends_as_complete(start, tmp_path, monkeypatch):
    (tmp_path / "hostile.py").write_text(HOSTILE)
    monkeypatch.setenv("PYTHONPATH", f"{ROOT}:{tmp_path}")
    run = start(
        "--module", "hostile", *ENDLESS, "--max-drops-in-a-row", "40", config="mastered"
    ).ended_well()
    assert (
        "stopped by nothing left to learn: in the last 40 groups of each task all rewards tie"
        in run.out
    )
    assert (run.folder / "policy").is_dir()
    run.assert_nothing_left()


STARVED = """
import dataclasses

from torch.distributed.checkpoint.staging import DefaultStager

from torchtitan.experiments.rl.config_registry import rl_grpo_qwen3_debug
from torchtitan.experiments.rl.training.config import TrainerConfig


class Config(TrainerConfig):
    "Brings this module into the trainer's process."


def only_once(self, state_dict, stage=DefaultStager.stage, copies=[]):
    copies.append(self)
    if len(copies) > 1:
        raise RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 1048576 bytes.")
    return stage(self, state_dict)


DefaultStager.stage = only_once


def starved():
    "The host's memory ends after the first checkpoint."
    config = rl_grpo_qwen3_debug()
    trainer = config.trainer
    config.trainer = Config(**{field.name: getattr(trainer, field.name) for field in dataclasses.fields(trainer)})
    return config
"""


@pytest.mark.slow
def test_run_whose_host_has_no_memory_for_checkpoints_goes_on_to_its_end_and_says_so_at_once(
    start, tmp_path, monkeypatch
):
    (tmp_path / "starved.py").write_text(STARVED)
    monkeypatch.setenv("PYTHONPATH", f"{ROOT}:{tmp_path}")
    words = [
        "--module",
        "starved",
        "--steps",
        "3",
        "--validation.every",
        "0",
        "--checkpoint.interval",
        "1",
    ]
    run = start(*words, config="starved").ended_well()
    warnings = [line for line in run.err.splitlines() if line.startswith("WARNING")]
    wanted = [
        f"WARNING controller: step-000001 stays the newest checkpoint: the state after step {step} is not saved: trainer 0: "
        "rank 0 can't copy its state into its host's memory: raise the limit of the host or container"
        for step in (2, 3)
    ]
    assert [line[: len(begin)] for line, begin in zip(warnings, wanted, strict=False)] == wanted
    assert len(warnings) in (
        2,
        3,
    )  # the end tries the last state once more, unless that attempt was the end's own
    assert [path.name for path in checkpoints(run.folder)] == ["step-000001"]
    verify(run.folder / "checkpoints/step-000001")
    assert "steps       3 of 3" in run.out and "checkpoint  checkpoints/step-000001" in run.out
    assert (
        "not saved   the state after step 3 is not saved" in run.out
        and (run.folder / "policy/step-3").is_dir()
    )
    run.assert_nothing_left()


MISTAKES = {
    "unknown config": ["--config", "rl_grpo_qwen3_debugg"],
    "unknown field": ["--stepz", "3"],
    "wrong type": ["--steps", "three"],
    "missing folder": ["--model.hf-assets-path", "/nowhere"],
    "sequence longer than the model": ["--batcher.row-length", "5000"],
}


@pytest.mark.slow
def test_mistakes_are_one_line_and_exit_code_2_and_start_nothing(tmp_path):
    def attempt(words: list[str]) -> subprocess.CompletedProcess:
        return command(
            ["--config", "rl_grpo_qwen3_debug", "--output-dir", str(tmp_path / "outputs"), *words]
        )

    with ThreadPoolExecutor(2) as pool:
        results = list(pool.map(attempt, MISTAKES.values()))
    for name, result in zip(MISTAKES, results, strict=True):
        assert result.returncode == 2, name
        assert re.fullmatch(r"error: [^\n]+\n", result.stderr), (name, result.stderr)
        started = (
            "starting    rl_grpo_qwen3_debugg"
            if name == "unknown config"
            else "starting    rl_grpo_qwen3_debug"
        )
        assert result.stdout == f"{started} (imports, then checks)\n", name
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
    result = command(
        ["--module", "my_package.configs", "--config", "my_run", "--dry-run"],
        cwd=elsewhere,
        env=env,
    )
    assert result.returncode == 0 and result.stderr == ""
    assert "steps          17, each on 256 rollouts" in result.stdout
    assert list(elsewhere.iterdir()) == []
