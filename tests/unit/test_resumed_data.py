"""Rows of a run that goes on: those that it began with, or a line that names the data set."""

import json
import subprocess
import sys
from dataclasses import dataclass
from datetime import date
from pathlib import Path

import numpy as np
import pytest

from tests.unit.command_line import assert_one_line
from torchtitan.experiments.rl.checkpointing.folder import CheckpointWriter
from torchtitan.experiments.rl.command.resume import save_config
from torchtitan.experiments.rl.command.run_folder import read_command
from torchtitan.experiments.rl.data.digest import ROWS_AT_ONCE, digest_of

ROOT = Path(__file__).parents[2]
MODULE = """
import json, os, random
from dataclasses import replace
from torchtitan.experiments.rl.config_registry import rl_questions_qwen3_debug
from torchtitan.experiments.rl.tasks import question_task

def exact(completion, row):
    return float(completion == row["answer"])

def drawn(seed):
    numbers = random.Random(seed)
    return [{"question": str(numbers.random()), "answer": "1"} for _ in range(64)]

def rl_mine():
    seen = json.loads(os.environ["SETTINGS"])
    rows = seen.get("file") or drawn(seen.get("seed", 0))
    task = question_task(rows, exact, validation=drawn(seen.get("validation", 9)))
    return replace(rl_questions_qwen3_debug(), tasks={"mine": task})
"""
ROWS = [{"question": f"{number} + 1?", "answer": str(number + 1)} for number in range(3)]


@pytest.fixture
def run(command, config_module, monkeypatch, tmp_path):
    """Runs the command as far as a process would be spawned, for a run that leaves a checkpoint."""
    module, _ = config_module(MODULE)
    folder = tmp_path / "run"

    def pretend(config, start, name):
        save_config(folder, config)
        if start.resume_from is None:
            checkpoints = CheckpointWriter(folder, keep=9)
            (checkpoints.begin(2) / "state").write_text("2")
            checkpoints.commit(2)
        start.lock.close()
        return 0

    monkeypatch.setattr("torchtitan.experiments.rl.train._run", pretend)

    def run(**seen):
        monkeypatch.setenv("SETTINGS", json.dumps(seen))
        where = ["--run-dir", str(folder)]
        if folder.exists():
            where = ["--resume", str(folder)]
        return command("--module", module, "--config", "rl_mine", *where)

    run.folder = folder
    return run


def write(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


CURE = "put those back, or start a new run (--init-from takes the weights)"


def test_a_list_in_memory_that_another_seed_made_is_refused_by_the_name_of_its_data_set(run):
    assert run(seed=0)[0] == 0
    assert set(read_command(run.folder).datasets) == {
        "tasks.mine.dataset",
        "tasks.mine.validation",
    }
    code, out, _ = run(seed=0)
    assert code == 0 and "changed" not in out
    code, out, err = run(seed=1)
    assert (code, out) == (2, "")
    assert_one_line(err)
    assert err.strip() == (
        "error: tasks.mine.dataset = 'RowDataset': its examples are not those that the run began "
        f"with (64 rows now, 64 rows when the run began): {CURE}"
    )
    assert run(seed=0)[0] == 0


def test_a_file_is_compared_by_its_rows_and_not_by_its_place_or_its_format(run, tmp_path):
    file = write(tmp_path / "rows.jsonl", ROWS)
    assert run(file=file)[0] == 0
    write(tmp_path / "rows.jsonl", [*ROWS, ROWS[0]])
    code, _, err = run(file=file)
    assert code == 2 and "(4 rows now, 3 rows when the run began)" in err
    write(tmp_path / "rows.jsonl", [ROWS[1], ROWS[0], ROWS[2]])
    code, _, err = run(file=file)
    assert code == 2 and "tasks.mine.dataset = 'RowDataset': its examples are not those" in err
    moved = tmp_path / "moved.json"
    moved.write_text(json.dumps(ROWS))
    code, out, _ = run(file=str(moved))
    assert code == 0 and "changed     tasks.mine.dataset.path" in out


def test_other_rows_to_validate_on_are_said_in_a_line(run):
    assert run()[0] == 0
    code, out, _ = run(validation=3)
    assert code == 0
    line = "tasks.mine.validation: other examples (64 rows now, 64 rows when the run began)"
    assert f"changed     {line}\n" in out
    assert "changed" not in run(validation=3)[1]


def test_a_run_of_a_version_that_kept_no_digests_goes_on(run):
    assert run(seed=0)[0] == 0
    file = run.folder / "command.json"
    saved = json.loads(file.read_text())
    del saved["datasets"]
    file.write_text(json.dumps(saved))
    assert run(seed=1)[0] == 0


@dataclass
class Point:
    x: object


def test_a_digest_changes_with_any_value_and_with_the_order_of_rows():
    rows = [{"a": 1, "b": None, "c": [{"d": "x"}]}] * ROWS_AT_ONCE + [{"a": 2}]
    others = [
        rows[1:],
        [*rows, {"a": 2}],
        [rows[-1], *rows[:-1]],
        [*rows[:-1], {"a": "2"}],
        [*rows[:-1], {"a": 2.5}],
        [*rows[:-1], {"b": 2}],
        [{"a": 1, "b": None, "c": [{"d": "y"}]}, *rows[1:]],
        [*rows[:-1], {"a": date(2020, 1, 2)}],
        [*rows[:-1], {"a": b"2"}],
        [*rows[:-1], {"a": np.arange(2000)}],
        [*rows[:-1], {"a": np.arange(2000)[::-1]}],
        [*rows[:-1], Point(1)],
        [*rows[:-1], Point(2)],
        [*rows[:-1], {"a": {"x", "y"}}],
    ]
    digests = {digest_of(entry) for entry in [rows, *others]}
    assert len(digests) == 1 + len(others) and None not in digests
    assert digest_of(rows) == digest_of([dict(row) for row in rows])
    itself: list = []
    itself.append(itself)
    assert digest_of(itself) is None


def test_a_digest_is_the_same_in_every_process():
    code = (
        "from torchtitan.experiments.rl.data.digest import digest_of\n"
        "print(digest_of([{'a': {'x', 'y', 'z'}, 'b': object(), 'c': 'é\\ud800', 'd': 1e300}]))"
    )

    def digest(seed):
        command = [sys.executable, "-c", code]
        environment = {"PYTHONHASHSEED": seed, "PATH": ""}
        return subprocess.check_output(command, env=environment, cwd=ROOT, text=True)

    assert digest("1") == digest("2") != ""
