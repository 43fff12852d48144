"""The report's page Evaluations: examples that were won and lost, counted by hand."""

import json

import pytest
from fastapi.testclient import TestClient

from tests.unit.report_runs import record_evaluation, small_run, write_metrics
from torchtitan.experiments.rl.tools.report.app import exported, report_app
from torchtitan.experiments.rl.tools.report.evaluations import evaluations, sign_test
from torchtitan.experiments.rl.tools.report.run import ReportedRun


@pytest.fixture
def runs(tmp_path):
    """Evaluations of versions 0 and 2 and of the final policy; the other run has one with another second example."""
    first, second = small_run(tmp_path / "first"), small_run(tmp_path / "second")
    record_evaluation(
        first, "0", {"a": [0, 1], "b": [0.1, 0.2, 0.3], "c": [1], "d": [None], "e": [0]}, step=0
    )
    record_evaluation(
        first, "2", {"a": [1, 1], "b": [0.3, 0.2, 0.1], "c": [0], "d": [1], "e": [0.25]}, step=2
    )
    record_evaluation(first, "2.final", {"a": [0, 0]}, step=2)
    record_evaluation(second, "0", {"a": [0, 0.25], "other": [1]}, step=0)
    reported = [ReportedRun(first), ReportedRun(second)]
    for run in reported:
        run.refresh()
    yield reported
    for run in reported:
        run.close()


@pytest.fixture
def compared(runs):
    client = TestClient(report_app(runs), base_url="http://127.0.0.1")

    def compared(before: tuple[int, str], after: tuple[int, str]):
        query = {
            "before_run": before[0],
            "before": before[1],
            "after_run": after[0],
            "after": after[1],
        }
        answer = client.get("/api/changes", params=query)
        return answer.json() | {"code": answer.status_code}

    compared.client = client
    return compared


def test_evaluations_with_records_are_listed_in_their_order(compared):
    listed = [
        compared.client.get(f"/api/runs/{n}/page/evaluations").json()["recorded"] for n in (0, 1)
    ]
    assert [(one["label"], one["version"], one["examples"]) for one in listed[0]] == [
        ("0", 0, 5),
        ("2", 2, 5),
        ("2.final", 2, 1),
    ]
    assert [one["label"] for one in listed[1]] == ["0"]


def test_failed_attempts_are_listed_with_their_first_cause_and_its_rollout(tmp_path):
    folder = small_run(tmp_path / "run")
    record_evaluation(folder, "2", {"a": [1], "b": [None], "c": [None]}, step=2)
    counts = {"validation/sums/attempts": 3, "validation/sums/failed": 2}
    write_metrics(folder, {4: {"validation/step": 2, "validation/sums/avg@1": 1.0, **counts}})
    run = ReportedRun(folder)
    run.refresh()
    client = TestClient(report_app([run]), base_url="http://127.0.0.1")
    (found,) = client.get("/api/runs/0/page/evaluations").json()["failures"]
    key = found.pop("key")
    assert found == {
        "version": 2,
        "task": "sums",
        "failed": 2,
        "attempts": 3,
        "cause": "error",
    }
    page = client.get(f"/api/runs/0/rollouts/{key}").json()
    assert page["rollout_id"] == "validation-sums-1@2/0" and page["reward"] is None
    (hint, *_) = client.get("/api/runs/0/page/overview").json()["hints"]
    assert hint["text"].startswith("2 of 3 attempts at sums failed in the evaluation of version 2")
    assert json.dumps(found["cause"]) in exported([run], sample=2)
    run.close()


def test_an_example_is_won_where_the_mean_reward_of_its_attempts_rose(compared):
    found = compared((0, "0"), (0, "2"))
    assert [(row["example"], row["change"]) for row in found["won"]] == [("a", 0.5), ("e", 0.25)]
    assert [
        (row["example"], row["before"]["reward"], row["after"]["reward"]) for row in found["lost"]
    ] == [("c", 1, 0)]
    # b has the same three rewards in another order; d has none in the first.
    assert found["counts"] == {"won": 2, "lost": 1, "same": 1} and found["left_out"] == 1
    assert found["chance"] == 1.0


def test_a_change_has_its_question_and_both_answers(compared, runs):
    found = compared((0, "0"), (0, "2"))
    for row in (*found["won"], *found["lost"]):
        assert (row["asked"], row["before"]["answered"], row["after"]["answered"]) == (
            "3 4",
            "7",
            "7",
        )
    runs[0].folder.joinpath("rollouts.jsonl.gz").unlink()
    row = compared((0, "0"), (0, "2"))["lost"][0]
    assert (row["asked"], row["before"]["answered"]) == ("", "")


def test_two_shares_that_are_the_same_are_one_line(runs):
    same = {"validation/sums/avg@1": 0.25, "validation/sums/pass@1": 0.25}
    other = {"validation/words/avg@1": 0.25, "validation/words/pass@1": 0.5}
    write_metrics(runs[1].folder, {3: {"validation/step": 3, **same, **other}}, resume_step=2)
    runs[1].refresh()
    lines = evaluations(runs[1])["lines"]
    assert lines["validation/words/pass@1"] == [(3, 0.5)]
    assert lines["validation/words/avg@1"] == [(3, 0.25)]
    assert lines["validation/sums/pass@1"] == [(3, 0.25)]  # avg@1 has a value at version 0 too
    assert len(lines) == 4
    write_metrics(runs[0].folder, {0: {"validation/step": 0, **same}})
    runs[0].refresh()
    assert evaluations(runs[0])["lines"] == {"validation/sums/avg@1 and pass@1": [(0, 0.25)]}


def test_each_side_leads_to_its_rollouts(compared):
    row = compared((0, "0"), (0, "2"))["won"][0]
    for side, label, rewards in (("before", "0", [0, 1]), ("after", "2", [1, 1])):
        pages = [
            compared.client.get(f"/api/runs/{row[side]['run']}/rollouts/{key}").json()
            for key in row[side]["keys"]
        ]
        assert [page["rollout_id"] for page in pages] == [
            f"validation-sums-0@{label}/{n}" for n in (0, 1)
        ]
        assert [page["reward"] for page in pages] == rewards


def test_examples_of_two_runs_are_compared_where_they_are_the_same(compared):
    found = compared((0, "0"), (1, "0"))
    assert [(row["example"], row["change"]) for row in found["lost"]] == [("a", -0.375)] and found[
        "won"
    ] == []
    assert found["left_out"] == 4


def test_an_evaluation_that_is_not_there_has_no_examples(compared):
    assert compared((0, "0"), (0, "77"))["counts"] == {"won": 0, "lost": 0, "same": 0}
    assert compared((0, "0"), (9, "0"))["code"] == compared((0, "0"), (-1, "0"))["code"] == 404


def test_the_sign_test_is_that_of_the_binomial():
    assert sign_test(0, 0) == sign_test(3, 3) == sign_test(1, 0) == 1.0
    assert sign_test(5, 0) == 2 / 32 and sign_test(1, 4) == 12 / 32
    assert sign_test(3000, 1000) < 1e-200
