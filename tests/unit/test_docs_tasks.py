"""The code of docs/tasks.md works as written."""

import asyncio
import importlib
import inspect
import pickle
import re
import sys
from pathlib import Path

import pytest

from tests.fakes.contexts import context_of
from tests.fakes.rollouts import rollout_of, turn_of
from torchtitan.experiments.rl.algorithms import GRPO
from torchtitan.experiments.rl.command.checks import checked_plan
from torchtitan.experiments.rl.command.command_line import load_config, parse_command
from torchtitan.experiments.rl.config_registry import TINY_MODEL
from torchtitan.experiments.rl.rollouts.recorder import RolloutRecorder
from torchtitan.experiments.rl.rollouts.types import RolloutStatus
from torchtitan.experiments.rl.rubrics.rubric import Rubric, scored_at
from torchtitan.experiments.rl.tasks.scripted_policy import ScriptedPolicy
from torchtitan.experiments.rl.train import main

PAGE = (Path(__file__).parents[2] / "docs" / "tasks.md").read_text()
FILES = dict(re.findall(r"```python\n# (\w+)\.py\n(.*?)```", PAGE, re.DOTALL))


@pytest.fixture
def modules(tmp_path, monkeypatch):
    """The page's files, imported."""
    for name, code in FILES.items():
        (tmp_path / f"{name}.py").write_text(code)
    monkeypatch.syspath_prepend(tmp_path)
    yield {name: importlib.import_module(name) for name in FILES}
    for name in FILES:
        sys.modules.pop(name, None)


def sandbox_task(modules, renderer, **changes):
    return (
        modules["sandboxes"]
        .SandboxTask.Config(algorithm=GRPO.Config(), **changes)
        .build(name="phonebook", context=context_of(renderer))
    )


def test_every_block_of_code_is_one_that_is_run_here():
    assert set(FILES) == {
        "phonebook",
        "test_phonebook",
        "short_phonebook",
        "kinds",
        "sandboxes",
        "slow_tools",
    }
    assert PAGE.count("```python") == len(FILES)


def test_a_field_of_ones_own_is_held_to_its_bounds(modules, capsys):
    words = ["--module", "phonebook", "--config", "rl_phonebook", "--dry-run"]
    override, message = (
        "--tasks.phonebook.dataset.count 0",
        "tasks.phonebook.dataset.count = 0: must be at least 1",
    )
    assert override in PAGE and message in " ".join(PAGE.split())
    assert main([*words, *override.split()]) == 2
    assert capsys.readouterr().err == f"error: {message}\n"
    with pytest.raises(SystemExit):
        main([*words, "--help"])
    shown = capsys.readouterr().out.partition("--tasks.phonebook.dataset.count INT")[2][:300]
    assert "(must be at least 1)" in " ".join(shown.split())


async def test_the_tests_of_the_task_pass(modules):
    tests = [
        test for name, test in vars(modules["test_phonebook"]).items() if name.startswith("test_")
    ]
    assert len(tests) == 4
    for test in tests:
        outcome = test()
        if inspect.isawaitable(outcome):
            await outcome


async def test_the_shorter_task_has_less_than_thirty_lines_and_is_the_same(modules, renderer):
    assert len(FILES["short_phonebook"].splitlines()) < 30 < len(FILES["phonebook"].splitlines())
    call, broken = modules["test_phonebook"].CALL, modules["test_phonebook"].CALL.replace('"}}', "")
    config = modules["short_phonebook"].rl_phonebook()
    checked_plan(config)
    task = config.tasks["phonebook"].build(name="phonebook", context=context_of(renderer))
    looks_up, stumbles, makes_up = (
        [call, "It is 5514."],
        [broken, call, "It is 5514."],
        ["It is 1234."],
    )
    replies = ScriptedPolicy(
        TINY_MODEL, lambda rollout, turn: (looks_up, stumbles, makes_up)[rollout][turn]
    )
    group = await task.run_group(task.dataset[0], replies, group_id="g", seed=0, group_size=3)
    assert await task.score_group(group) is None
    assert [rollout.reward for rollout in group.rollouts] == [1.0, 1.0, 0.0]
    assert [rollout.reward_components for rollout in group.rollouts] == [
        {"right": 1, "calls": 1},
        {"right": 1, "calls": 2},
        {"right": 0, "calls": 0},
    ]
    assert any("5514" in prompt for prompt in replies.prompts) and any(
        "Error: no such name" in text for text in replies.prompts
    )
    assert [task.dataset[i].env_input["name"] for i in range(len(task.dataset))] == [
        "Ada",
        "Grace",
        "Alan",
    ]
    assert [task.validation[i].env_input["name"] for i in range(len(task.validation))] == ["Edsger"]
    again = pickle.loads(pickle.dumps(config.tasks["phonebook"]))
    assert again.message_env is modules["short_phonebook"].PhonebookEnv, (
        "a rollout worker imports it by its name"
    )


def test_the_command_finds_the_config_and_its_override(modules):
    words = [
        "--module",
        "phonebook",
        "--config",
        "rl_phonebook",
        "--tasks.phonebook.env.max-turns",
        "2",
    ]
    assert all(word in PAGE for word in words)
    config = load_config(parse_command(words))
    assert config.tasks["phonebook"].env.max_turns == 2


async def test_a_reply_is_cut_at_its_limit(modules, renderer):
    task = sandbox_task(modules, renderer)
    task.config.sampling.max_tokens = 3
    await task.setup(ScriptedPolicy(TINY_MODEL, []))
    policy = ScriptedPolicy(TINY_MODEL, ["It is 5514, I think."])
    group = await task.run_group(task.dataset[0], policy, group_id="g", seed=0, group_size=1)
    (rollout,) = group.rollouts
    assert rollout.status is RolloutStatus.TRUNCATED_LENGTH and rollout.completion_tokens == 3


async def test_sandboxes_are_lent_to_one_env_at_a_time_and_come_back_whatever_happens(
    modules, renderer
):
    task = sandbox_task(modules, renderer, max_retries=0)
    await task.setup(ScriptedPolicy(TINY_MODEL, []))
    sandboxes = list(task.pool._queue)

    def reply(rollout, turn):
        if rollout % 3 == 0:
            raise RuntimeError("the engine is gone")
        return "It is 5514."

    group = await task.run_group(
        task.dataset[0], ScriptedPolicy(TINY_MODEL, reply), group_id="g", seed=0, group_size=12
    )
    assert [rollout.status for rollout in group.rollouts] == ["error", "completed", "completed"] * 4
    assert sorted(map(id, task.pool._queue)) == sorted(map(id, sandboxes)) and len(sandboxes) == 4
    assert sum(sandbox.uses for sandbox in sandboxes) == 12


async def test_functions_for_rows_of_several_kinds_judge_their_own(modules):
    kinds = modules["kinds"]
    functions = [kinds.of_math, kinds.of_code, kinds.short_later]
    rubric = Rubric.Config(reward_fns=functions).build()
    for row, said, version, reward in (
        ({"kind": "math", "answer": "4"}, "4", 0, 1.0),
        ({"kind": "math", "answer": "4"}, "5", 100, 0.5),  # wrong, and short
        ({"kind": "code"}, "def f(): ...", 99, 1.0),
    ):
        turn = turn_of([1], [2])
        turn.assistant_message["content"] = said
        with scored_at(version):
            (scored,) = await rubric.score_group([rollout_of(turn)], row)
        assert scored.reward == reward


async def test_what_was_said_can_be_read_as_shown(modules, renderer, tmp_path):
    class SlowEnv(modules["phonebook"].PhonebookEnv):
        async def step_message(self, message):
            await asyncio.sleep(0.05)
            return await super().step_message(message)

    task = (
        modules["phonebook"]
        .PhonebookTask.Config(algorithm=GRPO.Config())
        .build(name="phonebook", context=context_of(renderer))
    )
    task.make_env = lambda sample: SlowEnv(sample.env_input)
    policy = ScriptedPolicy(TINY_MODEL, ["It is 1234."])
    group = await task.run_group(task.dataset[0], policy, group_id="g", seed=0, group_size=2)
    assert await task.score_group(group) is None
    recorder = RolloutRecorder.Config().build(run_dir=tmp_path)
    recorder.record(group, {rollout.rollout_id: "trained" for rollout in group.rollouts})
    recorder.close()
    slow = list(modules["slow_tools"].slow_tools(tmp_path, 0.02))
    assert [entry[:2] for entry in slow] == [("trained", "It is 1234.")] * 2
    assert not list(modules["slow_tools"].slow_tools(tmp_path, 60.0))


def test_every_status_is_in_the_table():
    assert set(re.findall(r"^\| `(\w+)` \| ", PAGE, re.MULTILINE)) - set(
        "Dataset MessageEnv Rubric Task Algorithm".split()
    ) == {status.value for status in RolloutStatus if status.is_terminal()}
