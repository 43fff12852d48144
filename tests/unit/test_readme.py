"""The code of the README works as written."""

import re
import sys
from pathlib import Path

import pytest

from tests.fakes.clock import Clock
from tests.fakes.contexts import context_of
from tests.fakes.policy import ScriptedPolicy
from tests.fakes.terminal import Screen, Terminal
from tests.forkserver import run_module
from torchtitan.experiments.rl.command.checks import checked_plan
from torchtitan.experiments.rl.command.command_line import load_config, parse_command, starting_line
from torchtitan.experiments.rl.observability.console import (
    Console,
    Progress,
    RunSummary,
    title_line,
)

FILES = ("metrics", "records", "ledger", "logs", "policy", "checkpoint")
ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text()


@pytest.fixture
def my_tasks(tmp_path, monkeypatch):
    (code,) = re.findall(r"```python\n# my_tasks.py\n(.*?)```", README, re.DOTALL)
    (tmp_path / "my_tasks.py").write_text(code)
    monkeypatch.syspath_prepend(tmp_path)
    yield
    sys.modules.pop("my_tasks", None)


async def test_the_task_in_twenty_lines_runs_and_scores(my_tasks, renderer, tokenizer):
    config = load_config(parse_command(["--module", "my_tasks", "--config", "rl_larger"]))
    checked_plan(config)
    task = config.tasks["larger"].build(name="larger", context=context_of(renderer))
    larger = max(task.dataset[49].env_input)
    replies = [str(larger), str(larger + 1), "no digit"]
    policy = ScriptedPolicy(tokenizer, lambda rollout_id, turn: replies[int(rollout_id[-1])])
    group = await task.run_group(task.dataset[49], policy, group_id="g", seed=0, group_size=3)
    assert await task.score_group(group) is None
    assert [rollout.reward for rollout in group.rollouts] == [1.0, 0.5, 0.0]


def lines_at_a_terminal(method, *args, **kwargs) -> list[str]:
    """Return what a console prints at a terminal of 80 columns. Longer commands are not broken."""

    method(Console(terminal := Terminal()), *args, **kwargs)
    return Screen(200).feed(terminal.getvalue()).rows[:-1]


def test_what_the_demo_prints_is_shown_as_the_console_prints_it(monkeypatch):
    """The numbers are read from the README, as they are one run's; words, widths and order are the console's."""
    block, live = re.findall(r"```\n(starting .*?)```|```\n( +16/100 .*?)\n```", README, re.DOTALL)
    shown = block[0].splitlines()
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "80")
    folder = Path("outputs/rl_grpo_qwen3_debug-...")
    header = lines_at_a_terminal(
        Console.header,
        folder,
        config="rl_grpo_qwen3_debug",
        model="assets/tiny_qwen3 (0.9M parameters)",
        sizes={
            "steps": 100,
            "rollouts a step": 256,
            "off-policy steps": 1,
            "trainer ranks": 1,
            "generators": 1,
        },
    )
    ((seconds, first, last),) = re.findall(
        r"of 100 in ([\d.]+) s, done\n.* reward ([\d.]+) -> ([\d.]+)", block[0]
    )
    said = {
        "sum_digits dispatched": "sum_digits/dispatched",
        "sum_digits left out (gibberish)": "sum_digits/filtered/post/gibberish",
        "sum_digits left out (zero advantage)": "sum_digits/filtered/post/zero_advantage",
        "sum_digits trained on": "sum_digits/trained",
    }
    whole = re.sub(r"\n {12}", " ", block[0])  # lines that a terminal breaks
    counts = re.findall(r"([\d,]+) (sum_digits [\w ()]+)", whole)
    ledger = {said[column]: int(count.replace(",", "")) for count, column in counts}
    assert 2 * ledger["sum_digits/dispatched"] == sum(ledger.values())
    names = "metrics.jsonl rollouts.jsonl.gz ledger.jsonl logs policy/step-100 checkpoints/step-000100".split()
    summary = RunSummary(
        steps=100,
        total_steps=100,
        wall_time_s=float(seconds),
        start_val_reward=float(first),
        final_val_reward=float(last),
        ledger=ledger,
        files={label: folder / name for label, name in zip(FILES, names, strict=True)},
        run_dir=folder,
    )
    monkeypatch.chdir(ROOT)
    monkeypatch.setattr("sys.argv", [str(ROOT / ".venv/bin/rl-train")])  # as Makefile starts it
    monkeypatch.setenv("PATH", "/usr/bin")
    end = lines_at_a_terminal(Console.summary, summary)
    starting = starting_line(parse_command(["--config", "rl_grpo_qwen3_debug"]))
    middle = ["validation before the first step: reward 0.320", title_line()]
    assert shown[: len(header) + 3] == [starting, *header, *middle]
    assert shown[-len(end) :] == end
    steps = shown[len(header) + 3 : -len(end)]
    assert {len(line) for line in steps if line.strip() != "..."} == {len(title_line())}
    clock = Clock()
    progress = Progress(clock)
    progress.begin(0, 100)
    for step in range(1, 17):
        clock.now += 0.5
        progress.step(step)
    assert live[1] == progress.line()


def test_every_named_config_is_listed():
    for command in ("train", "grpo"):
        ended = run_module(f"torchtitan.experiments.rl.{command}", "--list")
        assert ended.returncode == 0, ended.stderr
        for name in re.findall(r"rl_grpo_qwen3_\w+", README):
            assert f"{name} " in ended.stdout
