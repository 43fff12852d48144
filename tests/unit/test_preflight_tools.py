"""The call of a task's first tool before a run."""

from enum import Enum
from typing import Literal

import pytest

from torchtitan.experiments.rl.algorithms import GRPO
from torchtitan.experiments.rl.command.build import build_tasks, read_policy_tokenizer
from torchtitan.experiments.rl.command.preflight import run_preflight
from torchtitan.experiments.rl.config_registry import rl_questions_qwen3_debug
from torchtitan.experiments.rl.envs.message_env import MessageEnv, ResetOutput, StepOutput
from torchtitan.experiments.rl.envs.tool_calls import example_call
from torchtitan.experiments.rl.rollouts.policy import SamplingConfig
from torchtitan.experiments.rl.tasks import env_task, tool_task
from torchtitan.experiments.rl.tasks.tools import Tool

ROWS = [{"question": "What does an apple cost?", "answer": "3"}]
CALLS: list = []


class Color(Enum):
    RED = "red"


def price(
    item: str,
    count: int,
    color: Color,
    size: Literal["big", "small"],
    tags: list[str],
    note: str = "",
) -> str:
    """Say what an item costs."""
    CALLS.append((item, count, color, size, tags, note))
    return "3"


def broken(item: str) -> str:
    """Say what an item costs."""
    return {"apple": 3}[item]


class ShopEnv(MessageEnv):
    """Reads a key that no call has."""

    key = "tool_id"

    async def reset(self):
        return ResetOutput(
            messages=[{"role": "user", "content": self.row["question"]}], tools=[Tool(price).spec]
        )

    async def step_message(self, message):
        calls = message.get("tool_calls") or []
        answers = [
            {"role": "tool", "tool_call_id": call[self.key], "content": "3"} for call in calls
        ]
        return StepOutput(env_messages=answers, done=not answers)


class GoodShopEnv(ShopEnv):
    key = "id"


class SilentEnv(ShopEnv):
    """Offers no tool."""

    async def reset(self):
        return ResetOutput(messages=[{"role": "user", "content": self.row["question"]}])


def reward(completion, example):
    return float(completion == example["answer"])


def warnings_of(task) -> list[str]:
    task.algorithm = GRPO.Config()
    run = rl_questions_qwen3_debug()
    run.tasks = {"shop": task}
    policy = read_policy_tokenizer(run)
    return [
        line
        for line in run_preflight(run, build_tasks(run, policy), policy)["shop"].warnings
        if "own answer" not in line
    ]


def test_the_first_tool_is_called_once_with_arguments_that_its_schema_allows():
    CALLS.clear()
    assert warnings_of(tool_task(ROWS, [price, broken], reward)) == []
    assert CALLS == [("text", 1, Color.RED, "big", ["text"], "")]


FAULTS = {
    "an env that reads a wrong key": (
        env_task(ROWS, ShopEnv, reward),
        [
            "tasks.shop: after the call price(",
            "the rollout ended as ERROR: ",
            "KeyError: 'tool_id' (test_preflight_tools.py:",
        ],
    ),
    "a tool that raises": (
        tool_task(ROWS, [broken, price], reward),
        [
            """tasks.shop: the call broken({"item": "text"}) was answered with "Error: broken: KeyError: 'text' (test_p"""
        ],
    ),
    "an answer that has no room for a call": (
        tool_task(ROWS, [price], reward, sampling=SamplingConfig(max_tokens=16)),
        [
            "tasks.shop: no tool was tried: the call price(",
            "takes more tokens than an answer may have",
        ],
    ),
}


@pytest.mark.parametrize(("task", "parts"), FAULTS.values(), ids=FAULTS)
def test_what_a_call_came_to_is_one_warning(task, parts):
    (line,) = warnings_of(task)
    assert all(part in line for part in parts) and "\n" not in line, line


@pytest.mark.parametrize("env", [GoodShopEnv, SilentEnv])
def test_nothing_is_said_of_an_env_that_answers_or_has_no_tool(env):
    assert warnings_of(env_task(ROWS, env, reward)) == []


def test_arguments_are_made_for_what_a_schema_requires():
    schema = {
        "type": "object",
        "required": ["a", "b", "c", "d", "e"],
        "properties": {
            "a": {"type": "integer", "minimum": 5},
            "b": {"type": ["string", "null"]},
            "c": {"type": "object", "required": ["x"], "properties": {"x": {"const": 7}}},
            "d": {"$ref": "#/$defs/Node"},
            "e": {"examples": ["Paris"], "type": "string"},
            "f": {"type": "string"},
        },
        "$defs": {
            "Node": {
                "type": "object",
                "required": ["next"],
                "properties": {"next": {"$ref": "#/$defs/Node"}},
            }
        },
    }
    name, arguments = example_call({"name": "f", "description": "", "parameters": schema})
    assert (name, arguments) == (
        "f",
        {"a": 5, "b": "text", "c": {"x": 7}, "d": {"next": None}, "e": "Paris"},
    )
    assert example_call({"name": "g", "description": "", "parameters": {}}) == ("g", {})
