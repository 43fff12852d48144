"""Math problems from files, read and compared as mathematics, in processes that can be killed."""

import json
import math

import datasets
import pytest

from tests.fakes.contexts import context_of
from tests.fakes.policy import ScriptedPolicy
from torchtitan.experiments.rl.algorithms.grpo import GRPO
from torchtitan.experiments.rl.config_registry import rl_math_qwen3
from torchtitan.experiments.rl.data import rows
from torchtitan.experiments.rl.data.rows import RowDataset
from torchtitan.experiments.rl.errors import ConfigError
from torchtitan.experiments.rl.rollouts.types import RolloutStatus
from torchtitan.experiments.rl.tasks.examples.math import (
    MathRubric,
    MathTask,
    answer_in,
    same_answer,
)

pytestmark = pytest.mark.usefixtures("one_scoring_server")

ROWS = [
    {"question": "What is 6 * 7?", "answer": "42"},
    {"question": "Half of 3?", "answer": "\\frac{3}{2}"},
    {"question": "Roots of x^2 = 4?", "answer": "\\{-2, 2\\}"},
    {"question": "2 + 2?", "answer": "4"},
]
GSM8K_ROW = {
    "question": "Ann has 3 bags of 40 nuts. How many?",
    "answer": "3 * 40 = <<3*40=120>>120 nuts\n#### 1,200",
}


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")


@pytest.fixture
def file(tmp_path):
    """Writes rows, as jsonl unless the name says otherwise; gives the path."""

    def write(rows=ROWS, name="problems.jsonl"):
        path = tmp_path / name
        if path.suffix == ".parquet":
            columns = {name: [row[name] for row in rows] for name in ("question", "answer")}
            datasets.Dataset.from_dict(columns).to_parquet(path)
        else:
            path.write_text(
                "".join((row if isinstance(row, str) else json.dumps(row)) + "\n" for row in rows)
            )
        return str(path)

    return write


def config(path, *, rubric=None, template=None, **dataset):
    task = MathTask.Config(
        algorithm=GRPO.Config(), dataset=RowDataset.Config(path=path, **dataset), group_size=4
    )
    task.rubric = MathRubric.Config(isolated_workers=1, **(rubric or {}))
    task.template = template or task.template
    return task


# ---- the data


@pytest.mark.parametrize("name", ["problems.jsonl", "problems.json", "problems.parquet"])
def test_a_file_of_any_format_gives_its_rows_in_order(file, name):
    dataset = RowDataset.Config(path=file(name=name)).build()
    assert [dataset[i].env_input for i in range(len(dataset))] == ROWS
    assert [dataset[i].sample_id for i in range(len(dataset))] == ["0", "1", "2", "3"]


def test_one_file_can_be_cut_into_training_and_validation(file):
    path = file()
    parts = [
        RowDataset.Config(path=path, split=split).build()
        for split in ("train[:75%]", "train[75%:]", "test[:1]")
    ]
    assert [[part[i].env_input["answer"] for i in range(len(part))] for part in parts] == [
        ["42", "\\frac{3}{2}", "\\{-2, 2\\}"],
        ["4"],
        ["42"],
    ]


async def test_columns_can_have_any_name_and_answers_can_be_numbers(file, renderer, tokenizer):
    path = file([{"problem": "6 * 7?", "solution": 42}])
    task_config = config(path, rubric={"answer_column": "solution"}, template="{problem}")
    task, policy, group, _ = await run(
        task_config, renderer, tokenizer, ["\\boxed{42}", "\\boxed{43}"]
    )
    task.check_examples(field="tasks.t")
    assert [rollout.reward for rollout in group.rollouts] == [1.0, 0.0]
    assert "user\n6 * 7?<|im_end|>" in tokenizer.decode(policy.sessions[0].prompts[0])


def test_an_answer_at_the_end_of_its_solution_is_cut_out_by_its_marker(file):
    (sample,) = RowDataset.Config(path=file([GSM8K_ROW]), demonstration_column="answer").build()
    assert answer_in(sample.env_input, column="answer", marker="####") == "1,200"
    assert sample.info == {"demonstration": GSM8K_ROW["answer"]}
    assert rl_math_qwen3().tasks["math"].rubric.answer_marker == "####"
    assert rl_math_qwen3().tasks["math"].dataset.demonstration_column == "answer"


MISTAKES = {
    "no such column": (
        {},
        {"template": "{problem}"},
        "t.template = '{problem}'",
        "no column 'problem'; it has question, answer",
    ),
    "no rows": (
        {"rows": [], "name": "problems.parquet"},
        {},
        "t.dataset.path",
        "is empty: want at least one row",
    ),
    "a slice with no rows": (
        {},
        {"split": "train[:0]"},
        "t.dataset.split = 'train[:0]': is empty: there are 4 rows",
    ),
    "no JSON": (
        {"rows": [*ROWS, "{"]},
        {},
        "t.dataset.path",
        "line 5 is no JSON (Expecting",
    ),
    "a slice that is none": (
        {},
        {"split": "train[x]"},
        "t.dataset.split = 'train[x]': names no part, such as",
    ),
    "a question that is null": (
        {"rows": [ROWS[0], {"question": None, "answer": "1"}]},
        {},
        "problems.jsonl: line 2 has no 'question': fill it in, or remove the row",
    ),
    "an answer that is a list": (
        {"rows": [{"question": "1?", "answer": ["1"]}]},
        {},
        "t.rubric.answer_column = 'answer': line 1 of ",
        "ends ['1']: want a text or a number",
    ),
    "no such answer column": (
        {},
        {"rubric": {"answer_column": "x"}},
        "t.rubric.answer_column = 'x': line 1 of ",
        "ends None: want",
    ),
    "an answer that is empty": (
        {"rows": [*ROWS, {"question": "1?", "answer": " "}]},
        {},
        "line 5 of ",
        "ends ' ': want a text",
    ),
    "an answer that is null": (
        {"rows": [*ROWS, {"question": "1?", "answer": None}]},
        {},
        "line 5 of ",
        "ends None: want a text",
    ),
    "no marker": (
        {},
        {"rubric": {"answer_marker": "####"}},
        "line 1 of ",
        "ends '42': want a text or a number behind \"####\"",
    ),
    "nothing after the marker": (
        {"rows": [{"question": "1?", "answer": "1 ####"}]},
        {"rubric": {"answer_marker": "####"}},
        "t.rubric.answer_column = 'answer': line 1 of ",
        "ends '1 ####': want a text",
    ),
}


@pytest.mark.parametrize(
    ("written", "fields", "parts"), [(w, d, p) for w, d, *p in MISTAKES.values()], ids=MISTAKES
)
def test_data_that_cannot_be_asked_is_refused_in_one_line_before_a_run(
    file, renderer, written, fields, parts
):
    task_config = config(file(**written), **fields)
    task_config.validate(field="tasks.t")  # a plan needs no data
    with pytest.raises(ConfigError) as error:
        task_config.check_present(field="tasks.t")
        task_config.build(name="tasks.t", context=context_of(renderer)).check_examples(
            field="tasks.t"
        )
    assert "\n" not in str(error.value)
    for part in parts:
        assert part in str(error.value)


def test_a_row_without_an_answer_is_refused_in_the_validation_too(file, renderer):
    task_config = config(file())
    task_config.validation = RowDataset.Config(
        path=file([{"question": "1?", "answer": ""}], name="held_out.jsonl")
    )
    with pytest.raises(
        ConfigError,
        match=r"tasks.t.rubric.answer_column = 'answer': line 1 of .*held_out.jsonl ends ''",
    ):
        task_config.build(name="t", context=context_of(renderer)).check_examples(field="tasks.t")


def test_a_missing_file_is_named_and_so_is_that_of_the_validation(file):
    task = config("nowhere/problems.jsonl")
    with pytest.raises(
        ConfigError, match=r"tasks.t.dataset.path = 'nowhere/problems.jsonl': no such file"
    ):
        task.check_present(field="tasks.t")
    task = config(file())
    task.validation = RowDataset.Config(path="nowhere/test.parquet")
    with pytest.raises(
        ConfigError, match=r"tasks.t.validation.path = 'nowhere/test.parquet': no such file"
    ):
        task.check_present(field="tasks.t")


def test_a_hub_dataset_is_loaded_by_its_three_names_and_not_before_the_run(monkeypatch):
    asked = []

    def load_dataset(path, name, *, split):
        asked.append((path, name, split))
        return datasets.Dataset.from_list([GSM8K_ROW])

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    monkeypatch.setattr(rows, "hub_fault", lambda: None)
    task = config("openai/gsm8k", name="main", split="test")
    task.validate(field="tasks.t")
    task.check_present(field="tasks.t")
    assert asked == []
    assert task.dataset.build()[0].env_input == GSM8K_ROW and asked == [
        ("openai/gsm8k", "main", "test")
    ]


def test_a_hub_that_cannot_be_reached_is_one_line(monkeypatch):
    def load_dataset(*args, **kwargs):
        raise ConnectionError("Couldn't reach 'openai/gsm8k' on the Hub\n(LocalEntryNotFoundError)")

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    found = {
        None: "can't be loaded: ConnectionError: Couldn't reach",
        "no hub answers": "is no file, and was never downloaded from the hub (no hub answers): name a .jsonl",
    }
    for fault, cause in found.items():
        monkeypatch.setattr(rows, "hub_fault", lambda fault=fault: fault)
        with pytest.raises(ConfigError) as error:
            config("openai/gsm8k").dataset.build()
        assert str(error.value).startswith(f"dataset.path = 'openai/gsm8k': {cause}")
        assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            lambda task: setattr(task, "template", "Solve it."),
            "tasks.t.template = 'Solve it.': names no column of the data",
        ),
        (
            lambda task: setattr(task.dataset, "path", ""),
            "tasks.t.dataset.path = '': must not be empty",
        ),
        (
            lambda task: setattr(task.dataset, "name", "main"),
            "tasks.t.dataset.name = 'main': only datasets of the hub have one",
        ),
    ],
)
def test_a_config_that_cannot_work_is_refused_before_a_plan(change, message):
    task = config("problems.jsonl")
    change(task)
    with pytest.raises(ConfigError) as error:
        task.validate(field="tasks.t")
    assert str(error.value).startswith(message)


def test_without_math_verify_the_cure_is_its_name(file, monkeypatch):
    monkeypatch.setattr(
        "torchtitan.experiments.rl.tasks.examples.math.find_spec", lambda name: None
    )
    with pytest.raises(
        ConfigError,
        match=r"tasks.t.rubric = 'math-verify': is not installed: pip install math-verify",
    ):
        config(file()).check_present(field="tasks.t")


# ---- the comparison


@pytest.mark.parametrize(
    ("expected", "given", "same"),
    [
        ("42", "42.0", True),
        ("42", "x = 42", True),
        ("1,200", "1200", True),
        ("1200", "\\$1,200", True),
        ("\\frac{1}{2}", "0.5", True),
        ("1/2", "\\dfrac{2}{4}", True),
        ("\\sqrt{8}", "2\\sqrt{2}", True),
        ("x^2 + 2x + 1", "(x + 1)^2", True),
        ("\\{1, 2\\}", "\\{2, 1\\}", True),
        ("[1, 2)", "[1,2)", True),
        ("10\\%", "0.1", True),
        ("Evelyn", "\\text{Evelyn}", True),
        ("42", "43", False),
        ("42", "-42", False),
        ("42", "41, 42", False),
        ("2/3", "0.6667", False),
        ("[1, 2)", "[1, 2]", False),
        ("42", "", False),
        ("42", "\\frac{", False),
        ("42", "no idea", False),
        ("42", "}{", False),
    ],
)
def test_answers_are_compared_as_mathematics(expected, given, same):
    assert same_answer(expected, given) is same


# ---- the whole task


async def run(task_config, renderer, tokenizer, replies, *, index=0):
    task = task_config.build(name="math", context=context_of(renderer))
    policy = ScriptedPolicy(
        tokenizer, lambda rollout_id, turn: replies[int(rollout_id.rpartition("/")[2])]
    )
    group = await task.run_group(
        task.dataset[index], policy, group_id="g", seed=0, group_size=len(replies)
    )
    return task, policy, group, await task.score_group(group)


async def test_right_wrong_and_unreadable_answers_get_1_and_0(file, renderer, tokenizer):
    replies = [
        "6 * 7 is \\boxed{42}.",
        "\\boxed{42}? No: \\boxed{43}",
        "The answer is 42.",
        "\\boxed{\\frac{}",
    ]
    _, policy, group, failure = await run(config(file()), renderer, tokenizer, replies)
    assert failure is None
    assert [(rollout.status, rollout.reward) for rollout in group.rollouts] == [
        (RolloutStatus.COMPLETED, reward) for reward in (1.0, 0.0, 1.0, 0.0)
    ]
    assert [rollout.reward_components["boxed"] for rollout in group.rollouts] == [
        1.0,
        1.0,
        0.0,
        0.0,
    ]
    asked = "What is 6 * 7?\n\nReason step by step, and put your final answer within \\boxed{}.<|im_end|>"
    assert tokenizer.decode(policy.sessions[0].prompts[0]).count(asked) == 1
    (sample,) = group.rollouts[0].samples
    assert tokenizer.decode(sample.token_ids[sample.loss_mask]) == replies[0] + "<|im_end|>"


async def test_an_answer_nobody_can_compare_is_an_error_not_a_0_and_costs_the_others_nothing(
    file, renderer, tokenizer
):
    replies = ["\\boxed{9^{9^{9^{9}}}}", "\\boxed{1.5}", "\\boxed{2}"]
    _, _, group, failure = await run(
        config(file(), rubric={"timeout_s": 4.0}), renderer, tokenizer, replies, index=1
    )
    assert failure is None
    hung, *others = group.rollouts
    assert (hung.status, hung.reward) == (RolloutStatus.ERROR, None)
    assert hung.error == "reward function 'correct': no answer within 4 s; its process was killed"
    assert [rollout.reward for rollout in others] == [1.0, 0.0]
    # Its group's advantages are of the two that have a reward: 1 and 0, less their mean.
    assert math.isclose(float(others[0].samples[0].advantages.max()), 0.5)


async def test_a_system_prompt_and_a_template_of_ones_own_reach_the_model(
    file, renderer, tokenizer
):
    task_config = config(file())
    task_config.system_prompt, task_config.template = "Be brief.", "Box it: \\boxed{}. {question}"
    _, policy, _, _ = await run(task_config, renderer, tokenizer, ["\\boxed{42}"])
    prompt = tokenizer.decode(policy.sessions[0].prompts[0])
    assert (
        "system\nBe brief.<|im_end|>" in prompt
        and "user\nBox it: \\boxed{}. What is 6 * 7?<|im_end|>" in prompt
    )
