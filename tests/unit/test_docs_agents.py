"""The code of docs/agents.md works as written."""

import importlib
import json
import random
import re
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from tests.fakes.policy import ScriptedPolicy
from tests.frameworks import __main__ as frameworks
from tests.unit.agents import run_task
from torchtitan.experiments.rl.command.checks import checked_plan
from torchtitan.experiments.rl.rollouts.types import Rollout, RolloutStatus

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
    group = await run_task(
        task, ScriptedPolicy(tokenizer, lambda rollout_id, turn: replies[turn]), renderer
    )
    for rollout in group.rollouts:
        assert rollout.status is RolloutStatus.COMPLETED, rollout.error
        assert (
            rollout.reward == 1.0
            and len(rollout.turns) == len(replies)
            and len(rollout.samples) == samples
        )


def test_the_hubs_of_the_page_are_tasks_and_their_rewards_are_read(config_of, tmp_path):
    """``python -m tests.frameworks`` runs them with the hubs' packages."""
    for name in ("my_sums_v1", "my_env_agent"):
        compile(FILES[name], f"{name}.py", "exec")
    python = tmp_path / "hubs" / "openenv" / "bin" / "python"
    python.parent.mkdir(parents=True)
    python.symlink_to(sys.executable)
    for module, name in (("my_verifiers", "rl_verifiers"), ("my_openenv", "rl_openenv")):
        checked_plan(config_of(module, name))

    rewards = {"right": {"score": 1.0, "weight": 0.5}, "short": {"score": 2.0, "weight": 0.25}}
    trace = tmp_path / "run" / "traces.jsonl"
    trace.parent.mkdir()
    trace.write_text(json.dumps({"traces": [{"rewards": rewards}]}) + "\n")
    assert sys.modules["my_verifiers"].reward(SimpleNamespace(folder=tmp_path), {}) == 1.0
    assert (
        sys.modules["my_openenv"].reward(SimpleNamespace(output="INFO: started\n1.25\n"), {})
        == 1.25
    )


class GuessBetween1And20:
    """Game with the calls of textarena's GuessTheNumber-v0-raw, whose board comes from the shared random state."""

    def reset(self, num_players, seed):
        random.seed(seed)
        self.number, self.new = random.randint(1, 20), [(-1, "Guess.", None)]

    def get_observation(self):
        return 0, self.new

    def step(self, text):
        guess = int(text.strip("[]"))
        self.new = [(0, text, None), (-1, "higher" if guess < self.number else "lower", None)]
        return guess == self.number, {}

    def close(self):
        return {0: 1.0}, {}


async def test_the_game_of_the_page_is_played(config_of, renderer, tokenizer, monkeypatch):
    monkeypatch.setitem(
        sys.modules, "textarena", SimpleNamespace(make=lambda name: GuessBetween1And20())
    )
    (task,) = config_of("my_game", "rl_game").tasks.values()
    task.group_size, task.max_retries = 2, 0
    replies = ["[7]", "[13]"]  # 13 is what the seed of the first row gives
    group = await run_task(
        task, ScriptedPolicy(tokenizer, lambda rollout_id, turn: replies[turn]), renderer
    )
    for rollout in group.rollouts:
        assert rollout.status is RolloutStatus.COMPLETED, rollout.error
        assert rollout.reward == 1.0 and len(rollout.turns) == 2 and len(rollout.samples) == 1
        assert [turn.prompt_messages[-1]["content"] for turn in rollout.turns] == [
            "Guess.",
            "higher",
        ]


def test_the_table_of_frameworks_has_a_row_for_every_mode_that_is_run():
    table = frameworks.TABLE.search(PAGE)
    rows = [
        tuple(cell.strip() for cell in line.split("|")[1:3]) for line in table[0].splitlines()[2:]
    ]
    programs = [(name, mode) for name, modes in frameworks.PROGRAMS.items() for mode in modes]
    assert rows == programs + [(name, hub.mode) for name, hub in frameworks.HUBS.items()]


def test_frameworks_that_are_run_alone_replace_their_own_rows_of_the_table():
    table = frameworks.HEADER + "| litellm | chat | yes | 3 | 1 |\n| agno | chat | yes | 3 | 1 |\n"
    rollout = Rollout(group_id="g", index_in_group=0, task_name="t", status=RolloutStatus.ERROR)
    rollout.error = "no"
    row = frameworks.Row(framework="litellm", mode="stream", rollout=rollout)
    assert frameworks.with_rows(table, [row]) == (
        f"{frameworks.HEADER}| litellm | stream | no: no | 0 |  |\n| agno | chat | yes | 3 | 1 |\n"
    )
