"""The report's index: what it has of a run's files, as they grow, are cut back, and are torn."""

import json

import pytest

from tests.unit.report_runs import record, rollout, small_run, write_ledger, write_metrics
from torchtitan.experiments.rl.tools.report import run as index_module
from torchtitan.experiments.rl.tools.report.run import ReportedRun


def ids(index: ReportedRun) -> list[str]:
    return [row[0] for row in index.rows("SELECT rollout_id FROM rollouts ORDER BY place, line")]


@pytest.fixture
def run(tmp_path):
    return small_run(tmp_path / "run")


def test_the_index_has_every_rollout_once_however_often_it_is_refreshed(run):
    for _ in range(2):
        index = ReportedRun(run)
        assert index.refresh() and index.refresh()
        assert ids(index) == ["sums-0/0", "sums-0/1", "words-0/0", "words-0/1"]
        assert index.rows("SELECT COUNT(*) FROM ledger")[0][0] == 4 and index.unread_bytes() == 0
        index.close()
    assert not [path for path in run.iterdir() if path.name.startswith(".report")]


def test_what_is_appended_is_read_and_nothing_else(run):
    index = ReportedRun(run)
    index.refresh()
    record(run, [[rollout("sums-9", 0, reward=0.5)]], {"sums-9/0": "trained"}, step=3)
    write_ledger(run, [("sums", "sums-9/0", "trained")])
    assert index.unread_bytes() > 0
    index.refresh()
    assert ids(index)[-1] == "sums-9/0" and index.rows("SELECT COUNT(*) FROM ledger")[0][0] == 5
    row = dict(index.rows("SELECT * FROM rollouts WHERE rollout_id = 'sums-9/0'")[0])
    names = ("reward", "version", "step", "turns", "tokens", "outcome")
    assert [row[name] for name in names] == [0.5, 3, 5, 1, 2, "trained"]


def test_a_part_of_the_records_at_a_time_gives_the_same(run, monkeypatch):
    for number in range(30):
        record(run, [[rollout(f"sums-{number + 1}", 0, reward=0.0)]], {})
    monkeypatch.setattr(index_module, "BATCH_BYTES", 1)
    index = ReportedRun(run)
    rounds = 1
    while not index.refresh():
        rounds += 1
    assert len(ids(index)) == 34 and 30 < rounds <= 34
    assert (
        index.rows("SELECT COUNT(*) FROM ledger")[0][0] == 4
        and index.rows("SELECT MAX(step) FROM metrics")[0][0] == 3
    )


def test_a_line_that_is_being_written_is_read_when_it_is_whole(run):
    index = ReportedRun(run)
    index.refresh()
    line = json.dumps({"step": 4, "rollout/reward_mean": 0.9}).encode() + b"\n"
    with (run / "metrics.jsonl").open("ab", buffering=0) as file:
        file.write(line[:10])
        index.refresh()
        assert index.rows("SELECT MAX(step) FROM metrics")[0][0] == 3
        file.write(line[10:])
        index.refresh()
    assert index.rows("SELECT value FROM metrics WHERE step = 4")[0][0] == 0.9


def test_files_that_a_resumed_run_has_cut_back_are_read_again(run):
    index = ReportedRun(run)
    index.refresh()
    size = (run / "rollouts.jsonl.gz").stat().st_size
    metrics = run / "metrics.jsonl"
    metrics.write_text(
        "".join(
            line for line in metrics.read_text().splitlines(True) if json.loads(line)["step"] <= 1
        )
    )
    write_metrics(run, {2: {"rollout/reward_mean": 0.75}}, resume_step=1)
    (run / "rollouts.jsonl.gz").unlink()
    (run / "ledger.jsonl").unlink()
    record(run, [[rollout(f"sums-{n}", 0, reward=1.0)] for n in range(20)], {})
    assert (run / "rollouts.jsonl.gz").stat().st_size > size
    write_ledger(run, [("sums", "sums-0/0", "lost")])
    index.refresh()
    assert ids(index) == [f"sums-{n}/0" for n in range(20)]
    assert [tuple(row) for row in index.rows("SELECT rollout_id, column_ FROM ledger")] == [
        ("sums-0/0", "lost")
    ]
    assert [row[0] for row in index.rows("SELECT DISTINCT step FROM metrics ORDER BY step")] == [
        0,
        1,
        2,
    ]
    assert (
        index.rows("SELECT value FROM metrics WHERE name = 'rollout/reward_mean' AND step = 2")[0][
            0
        ]
        == 0.75
    )


def test_a_torn_group_is_passed_over_where_others_follow_and_waited_for_at_the_end(run):
    path = run / "rollouts.jsonl.gz"
    whole = path.read_bytes()
    path.write_bytes(whole + whole[:40])
    record(run, [[rollout("sums-5", 0, reward=1.0)]], {})
    whole = path.read_bytes()
    path.write_bytes(whole + whole[:40])
    index = ReportedRun(run)
    assert index.refresh()
    assert ids(index)[-1] == "sums-5/0" and len(ids(index)) == 5
    path.write_bytes(whole)
    record(run, [[rollout("sums-6", 0, reward=1.0)]], {})
    index.refresh()
    assert ids(index)[-1] == "sums-6/0" and len(ids(index)) == 6


def test_half_a_character_in_a_record_loses_nothing(run):
    record(run, [[rollout("sums-7", 0, reward=None, reply="\udfff", error="half \ud800")]], {})
    index = ReportedRun(run)
    index.refresh()
    assert ids(index)[-1] == "sums-7/0"
    assert (
        index.rows("SELECT error FROM rollouts WHERE rollout_id = 'sums-7/0'")[0][0]
        == "half \\ud800"
    )


def test_a_place_without_a_record_is_a_lookup_error(run):
    index = ReportedRun(run)
    for place, line in ((1, 0), (-5, 0), (10**30, 0), (0, 2), (0, -1)):
        with pytest.raises(LookupError):
            index.record(place, line)
    assert b"sums-0/1" in index.record(0, 1)
