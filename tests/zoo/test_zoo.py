"""A third of the zoo, spread over all places and kinds; `python -m tests.zoo` runs all of it."""

from tests.zoo.cases import cases
from tests.zoo.known_failures import KNOWN_FAILURES
from tests.zoo.places import PLACES
from tests.zoo.report import run_cases

EVERY = 3
"""In the suite each third case runs: all would take some minutes."""


def test_culprits_are_named_untrained_and_closed_and_hurt_nobody_else():
    results = list(run_cases(every=EVERY, known=False))
    failed = [f"{result.name}: {'; '.join(result.problems)}" for result in results if result.problems]
    print(f"{len(results) - len(failed)} of {len(results)}")
    assert not failed, "\n".join(failed)
    assert len(results) >= 300
    assert {result.name.rpartition(": ")[0] for result in results} == PLACES.keys()


def test_every_known_failure_is_a_case():
    names = [case.name for case in cases()]
    assert len(set(names)) == len(names)
    known = [name for failing in KNOWN_FAILURES.values() for name in failing]
    assert len(set(known)) == len(known) and set(known) <= set(names)
