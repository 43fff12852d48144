"""Typical mistakes of a first hour: each is one line that names the place, exit code 2, in seconds, and nothing is spawned."""

from pathlib import Path

import pytest

from tests.forkserver import run_module
from tests.unit.command_line import DEBUG
from torchtitan.experiments.rl.command import preflight
from torchtitan.experiments.rl.command.overrides import last_of_each
from torchtitan.experiments.rl.errors import ConfigError
from torchtitan.experiments.rl.tasks import question_task

TINY_MODEL = Path(__file__).resolve().parents[2] / "assets/tiny_qwen3"
MODULE = """
import asyncio, time
from torchtitan.experiments.rl.config_registry import rl_grpo_qwen3_debug
from torchtitan.experiments.rl.algorithms import GRPO
from torchtitan.experiments.rl.rollouts.filters import Filter
from torchtitan.experiments.rl.tasks import *
from torchtitan.experiments.rl.tasks.questions import question_task

ROWS = [{"question": "6 * 7?", "answer": "42"}, {"question": "2 + 2?", "answer": "4"}]
SHORT = RendererEnvConfig(max_rollout_tokens=128, max_turns=2)
SEEN = []

def exact(completion, example):
    return float(completion.strip() == example["answer"])

class Rows(Dataset):
    def __len__(self): return 2
    def __getitem__(self, i): return DataSample(sample_id=str(i), env_input=ROWS[i])

class Env(MessageEnv):
    async def reset(self): return ResetOutput(messages=[{"role": "user", "content": "hi"}])
    async def step_message(self, message): return StepOutput(env_messages=[], done=True)

class Own(Task):
    def make_env(self, sample): return Env()

def asks(*fns, rows=ROWS, **fields):
    return question_task(rows, *fns, env=SHORT, **fields)

def own(cls=Own, **fields):
    fields = {"dataset": Rows.Config(), "rubric": Rubric.Config(reward_fns=[exact])} | fields
    return cls.Config(**{"algorithm": GRPO.Config(), "env": SHORT} | fields)
"""

MADE = """
def made():
    config = rl_grpo_qwen3_debug()
    config.tasks = {{}}
    config.tasks["mine"] = {task}
    return config
"""


def reward(body):
    return f"def bad(completion, example): {body}", "asks(bad)"


def env(body):
    return (
        f"class Bad(Env):\n    {body}\nclass BadTask(Own):\n    def make_env(self, sample): return Bad()\n",
        "own(BadTask)",
    )


def reset(returned):
    return env(f"async def reset(self): return {returned}")


RUBRIC, MINE = "error: tasks.mine.rubric", "error: tasks.mine = 'BadTask': "
MISTAKES = {
    # name: (classes, task), parts of the line
    "a reward function of one argument": (
        ("def bad(completion): return 1.0", "asks(bad)"),
        f"{RUBRIC}.reward_fns = 'bad(completion)': too many positional arguments; want fn(completion, example)",
    ),
    "a rollout's function of one argument": (
        ("def bad(rollout): return 1.0", "asks(RewardFn(bad, takes='rollout'))"),
        f"{RUBRIC}.reward_fns = 'bad(rollout)': too many positional arguments; want fn(rollout, example)",
    ),
    "a reward that is text": (
        reward("return 'good'"),
        RUBRIC,
        "function 'bad': returned 'good' (str), want a finite number",
    ),
    "a reward function that forgets to return": (
        reward("pass"),
        RUBRIC,
        "'bad': returned None, and has no return with a value: return a number",
    ),
    "a reward that is not finite": (
        reward("return float('nan')"),
        RUBRIC,
        "'bad': returned nan (float)",
    ),
    "a reward function with a misspelt name": (
        reward("return scor"),
        RUBRIC,
        "NameError: name 'scor' is not defined (",
    ),
    "a reward function of a missing column": (
        reward("return example['anser']"),
        RUBRIC,
        "; the row has ",
    ),
    "a reward function that exits": (
        reward("raise SystemExit(1)"),
        RUBRIC,
        "'bad': SystemExit: 1 (",
    ),
    "a group's function that gives one number": (
        (
            "def bad(rollouts, env_input): return 1.0",
            "asks(RewardFn(bad, group_level=True, takes='rollout'))",
        ),
        RUBRIC,
        "returned a float, want a list of 8 numbers",
    ),
    "a function for the list of functions": (
        ("", "asks(rubric=Rubric.Config(reward_fns=exact))"),
        f"{RUBRIC}.reward_fns = <function exact",
        "must be a list",
    ),
    "a function for the rubric": (
        ("", "asks(rubric=exact)"),
        RUBRIC,
        "write Rubric.Config(reward_fns=[...])",
    ),
    "a class for the rubric's config": (
        ("", "asks(rubric=Rubric)"),
        RUBRIC,
        "write Rubric.Config(...)",
    ),
    "an empty rubric": (
        ("", "own(rubric=Rubric.Config())"),
        f"{RUBRIC}.reward_fns = []: GRPO compares rewards",
    ),
    "questions without a reward function": (
        ("", "asks()"),
        f"{RUBRIC} = None: names no reward function",
    ),
    "a component that the env does not give": (
        ("", "own(rubric=Rubric.Config(reward_fns=[env_component('sucess')]))"),
        RUBRIC,
        "the env gave no reward component 'sucess'; it gave none; where it gives it only sometimes, write "
        "env_component('sucess', default=0)",
    ),
    "TRL's reward function": (
        ("def bad(completions, **kwargs): return [1.0 for _ in completions]", "asks(bad)"),
        "error: tasks.mine.rubric.reward_fns = 'bad(completions, **kwargs)': TRL's form?",
        "want fn(completion, example)",
    ),
    "TRL's reward function of prompts": (
        ("def bad(prompts, completions, **kwargs): return [1.0 for _ in completions]", "asks(bad)"),
        "error: tasks.mine.rubric.reward_fns = 'bad(prompts, completions, **kwargs)': TRL's form?",
        "RewardFn(fn, group_level=True)",
        "docs/coming_from.md has a wrapper for TRL's",
    ),
    "a list for the dataset": (
        ("", "own(dataset=ROWS)"),
        "error: tasks.mine.dataset = [",
        "RowDataset.Config(rows=MemoryRows(",
    ),
    "a class for the dataset's config": (
        ("", "own(dataset=Rows)"),
        "error: tasks.mine.dataset",
        "write Rows.Config(...)",
    ),
    "a dataset for its config": (
        ("", "own(dataset=Rows(Rows.Config()))"),
        "tasks.mine.dataset",
        "write Rows.Config(...)",
    ),
    "items that are dicts": (
        (
            "class Bad(Rows):\n    def __getitem__(self, i): return ROWS[i]",
            "own(dataset=Bad.Config())",
        ),
        "error: tasks.mine.dataset = 'Bad': its __getitem__ returned a dict, want a DataSample",
    ),
    "a missing file": (
        ("", "asks(exact, rows='rows.jsonl')"),
        "tasks.mine.dataset.path = 'rows.jsonl': no such file",
    ),
    "a hub that does not answer": (
        ("", "asks(exact, rows='some/questions')"),
        "error: tasks.mine.dataset.path = 'some/questions': is no file, and was never downloaded from the hub (",
        "name a .jsonl, .json, .csv or .parquet file",
    ),
    "rows that are no dicts": (
        ("", "asks(exact, rows=['6 * 7?'])"),
        "dataset.rows = '6 * 7?': row 0 is a str, want a dict",
    ),
    "no rows": (
        ("", "asks(exact, rows=[])"),
        "error: tasks.mine.dataset.rows = <0 rows>: has no rows",
    ),
    "a template of a missing column": (
        ("", "asks(exact, template='{problem}')"),
        "tasks.mine.template = '{problem}': the data has no column 'problem'; it has question, answer",
    ),
    "a class for the algorithm's config": (
        ("", "own(algorithm=GRPO)"),
        "tasks.mine.algorithm",
        "write GRPO.Config(...)",
    ),
    "an algorithm of a wrong signature": (
        ("class Bad(GRPO):\n    def score_group(self): pass", "own(algorithm=Bad.Config())"),
        "error: tasks.mine.algorithm = 'Bad': ",
        "takes 1 positional argument but 2 were given",
    ),
    "a class for the task's config": (
        ("", "Own"),
        "error: tasks.mine = <class",
        "write Own.Config(...)",
    ),
    "make_env gives a class": (
        ("class BadTask(Own):\n    def make_env(self, sample): return Env", "own(BadTask)"),
        MINE,
        "BadTask.make_envs returned 1 of ABCMeta, want a list of 1 MessageEnv",
    ),
    "make_env forgets to return": (
        ("class BadTask(Own):\n    def make_env(self, sample): Env()", "own(BadTask)"),
        MINE,
        "BadTask.make_envs returned 1 of NoneType",
    ),
    "make_env takes no example": (
        ("class BadTask(Own):\n    def make_env(self): return Env()", "own(BadTask)"),
        MINE,
        "BadTask.make_env() takes 1 positional argument but 2 were given",
    ),
    "reset gives messages": (
        reset("[{'role': 'user', 'content': 'hi'}]"),
        MINE,
        "Bad.reset returned list, want ResetOutput",
    ),
    "a message without a role": (
        reset("ResetOutput(messages=[{'content': 'hi'}])"),
        MINE,
        "messages[0] has role NoneType",
    ),
    "a message of a role there is not": (
        reset("ResetOutput(messages=[{'role': 'human', 'content': 'hi'}])"),
        MINE,
        "role str 'human', want one of system, developer, user, assistant, tool",
    ),
    "messages that contain themselves": (
        env(
            "async def reset(self):\n        message = {'role': 'user', 'content': 'hi'}; message['again'] = message\n"
            "        return ResetOutput(messages=[message])"
        ),
        MINE,
        "Bad.reset: ResetOutput.messages[0] contains itself",
    ),
    "no messages": (
        reset("ResetOutput(messages=[])"),
        MINE,
        "Bad.reset: ResetOutput.messages is empty",
    ),
    "reset raises": (
        reset("open('/nowhere/db')"),
        MINE,
        "Bad.reset: FileNotFoundError: [Errno 2]",
        "'/nowhere/db' (",
    ),
    "a step gives a tuple": (
        env("async def step_message(self, message): return [], True"),
        MINE,
        "Bad.step_message returned tuple, want StepOutput",
    ),
    "setup raises": (
        (
            "class BadTask(Own):\n    async def setup(self, policy): raise ConnectionError('no pool')",
            "own(BadTask)",
        ),
        f"{MINE}its setup: ConnectionError: no pool (",
    ),
    "a filter of one answer": (
        (
            "class Bad(Filter):\n    def matches(self, group): return True",
            "own(); config.pre_batch_filters = [Bad.Config()]",
        ),
        "error: pre_batch_filters[0] = 'Bad': ",
        "it returned bool, want a list of 8 bools",
    ),
    "a filter of a misspelt field": (
        (
            "class Bad(Filter):\n    def matches(self, group): return [r.rewrd for r in group.scored]",
            "own(); config.post_batch_filters = [Bad.Config()]",
        ),
        "error: post_batch_filters[0] = 'Bad': ",
        "AttributeError: 'Rollout' object has no attribute 'rewrd' (",
    ),
    "a list for the tasks": (
        ("", "own(); config.tasks = list(config.tasks.values())"),
        "error: tasks = [",
    ),
}


@pytest.mark.parametrize(
    "made, parts", [(made, parts) for made, *parts in MISTAKES.values()], ids=MISTAKES
)
def test_a_mistake_in_a_task_is_refused_in_one_line(refused, config_module, made, parts):
    classes, task = made
    name, _ = config_module(f"{MODULE}\n{classes}\n{MADE.format(task=task)}")
    err = refused("--module", name, "--config", "made")
    for part in parts:
        assert part in err


RANKED = """
def ranked(completions, example):
    return [sum(len(o) < len(c) for o in completions) / (len(completions) - 1) for c in completions]
RANKED = RewardFn(ranked, group_level=True)
class ScoresItself(Own):
    async def score_group(self, group):
        for index, rollout in enumerate(group.rollouts): rollout.amend(reward=float(index))
        return await self.give_credit(group)
"""


@pytest.mark.parametrize(
    "task",
    [
        "asks(RANKED, validation=ROWS)",
        "own(rubric=Rubric.Config(reward_fns=[RANKED]), validation=Rows.Config())",
        "own(ScoresItself, rubric=Rubric.Config(reward_fns=[RANKED]), validation=Rows.Config())",
    ],
)
def test_a_reward_that_compares_a_group_is_tried_on_a_group_of_the_validations_size(
    command, config_module, task
):
    """The group that is trained on has 8 rollouts, the validation's has one by default."""
    name, _ = config_module(f"{MODULE}\n{RANKED}\n{MADE.format(task=task)}")
    words = ["--module", name, "--config", "made"]
    code, _, err = command(*words)
    line = err.splitlines()[0]
    assert code == 2 and line.startswith("error: tasks.mine.rubric = 'Rubric': the rewards of the ")
    assert "in a group of the validation, whose size is validation.attempts = 1: " in line
    assert "reward function 'ranked': ZeroDivisionError: division by zero" in line
    dry = [*words, "--dry-run"]
    assert command(*dry)[2] == err
    several = ["--validation.attempts", "2", "--validation.temperature", "1"]
    assert command(*dry, *several)[0] == 0
    assert command(*dry, "--validation.every", "0")[0] == 0


def test_the_rubric_of_the_validation_is_tried_and_named(command, config_module):
    broken = "def broken(completion, example): return 1 / 0"
    fields = "validation=Rows.Config(), validation_rubric=Rubric.Config(reward_fns=[broken])"
    name, _ = config_module(f"{MODULE}\n{broken}\n{MADE.format(task=f'own({fields})')}")
    code, _, err = command("--module", name, "--config", "made", "--dry-run")
    assert code == 2
    assert err.startswith("error: tasks.mine.validation_rubric = 'Rubric': the rewards of the ")
    assert "reward function 'broken': ZeroDivisionError: division by zero" in err


def test_rows_that_one_of_two_functions_judges_are_no_mistake(command, config_module):
    functions = "def of_code(completion, example): return 1.0 if 'code' in example else None"
    name, _ = config_module(
        f"{MODULE}\n{functions}\n{MADE.format(task='own(rubric=Rubric.Config(reward_fns=[exact, of_code]))')}"
    )
    code, _, err = command("--module", name, "--config", "made", "--dry-run")
    assert (code, err) == (0, "")
    fails = MADE.format(task="own(rubric=Rubric.Config(reward_fns=[of_code]))")
    name, _ = config_module(f"{MODULE}\n{functions}\n{fails}")
    code, _, err = command("--module", name, "--config", "made", "--dry-run")
    assert code == 2 and "reward function 'of_code': returned None, so that none judged" in err


IN_HELPER = "def helper(row): return row['anser']\n"
FAILURES = {
    "a reward function": ("def bad(completion, example): return helper(example)", "asks(bad)"),
    "a rubric": (
        "class Bad(Rubric):\n    async def score_group(self, rollouts, env_input): return helper(env_input)",
        "own(rubric=Bad.Config())",
    ),
    "an env": env("async def reset(self): return helper(ROWS[0])"),
    "an env's plain method": env("def step_message(self, message): return helper(ROWS[0])"),
    "an env's metadata": env("async def metadata(self): return helper(ROWS[0])"),
    "an env's constructor": env("def __init__(self): helper(ROWS[0])"),
    "a turn loop": (
        "class BadTask(Own):\n    def make_env(self, sample): return Env()\n"
        "    async def run_rollout(self, env, policy): helper(ROWS[0])",
        "own(BadTask)",
    ),
    "a setup": (
        "class BadTask(Own):\n    async def setup(self, policy): helper(ROWS[0])",
        "own(BadTask)",
    ),
    "a dataset": (
        "class Bad(Rows):\n    def __getitem__(self, i): return helper(ROWS[i])",
        "own(dataset=Bad.Config())",
    ),
    "a validation set": (
        "class Bad(Rows):\n    def __getitem__(self, i): return helper(ROWS[i])",
        "own(validation=Bad.Config())",
    ),
    "a sampler": (
        "from torchtitan.experiments.rl.data.sampler import ShuffledCursor\n"
        "class Bad(ShuffledCursor):\n    def next(self): return helper(ROWS[0])",
        "own(sampler=Bad.Config())",
    ),
    "an algorithm": (
        "class Bad(GRPO):\n    def score_group(self, group): helper(ROWS[0])",
        "own(algorithm=Bad.Config())",
    ),
    "an algorithm of a rollout": (
        "class Bad(GRPO):\n    async def score_rollout(self, rollout): helper(ROWS[0])",
        "own(algorithm=Bad.Config())",
    ),
    "a filter": (
        "class Bad(Filter):\n    def matches(self, group): return helper(ROWS[0])",
        "own(); config.pre_batch_filters = [Bad.Config()]",
    ),
    "an agent": (
        "class BadTask(AgentTask):\n    async def run_agent(self, sample, endpoint): helper(ROWS[0])",
        "own(BadTask)",
    ),
}


@pytest.mark.parametrize("classes, task", FAILURES.values(), ids=FAILURES)
def test_where_code_of_the_user_fails_the_terminal_shows_its_frames(
    command, config_module, classes, task
):
    name, file = config_module(f"{MODULE}\n{IN_HELPER}{classes}\n{MADE.format(task=task)}")
    code, _, err = command("--module", name, "--config", "made", "--dry-run")
    line, *frames = err.splitlines()
    assert code == 2 and line.startswith("error: ") and "KeyError: 'anser' (" in line
    assert "preflight" not in line
    if frames[-1] == "(user_code.preflight_timeout_s = 0 leaves this check out)":
        frames.pop()
    assert frames[0] == "Traceback (most recent call last):" and frames[-1] == "KeyError: 'anser'"
    places = [frame.partition(", line ")[0] for frame in frames if frame.startswith("  File ")]
    assert set(places) == {f'  File "{file}"'} and len(places) >= 2
    assert "    def helper(row): return row['anser']" in frames


def test_a_reward_function_that_ends_the_command_is_named(config_module):
    for body in ("os._exit(0)", "os.kill(os.getpid(), 11)"):  # also by a segmentation fault
        classes, task = reward(f"{body}")
        name, file = config_module(f"import os\n{MODULE}\n{classes}\n{MADE.format(task=task)}")
        words = ["--module", name, "--config", "made", "--dry-run"]
        ended = run_module("torchtitan.experiments.rl.train", *words, path=file.parent)
        assert ended.stderr == (
            "error: tasks.mine = 'QuestionTask': the rewards of the reply 'The answer is 42.' by bad: the command was killed, or "
            "this code called os._exit or crashed; user_code.preflight_timeout_s = 0 leaves this check out\n"
        )


WORDS = {
    "a config there is not": (
        ["--config", "rl_grpo_qwen3_debg"],
        "did you mean rl_grpo_qwen3_debug?",
    ),
    "no config": (["--steps", "3"], "--config = None: name a config; --list prints them"),
    "a misspelt option": (
        [*DEBUG, "--step", "3"],
        "error: no option --step; perhaps you meant --steps\n",
    ),
    "the end of an option": ([*DEBUG, "--lr=1e-4"], "perhaps you meant --trainer.optimizer.lr\n"),
    "another misspelt one": (
        [*DEBUG, "--steps", "3", "--max_retry", "1"],
        "meant --tasks.sum-digits.max-retries\n",
    ),
    "an option like none": ([*DEBUG, "--zebra", "3"], "error: no option --zebra\n"),
    "two unknown options": (
        [*DEBUG, "--step", "3", "--trainer.optimizer.lrr", "1e-4"],
        "error: no option --step, --trainer.optimizer.lrr; perhaps you meant --steps, --trainer.optimizer.lr\n",
    ),
    "a value of a part that is left out": (
        [*DEBUG, "--trainer.reference", "lagged"],
        "--trainer.reference = 'lagged': it is set by its fields: --trainer.reference.kind, --trainer.reference.",
    ),
    "a number that is none": ([*DEBUG, "--steps", "three"], "three"),
    "a number out of bounds": ([*DEBUG, "--steps", "0"], "steps = 0: must be at least 1"),
    "a group of one": (
        [*DEBUG, "--tasks.sum-digits.group-size", "1", "--rollouts-per-step", "8"],
        "group_size = 1: GRPO compares",
    ),
    "TRL's name of an option": (
        [*DEBUG, "--trainer.learning-rate", "1e-5"],
        "error: no option --trainer.learning-rate; perhaps you meant --trainer.optimizer.lr; "
        "docs/coming_from.md has TRL's words\n",
    ),
    "TRL's weight of the distance to a reference": (
        [*DEBUG, "--beta", "0.04"],
        "error: no option --beta; perhaps you meant --trainer.reference.kl-coef; "
        "docs/coming_from.md has TRL's words\n",
    ),
    "the end of an option of a part that is left out": (
        [*DEBUG, "--kl_coef", "0.04"],
        "error: no option --kl_coef; perhaps you meant --trainer.reference.kl-coef\n",
    ),
    "GPUs for a config of a CPU": (
        [*DEBUG, "--gpus", "2"],
        "--gpus = 2: this config computes on CPU: leave it out, or take --provision.device cuda",
    ),
    "a misspelt folder of a model": (
        [*DEBUG, "--model", str(TINY_MODEL.with_name("tiny_qwem3"))],
        f"perhaps you meant {TINY_MODEL}\n",
    ),
    "a missing model": (
        [*DEBUG, "--model.hf-assets-path", "nowhere"],
        "model.hf_assets_path = 'nowhere'",
    ),
}


@pytest.mark.parametrize("words, part", WORDS.values(), ids=WORDS)
def test_a_mistake_in_the_words_of_the_command_is_refused_in_one_line(refused, words, part):
    assert part in refused(*words)


# ---- what is no mistake


def test_an_evaluation_of_few_examples_is_warned_of_unless_there_is_none(command):
    words = [*DEBUG, "--dry-run", "--tasks.sum-digits.validation.count", "6"]
    warning = "tasks.sum_digits.validation: the reward of 6 examples says little"
    assert warning in command(*words)[2]
    assert command(*words, "--validation.every", "0")[2] == ""


UNSCORED = """
from torchtitan.experiments.rl.rubrics.rubric import Reward
class Undecided(Rubric):
    async def score_group(self, rollouts, env_input): return [Reward(reward=None) for _ in rollouts]
class ScoresItself(Own):
    async def score_group(self, group): return await super().score_group(group)
"""


@pytest.mark.parametrize("kind", ["Own", "ScoresItself"])
def test_a_rubric_that_leaves_the_scripted_replies_unscored_is_no_mistake(
    kind, command, config_module
):
    task = MADE.format(task=f"own({kind}, rubric=Undecided.Config())")
    name, _ = config_module(f"{MODULE}\n{UNSCORED}\n{task}")
    code, _, err = command("--module", name, "--config", "made", "--dry-run")
    assert (code, err) == (0, "")


SLOW = {
    "awaits": "await asyncio.sleep(3600)",
    "blocks": "time.sleep(3)",
}


@pytest.mark.parametrize("body", SLOW.values(), ids=SLOW)
def test_an_env_that_takes_longer_than_the_preflight_is_a_warning(
    command, config_module, monkeypatch, body
):
    monkeypatch.setattr(preflight, "GRACE_S", 0.5)
    classes, task = env(f"async def reset(self): {body}")
    name, _ = config_module(f"{MODULE}\n{classes}\n{MADE.format(task=task)}")
    words = ["--module", name, "--config", "made", "--dry-run", "--user-code.preflight-timeout-s"]
    code, out, err = command(*words, "0.2")
    assert code == 0 and "steps  " in out
    assert err.startswith(
        "warning: tasks.mine was not tried to its end (the rollout of the first example: no answer within 0.2 s"
    )
    assert (
        err.count("\n") == 1
        and "the run begins all the same; user_code.preflight_timeout_s sets this limit" in err
    )
    assert command(*words, "0")[2] == ""


USED = """
class Counted(Env):
    async def reset(self):
        SEEN.append("reset")
        return await super().reset()
    async def close(self): SEEN.append("close")

class CountedTask(Own):
    async def setup(self, policy):
        await super().setup(policy)
        SEEN.append("setup")
    def make_env(self, sample): return Counted()
    async def close(self): SEEN.append("end")
"""


def test_a_task_is_set_up_run_and_closed_once_and_its_prompt_shown(
    command, config_module, renderer, tokenizer
):
    name, file = config_module(f"{MODULE}\n{USED}\n{MADE.format(task='own(CountedTask)')}")
    code, out, err = command("--module", name, "--config", "made", "--dry-run")
    assert (code, err) == (0, "")
    assert __import__(name).SEEN == ["setup", "reset", "close", "reset", "close", "end"]
    ids = renderer.render_ids([{"role": "user", "content": "hi"}], add_generation_prompt=True)
    prompt = tokenizer.decode(ids)
    shown = [
        "task           mine: CountedTask, GRPO, groups of 8, 2 turns and 128 tokens a rollout at most",
        f"prompt         the first of mine, {len(ids)} tokens, as the model sees it:",
        *(f"  | {line}" for line in prompt.split("\n")),
        f"tokens         {' '.join(map(str, ids))}",
    ]
    shown[1:1] = [
        "rows           of mine: 2 to train on",
        "rewards        of mine: exact x 1",
    ]
    assert out.splitlines()[-len(shown) :] == shown
    assert "weights        " in out and "learning rate  " in out


THINKS = """
import re
FORMAT = re.compile(r"<think>.*?</think>.*", re.DOTALL)
def by_pattern(completion, example): return float(FORMAT.fullmatch(completion) is not None)
def by_text(completion, example): return float("<think>" in completion)
def of_rollout(rollout, example): return float("<think>" in str(rollout.turns))
def plain(completion, example):
    "<think>"
    return float(example["answer"] in completion)
"""


@pytest.mark.parametrize(
    "fn", ["by_pattern", "by_text", "RewardFn(of_rollout, takes='rollout')", "plain"]
)
def test_a_format_reward_that_looks_for_a_thought_in_the_completion_is_told_where_it_is(
    command, config_module, fn
):
    name, _ = config_module(
        f"{MODULE}\n{THINKS}\n{MADE.format(task=f'asks(plain, {fn})' if fn != 'plain' else 'asks(plain)')}"
    )
    code, _, err = command("--module", name, "--config", "made", "--dry-run")
    said = [line for line in err.splitlines() if "<think>" in line]
    assert code == 0 and len(said) == fn.startswith("by_")
    if said:
        assert f"warning: tasks.mine.rubric: {fn}: looks for <think> in the completion" in said[0]
        assert '"reasoning_content"' in said[0]


# ---- reward functions by words alone


REWARDS = """
def exact(completion, example): return float(completion == example["answer"])
def short(completion, example): return float(len(completion) < 9)
"""


@pytest.mark.parametrize(
    ("words", "shown"),
    [
        ("right_answer", "right_answer x 1"),
        ("{one}:exact,short", "exact x 0.5, short x 0.5"),
        ("{one}:exact,{other}:short", "exact x 0.5, short x 0.5"),
    ],
)
def test_reward_functions_of_several_files_are_named_in_one_word(
    command, config_module, tmp_path, words, shown
):
    rows = tmp_path / "rows.jsonl"
    rows.write_text('{"question": "6 * 7?", "answer": "42"}\n' * 20)
    (_, one), (_, other) = config_module(REWARDS), config_module(REWARDS)
    code, out, _ = command(
        "--config",
        "rl_questions_qwen3_debug",
        "--dry-run",
        "--tasks.questions.dataset.path",
        str(rows),
        "--tasks.questions.rubric",
        words.format(one=one, other=other),
    )
    assert code == 0 and f"rewards        of questions: {shown}" in out


def test_reward_functions_that_are_named_take_the_place_of_a_rubric_with_its_own(
    command, config_module
):
    _, one = config_module(REWARDS)
    words = ("--config", "rl_grpo_qwen3_debug", "--dry-run", "--tasks.sum-digits.rubric")
    code, out, _ = command(*words, f"{one}:short")
    assert code == 0 and "rewards        of sum_digits: short x 1\n" in out


def test_reward_functions_of_one_name_are_refused(refused, config_module):
    (_, one), (_, other) = config_module(REWARDS), config_module(REWARDS)
    words = f"{one}:exact,{other}:exact"
    assert "'exact' stands twice: give one of them another name" in refused(
        "--config", "rl_questions_qwen3_debug", "--tasks.questions.rubric", words
    )


def test_reward_functions_in_a_list_are_to_be_given_one_by_one():
    def exact(completion, example): ...

    with pytest.raises(ConfigError, match=r"give them one by one: \(rows, exact, exact\)"):
        question_task([{"question": "1", "answer": "1"}], [exact, exact])


def test_words_of_a_run_that_was_resumed_name_each_option_once():
    words = ["--steps", "40", "--tasks.t.algorithm", "grpo", "--steps", "60", "--metrics.wandb"]
    assert last_of_each(words) == [
        "--tasks.t.algorithm",
        "grpo",
        "--steps",
        "60",
        "--metrics.wandb",
    ]
