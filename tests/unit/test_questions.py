"""Own data in a few lines: question_task, bare reward functions, and the same from the command line."""

import asyncio
import json
import re
import shlex
import sys
from pathlib import Path

import pandas
import pytest

from tests.fakes.contexts import context_of
from tests.fakes.policy import ScriptedPolicy
from tests.unit.command_line import assert_one_line
from torchtitan.experiments.rl.algorithms import GRPO, MaxRL
from torchtitan.experiments.rl.command.build import build_tasks, read_policy_tokenizer
from torchtitan.experiments.rl.command.command_line import load_config, parse_command
from torchtitan.experiments.rl.command.resume import resolved_config
from torchtitan.experiments.rl.config_registry import rl_questions_qwen3_debug
from torchtitan.experiments.rl.errors import ConfigError, MissingError
from torchtitan.experiments.rl.tasks import MemoryRows, RewardFn, RowDataset, Rubric, question_task
from torchtitan.experiments.rl.train import main

PAGE = (Path(__file__).parents[2] / "docs" / "tasks.md").read_text()
README = (Path(__file__).parents[2] / "README.md").read_text()
ROWS = [{"question": "6 * 7?", "answer": "42"}, {"question": "2 + 2?", "answer": "4"}]


def exact(completion, example):
    return completion.strip() == example["answer"]


async def short(completion, example):
    return 1 / (1 + len(completion))


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """The working folder, with mine.jsonl."""
    (tmp_path / "mine.jsonl").write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("PYTHONPATH", "")
    return tmp_path


async def rewards_of(config, renderer, tokenizer, answer):
    task = config.build(name="mine", context=context_of(renderer))
    group = await task.run_group(
        task.dataset[0], ScriptedPolicy(tokenizer, answer), group_id="g", seed=0, group_size=2
    )
    assert await task.score_group(group) is None
    return group, [rollout.reward for rollout in group.rollouts]


@pytest.mark.parametrize("kind", ["file", "list", "frame", "config"])
async def test_any_form_of_the_rows_gives_the_same_task(kind, folder, renderer, tokenizer):
    data = {
        "file": "mine.jsonl",
        "list": ROWS,
        "frame": pandas.DataFrame(ROWS),
        "config": RowDataset.Config(path="mine.jsonl"),
    }[kind]
    config = question_task(data, exact)
    config.check_present(field="tasks.mine")
    group, rewards = await rewards_of(config, renderer, tokenizer, "42")
    assert isinstance(config.algorithm, GRPO.Config) and rewards == [1.0, 1.0]
    assert group.rollouts[0].turns[0].prompt_messages == [{"role": "user", "content": "6 * 7?"}]
    task = config.build(name="mine", context=context_of(renderer))
    assert [task.dataset[i].env_input for i in range(len(task.dataset))] == ROWS


async def test_bare_functions_and_reward_fns_mix_and_may_be_async(renderer, tokenizer):
    async def by_rollout(rollout, row):
        return float(len(rollout.turns) == 1 and row["answer"] == "42")

    config = question_task(ROWS, exact, short, RewardFn(by_rollout, weight=2.0, takes="rollout"))
    group, rewards = await rewards_of(config, renderer, tokenizer, "4")
    assert group.rollouts[0].reward_components == {"exact": 0.0, "short": 0.5, "by_rollout": 1.0}
    assert rewards == [pytest.approx((0.0 + 0.5 + 2.0) / 4)] * 2


async def test_the_template_and_the_system_prompt_make_the_prompt(renderer):
    template = "{question} Answer in \\boxed{}, not {{}}."
    task = question_task(ROWS, exact, template=template, system_prompt="Be brief.").build(
        name="mine", context=context_of(renderer)
    )
    env = task.make_env(task.dataset[1])
    asked = [("system", "Be brief."), ("user", "2 + 2? Answer in \\boxed{}, not {{}}.")]
    assert [
        (message["role"], message["content"]) for message in (await env.reset()).messages
    ] == asked


def test_a_saved_config_says_how_many_rows_there_are_and_not_what_they_are():
    saved = resolved_config(question_task(ROWS, exact))
    assert saved["dataset"]["rows"] == "<2 rows>"
    assert saved["rubric"]["reward_fns"] == [f"{__name__}.exact"]


MISTAKES = {
    "a template of no column": (
        {"template": "{quest}"},
        "tasks.mine.template = '{quest}': the data has no column 'quest'",
    ),
    "a template without a column": (
        {"template": "Hello"},
        "tasks.mine.template = 'Hello': names no column of the data",
    ),
    "no reward function": (
        {"rubric": Rubric.Config()},
        "tasks.mine.rubric = None: names no reward function",
    ),
    "no rows": (
        {"dataset": RowDataset.Config(rows=MemoryRows([]))},
        "tasks.mine.dataset.rows = <0 rows>: has no rows",
    ),
    "no data": (
        {"dataset": RowDataset.Config()},
        "tasks.mine.dataset.path = None: names no data: give a .jsonl",
    ),
    "no such file": (
        {"dataset": RowDataset.Config(path="x.jsonl")},
        "tasks.mine.dataset.path = 'x.jsonl': no such file",
    ),
    "two sources": (
        {"dataset": RowDataset.Config(path="mine.jsonl", rows=MemoryRows(ROWS))},
        "tasks.mine.dataset.path = 'mine.jsonl': the dataset has rows of its own too: name one of the two",
    ),
}


@pytest.mark.parametrize(("changes", "message"), MISTAKES.values(), ids=MISTAKES)
def test_each_mistake_is_one_line_before_a_run(changes, message, folder):
    config = question_task("mine.jsonl", exact)
    for name, value in changes.items():
        setattr(config, name, value)
    run = rl_questions_qwen3_debug()
    run.tasks = {"mine": config}
    with pytest.raises(ConfigError, match="^" + re.escape(message)):
        config.validate(field="tasks.mine")
        config.check_present(field="tasks.mine")
        build_tasks(run, read_policy_tokenizer(run))


def test_a_row_without_what_the_prompt_is_made_of_is_named_by_its_line(folder):
    (folder / "mine.jsonl").write_text(
        '{"question": "1?"}\n\n{"answer": "2"}\n{"question": null}\n'
    )
    run = rl_questions_qwen3_debug()
    run.tasks = {"mine": question_task("mine.jsonl", exact)}
    message = "tasks.mine.template = '{question}': mine.jsonl: line 3 has no 'question', and 1 other: fill it in"
    with pytest.raises(ConfigError, match="^" + re.escape(message)):
        build_tasks(run, read_policy_tokenizer(run))


ALPACA = [
    {"instruction": "Add.", "input": "1 2", "answer": "3"},
    {"instruction": "Name a color.", "input": None, "answer": "red"},
]


def test_a_missing_value_is_refused_with_the_field_that_gives_it_a_text(renderer):
    template = "{instruction}\n{input}"
    task = question_task(ALPACA, exact, template=template)
    with pytest.raises(
        ConfigError,
        match="row 1 has no 'input': .* or give --tasks.mine.missing-text '' to ask an empty text there",
    ):
        task.build(name="mine", context=context_of(renderer))
    task = question_task(ALPACA, exact, template=template, missing_text="").build(
        name="mine", context=context_of(renderer)
    )
    assert [task.question_of(row) for row in ALPACA] == ["Add.\n1 2", "Name a color.\n"]
    lacking = [ALPACA[0], {"instruction": "Name a color.", "answer": "red"}]
    task = question_task(lacking, exact, template=template, missing_text="").build(
        name="mine", context=context_of(renderer)
    )
    assert [task.question_of(task.dataset[index].env_input) for index in range(2)] == [
        "Add.\n1 2",
        "Name a color.\n",
    ]


def test_odd_rows_are_counted_in_one_warning_with_the_first_ones_line(folder, capsys, monkeypatch):
    good = [{"question": f"{n}?", "answer": "1"} for n in range(6)]
    odd = [
        {"question": " ", "answer": "1"},
        good[2],
        {"question": ["a", "b"], "answer": "1"},
        {"question": "7?", "answer": None},
        good[2],
        {"question": "long " * 2000, "answer": "1"},
    ]
    (folder / "mine.jsonl").write_text("\n".join(map(json.dumps, [*good, *odd])))
    (folder / "my_rewards.py").write_text(
        "def exact(completion, example): return len(completion)\n"
    )
    words = "--tasks.questions.dataset mine.jsonl --tasks.questions.rubric my_rewards.py:exact --dry-run"
    assert main(["--config", "rl_questions_qwen3_debug", *words.split()]) == 0
    err = capsys.readouterr().err
    limit = rl_questions_qwen3_debug().tasks["questions"].env.max_rollout_tokens
    assert err == (
        "warning: tasks.questions.dataset: of 12 rows 1 has an empty 'question' (first: line 7), "
        "2 repeat another (first: line 8), 1 has a list as 'question', not a text (first: line 9), "
        "1 has no 'answer' (first: line 10), "
        f"1 leaves no room for an answer in env.max_rollout_tokens = {limit} (first: line 12)\n"
    )


CHAT = [{"role": "user", "content": "6 * 7?"}]
SHAREGPT = [{"from": "human", "value": "6 * 7?"}]
OF_TRL = "--tasks.questions.messages-column prompt"
COLUMNS = {
    "chats as a text": (
        [{"prompt": CHAT, "answer": "42"}],
        "--tasks.questions.template {prompt}",
        "tasks.questions.template = '{prompt}': mine.jsonl: line 1 has a list of messages as "
        f"'prompt', want a text: where the rows are chats, give {OF_TRL}",
    ),
    "chats of ShareGPT as a text": (
        [{"prompt": SHAREGPT, "answer": "42"}],
        "--tasks.questions.template {prompt}",
        "tasks.questions.template = '{prompt}': mine.jsonl: line 1 has a list of messages as "
        f"'prompt', want a text: where the rows are chats, give {OF_TRL}",
    ),
    "chats under another name": (
        [{"prompt": CHAT, "answer": "42"}],
        "",
        "tasks.questions.template = '{question}': the data has no column 'question'; it has "
        f"prompt, answer: name that of the chats by {OF_TRL}",
    ),
    "chats under a misspelt name": (
        [{"prompt": CHAT, "answer": "42"}],
        "--tasks.questions.messages-column promt",
        "tasks.questions.messages_column = 'promt': the data has no column 'promt'; it has "
        f"prompt, answer: name that of the chats by {OF_TRL}",
    ),
    "texts under another name": (
        [{"answer": "42", "prompt": "6 * 7?", "level": 1}],
        "",
        "tasks.questions.template = '{question}': the data has no column 'question'; it has "
        "answer, prompt, level: name one of them, such as by --tasks.questions.template '{prompt}'",
    ),
    "texts under a like name": (
        [{"id": 7, "questions": "6 * 7?", "answer": "42"}],
        "",
        "tasks.questions.template = '{question}': the data has no column 'question'; it has id, "
        "questions, answer: name one of them, such as by --tasks.questions.template '{questions}'",
    ),
    "nothing to ask": (
        [{"answer": "42"}],
        "",
        "tasks.questions.template = '{question}': the data has no column 'question'; it has answer",
    ),
}


@pytest.mark.parametrize(("rows", "words", "message"), COLUMNS.values(), ids=COLUMNS)
def test_a_column_that_makes_no_prompt_is_refused_with_the_option_that_does(
    rows, words, message, folder, capsys
):
    (folder / "mine.jsonl").write_text("\n".join(map(json.dumps, rows)))
    (folder / "my_rewards.py").write_text(
        "def exact(completion, example): return len(completion)\n"
    )
    command = [
        *["--config", "rl_questions_qwen3_debug", "--tasks.questions.dataset", "mine.jsonl"],
        *["--tasks.questions.rubric", "my_rewards.py:exact", "--dry-run"],
    ]
    assert main([*command, *words.split()]) == 2
    assert capsys.readouterr().err == f"error: {message}\n"
    for option in re.findall("--tasks.*", message):
        assert main([*command, *shlex.split(option)]) == 0


@pytest.mark.parametrize(
    ("template", "prompt"),
    [
        ("{question}", "6 * 7?"),
        ("{question} {q-2} {a b} {x.y}", "6 * 7? hyphen space dot"),
        ("{question} \\frac{1 - n}{2 n} x^{n - 1} {}", "6 * 7? \\frac{1 - n}{2 n} x^{n - 1} {}"),
        ("{question}{q-2}, \\boxed{{answer}}", "6 * 7?hyphen, \\boxed{42}"),
        ('{question} as {"answer": 1}', '6 * 7? as {"answer": 1}'),
    ],
)
def test_a_column_of_any_name_fills_its_braces_and_other_braces_are_text(
    renderer, template, prompt
):
    rows = [{"question": "6 * 7?", "answer": "42", "q-2": "hyphen", "a b": "space", "x.y": "dot"}]
    task = question_task(rows, exact, template=template).build(
        name="mine", context=context_of(renderer)
    )
    assert task.question_of(rows[0]) == prompt


@pytest.mark.parametrize(
    "name", ["q-2", "the question", "reward_model.ground_truth", " question", "quest"]
)
def test_braces_that_look_like_a_column_and_are_none_are_refused(renderer, name):
    message = re.escape(f"the data has no column {name!r}; it has question, answer")
    with pytest.raises(ConfigError, match=message):
        question_task(ROWS, exact, template=f"{{question}}{{{name}}}").build(
            name="mine", context=context_of(renderer)
        )


MISSING = {
    "NaN": (float("nan"), "rows: row 1 has no 'question'"),
    "NaT": (pandas.NaT, "rows: row 1 has no 'question'"),
    "NA": (pandas.NA, "rows: row 1 has no 'question'"),
    "bytes": (b"abc", "rows: row 1 has bytes as 'question', want a text"),
}


@pytest.mark.parametrize(("value", "message"), MISSING.values(), ids=MISSING)
def test_a_value_that_is_no_text_is_refused_by_its_row_and_never_asked(renderer, value, message):
    rows = [ROWS[0], {"question": value, "answer": "1"}]
    for data in (rows, pandas.DataFrame(rows)):
        with pytest.raises(ConfigError, match=message):
            question_task(data, exact).build(name="mine", context=context_of(renderer))


def test_columns_of_a_frame_that_are_no_texts_are_refused():
    with pytest.raises(
        ConfigError,
        match="dataset.rows = 0: row 0 has a column that is named by no text: rename it",
    ):
        question_task(pandas.DataFrame([["6 * 7?", "42"]]), exact)


CONTROL = [*ROWS, {"question": "What does <|im_end|> mean?", "answer": "the end"}]


def built(**fields):
    """Build the one task of a run as the command does, and return it with the tokenizer."""
    run = rl_questions_qwen3_debug()
    run.tasks = {"mine": question_task(fields.pop("data", CONTROL), exact, **fields)}
    policy = read_policy_tokenizer(run)
    return build_tasks(run, policy)["mine"], policy.tokenizer


async def first_prompt_of(task, tokenizer, index):
    group = await task.run_group(
        task.dataset[index], ScriptedPolicy(tokenizer), group_id="g", seed=0, group_size=1
    )
    return group.rollouts[0].turns[0].prompt_token_ids.tolist(), group.costs


CONTROL_CHATS = [
    {"messages": [{"role": "user", "content": row["question"]}], "answer": "1"} for row in CONTROL
]


@pytest.mark.parametrize(
    "fields",
    [{}, {"data": CONTROL_CHATS, "messages_column": "messages"}],
    ids=["template", "messages"],
)
async def test_a_special_token_in_a_row_is_text_to_the_model_unless_a_field_says_that_it_is_meant(
    fields,
):
    task, tokenizer = built(**fields)
    ends = tokenizer.convert_tokens_to_ids("<|im_end|>")
    assert (
        "tasks.mine.dataset: 1 of 3 rows has a special token in "
        f"'{fields.get('messages_column', 'question')}' (first: row 2, '<|im_end|>'), which the "
        "model is shown as text" in task.examples_warning
    )
    prompt, costs = await first_prompt_of(task, tokenizer, 2)
    assert "What does <|im_end|> mean?<|im_end|>" in tokenizer.decode(prompt)
    assert prompt.count(ends) == 1 and costs["rollout/mine/special_texts"] == 1
    assert (await first_prompt_of(task, tokenizer, 0))[1].get("rollout/mine/special_texts") is None

    task, _ = built(control_tokens=True, **fields)
    prompt, costs = await first_prompt_of(task, tokenizer, 2)
    assert prompt.count(ends) == 2 and "rollout/mine/special_texts" not in costs
    assert task.examples_warning is None or "special token" not in task.examples_warning


async def test_special_tokens_of_a_template_are_meant_and_no_row_may_have_one_beside_them():
    template = "{question}<|im_end|>"
    message = re.escape(
        "tasks.mine.dataset = '<|im_end|>': row 2 has it in 'question', where it would be a control "
        "token as the '<|im_end|>' of the template"
    )
    with pytest.raises(ConfigError, match=message):
        built(template=template)
    task, tokenizer = built(data=ROWS, template=template)
    prompt, _ = await first_prompt_of(task, tokenizer, 0)
    assert prompt.count(tokenizer.convert_tokens_to_ids("<|im_end|>")) == 2


EXACT = "def exact(completion, example): return completion.strip() == example['answer']\n"
BOXED = (
    "def boxed(completion, example): return completion == '\\\\boxed{' + example['answer'] + '}'\n"
)
ANSWERS = {
    "texts": ("mine.jsonl", '{"question": "1?", "answer": "42"}\n', EXACT, None),
    "numbers of a CSV": ("mine.csv", "question,answer\n1?,42\n2?,4\n", EXACT, None),
    "a form that the reward asks for": (
        "mine.jsonl",
        '{"question": "1?", "answer": "42"}\n',
        BOXED,
        None,
    ),
    "no column of answers": (
        "mine.jsonl",
        '{"question": "1?"}\n',
        "def none(c, e): return 0\n",
        None,
    ),
    "numbers": (
        "mine.jsonl",
        '{"question": "1?", "answer": "42"}\n{"question": "2?", "answer": "7"}\n\n{"question": "3?", "answer": 4}\n',
        EXACT,
        "of the first 3 rows 1 are not rewarded for their own answer (line 4); line 4: the reply '4' earns 0, and an empty "
        "reply 0; see to the row's answer, and to how exact compares it with a text",
    ),
    "an empty answer": (
        "mine.jsonl",
        '{"question": "1?", "answer": ""}\n{"question": "2?", "answer": "4"}\n',
        EXACT,
        "of the first 2 rows 1 are not rewarded for their own answer (line 1); line 1: the reply '' earns 1, and an empty "
        "reply 1;",
    ),
    "a function that fails": (
        "mine.jsonl",
        '{"question": "1?", "answer": "4"}\n',
        "def last(completion, example): return completion.split()[-1] == example['answer']\n",
        "(line 1); line 1: reward function 'last': IndexError",
    ),
}


@pytest.mark.parametrize(("name", "rows", "code", "warning"), ANSWERS.values(), ids=ANSWERS)
def test_each_rows_own_answer_is_tried_as_the_reply_before_a_run(
    folder, capsys, name, rows, code, warning
):
    (folder / name).write_text(rows)
    (folder / "my_rewards.py").write_text(code)
    function = code.partition("(")[0].removeprefix("def ")
    words = f"--tasks.questions.dataset {name} --tasks.questions.rubric my_rewards.py:{function} --dry-run"
    assert main(["--config", "rl_questions_qwen3_debug", *words.split()]) == 0
    lines = [line for line in capsys.readouterr().err.splitlines() if "own answer" in line]
    assert len(lines) == (warning is not None)
    if warning is not None:
        assert lines[0].startswith("warning: tasks.questions.rubric: ") and warning in lines[0]


@pytest.mark.parametrize(("column", "said"), [("label", True), ("answer", False)])
def test_a_dry_run_says_where_no_known_answer_was_tried(
    tmp_path, monkeypatch, capsys, column, said
):
    rows = "".join(json.dumps({"question": f"{n}?", column: "1"}) + "\n" for n in range(3))
    (tmp_path / "labelled.jsonl").write_text(rows)
    (tmp_path / "labels.py").write_text("def one(completion, example): return completion == '1'")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sys.path", [*sys.path])
    monkeypatch.delitem(sys.modules, "labels", raising=False)
    words = (
        "--tasks.questions.dataset labelled.jsonl --tasks.questions.rubric labels.py:one --dry-run"
    )
    assert main(["--config", "rl_questions_qwen3_debug", *words.split()]) == 0
    line = "answers        of questions: no column 'answer': no known answer was tried"
    assert (line in capsys.readouterr().out.splitlines()) == said


def test_a_column_of_numbers_and_texts_is_warned_of_by_the_row_of_the_rarer_kind(renderer):
    answers = ["1", "2", 3, "4", None]
    rows = [{"question": f"{index}?", "answer": answer} for index, answer in enumerate(answers)]
    task = question_task(rows, exact).build(name="mine", context=context_of(renderer))
    task.check_examples(field="tasks.mine")
    assert task.examples_warning is not None
    wanted = "1 has a number as 'answer' where the others have a text, which are never equal (first: row 2)"
    assert wanted in task.examples_warning


def test_rows_that_are_chats_are_answered_as_they_stand(renderer):
    chat = [
        {"role": "user", "content": "Hi."},
        {"role": "assistant", "content": "Yes?"},
        {"role": "user", "content": "6 * 7?"},
    ]
    config = question_task(
        [{"messages": chat, "answer": "42"}],
        exact,
        messages_column="messages",
        system_prompt="Be brief.",
    )
    config.validate(field="tasks.mine")
    task = config.build(name="mine", context=context_of(renderer))
    task.check_examples(field="tasks.mine")
    assert task.examples_warning is None
    assert asyncio.run(task.make_env(task.dataset[0]).reset()).messages == [
        {"role": "system", "content": "Be brief."},
        *chat,
    ]


@pytest.mark.parametrize(
    ("messages", "fault"),
    [
        (
            [{"role": "user", "content": "1?"}, {"role": "assistant", "content": "1"}],
            "row 0 ends with an assistant's message",
        ),
        (
            [{"role": "person", "content": "1?"}],
            "row 0: messages[0] has role str 'person', want one of",
        ),
        ("1?", "row 0: messages is str '1?', want a list of messages"),
        ([], "row 0: messages is empty"),
    ],
)
def test_a_chat_that_can_not_be_answered_is_refused_by_its_row(renderer, messages, fault):
    task = question_task([{"messages": messages}], exact, messages_column="messages").build(
        name="mine", context=context_of(renderer)
    )
    with pytest.raises(
        ConfigError, match=f"^tasks.mine.messages_column = 'messages': {re.escape(fault)}"
    ):
        task.check_examples(field="tasks.mine")


def test_data_of_another_kind_is_refused():
    for data in ({"question": "?"}, 3, None, list, ["6 * 7?"]):
        with pytest.raises(ConfigError):
            question_task(data, exact)


def test_a_bare_function_of_other_arguments_is_refused_with_its_signature():
    for fn, shown in ((lambda completion: 0, "(completion)"), (lambda a, b, c: 0, "(a, b, c)")):
        with pytest.raises(ConfigError, match=re.escape(shown)):
            Rubric.Config(reward_fns=[fn]).build()


# ---- the command line


def load(*words):
    return load_config(parse_command(["--config", "rl_questions_qwen3_debug", *words]))


def test_the_command_line_alone_names_data_and_reward(folder):
    (folder / "my_rewards.py").write_text(
        "def exact(completion, example): return completion == example['answer']\ndef short(completion, example): return 0\n"
    )
    config = load(
        *[
            "--tasks.questions.dataset.path",
            "mine.jsonl",
            "--tasks.questions.rubric",
            "my_rewards.py:exact,short",
        ],
        *["--tasks.questions.rubric.timeout-s", "5", "--steps", "3"],
    )
    rubric = config.tasks["questions"].rubric
    assert [fn.__name__ for fn in rubric.reward_fns] == ["exact", "short"]
    assert (rubric.timeout_s, config.steps, config.tasks["questions"].dataset.path) == (
        5.0,
        3,
        "mine.jsonl",
    )


def test_validation_is_a_file_of_its_own_or_the_rest_of_a_share(folder):
    (folder / "held_out.jsonl").write_text(json.dumps({"question": "1?", "answer": "1"}))
    data = ["--tasks.questions.dataset", "mine.jsonl"]
    task = load(*data, "--tasks.questions.validation", "held_out.jsonl").tasks["questions"]
    assert (task.dataset.path, task.validation.path) == ("mine.jsonl", "held_out.jsonl")
    assert load(*data).tasks["questions"].validation is None
    task = load(*data, "--tasks.questions.dataset.split", "0.5").tasks["questions"]
    assert [
        [row["answer"] for row in part.build().rows] for part in (task.dataset, task.validation)
    ] == [["42"], ["4"]]
    both = [
        "--tasks.questions.validation",
        "held_out.jsonl",
        "--tasks.questions.validation.split",
        "train[:1]",
    ]
    task = load(*data, "--tasks.questions.dataset.split=0.5", *both).tasks["questions"]
    assert (task.dataset.split, task.validation.path, task.validation.split) == (
        "0.5",
        "held_out.jsonl",
        "train[:1]",
    )


TABLE = re.findall(r"^\| [^|]+ \| `(--tasks\.questions[^`]+)` \| `([^`]+)` \|$", PAGE, re.MULTILINE)


@pytest.mark.parametrize(("words", "code"), TABLE, ids=[words.split()[0] for words, _ in TABLE])
def test_each_kind_of_rows_of_the_page_is_the_same_task_by_flag_and_in_python(
    words, code, folder, renderer
):
    chat = [{"role": "user", "content": "6 * 7?"}]
    rows = [
        {"question": f"{n}?", "answer": "1", "context": "Sums.", "messages": chat}
        for n in range(10)
    ]
    for name in ("mine.jsonl", "held_out.jsonl"):
        (folder / name).write_text("\n".join(map(json.dumps, rows)))
    by_flag = load("--tasks.questions.dataset", "mine.jsonl", *shlex.split(words)).tasks[
        "questions"
    ]
    in_python = eval(code, {"question_task": question_task, "exact": exact})
    for name in ("dataset", "validation", "system_prompt", "template", "messages_column"):
        assert getattr(by_flag, name) == getattr(in_python, name), name
    task = in_python.build(name="mine", context=context_of(renderer))
    task.check_examples(field="tasks.mine")
    assert task.examples_warning is None


def test_the_page_has_each_kind_of_rows():
    assert len(TABLE) == 5


def test_a_name_alone_is_no_rubric_and_the_error_says_what_is(folder):
    with pytest.raises(
        ConfigError, match="rubric = 'larger': a rubric is .* my_rewards.py:larger; each"
    ):
        load("--tasks.questions.rubric", "larger")


def test_a_class_is_named_in_the_same_way_and_its_fields_can_be_set(folder):
    (folder / "my_algorithms.py").write_text(
        "from torchtitan.experiments.rl.algorithms import GRPO\nclass Mine(GRPO): pass\nclass Other: pass\n"
    )
    config = load(
        "--tasks.questions.algorithm=my_algorithms.py:Mine",
        "--tasks.questions.algorithm.length-penalty",
        "tokens",
    )
    algorithm = config.tasks["questions"].algorithm
    assert isinstance(algorithm, GRPO.Config) and algorithm.length_penalty == "tokens"
    assert type(algorithm.build()).__name__ == "Mine"
    config = load("--tasks.questions.algorithm", "torchtitan.experiments.rl.algorithms:MaxRL")
    assert type(config.tasks["questions"].algorithm) is MaxRL.Config


@pytest.mark.parametrize(
    ("place", "message"),
    {
        "nowhere.py:exact": "no such file: nowhere.py",
        "my_rewards.py:exakt": "my_rewards.py has no 'exakt'; it defines exact, Box",
        "my_rewards.py:Box": "Box is no Rubric",
        "my_rewards.py:number": "number is no function: want reward functions fn(completion, example)",
        "no_such_module:exact": "no_such_module can't be imported: ModuleNotFoundError",
        "json.py:dumps": "a module is named 'json' already: rename the file",
        "broken.py:exact": "broken.py can't be imported: ZeroDivisionError: division by zero",
    }.items(),
)
def test_each_wrong_place_is_one_line(place, message, folder, capsys):
    (folder / "my_rewards.py").write_text(
        "def exact(completion, example): return 0\nclass Box: pass\nnumber = 3\n"
    )
    (folder / "broken.py").write_text("1 / 0\n")
    (folder / "json.py").write_text("")
    assert (
        main(
            ["--config", "rl_questions_qwen3_debug", "--tasks.questions.rubric", place, "--dry-run"]
        )
        == 2
    )
    assert_one_line(
        capsys.readouterr().err, f"error: tasks.questions.rubric = {place!r}: {message}"
    )


async def test_own_data_as_the_readme_shows_it(folder, renderer, tokenizer):
    (code,) = re.findall(r"```python\n# mine.py\n(.*?)```", README, re.DOTALL)
    (folder / "mine.py").write_text(code)
    assert len([line for line in code.splitlines() if line.strip()]) < 15
    sys.path.append(str(folder))
    config = load_config(parse_command(["--module", "mine", "--config", "rl_mine"]))
    config.tasks["mine"].check_present(field="tasks.mine")
    assert (await rewards_of(config.tasks["mine"], renderer, tokenizer, "42"))[1] == [1.0, 1.0]


def test_the_command_of_the_readme_needs_no_python(folder, capsys):
    (folder / "my_rewards.py").write_text(
        "def exact(completion, example): return completion == example['answer']\n"
    )
    words = "--tasks.questions.dataset.path mine.jsonl --tasks.questions.rubric my_rewards.py:exact"
    assert words in " ".join(README.replace("\\\n", " ").split())
    assert main(["--config", "rl_questions_qwen3_debug", "--dry-run", *words.split()]) == 0
    assert "before a run" not in capsys.readouterr().out


def test_what_is_missing_is_named_by_the_config_that_ships(capsys):
    assert main(["--config", "rl_questions_qwen3_debug"]) == 2
    assert "tasks.questions.dataset.path = None: names no data" in capsys.readouterr().err
    config = load_config(parse_command(["--config", "rl_questions_qwen3"]))
    with pytest.raises(MissingError, match="names no data"):
        config.tasks["questions"].check_present(field="tasks.questions")
