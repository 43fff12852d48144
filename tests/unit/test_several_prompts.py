"""Envs that begin one example with different prompts: refused before a run, told of in one."""

import random

import pytest

from tests.fakes.contexts import context_of
from tests.fakes.policy import ScriptedPolicy
from torchtitan.experiments.rl.algorithms import SFT
from torchtitan.experiments.rl.command.build import build_tasks, read_policy_tokenizer
from torchtitan.experiments.rl.command.preflight import run_preflight
from torchtitan.experiments.rl.config_registry import rl_questions_qwen3_debug
from torchtitan.experiments.rl.errors import ConfigError
from torchtitan.experiments.rl.tasks import MessageEnv, ResetOutput, StepOutput, env_task
from torchtitan.experiments.rl.watch.alarms import SeveralPrompts

ROWS = [{"question": "go", "seed": 7}]


class DrawingEnv(MessageEnv):
    """Draws its question in reset, as the most natural env of a generated task does."""

    numbers = random.Random(0)

    async def reset(self):
        first, second = self.numbers.sample(range(1_000_000), 2)
        return ResetOutput(messages=[{"role": "user", "content": f"What is {first} + {second}?"}])

    async def step_message(self, message):
        return StepOutput(env_messages=[], done=True)


class SeededEnv(DrawingEnv):
    def __init__(self, row):
        super().__init__(row)
        self.numbers = random.Random(row["seed"])


def length(completion, row):
    return float(len(completion))


def tried(env, **fields):
    run = rl_questions_qwen3_debug()
    run.tasks = {"mine": env_task(ROWS, env, length, **fields)}
    policy = read_policy_tokenizer(run)
    return run_preflight(run, build_tasks(run, policy), policy)["mine"]


def test_a_task_whose_envs_ask_different_things_is_refused_with_both_questions_and_the_cure():
    with pytest.raises(ConfigError) as refused:
        tried(DrawingEnv)
    text = str(refused.value)
    assert text.startswith(
        "tasks.mine = 'DrawingEnv': two envs of the first example begin with different prompts, '"
    )
    assert text.count("What is ") == 2 and "compared with each other" in text
    assert text.endswith(
        "draw in the dataset, or from a seed in the row, and not in the env; if they may differ, "
        "set tasks.mine.prompts_may_differ = True"
    )


@pytest.mark.parametrize(
    ("env", "fields"),
    [
        (SeededEnv, {}),
        (DrawingEnv, {"prompts_may_differ": True}),
        (DrawingEnv, {"group_size": 1}),
        (DrawingEnv, {"algorithm": SFT.Config()}),
    ],
    ids=["a seed in the row", "allowed", "groups of one", "nothing is compared"],
)
def test_a_task_whose_groups_are_asked_one_thing_or_compare_nothing_is_tried_in_silence(
    env, fields
):
    assert not any("prompt" in warning for warning in tried(env, **fields).warnings)


@pytest.mark.parametrize(
    ("env", "allowed", "lines"),
    [(DrawingEnv, False, 1), (DrawingEnv, True, 0), (SeededEnv, False, 0)],
)
async def test_a_group_that_was_asked_different_things_is_told_of_once_a_task(
    env, allowed, lines, renderer, tokenizer
):
    config = env_task(ROWS, env, length, group_size=4, prompts_may_differ=allowed)
    task = config.build(name="mine", context=context_of(renderer))
    said = []
    watcher = SeveralPrompts(lambda line, traceback: said.append(line + traceback))
    for name in ("a", "b"):
        group = await task.run_group(
            task.dataset[0], ScriptedPolicy(tokenizer), group_id=name, seed=0
        )
        watcher.group_arrived(group)
    assert [line.partition(":")[0] for line in said] == ["warning"] * lines
    for line in said:
        assert "the rollouts of group a were asked different things" in line
        assert "set tasks.mine.prompts_may_differ = True" in line
