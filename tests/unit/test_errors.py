"""Every exception of the library survives the way between processes, with its message and what it carries."""

import ast
import importlib
import json
import pickle
import re
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

import torchtitan.experiments.rl as package
from torchtitan.experiments.rl.checkpointing.folder import CheckpointError
from torchtitan.experiments.rl.errors import ConfigError, MissingError, RunError, cause_of, user_code
from torchtitan.experiments.rl.process.lifetime import ProcessLost
from torchtitan.experiments.rl.user_code.calls import UserCodeTimeout

ROOT = Path(package.__path__[0])
THREE = ("tasks.a.env", 7, "lower it")


def exception_classes():
    """Found in the source by the name of a base class, so that a new one is tested too."""
    found, more = {"Exception", "ValueError", "RuntimeError", "BaseException", "TypeError", "OSError"}, True
    classes = {}
    while more:
        more = False
        for path in sorted(ROOT.rglob("*.py")):
            for node in ast.walk(ast.parse(path.read_text())):
                bases = {base.id for base in getattr(node, "bases", ()) if isinstance(base, ast.Name)}
                if bases & found and node.name not in classes:
                    parts = path.relative_to(ROOT).with_suffix("").parts
                    classes[node.name] = ".".join((package.__name__, *parts))
                    found.add(node.name)
                    more = True
    return sorted(classes.items())


def made(kind):
    if issubclass(kind, ConfigError):
        return kind(*THREE)
    return kind("generator 0", "signal 9") if kind is ProcessLost else kind("what went wrong")


@pytest.mark.parametrize(("name", "module"), exception_classes())
def test_exception_is_the_same_in_another_process(name, module):
    error = made(getattr(importlib.import_module(module), name))
    again = pickle.loads(pickle.dumps(error))
    assert type(again) is type(error) and str(again) == str(error)
    assert pickle.loads(pickle.dumps(again)).args == again.args


def test_the_search_finds_the_known_ones():
    assert {"ConfigError", "MissingError", "RunError", "CheckpointError", "UserCodeTimeout"} <= dict(exception_classes()).keys()
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
        raise SystemExit(3)

    __repr__ = __str__ = __eq__ = __reduce__


def test_config_error_of_a_value_that_can_not_be_pickled_or_shown_keeps_its_message():
    for value, text in ((Hostile(), "<Hostile>"), (lambda: 3, "<function"), (["a", Hostile], "['a', <class")):
        again = pickle.loads(pickle.dumps(ConfigError("field", value, "no cure")))
        assert str(again) == str(ConfigError("field", value, "no cure")) and str(again).startswith(f"field = {text}")


class Unreadable(Exception):
    def __str__(self):
        raise SystemExit(4)


def test_an_error_whose_text_exits_is_refused_by_its_type():
    shown = r"^dataset = 'Bad': its __len__ failed: Unreadable: its message can't be read \(SystemExit in __str__\) "
    shown += r"\(.*/test_errors\.py:\d+\)$"
    with pytest.raises(ConfigError, match=shown), user_code("dataset", "Bad", "its __len__ failed"):
        raise Unreadable


def test_only_the_main_thread_is_interrupted_by_a_person():
    def interrupted():
        with user_code("dataset", "Bad", "its __len__ failed"):
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        interrupted()
    with ThreadPoolExecutor(1) as thread, pytest.raises(ConfigError, match="its __len__ failed: KeyboardInterrupt"):
        thread.submit(interrupted).result()


def test_the_place_of_an_error_is_the_users_own_code_that_it_came_through():
    with pytest.raises(json.JSONDecodeError) as caught:
        json.loads("{")
    assert re.fullmatch(r"JSONDecodeError: .*\(char 1\) \(test_errors\.py:\d+\)", cause_of(caught.value))
    with pytest.raises(SyntaxError) as caught:
        compile("a = (", "/home/me/mine.py", "exec")
    assert cause_of(caught.value).endswith(" (mine.py:1)")
    assert cause_of(ValueError()) == "ValueError" and cause_of(RunError("a sentence")) == "a sentence"
