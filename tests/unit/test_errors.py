"""Every exception of the library survives the way between processes, with its message and what it carries."""

import ast
import functools
import importlib
import json
import pickle
import re
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

import torchtitan.experiments.rl as package
from torchtitan.experiments.rl.checkpointing.folder import CheckpointError
from torchtitan.experiments.rl.errors import (
    TRACEBACK_LINES,
    ConfigError,
    MissingError,
    RunError,
    UserCodeError,
    UserCodeTimeout,
    cause_of,
    user_code,
    users_traceback,
)
from torchtitan.experiments.rl.gateway.request import PromptTooLong
from torchtitan.experiments.rl.process.lifetime import ProcessLost

ROOT = Path(package.__path__[0])
THREE = ("tasks.a.env", 7, "lower it")


@functools.cache
def exception_classes():
    """Found in the source by the name of a base class, so that a new one is tested too."""
    found, more = (
        {"Exception", "ValueError", "RuntimeError", "BaseException", "TypeError", "OSError"},
        True,
    )
    classes = {}
    nodes = [
        (path, node)
        for path in sorted(ROOT.rglob("*.py"))
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.ClassDef)
    ]
    while more:
        more = False
        for path, node in nodes:
            bases = {base.id for base in node.bases if isinstance(base, ast.Name)}
            if bases & found and node.name not in classes:
                parts = path.relative_to(ROOT).with_suffix("").parts
                classes[node.name] = ".".join((package.__name__, *parts))
                found.add(node.name)
                more = True
    return sorted(classes.items())


def made(kind):
    if issubclass(kind, ConfigError):
        return kind(*THREE)
    if kind is PromptTooLong:
        return kind(14_293, 3_000)
    return kind("generator 0", "signal 9") if kind is ProcessLost else kind("what went wrong")


@pytest.mark.parametrize(("name", "module"), exception_classes())
def test_exception_is_the_same_in_another_process(name, module):
    error = made(getattr(importlib.import_module(module), name))
    again = pickle.loads(pickle.dumps(error))
    assert type(again) is type(error) and str(again) == str(error)
    assert pickle.loads(pickle.dumps(again)).args == again.args


def test_the_search_finds_the_known_ones():
    assert {
        "ConfigError",
        "MissingError",
        "RunError",
        "CheckpointError",
        "UserCodeTimeout",
    } <= dict(exception_classes()).keys()
    assert issubclass(CheckpointError, RunError) and issubclass(MissingError, ConfigError)


def test_what_an_error_carries_comes_along():
    late = UserCodeTimeout("no answer within 1 s")
    late.where, late.returned = "A.setup", True
    again = pickle.loads(pickle.dumps(late))
    assert (again.where, again.returned) == ("A.setup", True)
    refused = pickle.loads(pickle.dumps(MissingError(*THREE)))
    assert (refused.field, refused.value, refused.cure) == THREE


class Hostile:
    """Can't be pickled, shown or compared."""

    def __reduce__(self):
        raise ValueError(3)

    __repr__ = __str__ = __eq__ = __reduce__


def test_config_error_of_a_value_that_can_not_be_pickled_or_shown_keeps_its_message():
    for value, text in (
        (Hostile(), "<Hostile>"),
        (lambda: 3, "<function"),
        (["a", Hostile], "['a', <class"),
    ):
        again = pickle.loads(pickle.dumps(ConfigError("field", value, "no cure")))
        assert str(again) == str(ConfigError("field", value, "no cure")) and str(again).startswith(
            f"field = {text}"
        )


class Unreadable(Exception):
    def __str__(self):
        raise ValueError(4)


def test_an_error_whose_text_fails_is_refused_by_its_type():
    shown = r"^dataset = 'Bad': its __len__ failed: Unreadable: its message can't be read \(ValueError in __str__\) "
    shown += r"\(.*/test_errors\.py:\d+\)$"
    with pytest.raises(ConfigError, match=shown), user_code("dataset", "Bad", "its __len__ failed"):
        raise Unreadable


def test_only_the_main_thread_is_interrupted_by_a_person():
    def interrupted():
        with user_code("dataset", "Bad", "its __len__ failed"):
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        interrupted()
    with (
        ThreadPoolExecutor(1) as thread,
        pytest.raises(ConfigError, match="its __len__ failed: KeyboardInterrupt"),
    ):
        thread.submit(interrupted).result()


def test_the_place_of_an_error_is_the_users_own_code_that_it_came_through():
    with pytest.raises(json.JSONDecodeError) as caught:
        json.loads("{")
    assert re.fullmatch(
        r"JSONDecodeError: .*\(char 1\) \(test_errors\.py:\d+\)", cause_of(caught.value)
    )
    with pytest.raises(SyntaxError) as caught:
        compile("a = (", "/home/me/mine.py", "exec")
    assert cause_of(caught.value).endswith(" (mine.py:1)")
    assert (
        cause_of(ValueError()) == "ValueError" and cause_of(RunError("a sentence")) == "a sentence"
    )


def caught(call) -> BaseException:
    try:
        call()
    except BaseException as error:  # cases raise SystemExit and their own classes too
        return error
    raise AssertionError("nothing was raised")


def recurse(depth):
    return recurse(depth - 1) if depth else [][0]


def through_the_standard_library():
    json.loads("{}", object_hook=lambda made: made["x"])


def test_a_traceback_shows_the_users_frames_and_no_others():
    lines = users_traceback(caught(through_the_standard_library)).splitlines()
    assert [line.split(", ")[-1] for line in lines if line.startswith("  File ")] == [
        "in caught", "in through_the_standard_library", "in <lambda>",
    ]  # fmt: skip
    assert lines[0] == "Traceback (most recent call last):" and lines[-1] == "KeyError: 'x'"


def test_a_traceback_has_causes_and_groups_and_is_bounded():
    def of_a_cause():
        try:
            recurse(0)
        except IndexError as error:
            raise ValueError("no row") from error

    shown = users_traceback(caught(of_a_cause))
    assert (
        "in recurse" in shown
        and "The above exception was the direct cause" in shown
        and shown.endswith("ValueError: no row")
    )
    inside_a_group = users_traceback(
        ExceptionGroup("two failed", [caught(of_a_cause), caught(lambda: recurse(1))])
    )
    assert inside_a_group.count("in recurse") == 3
    many = users_traceback(
        ExceptionGroup("many failed", [caught(functools.partial(recurse, i)) for i in range(14)])
    )
    assert len(many.splitlines()) == TRACEBACK_LINES
    assert (
        len(users_traceback(caught(lambda: recurse(5000))).splitlines()) < 20
    )  # Python says how often a line is repeated


def test_a_library_error_has_the_traceback_of_what_it_was_made_of_here_and_in_another_process():
    raised = caught(lambda: recurse(0))
    made = UserCodeError("IndexError")
    made.__cause__ = raised
    named = made.of("Env.reset")
    assert users_traceback(named) == users_traceback(made) == users_traceback(raised) != ""
    assert users_traceback(pickle.loads(pickle.dumps(named))) == users_traceback(raised)
    assert users_traceback(RunError("a sentence")) == users_traceback(ValueError()) == ""
    with pytest.raises(SyntaxError) as wrong:
        compile("a = (", "/home/me/mine.py", "exec")
    assert users_traceback(wrong.value).splitlines()[-1] == "SyntaxError: '(' was never closed"


def test_an_exception_that_hides_its_notes_ends_nothing():
    class Noted(Exception):
        @property
        def __notes__(self):
            raise ValueError(5)

    def fail():
        raise Noted

    told = users_traceback(caught(fail))
    # Python 3.13 says so in the notes' place; before it could not print such an exception.
    if sys.version_info >= (3, 13):
        assert told.endswith("Ignored error getting __notes__: ValueError(5)")
    else:
        assert told == ""
