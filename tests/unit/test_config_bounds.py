"""Configs: every number has a bound, a wrong value is found by its field, --help shows the bounds, an option sets its field."""

import contextlib
import copy
import dataclasses
import functools
import importlib
import io
import math
import pkgutil
import re
import sys
import types
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal, Union, get_args, get_origin

import pytest
import torch
from annotated_types import BaseMetadata, Ge, GroupedMetadata, Gt, Le, Lt, MinLen
from hypothesis import given, settings
from hypothesis import strategies as st
from torchtitan.config import Configurable

import torchtitan.experiments.rl as library
from torchtitan.experiments.rl.bounds import check_fields, declared, field_annotations
from torchtitan.experiments.rl.command.checks import check, checked_plan
from torchtitan.experiments.rl.command.command_line import (
    DEFAULT_MODULE,
    config_functions,
    load_config,
    parse_command,
)
from torchtitan.experiments.rl.command.options import override
from torchtitan.experiments.rl.data.dataset import MadeDataset
from torchtitan.experiments.rl.errors import ConfigError
from torchtitan.experiments.rl.rollouts.policy import ModelReference
from torchtitan.experiments.rl.tasks import Dataset, MemoryRows, RowDataset, Task, question_task
from torchtitan.experiments.rl.tasks.questions import QuestionTask
from torchtitan.experiments.rl.train import main
from torchtitan.experiments.rl.training.recompute import CompiledFullAC

CONFIGS = config_functions(DEFAULT_MODULE)

ANY_REWARD = "rewards may be any finite number"
ANY_SEED = "names a stream of random numbers; any whole number does"
WITHOUT_BOUNDS = {
    "MadeDataset.Config.seed": ANY_SEED,
    "ReasoningGymDataset.Config.seed": ANY_SEED,
    "ValidationConfig.pass_reward": ANY_REWARD,
    "StopConfig.value": "a metric may have any value",
    "Rubric.Config.truncation_reward": ANY_REWARD,
    "Rubric.Config.error_reward": ANY_REWARD,
    "DifficultyPool.Config.hard_up_to": ANY_REWARD,
    "DifficultyPool.Config.easy_from": ANY_REWARD,
    "ExampleReplay.Config.mean_above": ANY_REWARD,
    "ExampleReplay.Config.mean_below": ANY_REWARD,
}


# ---- every number has a bound


def parts(annotation: Any) -> tuple[Any, tuple[Any, ...]]:
    """A type and its bounds, taken apart independently of the walk."""
    if get_origin(annotation) is not Annotated:
        return annotation, ()
    plain, *metadata = get_args(annotation)
    flat = [
        part
        for entry in metadata
        for part in (list(entry) if isinstance(entry, GroupedMetadata) else [entry])
    ]
    return plain, tuple(entry for entry in flat if isinstance(entry, BaseMetadata))


def bare_numbers(annotation: Any) -> bool:
    """Whether an int or float without a bound is anywhere in an annotation."""
    plain, bounds = parts(annotation)
    if plain in (int, float):
        return not bounds
    return get_origin(plain) is not Literal and any(
        bare_numbers(entry) for entry in get_args(plain)
    )


def shipped_config_classes() -> set[type]:
    """Config classes that the library's modules define, and those that a shipped config holds."""
    modules = [
        importlib.import_module(module.name)
        for module in pkgutil.walk_packages(library.__path__, library.__name__ + ".")
        if ".tasks." not in module.name
        or not module.name.endswith("loading")  # that one needs an environment's package
    ]
    ours = {module.__name__ for module in modules}
    found: set[type] = set()

    def add(config_class: type) -> None:
        if (
            config_class.__module__ in ours
            and dataclasses.is_dataclass(config_class)
            and named_class(config_class) is config_class
        ):
            found.add(config_class)
        for subclass in config_class.__subclasses__():
            add(subclass)

    add(Configurable.Config)
    add(ModelReference)
    for function in CONFIGS.values():
        found |= {
            type(holder)
            for holder, _, _, _ in fields_of(function())
            if dataclasses.is_dataclass(holder)
        }
    # Nobody sets these: the library reads a model's config from its checkpoint, and the learner makes the other one itself.
    return {
        config_class
        for config_class in found - {CompiledFullAC.Config}
        if not builds_a_module(config_class)
    }


def named_class(config_class: type) -> object:
    """Return what the module has by the class's name: where slots are added, another class replaces the one that was
    written, and the first may live on as a subclass (Python 3.11.2)."""
    return functools.reduce(
        lambda holder, name: getattr(holder, name, None),
        config_class.__qualname__.split("."),
        sys.modules[config_class.__module__],
    )


def builds_a_module(config_class: type) -> bool:
    return issubclass(getattr(config_class, "_owner", None) or object, torch.nn.Module)


def fields_of(
    value: Any, path: str = "", annotation: Any = Any, seen: set[int] | None = None
) -> list[tuple]:
    """(holder, key, annotation, path) of every field and entry in a tree of configs, each shared object once."""
    seen = set() if seen is None else seen
    if id(value) in seen and not isinstance(value, str | int | float | bool | None):
        return []
    seen.add(id(value))
    plain, _ = parts(annotation)
    if get_origin(plain) in (Union, types.UnionType):
        plain = next(
            (parts(option)[0] for option in get_args(plain) if option is not types.NoneType), Any
        )
    found: list[tuple] = []
    if dataclasses.is_dataclass(value):
        hints = field_annotations(type(value))
        entries = [
            (field.name, hints.get(field.name, Any), f"{path}.{field.name}" if path else field.name)
            for field in dataclasses.fields(value)
        ]
    elif isinstance(value, dict):
        entry_type = (*get_args(plain), Any, Any)[1]
        entries = [(key, entry_type, f"{path}.{key}") for key in value]
    elif isinstance(value, list):
        entries = [
            (index, (*get_args(plain), Any)[0], f"{path}[{index}]") for index in range(len(value))
        ]
    else:
        return []
    for key, entry_type, entry_path in entries:
        found.append((value, key, entry_type, entry_path))
        found += fields_of(held(value, key), entry_path, entry_type, seen)
    return found


def held(holder: Any, key: Any) -> Any:
    return getattr(holder, key) if dataclasses.is_dataclass(holder) else holder[key]


def put(holder: Any, key: Any, value: Any) -> None:
    if dataclasses.is_dataclass(holder):
        setattr(holder, key, value)
    else:
        holder[key] = value


def test_every_number_in_a_shipped_config_has_a_bound_or_a_reason():
    bare = {
        f"{config_class.__qualname__}.{name}"
        for config_class in shipped_config_classes()
        for name, annotation in field_annotations(config_class).items()
        if bare_numbers(annotation)
        and f"{declaring(config_class, name)}.{name}" not in WITHOUT_BOUNDS
    }
    assert bare == set()


def test_reasons_are_given_for_fields_that_exist():
    classes = {config_class.__qualname__: config_class for config_class in shipped_config_classes()}
    for field_name in WITHOUT_BOUNDS:
        class_name, _, name = field_name.rpartition(".")
        assert bare_numbers(field_annotations(classes[class_name])[name]), field_name


def declaring(config_class: type, name: str) -> str:
    """The class whose annotation a field has."""
    return next(
        base for base in config_class.__mro__ if name in vars(base).get("__annotations__", {})
    ).__qualname__


# ---- every wrong value is found


def bad_values(annotation: Any) -> list[Any]:
    """Values a field must not have: of another type, not finite, or just outside each bound."""
    plain, bounds = parts(annotation)
    if get_origin(plain) in (Union, types.UnionType):
        options = get_args(plain)
        values = [
            value
            for option in options
            if option is not types.NoneType
            for value in bad_values(option)
        ]
        right = {None} if types.NoneType in options else set()
        right |= (
            {3} if any(parts(option)[0] in (int, float) for option in options) else set()
        )  # wrong for the others only
        return [value for value in values if isinstance(value, list) or value not in right]
    values = []
    for bound in bounds:
        match bound:
            case Ge(least):
                values.append(least - 1)
            case Gt(low):
                values += [low, low - 1]
            case Le(most):
                values.append(most + 1)
            case Lt(high):
                values += [high, high + 1]
            case MinLen(1) if plain is str:
                values.append("")
    if plain is int:
        return [*values, None, "3", True, 2.5, math.nan, math.inf, [1]]
    if plain is float:
        return [*values, None, "0.5", True, math.nan, math.inf, -math.inf, 10**400, (1.0,)]
    if plain is bool:
        return [None, 1, "yes"]
    if plain is str:
        return [*values, None, 3, ["a"]]
    if get_origin(plain) is Literal:
        return [None, "no such choice", 3]
    if get_origin(plain) in (list, dict, tuple):
        return [None, "a", 3, {list: (), dict: [], tuple: []}[get_origin(plain)]]
    if dataclasses.is_dataclass(plain):
        return [None, "a", 3]
    return []


@functools.cache
def fresh(name: str) -> Any:
    return CONFIGS[name]()


@functools.cache
def wrong_values(name: str) -> tuple[Any, list[tuple[tuple, list[Any]]]]:
    """A copy of a config, and its fields with the values that each must not have."""
    config = copy.deepcopy(fresh(name))
    choices = [(entry, bad_values(entry[2])) for entry in fields_of(config)]
    return config, [choice for choice in choices if choice[1]]


@pytest.mark.parametrize("name", CONFIGS)
@settings(max_examples=20, deadline=None)
@given(data=st.data())
def test_a_wrong_value_in_any_field_of_a_shipped_config_is_one_error_that_names_it(name, data):
    config, choices = wrong_values(name)
    (holder, key, _, path), values = data.draw(st.sampled_from(choices))
    value = data.draw(st.sampled_from(values))
    right = held(holder, key)
    put(holder, key, value)
    try:
        with pytest.raises(ConfigError) as error:
            check(config)
    finally:
        put(holder, key, right)
    assert error.value.field == path
    assert error.value.value is value and error.value.cure.startswith("must ")


@pytest.mark.parametrize("name", CONFIGS)
def test_a_shipped_config_raises_no_false_alarm(name):
    check(CONFIGS[name]())


def test_wrong_entries_of_a_tuple_are_found():
    config = fresh("rl_grpo_qwen3_debug")
    for betas, index in (((1.0, 0.9), 0), ((0.9, -0.1), 1), ((math.nan, 0.9), 0)):
        changed = copy.deepcopy(config)
        changed.trainer.optimizer.betas = betas
        with pytest.raises(ConfigError) as error:
            checked_plan(changed)
        assert error.value.field == f"trainer.optimizer.betas[{index}]"


def test_a_second_walk_reads_no_annotations_anew():
    for name in CONFIGS:
        check_fields(fresh(name))
        read = field_annotations.cache_info().misses
        check_fields(fresh(name))
        assert field_annotations.cache_info().misses == read, name


# ---- the command line


def options_of(config: Any) -> list[tuple[str, Any, Any]]:
    """(option, annotation, value) of every field that is a number, a text or a choice."""
    return [
        ("--" + re.sub(r"\[(\d+)\]", r".\1", path).replace("_", "-"), annotation, held(holder, key))
        for holder, key, annotation, path in fields_of(config)
        if isinstance(held(holder, key), int | float | str | None)
        and not isinstance(held(holder, key), bool)
        if not any(
            isinstance(part, type) and dataclasses.is_dataclass(part)
            for part in get_args(parts(annotation)[0])
        )
    ]


def test_help_shows_the_bounds_of_every_option(capsys):
    with pytest.raises(SystemExit) as end:
        main(["--config", "rl_grpo_qwen3_debug", "--help"])
    assert not end.value.code
    text = capsys.readouterr().out
    parts = re.split(r"(?m)^\W*(?=--[a-z])", text)[1:]
    helps = {
        part.split()[0]: " ".join(re.sub("[│╭╮╰╯─]", " ", part).split()) for part in reversed(parts)
    }
    for option, bounds in {
        "--steps": "must be at least 1",
        "--max-offpolicy-steps": "must be at least 0",
        "--rollouts-per-step": "must be at least 1 and at most 1000000",
        "--trainer.optimizer.lr": "must be above 0 and at most 1",
        "--trainer.optimizer.betas": "must be at least 0 and below 1",
        "--trainer.lr-scheduler.warmup-steps": "must be at least 0",
        "--trainer.lr-scheduler.decay-ratio": "must be at least 0 and at most 1",
        "--generator.engine.gpu-memory-utilization": "must be above 0 and at most 1",
        "--recorder.fraction": "must be at least 0 and at most 1",
    }.items():
        assert f"({bounds})" in helps[option], helps[option]
    assert "must be" not in helps["--tasks.sum-digits.dataset.seed"]
    assert "normally 1/5 of --steps" in text and "training.steps" not in text, (
        "torchtitan's help names its trainer's option"
    )
    for option, annotation, _ in options_of(fresh("rl_grpo_qwen3_debug")):
        if re.search("INT|FLOAT", helps[option].split()[1]):
            assert ("(must be" in helps[option]) == (not bare_numbers(annotation)), option


def test_every_option_still_sets_its_field():
    config = fresh("rl_grpo_qwen3_debug")
    options = options_of(config)
    assert len(options) > 60
    words = [word for option, _, value in options for word in (option, str(value))]
    assert load_config(parse_command(["--config", "rl_grpo_qwen3_debug", *words])) == config


@pytest.mark.parametrize(
    ("option", "value", "message"),
    [
        ("--steps", "0", "steps = 0: must be at least 1"),
        (
            "--trainer.optimizer.lr",
            "nan",
            "trainer.optimizer.lr = nan: must be a finite number and above 0",
        ),
        (
            "--trainer.optimizer.lr",
            "inf",
            "trainer.optimizer.lr = inf: must be a finite number and above 0",
        ),
        ("--trainer.optimizer.eps", "0", "trainer.optimizer.eps = 0.0: must be above 0"),
        (
            "--trainer.lr-scheduler.warmup-steps",
            "-1",
            "trainer.lr_scheduler.warmup_steps = -1: must be at least 0",
        ),
        (
            "--trainer.lr-scheduler.decay-ratio",
            "2",
            "lr_scheduler.decay_ratio = 2.0: must be at least 0 and at most 1",
        ),
        (
            "--trainer.loss.rl.mask-high",
            "-0.1",
            "trainer.loss.rl.mask_high = -0.1: must be at least 0",
        ),
        (
            "--validation.temperature",
            "2.5",
            "validation.temperature = 2.5: must be at least 0 and at most 2",
        ),
        (
            "--tasks.sum-digits.dataset.min-digits",
            "1",
            "dataset.min_digits = 1: must be at least 2; lists of one digit",
        ),
        (
            "--tasks.sum-digits.dataset.min-digits",
            "6",
            "dataset.min_digits = 6: must be at most max_digits = 5",
        ),
        ("--output-dir", "", "output_dir = '': must not be empty"),
        (
            "--tasks.sum-digits.group-size",
            "1000000000",
            "group_size = 1000000000: must be at least 1 and at most 4096; all rollouts of a group",
        ),
        ("--validation.attempts", "1000000000", "must be at least 1 and at most 4096"),
        ("--generator.engine.max-num-seqs", "1000000000", "at least 1 and at most 65536"),
        ("--replay.capacity", "1000000000", "at least 1 and at most 1000000"),
        (
            "--max-offpolicy-steps",
            "10000",
            "with rollouts_per_step = 256 a run would have 2,560,256 rollouts open at once, and "
            "may have 2,000,000: lower either",
        ),
    ],
)
def test_an_override_out_of_bounds_is_one_line_and_exit_code_2(option, value, message, capsys):
    assert main(["--config", "rl_grpo_qwen3_debug", "--dry-run", option, value]) == 2
    out, err = capsys.readouterr()
    assert out == "" and err.startswith("error: ") and err.count("\n") == 1 and message in err


def made(config_class: type) -> Any:
    """A config of the class; what it must be given, a stand-in."""
    given = {}
    for entry in dataclasses.fields(config_class):
        if (
            entry.init
            and entry.default is dataclasses.MISSING
            and entry.default_factory is dataclasses.MISSING
        ):
            plain = declared(field_annotations(config_class).get(entry.name, Any)).type
            if get_origin(plain) in (Union, types.UnionType):
                plain = next(option for option in get_args(plain) if option in STAND_INS)
            plain = plain if plain in STAND_INS else get_origin(plain) or plain
            given[entry.name] = STAND_INS[plain] if plain in STAND_INS else made(plain)
    return config_class(**given)


def may_be_said(annotation: Any) -> bool:
    plain, _ = parts(annotation)
    return (
        plain in (int, float, str)
        or get_origin(plain) is Literal
        or any(map(may_be_said, get_args(plain)))
    )


STAND_INS = {
    str: "text",
    int: 1,
    float: 1.0,
    dict: {"a": 1.0},
    list: [1],
    list[str]: [],
    list[Any]: [],
    Task.Config: QuestionTask.Config(),
    Dataset.Config: RowDataset.Config(rows=MemoryRows([{"question": "1"}])),
    Any: object(),
    Callable: len,
}


def test_every_config_class_of_the_library_takes_options():
    classes = shipped_config_classes()
    for config_class in classes:
        config = made(config_class)
        said = [
            (option, str(value))
            for option, kind, value in options_of(config)
            if value is not None or may_be_said(kind)
        ]
        read = override(config, [word for words in said for word in words])
        assert read == config, config_class
        with pytest.raises(SystemExit) as end, contextlib.redirect_stdout(io.StringIO()):
            override(config, ["--help"])
        assert not end.value.code, config_class


class Rows:
    """No dataclass: what its constructor takes are no options."""

    def __init__(self, rows: Any):
        self.rows = rows


@dataclass(kw_only=True, slots=True)
class Part(Configurable.Config):
    weight: float = 1.0
    call: Any = len


@dataclass(kw_only=True, slots=True)
class OwnDataset(MadeDataset.Config):
    call: Callable[[int], int] = abs
    may_call: Callable[[int], int] | None = abs
    number_or_call: int | Callable[[int], int] = abs
    rows: Rows = field(default_factory=lambda: Rows([1]))
    may_have_rows: Rows | None = field(default_factory=lambda: Rows([2]))
    no_rows: Rows | None = None
    by_name: dict[str, Any] = field(
        default_factory=lambda: {"level": 3, "call": len, "rows": Rows([3])}
    )
    by_any_name: dict[Any, Any] = field(default_factory=lambda: {(1, 2): Rows([3]), "a b": 4})
    several: list[Part | Callable[..., Any]] = field(default_factory=lambda: [Part(), len])
    kind: type = int
    anything: Any = field(default_factory=lambda: Rows([4]))


def own_config() -> Any:
    config = fresh("rl_grpo_qwen3_debug")
    config.tasks["sum_digits"].dataset = OwnDataset()
    return config


def test_a_config_that_holds_functions_dicts_and_objects_takes_options_and_keeps_them():
    config = own_config()
    before = config.tasks["sum_digits"].dataset
    own = "--tasks.sum-digits.dataset."
    words = [
        "--steps",
        "3",
        f"{own}number-or-call",
        "7",
        f"{own}by-name.level",
        "5",
        f"{own}several.0.weight",
        "2",
        f"{own}seed",
        "9",
    ]
    read = override(config, words)
    dataset = read.tasks["sum_digits"].dataset
    assert read.steps == 3 and (dataset.number_or_call, dataset.by_name["level"], dataset.seed) == (
        7,
        5,
        9,
    )
    assert dataset.several == [Part(weight=2.0), len]
    for name in ("call", "may_call", "rows", "may_have_rows", "no_rows", "kind", "anything"):
        assert getattr(dataset, name) is getattr(before, name), name
    assert (
        dataset.by_any_name == before.by_any_name
        and dataset.by_name["rows"] is before.by_name["rows"]
    )


def test_help_shows_a_field_that_no_words_can_say_and_refuses_it_as_an_option(capsys):
    with pytest.raises(SystemExit) as end:
        override(own_config(), ["--help"])
    assert not end.value.code
    text = capsys.readouterr().out
    for name in (
        "call",
        "may-have-rows",
        "no-rows",
        "by-name.call",
        "by-any-name",
        "several.1",
        "kind",
        "anything",
    ):
        assert re.search(rf"--tasks\.sum-digits\.dataset\.{name} {{fixed}}", text), name
    assert "(is set in a config function)" in text
    with pytest.raises(ConfigError, match="dataset.call = 'len': is fixed to abs: no word can say"):
        override(own_config(), ["--tasks.sum-digits.dataset.call", "len"])


@pytest.mark.parametrize(
    "words", [["--steps", "3"], ["--tasks.mine.group-size", "4"], ["--validation.examples", "3"]]
)
def test_a_task_of_rows_in_memory_takes_options(words):
    config = fresh("rl_questions_qwen3_debug")
    config.tasks = {"mine": question_task([{"question": "1"}], max, validation=[{"question": "2"}])}
    rows = config.tasks["mine"].dataset.rows
    read = override(config, words)
    assert read.tasks["mine"].dataset.rows is rows and read != config


@pytest.mark.parametrize("dry_run", [["--dry-run"], []], ids=["dry run", "run"])
def test_a_registrys_own_mistakes_end_in_the_same_line(dry_run, tmp_path, monkeypatch, capsys):
    (tmp_path / "wrong_configs.py").write_text(
        "from torchtitan.experiments.rl.config_registry import rl_grpo_qwen3_debug\n"
        "def without_a_model():\n"
        "    config = rl_grpo_qwen3_debug()\n"
        "    config.model = None\n"
        "    return config\n"
        "def with_a_text():\n"
        "    config = rl_grpo_qwen3_debug()\n"
        "    config.steps = 'three'\n"
        "    return config\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    for name, message in (
        ("without_a_model", "model = None: must be a ModelConfig"),
        ("with_a_text", "steps = 'three': must be a whole number"),
    ):
        assert main(["--module", "wrong_configs", "--config", name, *dry_run]) == 2
        assert capsys.readouterr().err == f"error: {message}\n"
