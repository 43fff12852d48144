"""Tools of a task: what the model is told of them, and what each of its calls is answered with."""

import asyncio
import copy
import functools
import json
import re
import sys
from dataclasses import replace
from typing import Literal

import pytest

from tests.fakes.contexts import context_of
from tests.fakes.policy import ScriptedPolicy
from tests.unit.agents import config_of, run_task
from torchtitan.experiments.rl.errors import ConfigError
from torchtitan.experiments.rl.rollouts.types import RolloutStatus
from torchtitan.experiments.rl.rubrics.rubric import Rubric, env_component
from torchtitan.experiments.rl.tasks import (
    MCPServer,
    RendererEnvConfig,
    ToolTask,
    question_task,
    tool_task,
)
from torchtitan.experiments.rl.tasks.tools import Tool

ROW = {"question": "go", "stock": 3}


async def search(query: str, limit: int = 3, order: Literal["new", "old"] = "new") -> list[str]:
    """Search the notes.

    query: words that a note has to have
    limit (int): how many
    """
    return [query] * limit


def divide(a: int, b: int) -> float:
    return a / b


class Shop:
    closed: list[int] = []

    def __init__(self, row, discount=0):
        self.left = row["stock"] - discount

    def buy(self, count: int) -> str:
        """Buy apples."""
        self.left -= count
        return f"{self.left} left"

    async def metadata(self):
        return {"left": self.left}

    def close(self):
        self.closed.append(self.left)


SERVER = """
from mcp.server import MCPServer
server = MCPServer("notes")
@server.tool()
def read(name: str) -> str:
    "Read a note."
    if name == "none":
        raise ValueError("no such note")
    return "note " + name
server.run()
"""


def call(name, /, **arguments):
    return f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call>"


async def played(tools, replies, renderer, tokenizer, **fields):
    """The rollout of a scripted model, and what each tool answered it."""
    config = config_of(ToolTask, tools=tools, rows=[ROW], **fields)
    policy = ScriptedPolicy(tokenizer, lambda rollout_id, turn: replies[turn])
    rollout = (await run_task(config, policy, renderer)).rollouts[0]
    asked = rollout.turns[-1].prompt_messages if rollout.turns else []
    return rollout, [message["content"] for message in asked if message["role"] == "tool"]


def counts(rollout):
    return {
        name[4:]: value
        for name, value in rollout.reward_components.items()
        if name.endswith("_calls")
    }


def test_the_model_is_told_name_text_and_types():
    parameters = {
        "properties": {
            "query": {"description": "words that a note has to have", "type": "string"},
            "limit": {"default": 3, "description": "how many", "type": "integer"},
            "order": {"default": "new", "enum": ["new", "old"], "type": "string"},
        },
        "required": ["query"],
        "type": "object",
    }
    function = {"name": "search", "description": "Search the notes.", "parameters": parameters}
    assert Tool(search).spec == {"type": "function", "function": function}


async def test_calls_are_answered_and_counted(renderer, tokenizer):
    replies = [
        call("search", query="x", limit=2) + call("divide", a=6, b=4),
        call("search", query="x", order="best"),
        call("search", limit=1),
        call("serach", query="x"),
        call("divide", a=1, b=0),
        call("divide", a=1, b=2, c=3),
        "<tool_call>\n{no\n</tool_call>",
        "done",
    ]
    rollout, answers = await played([search, divide], replies, renderer, tokenizer)
    assert rollout.status is RolloutStatus.COMPLETED, rollout.error
    assert answers[:2] == ['["x","x"]', "1.5"]
    for answer, parts in zip(
        answers[2:],
        (
            ["order", "'new' or 'old'"],
            ["query", "required"],
            ["'serach'", "search, divide"],
            ["ZeroDivisionError"],
            ["c:"],
            [],
        ),
        strict=True,
    ):
        assert answer.startswith("Error: ") and all(part in answer for part in parts), answer
    assert counts(rollout) == {"good_calls": 2.0, "bad_calls": 5.0, "failed_calls": 1.0}


@pytest.mark.parametrize(("name", "calls"), [("good_calls", 2.0), ("failed_calls", 0.0)])
async def test_a_rollout_without_a_call_counts_as_0_of_each_kind(renderer, tokenizer, name, calls):
    rubric = Rubric.Config(reward_fns=[env_component(name)])
    for replies, earned in (([call("search", query="x") * 2, "done"], calls), (["done"], 0.0)):
        rollout, _ = await played([search], replies, renderer, tokenizer, rubric=rubric)
        assert rollout.status is RolloutStatus.COMPLETED, rollout.error
        assert (rollout.reward, rollout.reward_components[name]) == (earned, earned)


async def test_a_tool_that_raises_ends_the_rollout_where_the_task_says_so(renderer, tokenizer):
    replies = [call("divide", a=1, b=0), "done"]
    rollout, _ = await played([divide], replies, renderer, tokenizer, tool_errors="fail")
    assert rollout.status is RolloutStatus.ERROR and "ZeroDivisionError" in rollout.error
    replies = [call("divide", a="x", b=0), "done"]  # the model's own mistake
    rollout, (answer,) = await played([divide], replies, renderer, tokenizer, tool_errors="fail")
    assert rollout.status is RolloutStatus.COMPLETED and answer.startswith("Error: a: ")


async def test_a_class_is_made_for_each_rollout_and_closed_at_its_end(renderer, tokenizer):
    Shop.closed.clear()
    for tools, left in (([Shop], 1), ([functools.partial(Shop, discount=1)], 0)):
        rollout, answers = await played(
            tools, [call("buy", count=2), "done"], renderer, tokenizer, group_size=2
        )
        assert answers == [f"{left} left"] and rollout.metadata == {"left": left}
        assert [spec["function"]["name"] for spec in rollout.turns[0].tools] == ["buy"]
    assert Shop.closed == [1, 1, 0, 0]


async def test_the_tools_of_a_server_are_called(renderer, tokenizer, tmp_path):
    (tmp_path / "server.py").write_text(SERVER)
    server = MCPServer(command=(sys.executable, str(tmp_path / "server.py")))
    replies = [call("read", name="a"), call("read", name="none"), call("read"), "done"]
    rollout, answers = await played([server, search], replies, renderer, tokenizer)
    assert rollout.status is RolloutStatus.COMPLETED, rollout.error
    assert answers[0] == "note a" and answers[1].startswith("Error: ") and "name" in answers[2]
    assert counts(rollout) == {"good_calls": 1.0, "bad_calls": 0.0, "failed_calls": 2.0}

    gone = MCPServer(command=(sys.executable, "-c", "raise SystemExit(3)"))
    rollout, _ = await played([gone], ["done"], renderer, tokenizer)
    assert rollout.status is RolloutStatus.ERROR and "ToolEnv.reset" in rollout.error


class Stuck:
    """Object of a tool whose ``close`` fails, or takes a given time."""

    def __init__(self, row, seconds=0.0):
        self.seconds = seconds

    def look(self) -> str:
        return "here"

    async def close(self):
        await asyncio.sleep(self.seconds)
        raise OSError("stuck")


@pytest.mark.parametrize("seconds", [0.0, 3600.0])
async def test_an_object_that_can_not_be_closed_keeps_no_other_open(seconds, renderer, tokenizer):
    Shop.closed.clear()
    tools = [functools.partial(Stuck, seconds=seconds), Shop]
    config = config_of(ToolTask, tools=tools, rows=[ROW])
    config.env.step_timeout_s = 0.5
    await run_task(config, ScriptedPolicy(tokenizer, "done"), renderer)
    assert Shop.closed == [3]


class Clock:
    """Some of its methods need no object."""

    def __init__(self, row):
        pass

    @staticmethod
    def now() -> str:
        return "noon"

    @classmethod
    def zone(cls) -> str:
        return cls.__name__


async def test_static_methods_and_class_methods_are_tools(renderer, tokenizer):
    replies = [call("now") + call("zone"), "done"]
    tool_task([ROW], [Clock], lambda completion, row: 0.0).validate(field="tasks.notes")
    rollout, answers = await played([Clock], replies, renderer, tokenizer)
    assert rollout.status is RolloutStatus.COMPLETED and answers == ["noon", "Clock"]


class Empty:
    def __init__(self, row):
        pass


async def test_a_class_without_tools_fails_by_its_name(renderer, tokenizer):
    rollout, _ = await played([Empty], ["done"], renderer, tokenizer)
    assert rollout.status is RolloutStatus.ERROR
    assert "Empty has no public method" in rollout.error


def untyped(query):
    return query


def many(*words: str):
    return words


class Untyped:
    def __init__(self, row):
        pass

    def find(self, word):
        return word


@pytest.mark.parametrize(
    ("given", "part"),
    [
        (untyped, "query"),
        (many, "words"),
        (Untyped, "find(word)"),
        (functools.partial(search, limit=1), "write a typed function around it"),
        ("search", "want a typed function"),
        (MCPServer(), "command or its url"),
    ],
)
def test_what_is_no_tool_is_refused_by_its_place(given, part):
    config = tool_task([ROW], [search, given], lambda completion, row: 0.0)
    with pytest.raises(ConfigError) as refused:
        config.validate(field="tasks.notes")
    assert refused.value.field == "tasks.notes.tools[1]" and part in str(refused.value)


class Notes:
    def __init__(self, row):
        pass

    def search(self, query: str) -> str:
        """Search the notes."""
        return query


class Web(Notes):
    def search(self, query: str) -> str:
        """Search the web."""
        return query


@pytest.mark.parametrize(
    ("tools", "sources"),
    [
        ([Notes, Web], "Notes and Web both offer"),
        ([search, functools.partial(Notes)], "search and Notes both offer"),
        ([search, MCPServer(url="http://localhost:1/mcp"), search], "search and search both offer"),
    ],
)
def test_two_tools_of_one_name_are_refused_by_their_sources(tools, sources):
    config = tool_task([ROW], tools, lambda completion, row: 0.0)
    with pytest.raises(
        ConfigError, match=f"{sources} a tool named 'search': rename one"
    ) as refused:
        config.validate(field="tasks.notes")
    assert refused.value.field == "tasks.notes.tools"


async def test_two_servers_with_tools_of_one_name_fail_by_both_names(renderer, tokenizer, tmp_path):
    (tmp_path / "server.py").write_text(SERVER)
    servers = [
        MCPServer(command=(sys.executable, str(tmp_path / "server.py"), name)) for name in "ab"
    ]
    rollout, _ = await played(servers, ["done"], renderer, tokenizer)
    assert rollout.status is RolloutStatus.ERROR
    assert "server.py a) and MCPServer(" in rollout.error and "server.py b)" in rollout.error
    assert "both offer a tool named 'read'" in rollout.error


CHAT = [{"role": "user", "content": "What is the weather in Rome?"}]
WEATHER = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "Return the weather of a city.",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}},
    },
}


def built(config, renderer):
    task = config.build(name="mine", context=context_of(renderer))
    task.check_examples(field="tasks.mine")
    return task


async def test_a_row_of_messages_brings_its_tools_and_a_call_is_its_answer(renderer, tokenizer):
    def called(rollout):
        (call,) = rollout.turns[-1].assistant_message["tool_calls"]
        return float(json.loads(call["function"]["arguments"])["city"] == "Rome")

    rows = [{"messages": CHAT, "tools": [WEATHER]}, {"messages": CHAT, "tools": None}]
    config = question_task(rows, exact, messages_column="messages")
    task = built(config, renderer)
    policy = ScriptedPolicy(tokenizer, lambda *_: call("weather", city="Rome"))
    prompts = []
    for index in range(2):
        sample = task.dataset[index]
        group = await task.run_group(sample, policy, group_id="g", seed=0, group_size=1)
        (rollout,) = group.rollouts
        assert rollout.status is RolloutStatus.COMPLETED and len(rollout.turns) == 1
        prompts.append(tokenizer.decode(rollout.turns[0].prompt_token_ids))
    assert called(group.rollouts[0]) == 1.0
    assert "Return the weather of a city." in prompts[0] and "weather of" not in prompts[1]


async def test_a_row_of_a_template_brings_its_tools_unless_the_template_names_them(
    renderer, tokenizer
):
    rows = [{"question": "Is it sunny in Rome?", "tools": [WEATHER]}, {"question": "Hi?"}]

    async def prompts_of(**fields):
        task = built(question_task(rows, exact, **fields), renderer)
        prompts = []
        for index in range(len(rows)):
            policy = ScriptedPolicy(tokenizer, "ok")
            group = await task.run_group(
                task.dataset[index], policy, group_id="g", seed=0, group_size=1
            )
            prompts.append(tokenizer.decode(group.rollouts[0].turns[0].prompt_token_ids))
        return ["Return the weather of a city." in prompt for prompt in prompts]

    assert await prompts_of() == [True, False]
    assert await prompts_of(tools_column=None) == [False, False]
    rows = [{"question": "What is each for?", "tools": "hammer, saw"}]
    named = question_task(rows, exact, template="{question} {tools}")
    assert built(named, renderer).tools_of(rows[0]) == []
    with pytest.raises(ConfigError) as refused:
        built(question_task(rows, exact), renderer)
    assert refused.value.field == "tasks.mine.tools_column"
    assert str(refused.value).endswith("; set tools_column = None if 'tools' is something else")
    assert "row 0: " in str(refused.value) and "hammer, saw" in str(refused.value)


def test_a_row_with_tools_that_nothing_answers_is_refused_by_a_task_with_its_own(renderer):
    rows = [{"messages": CHAT}, {"messages": CHAT, "tools": [WEATHER]}]
    config = tool_task(rows, [search], exact, messages_column="messages")
    with pytest.raises(ConfigError, match="row 1: its 'tools' tell the model of tools") as refused:
        built(config, renderer)
    assert refused.value.field == "tasks.mine.tools_column"
    config = tool_task(rows, [search], exact, messages_column="messages", tools_column=None)
    built(config, renderer)


def exact(completion, row):
    return 1.0


def tiny(a: int) -> int:
    return a


def long(a: int) -> int:
    return a


long.__doc__ = "y " * 100


class Long:
    def __init__(self, row):
        pass

    def long(self, a: int) -> int:
        return a

    long.__doc__ = "y " * 100


def test_rows_are_measured_with_the_tools_beside_them(renderer):
    """All fit beside the tiny tool, and beside the long one only the first."""
    rows = [{"question": "x " * words} for words in (1, 100, 110, 120)]
    longest = [{"role": "user", "content": "x " * 120}]
    rendered = renderer.render(longest, tools=[Tool(tiny).spec], add_generation_prompt=True)
    limits = RendererEnvConfig(max_rollout_tokens=1 + len(rendered.token_ids))

    def warned(tools):
        return built(tool_task(rows, tools, exact, env=limits), renderer).examples_warning

    assert warned([tiny]) is None
    for tool in (long, Long):
        assert "of 4 rows 3 leave no room for an answer" in warned([tool])


async def test_the_preflight_measures_the_rows_with_the_tools_that_a_server_brings(
    renderer, tokenizer, tmp_path
):
    (tmp_path / "server.py").write_text(SERVER.replace("Read a note.", "y " * 100))
    server = MCPServer(command=(sys.executable, str(tmp_path / "server.py")))
    rows = [{"question": "x " * words} for words in (1, 100, 110, 120)]
    longest = [{"role": "user", "content": "x " * 120}]
    length = len(renderer.render(longest, tools=[Tool(tiny).spec]).token_ids)
    limits = RendererEnvConfig(max_rollout_tokens=length + 100)
    task = built(tool_task(rows, [server], exact, env=limits), renderer)
    assert task.examples_warning is None
    env = task.make_env(task.dataset[0])
    tools = (await env.reset()).tools
    await env.close()
    warning = task.check_tools(tools, field="tasks.mine")
    assert "with the tools that the servers have, 3 of 4 rows leave no room" in warning
    assert task.check_tools([], field="tasks.mine") is None


def page(length: int) -> str:
    """Return a page."""
    return "".join(chr(ord("a") + index % 26) for index in range(length)) + "<|im_end|>"


async def test_a_long_answer_is_cut_in_the_middle_and_says_by_how_much(renderer, tokenizer):
    replies = [call("page", length=26), call("page", length=9000), "done"]
    limits = RendererEnvConfig(max_turns=3, max_rollout_tokens=1500, max_answer_tokens=60)
    config = config_of(ToolTask, tools=[page], rows=[ROW])
    config.env = limits
    policy = ScriptedPolicy(tokenizer, lambda rollout_id, turn: replies[turn])
    group = await run_task(config, policy, renderer)
    (rollout, *_) = group.rollouts
    assert rollout.status is RolloutStatus.COMPLETED, rollout.error
    short, long = (turn.env_messages[0]["content"] for turn in rollout.turns[:2])
    assert short == page(26)
    alone = copy.deepcopy(tokenizer)

    def tokens(text):
        return alone.encode(text, add_special_tokens=False, split_special_tokens=True)

    found = re.fullmatch(r"(.*)\n\[\.\.\. ([\d,]+) tokens left out \.\.\.\]\n(.*)", long)
    head, count, tail = found.groups()
    whole = page(9000)
    assert whole.startswith(head) and whole.endswith(tail)
    assert (len(tokens(head)), len(tokens(tail))) == (30, 30)
    assert int(count.replace(",", "")) == len(tokens(whole)) - 60
    assert long in tokenizer.decode(rollout.turns[2].prompt_token_ids)
    assert group.costs[f"rollout/{group.task_name}/cut_answers"] == len(group.rollouts)

    config.env = replace(limits, max_answer_tokens=None)
    (rollout, *_) = (await run_task(config, policy, renderer)).rollouts
    assert rollout.status is RolloutStatus.TRUNCATED_PROMPT_OVERFLOW
