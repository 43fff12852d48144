"""A run folder that the report is shown may come from anywhere: what is no record, and what leads out of it, is not read."""

import json

import pytest
from fastapi.testclient import TestClient

from tests.unit.report_runs import record, rollout, small_run, write_ledger, write_metrics
from torchtitan.experiments.rl.rollouts.record_file import RecordFile, compress
from torchtitan.experiments.rl.tools.report.app import report_app
from torchtitan.experiments.rl.tools.report.run import ReportedRun

GARBAGE = [
    b"",
    b"7",
    b"null",
    b"[]",
    b"{}",
    b"\xff\xfe",
    b'{"step": "x"}',
    b"[" * 100_000,
    b'{"step": 1e99}',
    b"x" * 2**20,
]


@pytest.fixture
def run(tmp_path):
    return small_run(tmp_path / "run")


def client_of(folder):
    run = ReportedRun(folder)
    run.refresh()
    return TestClient(report_app([run]), base_url="http://127.0.0.1")


@pytest.mark.parametrize("content", [*GARBAGE, b'{"models": []}', b'{"models": [{"metrics": 7}]}'])
def test_an_evaluation_without_a_result_has_records_and_no_figures(tmp_path, content):
    for folder in (tmp_path, tmp_path / "against"):
        folder.mkdir(exist_ok=True)
        (folder / "config.json").write_text("{}")
        (tmp_path / "evaluation.json").write_bytes(content)
        api = client_of(folder).get("/api/runs/0/page/overview").json()
        assert api["state"]["state"] == "records" and api["hints"] == [] and api["metrics"] == []


def test_lines_that_are_no_records_are_passed_over(run):
    for name in ("metrics.jsonl", "ledger.jsonl"):
        with (run / name).open("ab") as file:
            file.write(b"\n".join(GARBAGE) + b"\n")
    write_ledger(run, [("sums", "sums-7/0", "trained")])
    with (run / "metrics.jsonl").open("ab") as file:
        file.write(
            b'{"step": 9, "a": "text", "b": [1], "c": true, "d": NaN, "e": 1e999, "f": %d, "__proto__": 2}\n'
            % 10**400
        )
        file.write(b'{"step": 9, "g": %d}\n' % 10**30)
    index = ReportedRun(run)
    assert not index.refresh() and index.refresh(), "the garbage is more than is read at once"
    assert index.rows("SELECT COUNT(*) FROM ledger")[0][0] == 5
    found = {row[0]: row[1] for row in index.rows("SELECT name, value FROM metrics WHERE step = 9")}
    assert found == {"c": 1, "d": None, "e": float("inf"), "__proto__": 2, "g": 1e30}


def test_a_ledger_with_half_characters_and_huge_numbers_loses_only_those_lines(run):
    end = {"task": "t\ud800", "dispatched_version": 0, "column": "trained"}
    with (run / "ledger.jsonl").open("a") as file:
        for number, version in enumerate((1, 2**63, -(10**30), "1", None)):
            file.write(
                json.dumps({**end, "rollout_id": f"x-{number}", "ended_version": version}) + "\n"
            )
    index = ReportedRun(run)
    index.refresh()
    rows = index.rows("SELECT rollout_id, task FROM ledger WHERE rollout_id LIKE 'x-%'")
    assert [tuple(row) for row in rows] == [("x-0", "t\\ud800")]


def test_rollouts_with_fields_of_other_types_lose_only_themselves(run):
    recorder = RecordFile(run / "rollouts.jsonl.gz")
    record(run, [[rollout("good-0", 0, reward=1.0)]], {})
    index = ReportedRun(run)
    index.refresh()
    place = index.rows("SELECT place FROM rollouts WHERE rollout_id = 'good-0/0'")[0][0]
    good = json.loads(index.record(place, 0))
    changes = [
        {"turn_count": 2**64},
        {"outcome": 7},
        {"outcome": "\udfff"},
        {"rollout": None},
        {"data_sample": {"sample_id": {}}},
    ]
    recorder.append(
        compress(
            b"".join(json.dumps(good | change).encode() + b"\n" for change in changes)
            + b"no json\n"
        )
    )
    index.refresh()
    rows = index.rows("SELECT line, outcome, sample_id FROM rollouts WHERE place > ?", (place,))
    assert [tuple(row) for row in rows] == [(2, "\\udfff", "s"), (4, None, "{}")]


def test_a_record_of_another_format_says_so_and_the_list_has_it(run):
    index = ReportedRun(run)
    index.refresh()
    old = json.loads(index.record(0, 0)) | {"format": 1, "rollout_id": "old-0/0"}
    RecordFile(run / "rollouts.jsonl.gz").append(compress(json.dumps(old).encode() + b"\n"))
    client = client_of(run)
    (row,) = [
        row
        for row in client.get("/api/runs/0/rollouts").json()["rows"]
        if row["rollout_id"] == "old-0/0"
    ]
    for page in ("", "/tokens"):
        answer = client.get(f"/api/runs/0/rollouts/{row['key']}{page}")
        assert (
            answer.status_code == 404
            and "this record can't be read: Invalid enum value 1" in answer.text
        )
    assert client.get(f"/api/runs/0/rollouts/{row['key']}/raw").json()["format"] == 1


@pytest.mark.parametrize(
    "name", ["metrics.jsonl", "ledger.jsonl", "rollouts.jsonl.gz", "config.json"]
)
def test_a_file_of_the_run_that_is_a_link_is_not_read(run, tmp_path, name):
    (run / name).rename(tmp_path / "elsewhere")
    (run / name).symlink_to(tmp_path / "elsewhere")
    client = client_of(run)
    pages = {
        page: client.get(f"/api/runs/0/{page}").json()
        for page in ("page/overview", "page/ledger", "rollouts")
    }
    config = client.get("/api/runs").json()["config"]
    missing = {
        "metrics.jsonl": not pages["page/overview"]["charts"],
        "ledger.jsonl": not pages["page/ledger"]["tasks"],
        "rollouts.jsonl.gz": not pages["rollouts"]["rows"],
        "config.json": not config,
    }
    assert [other for other, empty in missing.items() if empty] == [name]


def test_a_config_of_any_content_breaks_no_page(run):
    for config in (
        {"steps": "many", "tasks": [1]},
        {"steps": {"a": 1}, "tasks": {"a": None}, "model": 7},
        ["x"],
        "x" * 10**6,
    ):
        (run / "config.json").write_text(json.dumps(config))
        (run / "command.json").write_text(
            json.dumps({"config_name": 1, "module": 2, "overrides": 3, "started": "now"})
        )
        client = client_of(run)
        for page in (
            "api/runs",
            *(
                f"api/runs/0/page/{name}"
                for name in ("overview", "ledger", "evaluations", "timeline")
            ),
        ):
            assert client.get(f"/{page}").status_code == 200, (config, page)
        assert client.get("/api/runs/0/rollouts/0-0/tokens").status_code == 200


def test_a_problem_with_the_files_is_said_and_ends_nothing(run, monkeypatch):
    reported = ReportedRun(run)
    answers = iter([OSError("the disk fails")])

    def refresh():
        for error in answers:
            raise error
        reported._closed.set()
        return True

    monkeypatch.setattr(reported, "refresh", refresh)
    seen = []
    monkeypatch.setattr(
        reported._closed, "wait", lambda seconds: seen.append(reported.state()["problem"])
    )
    reported._follow()
    assert seen == ["OSError: the disk fails", None]
    reported.close()


def test_metrics_that_grow_after_a_resume_are_not_doubled(run):
    index = ReportedRun(run)
    index.refresh()
    for value in (0.5, 0.25):
        write_metrics(run, {3: {"rollout/reward_mean": value}}, resume_step=2)
        index.refresh()
        rows = index.rows(
            "SELECT value FROM metrics WHERE name = 'rollout/reward_mean' AND step = 3"
        )
        assert [row[0] for row in rows] == [value]
