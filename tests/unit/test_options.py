"""Options of any config: which there are, what words they read, and that the given config stays as it is."""

import copy
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal

import pytest
from annotated_types import Ge

from torchtitan.experiments.rl.algorithms import GRPO, MaxRL
from torchtitan.experiments.rl.command.command_line import load_config, parse_command
from torchtitan.experiments.rl.command.options import options_of, override
from torchtitan.experiments.rl.config_registry import rl_grpo_qwen3_debug
from torchtitan.experiments.rl.data.rows import MemoryRows, RowDataset
from torchtitan.experiments.rl.errors import ConfigError
from torchtitan.experiments.rl.tasks import question_task


@dataclass(kw_only=True, slots=True)
class Part:
    size: int = 1


@dataclass(kw_only=True, slots=True)
class Settings:
    steps: int = 1
    share: float | None = None
    shared: bool | None = None
    title: str = ""
    stop: list[str] = field(default_factory=list)
    sizes: tuple[int, ...] = ()
    betas: tuple[float, float] = (0.5, 0.5)
    tags: frozenset[str] = frozenset()
    level: Literal[1, 2, "most"] = 1
    either: list[int] | str | None = None
    weights: dict[str, Annotated[float, Ge(0)]] = field(default_factory=lambda: {"a": 1.0})
    places: dict[Literal["x", "y"], int] = field(default_factory=dict)
    parts: dict[str, Part] = field(default_factory=dict)
    anything: dict[Any, Any] = field(default_factory=dict)
    function: int | Callable[[int], int] = abs


def read(words: str, config: Settings | None = None) -> Settings:
    return override(Settings() if config is None else config, words.split())


@pytest.mark.parametrize(
    ("words", "name", "value"),
    [
        ("--steps 1_000", "steps", 1000),
        ("--share -1e-3", "share", -0.001),
        ("--share None", "share", None),
        ("--shared", "shared", True),
        ("--no-shared", "shared", False),
        ("--shared false", "shared", False),
        ("--shared None", "shared", None),
        ("--stop a b", "stop", ["a", "b"]),
        ("--stop=a", "stop", ["a"]),
        ("--stop []", "stop", []),
        ("--stop", "stop", []),
        ("--sizes 1 2 3", "sizes", (1, 2, 3)),
        ("--betas 0.9 1", "betas", (0.9, 1.0)),
        ("--tags a b", "tags", frozenset("ab")),
        ("--level 2", "level", 2),
        ("--level most", "level", "most"),
        ("--either 1 2", "either", [1, 2]),
        ("--either 1x", "either", "1x"),
        ("--either None", "either", None),
        ("--weights.a 2", "weights", {"a": 2.0}),
        ("--weights.b_c 2", "weights", {"a": 1.0, "b_c": 2.0}),
        ("--weights b 2 c 3", "weights", {"b": 2.0, "c": 3.0}),
        ("--weights []", "weights", {}),
        ("--places.y 3", "places", {"y": 3}),
        ("--function 3", "function", 3),
    ],
)
def test_words_are_read_as_the_fields_type(words, name, value):
    found = getattr(read(words), name)
    assert found == value and type(found) is type(value)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("--steps 5.0", "--steps = '5.0': must be a whole number"),
        ("--steps 1 2", "--steps = '1 2': takes one word, and '2' follows"),
        (
            "--title a b",
            "--title = 'a b': takes one word, and 'b' follows: a text with spaces stands in quotes",
        ),
        ("--sizes 1 2.0", "--sizes = '1 2.0': must be a tuple"),
        ("--betas 1", "--betas = '1': must be a tuple of 2"),
        ("--level 3", "--level = '3': must be one of 1, 2, 'most'"),
        ("--shared yes", "--shared = 'yes': must be True or False or None"),
        ("--weights b", "--weights = 'b': must be a dict"),
        ("--places.z 3", "--places = 'z': must be one of 'x', 'y'"),
        ("--places.x a", "--places.x = 'a': must be a whole number"),
        ("--stps 3", "no option --stps; perhaps you meant --steps"),
        ("3", "overrides = '3': belongs to no option"),
    ],
)
def test_words_of_no_value_of_the_type_are_refused_with_the_cure(words, message):
    with pytest.raises(ConfigError) as caught:
        read(words)
    assert str(caught.value).startswith(message)


def test_one_odd_key_of_a_dict_hides_none_of_its_siblings():
    config = Settings(parts={"a": Part(), "b c": Part()}, anything={"d": 1, (1, 2): 2})
    assert {"parts.a.size", "anything.d"} < options_of(config).keys()
    changed = read("--parts.a.size 3 --anything.d 4", config)
    assert changed.parts == {"a": Part(size=3), "b c": Part()}
    assert changed.anything == {"d": 4, (1, 2): 2}


def test_keys_that_would_share_an_option_are_refused():
    with pytest.raises(ConfigError, match="--parts.a-b.size = 'size': two keys share this option"):
        read("--steps 3", Settings(parts={"a_b": Part(), "a-b": Part()}))


def of_two_tasks() -> Any:
    """A config whose two tasks are one object, as are the lists of filters."""
    config = rl_grpo_qwen3_debug()
    (task,) = config.tasks.values()
    config.tasks = {"a": task, "b": task}
    config.post_batch_filters = config.pre_batch_filters
    return config


@pytest.mark.parametrize(
    "words",
    [
        "--tasks.a.algorithm max_rl",
        "--tasks.a.validation None",
        "--tasks.a.validation-schedule.every 3",
        "--trainer.lora.rank 4",
        "--trainer.compile",
        "--pre-batch-filters.0.mode enforce",
        "--pre-batch-filters truncated",
        "--tasks.a.group-size 4",
        "--provision.job process --provision.job.hosts 3",
    ],
)
def test_the_given_config_stays_as_it_is(words):
    config = of_two_tasks()
    before = copy.deepcopy(config)
    changed = override(config, words.split())
    assert config == before and changed != before
    assert changed.tasks["b"] == before.tasks["b"]
    assert changed.post_batch_filters == before.post_batch_filters


def test_a_part_is_named_for_one_of_two_tasks_that_share_a_config():
    changed = override(of_two_tasks(), ["--tasks.a.algorithm", "max_rl"])
    assert type(changed.tasks["a"].algorithm) is MaxRL.Config
    assert type(changed.tasks["b"].algorithm) is GRPO.Config


SPLIT_ROWS = """
from torchtitan.experiments.rl.config_registry import rl_grpo_qwen3_debug
from torchtitan.experiments.rl.tasks import MemoryRows, RowDataset, question_task

ROWS = [{"question": str(row)} for row in range(10)]
TASK = question_task(RowDataset.Config(rows=MemoryRows(ROWS)), max)

def split_rows():
    config = rl_grpo_qwen3_debug()
    config.tasks["rows"] = TASK
    return config
"""


def test_none_leaves_a_task_without_validation_also_where_its_dataset_is_split(config_module):
    module, _ = config_module(SPLIT_ROWS)
    words = ["--config", "split_rows", "--module", module, "--tasks.rows.dataset.split", "0.9"]
    rows = RowDataset.Config(rows=MemoryRows([{}]), split="0.9")
    left = load_config(parse_command(words)).tasks
    assert left["rows"].validation.split == rows.rest().split == "0.9:"
    none = [*words, "--tasks.rows.validation", "None", "--tasks.sum-digits.validation", "None"]
    tasks = load_config(parse_command(none)).tasks
    assert tasks["rows"].validation is None and tasks["sum_digits"].validation is None
    assert load_config(parse_command(words[:4])).tasks["rows"].validation is None, (
        "the module's own task has been left as it was"
    )


def test_a_task_of_rows_has_its_validation_named_by_a_file():
    config = rl_grpo_qwen3_debug()
    config.tasks = {"rows": question_task([{"question": "1"}], max)}
    changed = override(config, ["--tasks.rows.validation", "held_out.jsonl"])
    assert changed.tasks["rows"].validation == RowDataset.Config(path="held_out.jsonl")
    with pytest.raises(ConfigError, match="tasks.rows.dataset = 'None': a task can't do without"):
        override(config, ["--tasks.rows.dataset", "None"])


def test_a_rubric_of_the_validation_is_named_by_a_file_and_its_functions(tmp_path):
    file = tmp_path / "my_rewards.py"
    file.write_text(
        "def exact(completion, row): return 1.0\ndef short(completion, row): return 0.0\n"
    )
    config = rl_grpo_qwen3_debug()
    config.tasks = {"rows": question_task([{"question": "1"}], max)}
    option = "--tasks.rows.validation-rubric"
    changed = override(config, [option, f"{file}:exact,short"]).tasks["rows"]
    assert [fn.__name__ for fn in changed.validation_rubric.reward_fns] == ["exact", "short"]
    assert changed.rubric.reward_fns == [max]
    config.tasks["rows"] = changed
    assert override(config, [option, "None"]).tasks["rows"].validation_rubric is None
    with pytest.raises(ConfigError, match="a rubric is reward functions and their place"):
        override(config, [option, "exact"])
