"""Runs agent frameworks' own programs as agents of a task, and prints the table of docs/agents.md.

    python -m tests.frameworks                      # all of them
    python -m tests.frameworks --only agno dspy     # some
    python -m tests.frameworks --write              # and puts their rows into docs/agents.md

Each folder here has the program of a framework and its requirements, which are installed into an environment of its own
below outputs/frameworks. The programs of the hubs are those that docs/agents.md shows. A program runs as it does in a run: as
the command of an agent_command_task, against the gateway. The policy behind the gateway is scripted, because the tiny model
can't write what each framework asks for. It calls a calculator twice and answers, so a row says what the framework and the
gateway do, and nothing of a model's skill.
"""

import argparse
import asyncio
import importlib
import itertools
import json
import os
import re
import subprocess
import sys
import sysconfig
import venv
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.fakes.contexts import context_of
from torchtitan.experiments.rl.config_registry import TINY_MODEL
from torchtitan.experiments.rl.envs.renderer import RendererConfig, build_renderer
from torchtitan.experiments.rl.rollouts.types import Rollout, RolloutStatus
from torchtitan.experiments.rl.tasks import (
    RendererEnvConfig,
    SamplingConfig,
    Task,
    agent_command_task,
)
from torchtitan.experiments.rl.tasks.scripted_policy import ScriptedPolicy

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
PAGE = ROOT / "docs" / "agents.md"
QUESTION = "What is 2 + 3 + 4? Use the calculator, then give the final answer as a number."
ANSWER = "9"
HEADER = "| framework | mode | works | calls | samples a rollout |\n|---|---|---|---|---|\n"
FILE = re.compile(r"```python\n(?=# (\w+\.py)\n)(.*?)```", re.DOTALL)
TABLE = re.compile(re.escape(HEADER) + r"(\|.*\n)*")
LONGEST_S = 600.0
"""Maximum duration of a rollout. Programs take seconds, and minutes on a busy machine."""


def tool_call(name: str, **arguments: Any) -> str:
    return f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call>"


def code(line: str) -> str:
    """Return a reply that runs the line, as smolagents' CodeAgent asks for it."""
    return f"Thought: I go on.\n<code>\n{line}\n</code>"


def structured_code(line: str) -> str:
    return json.dumps({"thought": "I go on.", "code": line})


def fields(**values: Any) -> str:
    """Return a reply with fields, as dspy's ChatAdapter asks for it."""
    texts = {
        name: value if isinstance(value, str) else json.dumps(value)
        for name, value in values.items()
    }
    return "\n\n".join(f"[[ ## {name} ## ]]\n{text}" for name, text in texts.items())


ADDITIONS = [
    tool_call("calculator", expression="2 + 3"),
    tool_call("calculator", expression="5 + 4"),
]
TEXT = [*ADDITIONS, ANSWER]
OBJECT = '{"value": 9}'
LINES = ['print(calculator("2 + 3"))', 'print(calculator("5 + 4"))', "final_answer(9)"]
COMMANDS = ["expr 2 + 3", "expr 5 + 4", "echo COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT; echo 9"]
STEPS: list[dict[str, Any]] = [
    *(
        {
            "next_thought": "I add.",
            "next_tool_name": "calculator",
            "next_tool_args": {"expression": expression},
        }
        for expression in ("2 + 3", "5 + 4")
    ),
    {"next_thought": "I am done.", "next_tool_name": "finish", "next_tool_args": {}},
    {"reasoning": "I added.", "answer": ANSWER},
]
"""Replies that dspy's ReAct asks for, by field."""

PROGRAMS: dict[str, dict[str, list[str]]] = {
    "openai-agents": {
        "responses": TEXT,
        "responses, stream": TEXT,
        "responses, required tool": TEXT,
        "responses, output type": [*ADDITIONS, OBJECT],
        "chat": TEXT,
        "chat, stream": TEXT,
        "chat, required tool": TEXT,
        "chat, output type": [*ADDITIONS, OBJECT],
    },
    "pydantic-ai": {
        "chat": TEXT,
        "stream": TEXT,
        "responses": TEXT,
        "tool output": [*ADDITIONS, tool_call("final_result", value=9)],
        "native output": [*ADDITIONS, OBJECT],
        "prompted output": [*ADDITIONS, OBJECT],
    },
    "langgraph": {
        "chat": TEXT,
        "stream": TEXT,
        "responses": TEXT,
        "response format": [*TEXT, OBJECT],
        "json schema": [OBJECT],
        "json mode": [OBJECT],
        "function calling": [tool_call("Sum", value=9)],
        "any tool": [tool_call("calculator", expression="2 + 3 + 4")],
    },
    "smolagents": {
        "tools": [*ADDITIONS, tool_call("final_answer", answer=ANSWER)],
        'tools, tool_choice="auto"': [*ADDITIONS, tool_call("final_answer", answer=ANSWER)],
        "code": [code(line) for line in LINES],
        "code, stream": [code(line) for line in LINES],
        "code, structured": [structured_code(line) for line in LINES],
    },
    "anthropic": {
        "tool_runner": TEXT,
        "tool_runner, stream": TEXT,
        "tool_runner, no thread": TEXT,
    },
    "openai": {
        "responses tool runner": TEXT,
        "responses tool runner, stream": TEXT,
        "chat, parse": [*ADDITIONS, OBJECT],
    },
    "litellm": {
        "chat": TEXT,
        "chat, stream": TEXT,
        "responses": TEXT,
        "messages": TEXT,
        "messages, stream": TEXT,
        "too long a prompt, chat": TEXT,
        "too long a prompt, messages": TEXT,
    },
    "dspy": {
        "chain of thought": [fields(reasoning="I add.", answer=ANSWER)],
        "react": [fields(**step) for step in STEPS],
        "react, json": [json.dumps(step) for step in STEPS],
        "react, responses": [fields(**step) for step in STEPS],
    },
    "crewai": {"chat": TEXT, "chat, stream": TEXT, "output type": [*TEXT, OBJECT]},
    "autogen": {"chat": TEXT, "stream": TEXT, "output type": [*ADDITIONS, OBJECT]},
    "mini-swe-agent": {
        "tool calls": [tool_call("bash", command=command) for command in COMMANDS],
        "text": [f"I go on.\n\n```mswea_bash_command\n{command}\n```" for command in COMMANDS],
        "too long a prompt": [tool_call("bash", command=command) for command in COMMANDS],
    },
    "agno": {
        "chat": TEXT,
        "chat, stream": TEXT,
        "chat, output schema": [*ADDITIONS, OBJECT],
        "responses": TEXT,
        "responses, stream": TEXT,
    },
    "strands": {
        "chat": TEXT,
        "responses": TEXT,
        "output model": [*ADDITIONS, tool_call("Sum", value=9)],
    },
}
"""Replies of the policy, by framework and by the mode that its program is given."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Hub:
    """Hub of environments whose task docs/agents.md shows."""

    mode: str
    module: str
    """Name of the page's file that has the config."""
    config: str
    replies: list[str]


HUBS = {
    "verifiers": Hub(
        mode="v1, null harness", module="my_verifiers", config="rl_verifiers", replies=["1"]
    ),
    "openenv": Hub(
        mode="template", module="my_openenv", config="rl_openenv", replies=["hello", "again"]
    ),
    "textarena": Hub(
        mode="GuessTheNumber", module="my_game", config="rl_game", replies=["[7]", "[13]"]
    ),
}


@dataclass(frozen=True, kw_only=True, slots=True)
class Row:
    """Line of the table: what became of a rollout."""

    framework: str
    mode: str
    rollout: Rollout

    @property
    def works(self) -> bool:
        return self.rollout.status is RolloutStatus.COMPLETED and self.rollout.reward == 1.0

    def __str__(self) -> str:
        rollout = self.rollout
        works = "yes" if self.works else f"no: {reason(rollout)}"
        trained = sum(int(sample.loss_mask.sum()) for sample in rollout.samples)
        if trained != rollout.completion_tokens:
            works += f"; {trained} of {rollout.completion_tokens} sampled tokens are trained"
        samples = str(len(rollout.samples)) if self.works else ""
        return f"| {self.framework} | {self.mode} | {works} | {len(rollout.turns)} | {samples} |\n"


def reason(rollout: Rollout) -> str:
    """Return why a rollout does not work: the field that the gateway refused, or the last line of the program's errors."""
    printed = rollout.answer.get("errors", "") if isinstance(rollout.answer, dict) else ""
    if refused := re.search(r"'param': '([^']+)'", printed):
        return f"`{refused[1]}` is refused"
    lines = [rollout.status.value, *(rollout.error or "").splitlines(), *printed.split("\n")]
    return [line for line in lines if line.strip()][-1][-100:].replace("|", "\\|")


def right(result: Any, row: dict[str, Any]) -> float:
    """Return 1 if the program ended well and the last line that it printed is the answer."""
    return float(result.exit_code == 0 and result.output.split()[-1:] == [ANSWER])


def environment(name: str, folder: Path) -> Path:
    """Return the Python of a framework's own environment, which is made the first time, and again for other requirements."""
    wanted = (HERE / name.replace("-", "_") / "requirements.txt").read_text()
    python, installed = folder / name / "bin" / "python", folder / name / "installed.txt"
    if not installed.is_file() or installed.read_text() != wanted:
        print(f"installing {wanted.split()}", file=sys.stderr)
        venv.create(folder / name, with_pip=True, clear=True)
        subprocess.run([python, "-m", "pip", "install", "-q", *wanted.split()], check=True)
        installed.write_text(wanted)
    return python


async def run_program(name: str, mode: str, python: Path) -> Row:
    """Run one rollout of the framework's program in a mode."""
    config = agent_command_task(
        [{"question": QUESTION}],
        [str(python), str(HERE / name.replace("-", "_") / "program.py"), mode],
        right,
        check_exit=False,
        env=RendererEnvConfig(max_turns=20, max_rollout_tokens=100_000),
        sampling=SamplingConfig(max_tokens=4096),
    )
    return Row(framework=name, mode=mode, rollout=await run_rollout(config, PROGRAMS[name][mode]))


async def run_hub(name: str, python: Path) -> Row:
    """Run one rollout of the task that docs/agents.md shows for the hub, in a folder with the page's files."""
    hub, folder = HUBS[name], python.parents[2] / "page"
    (folder / "hubs").mkdir(parents=True, exist_ok=True)
    for file, text in FILE.findall(PAGE.read_text()):
        (folder / file).write_text(text)
    if not (folder / "hubs" / name).exists():
        (folder / "hubs" / name).symlink_to(python.parents[1])
    os.chdir(folder)
    sys.path.insert(0, str(folder))  # the modules of the page
    if name == "openenv" and not Path("my_env").exists():
        subprocess.run(
            [python.with_name("openenv"), "init", "my_env"], check=True, stdout=sys.stderr
        )
    if name == "textarena":
        # Last, so that the packages of this environment come first.
        sys.path.append(sysconfig.get_path("purelib", vars={"base": str(python.parents[1])}))
    (config,) = getattr(importlib.import_module(hub.module), hub.config)().tasks.values()
    return Row(framework=name, mode=hub.mode, rollout=await run_rollout(config, hub.replies))


async def run_rollout(config: Task.Config, replies: list[str]) -> Rollout:
    """Run one rollout of the task's first example, in which the policy's calls get the replies."""
    config.group_size, config.max_retries, config.env.rollout_timeout_s = 1, 0, LONGEST_S
    task = config.build(
        name="agent", context=context_of(build_renderer(RendererConfig(), TINY_MODEL))
    )
    # By calls and not by turns of a conversation: a program that rewrites its history begins a conversation with each call.
    following = itertools.chain(replies, itertools.repeat("I have said all."))
    policy: Any = ScriptedPolicy(TINY_MODEL, lambda rollout, turn: next(following))
    await task.setup(policy)
    try:
        group = await task.run_group(task.dataset[0], policy, group_id="g", seed=0)
        await task.score_group(group)
    finally:
        await task.close()
    return group.rollouts[0]


def with_rows(table: str, rows: list[Row]) -> str:
    """Return the table with the rows of the frameworks that were run in place of their old ones."""
    lines: dict[str, list[str]] = {}
    for line in table.removeprefix(HEADER).splitlines(keepends=True):
        lines.setdefault(line.split("|")[1].strip(), []).append(line)
    lines |= {
        name: [str(row) for row in rows if row.framework == name]
        for name in dict.fromkeys(row.framework for row in rows)
    }
    return HEADER + "".join("".join(lines.get(name, [])) for name in [*PROGRAMS, *HUBS])


def parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument(
        "--only", nargs="+", choices=[*PROGRAMS, *HUBS], help="frameworks to run (default all)"
    )
    parser.add_argument(
        "--folder",
        type=Path,
        default=ROOT / "outputs/frameworks",
        help="where the environments are",
    )
    parser.add_argument("--write", action="store_true", help="put the table into docs/agents.md")
    return parser


async def main() -> int:
    options = parser().parse_args()
    rows = []
    for name in options.only or [*PROGRAMS, *HUBS]:
        python = environment(name, options.folder.absolute())
        for mode in PROGRAMS.get(name, [None]):
            rows.append(
                await (run_hub(name, python) if mode is None else run_program(name, mode, python))
            )
            print(rows[-1], end="", flush=True)
            if not rows[-1].works:
                print(rows[-1].rollout.answer, rows[-1].rollout.error, file=sys.stderr)
    if options.write:
        page = PAGE.read_text()
        found = TABLE.search(page)
        assert found is not None, "the page has the table"
        table = with_rows(found[0], rows)
        PAGE.write_text(TABLE.sub(lambda _: table, page))
    return 0


if __name__ == "__main__":
    sys.exit(asyncio.run(main()))
