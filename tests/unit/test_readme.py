"""What the README shows works as written."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.unit.rollout_stubs import ScriptedPolicy
from torchtitan.experiments.rl.config.checks import checked_plan
from torchtitan.experiments.rl.config.command_line import load_config, parse_command

README = (Path(__file__).parents[2] / "README.md").read_text()


@pytest.fixture
def my_tasks(tmp_path, monkeypatch):
    (code,) = re.findall(r"```python\n# my_tasks.py\n(.*?)```", README, re.DOTALL)
    (tmp_path / "my_tasks.py").write_text(code)
    monkeypatch.syspath_prepend(tmp_path)
    yield
    sys.modules.pop("my_tasks", None)


async def test_the_task_in_twenty_lines_runs_and_scores(my_tasks, renderer, tokenizer):
    config = load_config(parse_command(["--module", "my_tasks", "--config", "rl_backwards"]))
    checked_plan(config)
    task = config.tasks["backwards"].build(name="backwards", renderer=renderer)
    policy = ScriptedPolicy(tokenizer, "elppa")
    group = await task.run_group(task.dataset[0], policy, group_id="g", seed=0, group_size=2)
    assert await task.score_group(group) is None
    assert [rollout.reward for rollout in group.rollouts] == [1.0, 1.0]


def test_every_named_config_is_listed():
    listed = subprocess.run(
        [sys.executable, "-m", "torchtitan.experiments.rl.grpo", "--list"], capture_output=True, text=True, check=True
    ).stdout
    for name in re.findall(r"rl_grpo_qwen3_\w+", README):
        assert f"{name} " in listed
