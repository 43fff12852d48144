"""The ledger: every rollout in one column, and a lost one is noticed."""

import json
import logging
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.fakes.tasks import StubTask
from torchtitan.experiments.rl.errors import RunError
from torchtitan.experiments.rl.loops.groups import Ending, GroupBuffer, Pick
from torchtitan.experiments.rl.loops.ledger import Ledger
from torchtitan.experiments.rl.loops.pacing import Pacer


def dispatched(**tasks: int) -> Ledger:
    """A ledger with rollouts ``<task>/0``, ``<task>/1``, ... dispatched at version 3."""
    ledger = Ledger()
    for task, count in tasks.items():
        ledger.dispatch(task, [f"{task}/{index}" for index in range(count)], version=3)
    return ledger


def test_columns_of_a_task_are_counted_and_the_rest_is_open():
    ledger = dispatched(sums=4, sort=2)
    ledger.end("sums/0", "trained", version=4)
    ledger.end("sums/2", "trained", version=4)
    ledger.end("sums/1", "filtered/pre/zero_advantage", version=3)
    assert (ledger.open("sums"), ledger.open("sort")) == (1, 2)
    assert ledger.counts() == {
        "sums/dispatched": 4,
        "sums/filtered/pre/zero_advantage": 1,
        "sums/trained": 2,
        "sums/open": 1,
        "sort/dispatched": 2,
        "sort/open": 2,
    }
    ledger.check({"sums/3", "sort/0", "sort/1"})


@pytest.mark.parametrize(
    "seen, named", [(["sums/1"], "lost .*sums/2"), (["sums/0", "sums/1", "sums/2"], "sums/0")]
)
def test_a_ledger_that_does_not_balance_stops_the_run(seen, named):
    ledger = dispatched(sums=3)
    ledger.end("sums/0", "trained", version=4)
    with pytest.raises(RunError, match=f"does not balance.*{named}"):
        ledger.check(seen)


def test_a_rollout_ends_once():
    ledger = dispatched(sums=1)
    ledger.end("sums/0", "trained", version=4)
    with pytest.raises(RunError, match="rollout sums/0 ends as oversized, but it is not open"):
        ledger.end("sums/0", "oversized", version=4)
    with pytest.raises(RunError, match="rollout other/0 .* not open"):
        ledger.end("other/0", "trained", version=4)


def test_a_rollout_is_dispatched_once():
    with pytest.raises(RunError, match="rollout sums/1 was dispatched twice"):
        dispatched(sums=2).dispatch("sums", ["sums/1"], version=5)


def test_each_ended_rollout_is_a_line_of_the_file(tmp_path):
    ledger = Ledger(tmp_path / "ledger.jsonl")
    ledger.dispatch("sums", ["sums-0/0", "sums-0/1"], version=3)
    ledger.end("sums-0/1", "failed/timeout", version=5)
    ledger.close()
    (line,) = (tmp_path / "ledger.jsonl").read_text().splitlines()
    assert json.loads(line) == {
        "rollout_id": "sums-0/1",
        "task": "sums",
        "dispatched_version": 3,
        "column": "failed/timeout",
        "ended_version": 5,
    }


COLUMNS = st.sampled_from(["trained", "oversized", "failed/timeout"])


@given(st.lists(st.tuples(st.sampled_from("ab"), COLUMNS)), st.data())
def test_columns_and_open_always_sum_to_dispatched(events, data):
    ledger = Ledger()
    open_rollouts = {}
    for index, (task, column) in enumerate(events):
        ledger.dispatch(task, [f"{task}/{index}"], version=index)
        open_rollouts[f"{task}/{index}"] = column
    for rollout_id in data.draw(st.permutations(sorted(open_rollouts))):
        ledger.end(rollout_id, open_rollouts.pop(rollout_id), version=99)
        ledger.check(open_rollouts)
        counts = ledger.counts()
        for name in {task for task, _ in events}:
            columns = sum(
                n
                for key, n in counts.items()
                if key.startswith(f"{name}/") and not key.endswith("/dispatched")
            )
            assert columns == counts[f"{name}/dispatched"]


def test_a_rollout_that_ends_for_a_reason_is_logged_with_it_and_no_other_is(caplog):
    policy: Any = SimpleNamespace(version=3)
    sums: Any = StubTask(lambda number: [0.0, 1.0], name="sums")
    pacer = Pacer(rollouts_per_step=2, max_offpolicy_steps=0)
    buffer = GroupBuffer(pacer, Ledger(), policy, steps=1)
    group = buffer.claim(Pick(task=sums, groups_left=1))
    assert group is not None
    with caplog.at_level(logging.INFO, logger="torchtitan.experiments.rl"):
        buffer.end(group, {"sums-0/0": Ending("failed", "the env hangs")})
        buffer.end(group, {"sums-0/1": Ending("cancelled")})
    assert [record.getMessage() for record in caplog.records] == [
        "failed: rollout sums-0/0: the env hangs"
    ]
