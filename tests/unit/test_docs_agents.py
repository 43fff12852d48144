"""What docs/agents.md shows works as written."""

import importlib
import re
import sys
from pathlib import Path

import pytest

from tests.unit.agents import run_task
from tests.unit.rollout_stubs import ScriptedPolicy
from torchtitan.experiments.rl.config.checks import checked_plan
from torchtitan.experiments.rl.rollouts.types import RolloutStatus

PAGE = (Path(__file__).parents[2] / "docs" / "agents.md").read_text()
FILES = dict(re.findall(r"```python\n# (\w+)\.py\n(.*?)```", PAGE, re.DOTALL))
AGENT = """
import json, os, sys, urllib.request
body = json.dumps({"model": "policy", "messages": [{"role": "user", "content": sys.argv[1]}]}).encode()
headers = {"Authorization": "Bearer " + os.environ["OPENAI_API_KEY"]}
request = urllib.request.Request(os.environ["OPENAI_BASE_URL"] + "/chat/completions", body, headers)
said = json.load(urllib.request.urlopen(request))["choices"][0]["message"]["content"]
assert open("notes.txt").read() == "be brief"
open("out.txt", "w").write(said)
"""


@pytest.fixture
def config_of(tmp_path, monkeypatch):
    (tmp_path / "agent.py").write_text(AGENT)
    for name, code in FILES.items():
        (tmp_path / f"{name}.py").write_text(code)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.chdir(tmp_path)
    yield lambda module, name: getattr(importlib.import_module(module), name)()
    for name in FILES:
        sys.modules.pop(name, None)


@pytest.mark.parametrize(
    ("module", "name", "replies", "samples"),
    [
        ("my_agent", "rl_solver", ["it is 0", "0"], 1),
        ("my_command", "rl_command", ["7"], 1),
        (
            "my_tools",
            "rl_tools",
            [
                '<tool_call>\n{"name": "run_sql", "arguments": {"query": "SELECT COUNT(*) FROM books"}}\n</tool_call>',
                "There are 2.",
            ],
            1,
        ),
    ],
)
async def test_the_agents_and_tools_of_the_page_earn_their_reward(
    module, name, replies, samples, config_of, renderer, tokenizer
):
    config = config_of(module, name)
    checked_plan(config)
    (task,) = config.tasks.values()
    task.group_size, task.max_retries = 2, 0
    group = await run_task(task, ScriptedPolicy(tokenizer, lambda rollout_id, turn: replies[turn]), renderer)
    for rollout in group.rollouts:
        assert rollout.status is RolloutStatus.COMPLETED, rollout.error
        assert rollout.reward == 1.0 and len(rollout.turns) == len(replies) and len(rollout.samples) == samples
