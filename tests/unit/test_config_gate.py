"""The config gate: what a run would fail on after its processes are up is refused before, in one line, also by --dry-run."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.forkserver import run_module
from tests.unit.command_line import DEBUG, DRY_OR_NOT, assert_one_line

ROOT = Path(__file__).parents[2]


# ---- --module


MODULES = {
    "empty": ("", "is no module's name"),
    "a path": ("configs/mine.py", "is no module's name", "such as configs.mine"),
    "a path from here": ("./mine.py", "such as mine"),
    "an absolute path": ("/tmp/mine.py", "such as tmp.mine"),
    "relative": (".mine", "is no module's name", "such as mine"),
    "dots": ("..", "is no module's name"),
    "a blank": ("my configs", "is no module's name"),
    "a null character": ("mine\0", "is no module's name"),
    "a file": ("json.py", "is no module's name", "such as json"),
    "nowhere": ("nowhere.at.all", "no such module; is its folder on PYTHONPATH?"),
}


@pytest.mark.parametrize(
    "name, parts", [(name, parts) for name, *parts in MODULES.values()], ids=MODULES
)
@pytest.mark.parametrize(
    "words", [["--config", "rl_grpo_qwen3_debug"], ["--list"]], ids=["config", "list"]
)
def test_a_module_that_is_none_is_refused(refused, name, parts, words):
    err = refused("--module", name, *words)
    for part in ("--module = ", *parts):
        assert part in err


BROKEN = {
    "syntax": ("x = 1\ndef broken(:\n", "SyntaxError", 2),
    "import": (
        "import os\nimport no_such_package_of_anyone\n",
        "ModuleNotFoundError: No module named 'no_such_pack",
        2,
    ),
    "name in a module": ("from json import no_such_name\n", "ImportError", 1),
    "raises": ("\n\nraise ValueError('not today')\n", "ValueError: not today", 3),
    "exits": ("import sys\nsys.exit(3)\n", "SystemExit: 3", 2),
    "an exception that is no Exception": (
        "class Own(BaseException): pass\nraise Own('x')\n",
        "Own: x",
        2,
    ),
    "an exception without a text": (
        "class Mute(Exception):\n    def __str__(self): raise TypeError\nraise Mute()\n",
        "it can't be imported: Mute: ",
        3,
    ),
}


@pytest.mark.parametrize("text, cause, line", BROKEN.values(), ids=BROKEN)
def test_a_module_that_fails_is_named_with_file_and_line(refused, config_module, text, cause, line):
    name, file = config_module(text)
    err = refused("--module", name, "--config", "quick")
    assert f"--module = {name!r}" in err and cause in err and f"({file}:{line})" in err


# ---- the config function


FUNCTIONS = {
    "raises": ("raise KeyError('lr')", "the config function failed: KeyError: 'lr'", 2),
    "exits": ("import sys; sys.exit()", "the config function failed: SystemExit", 2),
    "exits with 0": ("import sys; sys.exit(0)", "the config function failed: SystemExit: 0", 2),
    "fails deep inside": ("import json; json.loads('{')", "JSONDecodeError", 2),
    "recurses": ("return made()", "RecursionError", 2),
    "returns nothing": ("pass", "returned a NoneType; return a RunConfig", 1),
    "returns a dict": ("return {'steps': 3}", "returned a dict; return a RunConfig", 1),
    "returns a class": (
        "from torchtitan.experiments.rl.config.run_config import RunConfig; return RunConfig",
        "returned a type; return a RunConfig",
        1,
    ),
    "returns another config": (
        "from torchtitan.experiments.rl.models.policy import ModelConfig; return ModelConfig(hf_assets_path='x')",
        "returned a ModelConfig; return a RunConfig",
        1,
    ),
    "misses a field": (
        "from torchtitan.experiments.rl.config.run_config import RunConfig; return RunConfig(tasks={})",
        "TypeError: RunConfig.__init__() missing 1 required keyword-only argument: 'model'",
        2,
    ),
}


@pytest.mark.parametrize("body, cause, line", FUNCTIONS.values(), ids=FUNCTIONS)
@DRY_OR_NOT
def test_a_config_function_that_fails_is_named_with_file_and_line(
    refused, config_module, body, cause, line, dry_run
):
    name, file = config_module(f"def made():\n    {body}\n")
    err = refused("--module", name, "--config", "made", *dry_run)
    assert "--config = 'made'" in err and cause in err and f"({file}:{line})" in err


def test_an_async_config_function_is_refused_and_no_warning_printed(refused, config_module):
    name, _ = config_module("async def made():\n    pass\n")
    assert "returned a coroutine; return a RunConfig" in refused(
        "--module", name, "--config", "made", "--dry-run"
    )


# ---- relations


RELATIONS = {
    "betas": (
        ["--trainer.optimizer.betas", "0.99", "0.9"],
        "trainer.optimizer.betas[0] = 0.99",
        "betas[1] = 0.9",
    ),
    "a schedule that ends before the run": (
        ["--trainer.lr-scheduler.total-steps", "99"],
        "trainer.lr_scheduler.total_steps = 99",
        "at least steps = 100",
    ),
    "ranks without end": (
        ["--trainer.ranks", "1000000000"],
        "trainer.ranks = 1000000000",
        "a run has at most 1024 processes",
    ),
    "replicas without end": (
        ["--generator.replicas", "1000000000"],
        "generator.replicas = 1000000000",
    ),
    "workers without end": (["--rollout-workers", "1000000000"], "rollout_workers = 1000000000"),
    "parallel without end": (
        ["--generator.engine.tensor-parallel-degree", "1000000000"],
        "tensor_parallel_degree = 1000000000",
    ),
    "heads in three parts": (
        ["--generator.engine.tensor-parallel-degree", "3"],
        "generator.engine.tensor_parallel_degree = 3: the model's 4 attention heads can't be divided by it",
    ),
    "heads of a model that is not there in three parts": (
        [
            "--config",
            "rl_grpo_qwen3_32b",
            "--generator.engine.tensor-parallel-degree",
            "3",
            "--dry-run",
        ],
        "generator.engine.tensor_parallel_degree = 3: the model's 64 attention heads can't be divided by it",
    ),
    "rollouts without end": (
        ["--rollouts-per-step", "1000000000000"],
        "rollouts_per_step = 1000000000000",
        "1000000",
    ),
    "a learning rate without end": (
        ["--trainer.optimizer.lr", "1e308"],
        "trainer.optimizer.lr = 1e+308",
    ),
    "digits without end": (
        ["--tasks.sum-digits.dataset.max-digits", "100000"],
        "tasks.sum_digits.dataset.max_digits = 100000",
    ),
    "a stop token that is none": (
        ["--tasks.sum-digits.sampling.stop-token-ids", "768"],
        "tasks.sum_digits.sampling.stop_token_ids = 768: the model has 768 ids",
    ),
    "a stop text of nothing": (
        ["--tasks.sum-digits.sampling.stop", ""],
        "sampling.stop[0] = '': must not be empty",
    ),
    "a context longer than the model's": (
        ["--generator.engine.max-model-len", "100000"],
        "generator.engine.max_model_len = 100000: the model has 2048 positions",
    ),
}


@pytest.mark.parametrize(
    "words, parts", [(words, parts) for words, *parts in RELATIONS.values()], ids=RELATIONS
)
@DRY_OR_NOT
def test_numbers_that_do_not_fit_together_are_refused(refused, words, parts, dry_run):
    err = refused(*DEBUG, *words, *dry_run)
    for part in parts:
        assert part in err


def test_a_cache_larger_than_the_machine_is_refused(refused):
    err = refused(*DEBUG, "--generator.engine.cpu-kv-cache-gib", "100000")
    assert (
        "it needs 100,000.01 GiB and this host has" in err
        and "lower generator.engine.cpu_kv_cache_gib" in err
    )


def test_a_flavor_of_another_size_than_the_folder_is_refused(refused):
    err = refused(*DEBUG, "--model.flavor", "qwen3/0.6B", "--dry-run")
    assert "model.flavor = 'qwen3/0.6B': it has hidden_size = 1024" in err and "has 128" in err


def test_a_flavor_of_another_family_than_the_folder_is_refused(refused):
    err = refused(*DEBUG, "--model.flavor", "llama3/8B", "--dry-run")
    assert "model.flavor = 'llama3/8B'" in err and "holds a Qwen3ForCausalLM" in err


# ---- paths


PATHS = {
    "a file": ("{tmp}/file", "is a file"),
    "below a file": ("{tmp}/file/run", "Not a directory"),
    "a name too long": ("{tmp}/" + "x" * 300, "too long"),
    "a path too long": ("{tmp}/" + "x/" * 3000, "too long"),
    "in /proc": ("/proc/run", "name a folder that can be written"),
    "in /sys": ("/sys/kernel/run", "name a folder that can be written"),
    "a device": ("/dev/null", "is a file"),
    "a null character": ("{tmp}/a\0b", "name a folder that can be written"),
}


@pytest.mark.parametrize("path, part", PATHS.values(), ids=PATHS)
@pytest.mark.parametrize("option", ["--run-dir", "--output-dir"])
@DRY_OR_NOT
def test_a_folder_that_can_not_be_made_is_refused(refused, tmp_path, path, part, option, dry_run):
    (tmp_path / "file").write_text("")
    before = sorted(os.listdir(tmp_path))
    err = refused(*DEBUG, option, path.format(tmp=tmp_path), *dry_run)
    assert ("--run-dir = " if option == "--run-dir" else "output_dir = ") in err and part in err
    assert sorted(os.listdir(tmp_path)) == before


def test_an_empty_run_dir_is_refused(refused):
    assert "--run-dir = '': must not be empty" in refused(*DEBUG, "--run-dir", "", "--dry-run")


def test_a_mount_that_is_read_only_is_named_so(refused, monkeypatch, tmp_path):
    def read_only(self, *args, **kwargs):
        raise OSError(30, "Read-only file system", str(self))

    monkeypatch.setattr(Path, "mkdir", read_only)
    err = refused(*DEBUG, "--run-dir", str(tmp_path / "run"), "--dry-run")
    assert f"--run-dir = '{tmp_path}/run': Read-only file system" in err


def test_folders_made_on_the_way_to_one_that_can_not_be_made_are_removed(refused, tmp_path):
    refused(*DEBUG, "--run-dir", str(tmp_path / "a" / "b" / ("x" * 300)))
    assert not (tmp_path / "a").exists()


def test_a_runs_folder_is_made_and_holds_the_command_alone(command, tmp_path, monkeypatch):
    made = []
    monkeypatch.setattr(
        "torchtitan.experiments.rl.train._run",
        lambda config, start, name: made.append(start.run_dir) or 0,
    )
    assert command(*DEBUG, "--run-dir", str(tmp_path / "a" / "b"))[0] == 0
    assert made == [str(tmp_path / "a" / "b")] and sorted(os.listdir(tmp_path / "a" / "b")) == [
        ".lock",
        "command.json",
    ]


@pytest.mark.parametrize(
    "path",
    ["{tmp}", "{tmp}/" + "x" * 300 + ".jsonl", "/proc/self/mem.jsonl"],
    ids=["folder", "long", "proc"],
)
def test_a_dataset_file_that_is_none_is_refused_before_a_run(
    refused, config_module, tmp_path, path
):
    name, _ = config_module(
        "from torchtitan.experiments.rl.algorithms import GRPO\n"
        "from torchtitan.experiments.rl.config_registry import rl_grpo_qwen3_debug\n"
        "from torchtitan.experiments.rl.tasks import RowDataset\n"
        "from torchtitan.experiments.rl.tasks.examples.math import MathTask\n"
        "def made():\n"
        "    config = rl_grpo_qwen3_debug()\n"
        f"    rows = RowDataset.Config(path={path.format(tmp=tmp_path / 'rows.jsonl')!r})\n"
        "    task = MathTask.Config(algorithm=GRPO.Config(), dataset=rows)\n"
        "    task.env.max_rollout_tokens = 128\n"
        "    config.tasks = {'math': task}\n"
        "    return config\n"
    )
    (tmp_path / "rows.jsonl").mkdir()
    err = refused("--module", name, "--config", "made")
    assert "error: tasks.math.dataset.path = " in err


# ---- through a real process


def test_the_command_itself_ends_in_one_line(tmp_path):
    refused = {
        "trainer.optimizer.betas[0] = 0.99": ["--trainer.optimizer.betas", "0.99", "0.9"],
        "--run-dir = '/proc/run'": ["--run-dir", "/proc/run"],
        "--module = './mine.py'": ["--module", "./mine.py"],
    }
    for part, words in refused.items():
        ended = run_module("torchtitan.experiments.rl.train", *DEBUG, *words, folder=tmp_path)
        assert (
            ended.returncode == 2
            and ended.stdout == "starting    rl_grpo_qwen3_debug (imports, then checks)\n"
        )
        assert_one_line(ended.stderr, part)
    assert list(tmp_path.iterdir()) == []


def test_a_locale_without_utf_8_is_no_obstacle(tmp_path):
    """Python takes its UTF-8 mode by itself for LC_ALL=C, unless PYTHONUTF8=0. Then torch can't be imported."""
    (tmp_path / "umlauts.py").write_text(
        "from torchtitan.experiments.rl.config_registry import rl_grpo_qwen3_debug\n"
        "def grün():\n    'Größe ≥ 3 …'\n    return rl_grpo_qwen3_debug()\n",
        encoding="utf-8",
    )
    locale = {
        "LC_ALL": "C",
        "PYTHONUTF8": "0",
        "PYTHONCOERCECLOCALE": "0",
        "PYTHONPATH": f"{tmp_path}:{ROOT}",
    }
    command = [sys.executable, "-m", "torchtitan.experiments.rl.train", "--module", "umlauts"]
    ended = subprocess.run(
        [*command, "--config", "grün", "--dry-run"],
        cwd=tmp_path,
        env=os.environ | locale,
        capture_output=True,
        encoding="utf-8",
    )
    assert ended.returncode == 0 and ended.stderr == ""
    assert "starting    grün" in ended.stdout and "0.9M parameters" in ended.stdout
