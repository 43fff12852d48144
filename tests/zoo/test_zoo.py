"""A fourteenth of the zoo, spread over all places; `python -m tests.zoo` runs all of it."""

import json

from tests.forkserver import run_module
from tests.zoo.cases import cases
from tests.zoo.places import PLACES


def test_culprits_are_named_untrained_and_closed_and_hurt_nobody_else(tmp_path):
    # In a process of its own: children forked from one that has run other tests, with their threads, may hang.
    found = tmp_path / "found"
    ended = run_module("tests.zoo", "--every", "14", "--json", str(found))
    assert found.exists(), ended.stderr
    problems: dict[str, list[str]] = json.loads(found.read_text())
    failed = [f"{name}: {'; '.join(texts)}" for name, texts in problems.items() if texts]
    assert not failed, "\n".join(failed)
    assert ended.returncode == 0, ended.stderr
    assert len(problems) >= 100
    assert {name.rpartition(": ")[0] for name in problems} == PLACES.keys()


def test_cases_have_names_of_their_own():
    names = [case.name for case in cases()]
    assert len(set(names)) == len(names)
