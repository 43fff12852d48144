"""The report's API: its figures are those of metrics.jsonl and ledger.jsonl, and nothing that a request names is a path."""

import base64
import gzip
import hashlib
import json
import math
import os
import re
import socket
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
from fastapi.testclient import TestClient

from tests.unit.report_runs import (
    record,
    record_evaluation,
    rollout,
    small_run,
    write_ledger,
    write_metrics,
)
from torchtitan.experiments.rl.checkpointing.folder import CheckpointWriter
from torchtitan.experiments.rl.command import history
from torchtitan.experiments.rl.command.history import write_end, write_start
from torchtitan.experiments.rl.command.run_folder import SavedCommand, save_command
from torchtitan.experiments.rl.errors import RunError
from torchtitan.experiments.rl.report import main
from torchtitan.experiments.rl.tools.report import pages
from torchtitan.experiments.rl.tools.report.app import STATIC, exported, report_app
from torchtitan.experiments.rl.tools.report.run import ReportedRun, is_locked

HOSTILE = "<script>alert(1)</script></textarea>\x1b[31m\x1b]0;title\x07\u202e\udfff"


@pytest.fixture
def run(tmp_path):
    small_run(tmp_path / "run")
    reported = ReportedRun(tmp_path / "run")
    reported.refresh()
    yield reported
    reported.close()


def client_of(*runs, **options):
    return TestClient(
        report_app(runs, **options), base_url="http://127.0.0.1:8765", follow_redirects=False
    )


@pytest.fixture
def get(run):
    client = client_of(run)

    def get(path: str):
        answer = client.get(f"/api/runs/0/{path}")
        assert answer.status_code == 200, answer.text
        return answer.json()

    return get


def lines_of(path: Path) -> list[dict]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_curves_are_those_of_the_metrics_file(run, get):
    lines = {
        name: points
        for chart in get("page/overview")["charts"]
        for name, points in chart["lines"].items()
    }
    records = lines_of(run.folder / "metrics.jsonl")
    for name in ("rollout/reward_mean", "policy/entropy", "time/step_s"):
        assert lines[name] == [[r["step"], r[name]] for r in records if name in r]
        assert get(f"metrics?name={name}")["points"] == lines[name]
    assert lines["policy/entropy"][1] == [2, None]  # what is null in the file is no point


def test_the_negative_log_likelihood_of_demonstrations_is_drawn_before_the_loss(run):
    write_metrics(run.folder, {3: {"ce/nll": 0.5, "loss/total": 0.25}}, resume_step=2)
    run.refresh()
    charts = client_of(run).get("/api/runs/0/page/overview").json()["charts"]
    titles = [chart["title"] for chart in charts]
    nll = titles.index("Negative log-likelihood")
    assert titles[nll + 1] == "Loss" and charts[nll]["unit"] == "nats a token"
    assert charts[nll]["lines"] == {"ce/nll": [[3, 0.5]]}


def test_a_validation_is_drawn_at_the_version_it_measured(run):
    write_metrics(run.folder, {3: {"validation/step": 1, "validation/reward": 0.5}}, resume_step=2)
    run.refresh()
    page = client_of(run).get("/api/runs/0/page/overview").json()
    (chart,) = [chart for chart in page["charts"] if chart["title"] == "Validation"]
    assert chart["lines"]["validation/reward"] == [[0, 0.25], [1, 0.5]]
    rows = client_of(run).get("/api/runs/0/page/evaluations").json()["evaluations"]
    assert [
        (row["version"], row["reported"], row["metrics"]["validation/reward"]) for row in rows
    ] == [
        (0, 0, 0.25),
        (1, 3, 0.5),
    ]


def test_the_ledgers_boxes_count_the_lines_of_the_ledger_file(run, get):
    wanted = Counter(
        (line["task"], line["column"]) for line in lines_of(run.folder / "ledger.jsonl")
    )
    tasks = {task["task"]: task for task in get("page/ledger")["tasks"]}
    assert {(t, c): n for t, task in tasks.items() for c, n in task["columns"].items()} == dict(
        wanted
    )
    assert (tasks["sums"]["dispatched"], tasks["sums"]["open"], tasks["words"]["dispatched"]) == (
        3,
        1,
        2,
    )
    for task, column in wanted:
        assert (
            get(f"rollouts?task={task}&outcome={column}")["total"]
            == wanted[task, column]
            == tasks[task]["recorded"][column]
        )


@pytest.mark.parametrize(
    ("query", "found"),
    [
        ("", ["words-0/0", "words-0/1", "sums-0/0", "sums-0/1"]),
        ("task=sums", ["sums-0/0", "sums-0/1"]),
        ("version=1", ["words-0/0", "words-0/1"]),
        ("step=2", ["sums-0/0", "sums-0/1"]),
        ("step=0", []),
        ("step=1", []),
        ("status=error", ["words-0/1"]),
        ("outcome=failed", ["words-0/1"]),
        ("outcome=fail", []),
        ("outcome=trained&min_reward=0.5", ["sums-0/0"]),
        ("max_reward=0.5", ["sums-0/1"]),
        ("group=words-0&sort=lowest", ["words-0/0", "words-0/1"]),
        ("text=EIGHT", ["sums-0/1"]),
        ("text=nowhere", []),
        ("sort=highest&limit=1", ["words-0/0"]),
        ("limit=2&offset=2", ["sums-0/0", "sums-0/1"]),
        ("task=' OR 1=1 --", []),
    ],
)
def test_filters_choose_rollouts(get, query, found):
    assert [row["rollout_id"] for row in get(f"rollouts?{query}")["rows"]] == found


def test_a_rollout_is_a_conversation_with_its_credit(get):
    key = get("rollouts?text=eight")["rows"][0]["key"]
    page = get(f"rollouts/{key}")
    assert [m["role"] for m in page["turns"][0]["messages"]] == ["system", "user"] and page[
        "turns"
    ][0]["reply"]["text"] == "eight"
    assert page["reward_components"] == {"right": 0.0} and page["advantage"] == {
        "min": -0.5,
        "mean": -0.5,
        "max": -0.5,
    }
    assert page["samples"] == [{"tokens": 5, "trained": 2}] and page["example"] == {
        "sample_id": "s",
        "env_input": "[3, 4]",
    }
    group = get(f"groups/{page['place']}")
    assert [member["reward"] for member in group["members"]] == [1.0, 0.0] and (
        group["mean"],
        group["std"],
    ) == (0.5, 0.5)
    assert group["members"][0]["advantage"] == {"min": 0.5, "mean": 0.625, "max": 0.75}
    filtered = get("rollouts/" + get("rollouts?outcome=filtered")["rows"][0]["key"])
    assert filtered["advantage_is"] == "Dropped by the pre_batch_filters entry zero_advantage."


def test_tokens_have_their_streams(get):
    page = get(f"rollouts/{get('rollouts?task=sums')['rows'][0]['key']}/tokens")
    assert page["ids"] == [1, 2, 3, 4, 5] and page["texts"] is None
    streams = page["streams"]
    assert streams["generator_logprobs"] == [0, 0, 0, -0.5, -0.25] and streams[
        "policy_versions"
    ] == [-1, -1, -1, 2, 3]
    assert (
        streams["advantages"] == [0, 0, 0, 0.5, 0.75]
        and streams["loss_mask"] == [False] * 3 + [True] * 2
    )
    assert streams["role_ids"] == ["system", "user", None, "assistant", "assistant"] and streams[
        "rl_weights"
    ] == [
        0,
        0,
        0,
        1,
        1,
    ]
    assert "ce_weights" not in streams


def test_the_ratio_of_trainer_and_generator_is_that_of_sampled_tokens(run, get):
    one = rollout("ratio-0", 0, reward=1.0)  # the generator says -0.5 and -0.25
    one.samples[0].trainer_logprobs = np.array([0, 0, 0, math.log(2) - 0.5, -1000], np.float32)
    record(run.folder, [[one]], {"ratio-0/0": "trained"})
    run.refresh()
    page = get(f"rollouts/{get('rollouts?group=ratio-0')['rows'][0]['key']}/tokens")
    assert page["streams"]["ratio"] == [None, None, None, pytest.approx(2), 0]
    assert page["streams"]["trainer_logprobs"][3:] == [pytest.approx(0.1931, abs=1e-4), -1000]
    assert (
        "ratio"
        not in get(f"rollouts/{get('rollouts?task=words')['rows'][0]['key']}/tokens")["streams"]
    )


def test_hostile_and_huge_texts_arrive_as_data(run):
    record(
        run.folder,
        [
            [
                rollout("bad-0", 0, reward=1.0, reply=HOSTILE),
                rollout("bad-0", 1, reward=1.0, reply="x" * 2**20),
            ]
        ],
        {},
    )
    run.refresh()
    client = client_of(run)
    row, huge = client.get("/api/runs/0/rollouts?group=bad-0").json()["rows"]
    answer = client.get(f"/api/runs/0/rollouts/{row['key']}")
    assert (
        answer.headers["content-type"] == "application/json"
        and answer.headers["x-content-type-options"] == "nosniff"
    )
    assert answer.json()["turns"][0]["reply"]["text"] == HOSTILE
    answer = client.get(f"/api/runs/0/rollouts/{huge['key']}")
    assert len(answer.content) < 50_000 and "1,028,576 characters more" in answer.text
    assert len(client.get(f"/api/runs/0/rollouts/{huge['key']}?whole=true").content) > 2**20
    page = exported([run], sample=10)
    assert "<script>alert" not in page and page.count("</script>") == 2
    held = json.loads(re.search(r'id="data">(.*?)</script>', page, re.DOTALL)[1])
    assert held[f"api/runs/0/rollouts/{row['key']}"]["turns"][0]["reply"]["text"] == HOSTILE


def test_scripts_make_no_html_from_texts():
    """What a page shows goes into text nodes; the policy of the page would stop what went past that."""
    for path in STATIC.iterdir():
        text = path.read_text()
        assert not re.search(
            r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|eval\(|new Function|https?://(?!www\.w3)",
            text,
        )


def test_every_answer_has_a_policy_that_runs_no_script_of_a_text(run):
    for path in ("/", *(f"/{path.name}" for path in STATIC.iterdir()), "/api/runs", "/nowhere"):
        policy = client_of(run).get(path).headers["content-security-policy"]
        assert (
            "default-src 'none'; script-src 'self'; style-src 'self'" in policy
            and "unsafe" not in policy
        )
    page = exported([run], sample=1)
    script, style = (
        re.search(r"<script>(.*)</script>", page, re.DOTALL)[1],
        re.search(r"<style>(.*)</style>", page, re.DOTALL)[1],
    )
    for kind, text in (("script", script), ("style", style)):
        assert (
            f"{kind}-src 'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"
            in page
        )


def test_no_path_leads_out_of_the_run(run, tmp_path):
    (tmp_path / "secret.json").write_text("the secret")
    client = client_of(run)
    for place in (
        "/{}",
        "/api/runs/{}",
        "/api/runs/0/page/{}",
        "/api/runs/0/traces/{}",
        "/api/runs/0/rollouts/{}",
    ):
        for name in (
            "../../secret.json",
            "..%2f..%2fsecret.json",
            "%2e%2e/secret.json",
            "/etc/passwd",
            "%2e%2e",
            "secret.json%00",
        ):
            answer = client.get(place.format(name))
            assert answer.status_code in (404, 422) or answer.url.path == "/", (place, name)
            assert "the secret" not in answer.text and "root:" not in answer.text


def test_no_value_of_a_filter_breaks_the_list(run):
    client = client_of(run)
    for (
        field
    ) in "task step status outcome group min_reward max_reward text sort limit offset".split():
        for value in (
            "../../secret.json",
            "x" * 2000,
            "1e999",
            "9" * 40,
            "\x00",
            "\ud800",
            "'; DROP TABLE rollouts; --",
        ):
            answer = client.get(
                "/api/runs/0/rollouts", params={field: value.encode("utf-8", "surrogatepass")}
            )
            assert answer.status_code in (200, 422), (field, value)
    assert client.get("/api/runs/0/rollouts").json()["total"] == 4


def test_a_trace_is_served_and_a_link_with_its_name_is_not(run, tmp_path):
    (run.folder / "trace-steps-2-3.json").write_text("{}")
    (tmp_path / "secret.json").write_text("the secret")
    (run.folder / "trace-steps-4-5.json").symlink_to(tmp_path / "secret.json")
    client = client_of(run)
    assert client.get("/api/runs/0/page/timeline").json()["traces"] == ["trace-steps-2-3.json"]
    assert client.get("/api/runs/0/traces/trace-steps-2-3.json").json() == {}
    assert client.get("/api/runs/0/traces/trace-steps-4-5.json").status_code == 404


def test_without_a_token_only_local_names_are_answered(run):
    app = report_app([run])
    for host in ("127.0.0.1:8765", "localhost", "[::1]:8765", "[::1]"):
        assert TestClient(app, base_url=f"http://{host}").get("/").status_code == 200
    for host in ("evil.example", "evil.example:8765", "127.0.0.1.evil.example"):
        assert TestClient(app, base_url=f"http://{host}").get("/api/runs").status_code == 400


def test_with_a_token_nothing_is_answered_without_it(run):
    client = client_of(run, token="right")
    assert client.get("/api/runs").status_code == client.get("/?token=wrong").status_code == 401
    opened = client.get("/?token=right")
    assert (
        opened.status_code == 303
        and opened.headers["location"] == "/"
        and "HttpOnly" in opened.headers["set-cookie"]
    )
    assert client.get("/api/runs").status_code == 200
    other = client_of(run, token="right")
    other.cookies.set("report-token", "wrong")
    assert other.get("/api/runs").status_code == 401


def test_keys_are_on_no_page(run):
    text = client_of(run).get("/api/runs").text + exported([run], sample=2)
    assert "sk-1" not in text and "(hidden)" in text and "JUDGE" in text


def test_several_runs_show_the_fields_that_differ(run, tmp_path):
    other = small_run(tmp_path / "other")
    config = json.loads((other / "config.json").read_text()) | {"seed": 8, "new": [1]}
    (other / "config.json").write_text(json.dumps(config))
    second = ReportedRun(other)
    answer = client_of(run, second).get("/api/runs").json()
    assert answer["config"] == {"new": [None, "[1]"], "seed": [7, 8]} and [
        r["name"] for r in answer["runs"]
    ] == [
        "run",
        "other",
    ]
    second.close()


def test_states_follow_the_files_and_the_lock(run, tmp_path):
    import fcntl

    assert run.state()["state"] == "done"
    assert run.state()["started"] is None and run.state()["resumes"] == []
    config = json.loads((run.folder / "config.json").read_text()) | {"steps": 9}
    (run.folder / "config.json").write_text(json.dumps(config))
    assert run.state()["state"] == "stopped"
    with (run.folder / ".lock").open("ab") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        assert is_locked(run.folder / ".lock") and run.state()["state"] == "running"
        os.utime(run.folder / "metrics.jsonl", (0, 0))
        page = client_of(run).get("/api/runs/0/page/overview").json()
        assert page["state"]["state"] == "stalled" and page["hints"][0]["text"].startswith(
            "Stalled"
        )
    assert not is_locked(run.folder / ".lock")


def test_the_records_of_an_evaluation_have_its_figures_at_version_0(tmp_path):
    """A figure that is not finite is null, as in metrics.jsonl; a run's own metrics stay."""
    names = {"validation/step": 0, "validation/sums/avg@1": 0.75, "validation/sums/loss": math.nan}
    (tmp_path / "evaluation.json").write_text(json.dumps({"models": [{"metrics": names}]}))
    (tmp_path / "config.json").write_text(json.dumps({"steps": 30}))
    index = ReportedRun(tmp_path)
    index.refresh()
    page = client_of(index).get("/api/runs/0/page/evaluations").json()
    assert page["evaluations"] == [
        {
            "version": 0,
            "reported": 0,
            "metrics": {"validation/step": 0, "validation/sums/avg@1": 0.75},
        }
    ]
    assert index.state()["state"] == "records"
    write_metrics(tmp_path, {1: {"rollout/reward_mean": 0.5}})
    assert index.state()["state"] == "stopped"
    index.close()


def test_the_ledger_counts_causes_that_differ_by_numbers_alone_as_one(run, get):
    causes = ["line 3 at 0x7f", "line 4 at 0xa0", "hangs"]
    group = [
        rollout("sums-7", n, reward=None, error=cause) for n, cause in enumerate([*causes, None])
    ]
    record(run.folder, [group], {one.rollout_id: "failed/error" for one in group})
    run.refresh()
    by_task = {entry["task"]: entry["causes"] for entry in get("page/ledger")["tasks"]}
    assert [(one["count"], one["cause"]) for one in by_task["sums"]] == [
        (2, "line 3 at 0x7f"),
        (1, "hangs"),
    ]
    key = by_task["sums"][0]["key"]
    assert get(f"rollouts/{key}")["rollout_id"] == "sums-7/0"
    assert f'"api/runs/0/rollouts/{key}": ' in exported([run], sample=1), "its link works there"
    assert [one["cause"] for one in by_task["words"]] == ["it broke"]
    assert get("rollouts?text=HANGS")["rows"][0]["rollout_id"] == "sums-7/2"
    assert {"failed", "failed/error"} <= set(get("rollouts")["choices"]["outcome"])


def first_hint(run):
    page = client_of(run).get("/api/runs/0/page/overview").json()
    hint = page["hints"][0] if page["hints"] else {"severity": "", "text": "", "field": ""}
    return page["state"]["state"], f"{hint['severity']}: {hint['text']} -> {hint['field']}"


CAUSE = "none of the first 100 groups teaches anything: '2' to example 37 earns 0; see the rubric"
NO_CHECKPOINT = "start a new run: this one has no checkpoint to go on from"


@pytest.mark.parametrize(
    ("end", "state", "hint"),
    [
        (("failed", CAUSE), "failed", f"error: {CAUSE} -> mend the cause, then {NO_CHECKPOINT}"),
        (
            ("stopped", "SIGINT"),
            "stopped",
            f"warning: Stopped after step 3 of 9 by Ctrl-C (SIGINT) -> {NO_CHECKPOINT}",
        ),
        (None, "killed", "error: Killed after step 3 of 9: the command ended without a word"),
        (
            ("done", "nothing left to learn: all rewards tie"),
            "done",
            "note: Done after step 3 of 9: nothing left to learn: all rewards tie -> ",
        ),
        (("done", None), "done", ": "),
    ],
)
def test_however_a_run_ends_its_state_and_first_hint_say_so(run, end, state, hint):
    config = json.loads((run.folder / "config.json").read_text()) | {"steps": 9}
    (run.folder / "config.json").write_text(json.dumps(config))
    write_start(run.folder, 0)
    if end is not None:
        write_end(run.folder, *end)
    (run.folder / "ledger.jsonl").write_text("")  # of its rollouts there is nothing to say
    run.refresh()
    found = first_hint(run)
    assert found[0] == state and found[1].startswith(hint), found


def test_a_run_that_ended_before_its_first_checkpoint_is_advised_to_begin_again(run):
    save_command(run.folder, SavedCommand(config_name="small", module="m", overrides=[]))
    write_start(run.folder, 0)
    write_end(run.folder, "failed", "the disk is full")
    again = (
        "mend the cause, then --resume with this folder begins again: there is no checkpoint yet"
    )
    assert first_hint(run) == ("failed", f"error: the disk is full -> {again}")


def test_a_resume_is_advised_where_there_is_a_checkpoint(run):
    write_start(run.folder, 0)
    write_end(run.folder, "failed", "the disk is full")
    folder = CheckpointWriter(run.folder, keep=9)
    folder.begin(2)
    folder.commit(2)
    resume = "mend the cause, then --resume with this folder goes on from step 2"
    assert first_hint(run) == ("failed", f"error: the disk is full -> {resume}")


def test_a_run_that_goes_on_after_a_resume_says_so_and_not_how_it_ended_before(run):
    import fcntl

    config = json.loads((run.folder / "config.json").read_text()) | {"steps": 9}
    (run.folder / "config.json").write_text(json.dumps(config))
    write_start(run.folder, 0)
    write_end(run.folder, "failed", CAUSE)
    write_start(run.folder, 2)
    with (run.folder / ".lock").open("ab") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        state = run.state()
    assert (state["state"], state["why"]) == ("running", "")
    (resume,) = state["resumes"]
    assert resume["step"] == 2 and state["started"] <= resume["time"]


def test_a_run_on_another_host_whose_lock_is_not_seen_here_is_not_called_killed(run, monkeypatch):
    config = json.loads((run.folder / "config.json").read_text()) | {"steps": 9}
    (run.folder / "config.json").write_text(json.dumps(config))
    monkeypatch.setattr(history.socket, "gethostname", lambda: "another")
    write_start(run.folder, 0)
    monkeypatch.undo()
    assert run.state()["state"] == "running"
    os.utime(run.folder / "metrics.jsonl", (0, 0))
    assert run.state()["state"] == "stalled"


def test_a_key_of_the_config_is_not_in_the_error(run):
    write_start(run.folder, 0)
    write_end(run.folder, "failed", "401 for key sk-1")
    assert first_hint(run)[1].startswith("error: 401 for key (hidden) -> ")


def test_a_version_at_which_no_rollout_ended_in_a_column_counts_0(run):
    """The ledger's lines: "trained" has 2 rollouts at version 1, and here 1 at version 6."""
    ends = [
        {"rollout_id": f"sums-9/{version}", "task": "sums", "dispatched_version": 0}
        | {"column": column, "ended_version": version}
        for version, column in ((6, "trained"), (7, "lost"))
    ]
    with (run.folder / "ledger.jsonl").open("a") as file:
        file.writelines(json.dumps(end) + "\n" for end in ends)
    run.refresh()
    tasks = {task["task"]: task for task in pages.ledger(run)["tasks"]}
    assert tasks["sums"]["lines"]["trained"] == [(1, 2), (2, 0), (5, 0), (6, 1), (7, 0)]
    assert tasks["sums"]["lines"]["lost"] == [(1, 0), (2, 0), (5, 0), (6, 0), (7, 1)]


def test_shares_of_a_ledger_that_is_ahead_of_the_metrics_sum_to_the_whole(run):
    """The metrics say 3 dispatched and 1 open, and 2 had ended; the run was killed after 5 ends."""
    write_ledger(run.folder, [("sums", f"sums-9/{n}", "failed/error") for n in range(3)])
    run.refresh()
    sums = pages.ledger(run)["tasks"][0]
    assert (sums["task"], sums["dispatched"], sums["open"]) == ("sums", 5, 0)
    assert sum(sums["columns"].values()) == 5


def test_a_rollouts_reward_functions_have_the_configs_weights(run, get):
    fns = [{"fn": "my.right", "name": None, "weight": 3.0}, {"fn": "f", "name": "economy"}, "my.f"]
    config = json.loads((run.folder / "config.json").read_text())
    config["tasks"]["sums"]["rubric"] = {"reward_fns": fns}
    (run.folder / "config.json").write_text(json.dumps(config))
    key = get("rollouts?task=sums")["rows"][0]["key"]
    weights = {"right": 3.0, "economy": 1.0, "f": 1.0}
    assert get(f"rollouts/{key}")["weights"] == weights
    assert get(f"groups/{key.split('-')[0]}")["weights"] == weights
    key = get("rollouts?task=words")["rows"][0]["key"]
    assert get(f"rollouts/{key}")["weights"] == {}  # the config does not say


def test_evaluations_are_counted_apart(run, get):
    record_evaluation(run.folder, "0", {"a": [1], "b": [0]}, step=0)
    run.refresh()
    counts = [get(f"rollouts?{query}") for query in ("", "task=sums", "outcome=trained")]
    assert [(one["total"], one["evaluated"]) for one in counts] == [(6, 2), (4, 2), (2, 0)]


def test_a_port_in_use_is_one_line_that_names_the_option(run, capsys):
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        assert main([str(run.folder), "--port", str(port)]) == 2
    line = f"error: --port {port}: another program listens there; --port 0 takes one that is free\n"
    assert capsys.readouterr().err == line


def test_a_folder_without_a_run_is_refused(tmp_path):
    with pytest.raises(RunError, match="no run"):
        ReportedRun(tmp_path)


def test_records_of_before_a_run_of_any_kind_are_read_as_they_are(run):
    """The raw record is the line of the file."""
    with gzip.open(run.folder / "rollouts.jsonl.gz") as file:
        lines = file.read().splitlines()
    rows = client_of(run).get("/api/runs/0/rollouts?sort=oldest").json()["rows"]
    assert [
        client_of(run).get(f"/api/runs/0/rollouts/{row['key']}/raw").content for row in rows
    ] == lines
