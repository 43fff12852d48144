"""Programs as agents: whatever one does, its rollout has an end with a name, and no process and no folder stays."""

import asyncio
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.fakes.contexts import context_of
from tests.fakes.policy import ScriptedPolicy
from tests.unit.agents import config_of, run_task
from torchtitan.experiments.rl.envs.renderer import RendererConfig, build_renderer
from torchtitan.experiments.rl.errors import ConfigError
from torchtitan.experiments.rl.rollouts.types import RolloutStatus
from torchtitan.experiments.rl.tasks import AgentCommandTask, Rubric, agent_command_task
from torchtitan.experiments.rl.tasks.examples.calculator import CalculatorRubric
from torchtitan.experiments.rl.tasks.examples.calculator_agent import PROGRAM

ASK = """
import json, os, urllib.request
def ask(text="hello", timeout=30, key=os.environ["OPENAI_API_KEY"]):
    body = json.dumps({"model": "policy", "messages": [{"role": "user", "content": text}]}).encode()
    url = os.environ["OPENAI_BASE_URL"] + "/chat/completions"
    request = urllib.request.Request(url, body, {"Authorization": "Bearer " + key})
    return json.load(urllib.request.urlopen(request, timeout=timeout))["choices"][0]["message"]["content"]
"""

ROOT = Path(__file__).resolve().parents[2]

WAYS = {
    "ends well": ("print(ask())", "completed", ""),
    "asks nothing": ("print('hi')", "error", "had not asked the model anything"),
    "exits 1": ("ask(); raise SystemExit('out of ideas')", "error", "exited with 1: out of ideas"),
    "is killed": ("ask(); os.kill(os.getpid(), 9)", "error", "exited with -9"),
    "hangs": ("ask(); import time; time.sleep(3600)", "timeout", "took longer than 2 s"),
    "hangs and takes no notice": (
        "ask(); import signal, time; signal.signal(15, signal.SIG_IGN); time.sleep(3600)", "timeout", "took longer than 2 s",
    ),
    "prints without end": (
        "ask(); [os.write(1, b'x' * (1 << 20)) for _ in range(512)]; [os.write(2, b'y' * (1 << 20)) for _ in range(512)]",
        "completed", "",
    ),
    "leaves a child": ("ask(); import subprocess; subprocess.Popen(['sleep', '3600'])", "completed", ""),
    "forks away": (
        "ask()\nif not os.fork():\n    os.setsid()\n    if not os.fork():\n        os.execlp('sleep', 'sleep', '3600')",
        "completed", "",
    ),
    "forks away and forgets its environment": (
        "ask()\nif not os.fork():\n    os.setsid(); os.chdir('/')\n    if not os.fork():\n"
        "        os.execve('/bin/sh', ['sh', '-c', 'exec sleep 3600.5'], {})\n    os._exit(0)",
        "completed", "",
    ),
    "leaves folders that are read-only": (
        "ask(); os.makedirs('a/b'); open('a/b/c', 'w').close(); os.chmod('a/b', 0o500); os.chmod('a', 0o500)", "completed", "",
    ),
    "calls after its end": (
        "import time\nask()\nif os.fork():\n    os._exit(0)\nos.setsid()\n"
        "for n in range(10**6): time.sleep(0.1); ask(str(n))  # slower than the end is noticed, or its turns are spent first",
        "completed", "",
    ),
    "storms": (
        "import threading, urllib.error\ndef storm():\n    while True:\n        try: ask(timeout=0.01)\n"
        "        except urllib.error.HTTPError: return\n        except OSError: pass\n"
        "storms = [threading.Thread(target=storm) for _ in range(8)]; [t.start() for t in storms]; [t.join() for t in storms]",
        "truncated_max_turns", "",
    ),
    "uses another key": ("ask(key='rl-guess')", "error", "HTTP Error 401"),
    "asks fifty times at once": (
        "from concurrent.futures import ThreadPoolExecutor as T; list(T(50).map(ask, [str(n) for n in range(50)]))",
        "completed", "",
    ),
    "reads half": (
        "import socket; s = socket.create_connection(os.environ['OPENAI_BASE_URL'].split('/')[2].split(':')); "
        "s.send(b'POST /v1/chat/completions HTTP/1.1\\r\\nContent-Length: 999\\r\\n\\r\\n{'); s.close(); ask()",
        "completed", "",
    ),
}  # fmt: skip


def processes_with(marker: str) -> list[int]:
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                if (
                    marker in (entry / "environ").read_text()
                    or "3600.5" in (entry / "cmdline").read_text()
                ):
                    found.append(int(entry.name))
            except OSError:
                pass
    return found


@pytest.fixture
def places(tmp_path, monkeypatch):
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    return tmp_path


async def run_command(command, renderer, policy, *, row, reward, **fields):
    rubric = Rubric.Config(reward_fns=[reward])
    return await run_task(
        config_of(AgentCommandTask, command=command, rows=[row], rubric=rubric, **fields),
        policy,
        renderer,
    )


@pytest.mark.parametrize("way", WAYS)
async def test_every_end_has_a_name_and_nothing_stays(way, renderer, tokenizer, places):
    code, status, cause = WAYS[way]
    marker = f"AGENT_TEST_{os.getpid()}_{list(WAYS).index(way)}"
    seen = []

    def reward(result, row):
        seen.append(
            (result.exit_code, len(result.output), len(result.errors), result.folder.is_dir())
        )
        return 1.0

    row = {"files": {"agent.py": ASK + code}, "variables": {"MARK": marker}}
    group = await run_command(
        [sys.executable, "-S", "agent.py"],
        renderer,
        ScriptedPolicy(tokenizer, "ok"),
        row=row,
        reward=reward,
        timeout_s=2.0 if status == "timeout" else 60.0,  # a busy machine takes its time
    )
    (rollout,) = group.rollouts
    assert rollout.status == status and cause in (rollout.error or ""), rollout.error
    assert rollout.reward == (1.0 if status in ("completed", "truncated_max_turns") else None)
    assert all(kept <= 16_384 for _, *lengths, _ in seen for kept in lengths) and all(
        there for *_, there in seen
    )
    for _ in range(100):  # the kernel takes a moment to take them down
        if not (left := processes_with(marker)):
            break
        await asyncio.sleep(0.02)
    assert left == [] and list(places.iterdir()) == []


HOST = """
import asyncio, sys, tempfile
from pathlib import Path
from torchtitan.experiments.rl.tasks.agent import _run_command

async def main():
    script = "setsid sleep 3600 & (trap '' TERM HUP; sleep 3600) & sleep 3600"
    for _ in range(4):
        asyncio.create_task(_run_command(["sh", "-c", script], Path(tempfile.gettempdir()), {"MARK": sys.argv[1]}))
    await asyncio.sleep(3600)

asyncio.run(main())
"""


def test_commands_end_with_a_process_that_is_killed():
    marker = f"AGENT_TEST_{os.getpid()}_killed"
    host = subprocess.Popen(
        [sys.executable, "-c", HOST, marker], cwd=ROOT, stdout=subprocess.PIPE, env=os.environ
    )
    try:
        until(lambda: len(processes_with(f"MARK={marker}")) >= 16, seconds=60)
        host.kill()
        host.communicate(timeout=60)  # nothing holds the pipe: a reader of its output sees the end
        until(lambda: not processes_with(f"MARK={marker}"), seconds=60)
    finally:
        host.kill()
        for pid in processes_with(f"MARK={marker}"):
            os.kill(pid, signal.SIGKILL)


def until(holds, *, seconds):
    end = time.monotonic() + seconds
    while not holds():
        assert time.monotonic() < end
        time.sleep(0.05)


async def test_rewards_may_judge_exit_codes(renderer, tokenizer, places):
    def reward(result, row):
        return float(
            result.exit_code == 3
            and "bye" in result.errors
            and (result.folder / "made.txt").read_text() == "this"
        )

    code = "ask(); open('made.txt', 'w').write('this'); import sys; print('bye', file=sys.stderr); sys.exit(3)"
    row = {"files": {"agent.py": ASK + code}}
    command = [sys.executable, "-S", "agent.py"]
    group = await run_command(
        command, renderer, ScriptedPolicy(tokenizer, "ok"), row=row, reward=reward, check_exit=False
    )
    assert group.rollouts[0].reward == 1.0, group.rollouts[0].error


async def test_no_attempt_leaves_a_folder(renderer, tokenizer, places):
    """Neither attempt asks the model anything, so the rollout fails twice."""
    config = config_of(AgentCommandTask, command=["true"], rows=[{"question": "x"}], max_retries=1)
    policy = ScriptedPolicy(tokenizer, "ok")
    task = config.build(name="agent", context=context_of(renderer))
    await task.setup(policy)
    try:
        group = await task.run_group(task.dataset[0], policy, group_id="g", seed=0)
        assert len(policy.sessions) == 2 and group.rollouts[0].status is RolloutStatus.ERROR
        await task.score_group(group)
        assert list(places.iterdir()) == [], "while the task goes on"
    finally:
        await task.close()


@pytest.mark.parametrize(
    ("column", "value"),
    [("files", ["a"]), ("files", {"a": None}), ("variables", "x"), ("variables", {"A": [1]})],
)
async def test_columns_that_are_no_texts_are_named(column, value, renderer, tokenizer, places):
    row = {column: value}
    group = await run_command(
        ["true"], renderer, ScriptedPolicy(tokenizer, "ok"), row=row, reward=lambda result, row: 0.0
    )
    assert (
        f"the row's column {column!r} is " in group.rollouts[0].error
        and list(places.iterdir()) == []
    )


async def test_a_file_outside_the_folder_is_refused(renderer, tokenizer, places):
    row = {"files": {"../outside.txt": "x"}}
    group = await run_command(
        ["true"], renderer, ScriptedPolicy(tokenizer, "ok"), row=row, reward=lambda result, row: 0.0
    )
    assert "'../outside.txt' is outside the command's folder" in group.rollouts[0].error
    assert list(places.iterdir()) == []


async def test_a_command_gets_no_secret_of_the_run(renderer, tokenizer, places, monkeypatch):
    monkeypatch.setenv("WANDB_API_KEY", "secret")
    seen = []
    row = {"files": {"agent.py": ASK + "ask(); print(sorted(os.environ))"}}

    def reward(result, row):
        seen.append(result.output)
        return 0.0

    await run_command(
        [sys.executable, "-S", "agent.py"],
        renderer,
        ScriptedPolicy(tokenizer, "ok"),
        row=row,
        reward=reward,
    )
    assert "ANTHROPIC_BASE_URL" in seen[0] and "WANDB_API_KEY" not in seen[0]


async def test_the_calculator_program_earns_what_the_env_gives(places):
    path = Path(__file__).resolve().parents[2] / "assets/tiny_qwen3_conversations"
    from transformers import AutoTokenizer

    call = (
        '<tool_call>\n{"name": "calculator", "arguments": {"expression": "12 + 30"}}\n</tool_call>'
    )
    policy = ScriptedPolicy(
        AutoTokenizer.from_pretrained(str(path)), lambda rollout_id, turn: [call, "42"][turn]
    )
    config = config_of(AgentCommandTask, command=PROGRAM, rubric=CalculatorRubric.Config())
    task = config.build(name="agent", context=context_of(build_renderer(RendererConfig(), path)))
    sample = task.dataset[0]
    sample.env_input = "12 + 30"
    await task.setup(policy)
    group = await task.run_group(sample, policy, group_id="g", seed=0)
    await task.score_group(group)
    await task.close()
    (rollout,) = group.rollouts
    assert rollout.status is RolloutStatus.COMPLETED and rollout.reward == 1.0, rollout.error
    assert len(rollout.samples) == 1 and len(rollout.turns) == 2


def test_a_program_that_is_not_there_is_refused_by_its_field():
    config = agent_command_task([{"q": "x"}], ["no-such-program"], lambda result, row: 0.0)
    with pytest.raises(ConfigError, match="no such program on PATH") as refused:
        config.validate(field="tasks.mine")
    assert refused.value.field == "tasks.mine.command"


@pytest.mark.parametrize(
    ("field", "value"), [("models", {"gpt": "trained"}), ("noise", {"date": "("})]
)
def test_names_and_patterns_are_checked_before_a_run(field, value):
    config = agent_command_task([{"q": "x"}], ["true"], lambda result, row: 0.0, **{field: value})
    with pytest.raises(ConfigError) as refused:
        config.validate(field="tasks.mine")
    assert refused.value.field == f"tasks.mine.{field}.{next(iter(value))}"
