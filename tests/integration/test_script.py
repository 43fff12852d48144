"""Runs that a script starts by train(config), with a task of its own: rows, an env with a tool, a reward function."""

import os
import re
import subprocess
import sys

import pytest

from tests.integration.command_runs import ROOT
from torchtitan.experiments.rl.rollouts.recorder import read_rollouts

PAGE = (ROOT / "docs/tasks.md").read_text()
TRAINED = """
import sys
from torchtitan.experiments.rl.script import train
config = rl_phonebook()
words = ["--rollout-workers", "1", "--rollouts-per-step", "16", "--validation.every", "2", "--post-batch-filters", "none"]
folder = train(config, *words, "--steps", "1", "--run-dir", "run")
if "resume" in sys.argv:
    assert train(config, "--resume", str(folder), "--steps", "2") == folder
print("all ended")
"""


@pytest.mark.parametrize(
    ("words", "summary", "steps"),
    [
        ([], "steps       1 of 1 in ", 1),
        pytest.param(["resume"], "steps       2 of 2, 1 of them in ", 2, marks=pytest.mark.slow),
    ],
    ids=["once", "resumed"],
)
def test_a_script_trains_a_task_of_its_own_with_workers_and_resumes_it(
    tmp_path, words, summary, steps
):
    """The task is the short phone book of docs/tasks.md, defined in the script itself."""
    (code,) = re.findall(r"```python\n# short_phonebook.py\n(.*?)```", PAGE, re.DOTALL)
    (tmp_path / "mine.py").write_text(code + TRAINED)
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    ended = subprocess.run(
        [sys.executable, "mine.py", *words],
        cwd=tmp_path,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert ended.returncode == 0, ended.stdout + ended.stderr
    assert ended.stdout.endswith("all ended\n") and summary in ended.stdout
    rollouts = [record.rollout for record in read_rollouts(tmp_path / "run")]
    assert {rollout.task_name for rollout in rollouts} == {"phonebook"} and len(
        rollouts
    ) >= 16 * steps
    assert {"right", "calls"} <= set(rollouts[0].reward_components)
    assert any(len(rollout.turns) > 1 for rollout in rollouts), "some call the tool"
    assert list(read_rollouts(tmp_path / "run", "validation")), (
        "the row that is held out is asked too"
    )
