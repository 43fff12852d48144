"""The ledger: every rollout in one column, and a lost one is noticed."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from torchtitan.experiments.rl.errors import RunError
from torchtitan.experiments.rl.ledger import Ledger


def test_columns_of_a_task_are_counted_and_the_rest_is_open():
    ledger = Ledger()
    ledger.dispatch("sums", 8)
    ledger.dispatch("sums", 8)
    ledger.dispatch("sort", 4)
    ledger.end("sums", "trained", 5)
    ledger.end("sums", "filtered/zero_advantage", 3)
    ledger.end("sums", "failed/error")
    assert (ledger.open("sums"), ledger.open("sort")) == (7, 4)
    assert ledger.counts() == {
        "sums/dispatched": 16,
        "sums/failed/error": 1,
        "sums/filtered/zero_advantage": 3,
        "sums/trained": 5,
        "sums/open": 7,
        "sort/dispatched": 4,
        "sort/open": 4,
    }


def test_an_empty_column_is_not_named():
    ledger = Ledger()
    ledger.dispatch("sums", 2)
    ledger.end("sums", "untrained", 0)
    assert ledger.counts() == {"sums/dispatched": 2, "sums/open": 2}


@pytest.mark.parametrize("ended, seen", [(3, 4), (5, 4), (9, 0)], ids=["lost", "counted twice", "more than there were"])
def test_a_ledger_that_does_not_balance_stops_the_run(ended, seen):
    ledger = Ledger()
    ledger.dispatch("sums", 8)
    ledger.end("sums", "trained", ended)
    with pytest.raises(RunError, match="ledger of sums does not balance: 8 dispatched"):
        ledger.check({"sums": seen})


def test_one_task_does_not_make_up_for_another():
    ledger = Ledger()
    ledger.dispatch("sums", 2)
    ledger.dispatch("sort", 2)
    ledger.end("sums", "trained", 2)
    with pytest.raises(RunError, match="sums"):
        ledger.check({"sums": 1, "sort": 1})
    ledger.check({"sums": 0, "sort": 2})


COLUMNS = st.sampled_from(["trained", "oversized", "failed/timeout"])


@given(st.lists(st.tuples(st.sampled_from("ab"), COLUMNS, st.integers(0, 5))))
def test_columns_and_open_always_sum_to_dispatched(events):
    ledger = Ledger()
    for task, _, rollouts in events:
        ledger.dispatch(task, rollouts)
    for task, column, rollouts in events:
        ledger.end(task, column, rollouts)
        counts = ledger.counts()
        for name in {task for task, _, _ in events}:
            columns = sum(n for key, n in counts.items() if key.startswith(f"{name}/") and not key.endswith("/dispatched"))
            assert columns == counts[f"{name}/dispatched"]
    ledger.check({})
