"""An env of one's own and rows: env_task."""

import pytest

from torchtitan.experiments.rl.command.command_line import load_config, parse_command
from torchtitan.experiments.rl.command.resume import resolved_config
from torchtitan.experiments.rl.errors import ConfigError
from torchtitan.experiments.rl.tasks import EnvTask, MessageEnv, ResetOutput, StepOutput, env_task

ROWS = [{"question": "6 * 7?", "answer": "42"}, {"question": "2 + 2?", "answer": "4"}]


class AskEnv(MessageEnv):
    async def reset(self):
        return ResetOutput(messages=[{"role": "user", "content": self.row["question"]}])

    async def step_message(self, message):
        return StepOutput(env_messages=[], done=True)


class HalfEnv(MessageEnv):
    async def reset(self):
        return ResetOutput(messages=[])


class TwoEnv(AskEnv):
    def __init__(self, row, pool):
        super().__init__(row)


def right(completion, row):
    return completion == row["answer"]


@pytest.mark.parametrize(
    ("message_env", "cure"),
    [
        (dict, "want a class derived from MessageEnv"),
        (AskEnv(ROWS[0]), "want a class derived from MessageEnv"),
        (HalfEnv, "'HalfEnv': lacks step_message: define async def step_message(self, ...)"),
        (TwoEnv, "'TwoEnv': missing a required argument: 'pool'; it is called with the row alone"),
    ],
)
def test_what_makes_no_env_of_a_row_is_refused_by_its_field(message_env, cure):
    with pytest.raises(ConfigError, match=r"tasks\.mine\.message_env = ") as error:
        env_task(ROWS, message_env, right).validate(field="tasks.mine")
    assert cure in str(error.value)


def test_a_function_may_make_the_env():
    config = env_task(ROWS, lambda row: AskEnv(row), right)
    config.validate(field="tasks.mine")
    assert config.message_env(ROWS[1]).row == ROWS[1]


def test_the_saved_config_names_the_env_and_the_command_line_sets_every_other_field(config_module):
    name, _ = config_module(
        f"from {__name__} import *\nfrom torchtitan.experiments.rl.config_registry import rl_grpo_qwen3_debug\n"
        "def made():\n    config = rl_grpo_qwen3_debug()\n    config.tasks = {'mine': env_task(ROWS, AskEnv, right)}\n"
        "    return config\n"
    )
    words = [
        "--module",
        name,
        "--config",
        "made",
        "--tasks.mine.env.max-turns",
        "2",
        "--tasks.mine.group-size",
        "4",
    ]
    task = load_config(parse_command(words)).tasks["mine"]
    assert (type(task), task.env.max_turns, task.group_size, task.message_env) == (
        EnvTask.Config,
        2,
        4,
        AskEnv,
    )
    assert resolved_config(task)["message_env"] == "tests.unit.test_env_task.AskEnv"
