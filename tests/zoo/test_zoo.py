"""A fourteenth of the zoo, spread over all places; `python -m tests.zoo` runs all of it."""

import json
import subprocess
import sys
from pathlib import Path

from tests.zoo.cases import cases
from tests.zoo.places import PLACES

SCRIPT = """
import json
from tests.zoo.report import run_cases
print(json.dumps({result.name: result.problems for result in run_cases(every=14)}))
"""
ROOT = Path(__file__).resolve().parents[2]


def test_culprits_are_named_untrained_and_closed_and_hurt_nobody_else():
    # In a process of its own: children forked from one that has run other tests, with their threads, may hang.
    script = subprocess.run(
        [sys.executable, "-c", SCRIPT], cwd=ROOT, capture_output=True, text=True, timeout=600
    )
    assert script.returncode == 0, script.stderr
    problems: dict[str, list[str]] = json.loads(script.stdout.splitlines()[-1])
    failed = [f"{name}: {'; '.join(texts)}" for name, texts in problems.items() if texts]
    assert not failed, "\n".join(failed)
    assert len(problems) >= 100
    assert {name.rpartition(": ")[0] for name in problems} == PLACES.keys()


def test_cases_have_names_of_their_own():
    names = [case.name for case in cases()]
    assert len(set(names)) == len(names)
