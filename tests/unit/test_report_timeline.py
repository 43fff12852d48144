"""The report's page Timeline: what the logs of a run's processes say of them."""

import json

import pytest

from tests.unit.report_runs import small_run, write_metrics
from torchtitan.experiments.rl.command.history import write_end, write_start
from torchtitan.experiments.rl.fleet.restarts import deaths_logger
from torchtitan.experiments.rl.tools.report.run import ReportedRun
from torchtitan.experiments.rl.tools.report.timeline import (
    DEATHS,
    LOG_BYTES,
    MOST_CHARACTERS,
    MOST_WARNINGS,
    timeline,
)

OURS = "torchtitan.experiments.rl.fleet."


@pytest.fixture
def run(tmp_path):
    small_run(tmp_path / "run")
    (tmp_path / "run/logs").mkdir()
    reported = ReportedRun(tmp_path / "run")
    yield reported
    reported.close()


def log(run, process, *lines, end="\n"):
    """``lines``: second, level, logger, message and fields of each."""
    records = [
        {
            "time": f"2026-01-01T00:00:{second:02}.000+00:00",
            "level": level,
            "logger": logger,
            "process": process,
            "message": text,
            **dict(fields),
        }
        for second, level, logger, text, *fields in lines
    ]
    with (run.folder / f"logs/{process}.jsonl").open("a") as file:
        file.write("\n".join(map(json.dumps, records)) + end)


def test_deaths_hangs_and_errors_are_events_the_newest_first(run):
    died = "generator 0 died: killed by SIGKILL"
    log(run, "controller", (3, "INFO", DEATHS, died), (1, "INFO", OURS + "assembly", "agree"))
    paused = "this process was paused for 10 s: the limits of the others start from zero"
    log(run, "controller", (1, "INFO", OURS + "supervision", paused))
    log(
        run,
        "generator-0",
        (2, "WARNING", "vllm.platform", "slow"),
        (4, "ERROR", "vllm.engine", "out of memory"),
    )
    found = timeline(run)
    assert [(event["process"], event["text"]) for event in found["events"]] == [
        ("generator-0", "out of memory"),
        ("controller", died),
    ]
    assert [
        (p["process"], p["warnings"], p["errors"], p["last"][17:19]) for p in found["processes"]
    ] == [
        ("controller", 0, 0, "01"),
        ("generator-0", 1, 1, "04"),
    ]


def test_a_failed_run_has_its_error_first_and_the_traceback_of_the_log(run):
    traceback = "Traceback (most recent call last):\n  File rubric.py\nKeyError: 'sk-1'"
    failed = (1, "ERROR", OURS + "run", "the run failed", ("exception", traceback))
    log(run, "controller", failed)
    write_start(run.folder, 0)
    write_end(run.folder, "failed", "reward: KeyError: 'sk-1'")
    first, second = timeline(run)["events"]
    assert (first["level"], first["text"]) == ("FAILED", "reward: KeyError: '(hidden)'")
    assert second["text"] == "the run failed"
    assert second["traceback"] == traceback.replace("sk-1", "(hidden)")
    write_start(run.folder, 2)  # it was resumed
    assert [event["text"] for event in timeline(run)["events"]] == ["the run failed"]


def test_warnings_of_a_process_are_listed_those_of_libraries_too(run):
    lines = [(n, "WARNING", "vllm.platform", f"slow {n}") for n in range(60)]
    log(run, "generator-0", *lines, (59, "INFO", "x", "no matter"))
    (process,) = timeline(run)["processes"]
    assert (process["warnings"], process["errors"]) == (60, 0)
    assert [event["text"] for event in process["listed"]] == [
        f"slow {n}" for n in range(59, 59 - MOST_WARNINGS, -1)
    ]


def test_use_is_that_of_the_metrics(run):
    names = ("perf/generator_0/busy", "perf/trainer_rank_1/busy")
    write_metrics(
        run.folder,
        {4: dict(zip(names, (0.25, 0.5), strict=True)), 5: {names[0]: 0.75}},
        resume_step=3,
    )
    log(run, "generator-0", (0, "INFO", "x", ""))
    log(run, "trainer-1", (0, "INFO", "x", ""))
    run.refresh()
    found = {p["process"]: (p["busy"], p["busy_mean"]) for p in timeline(run)["processes"]}
    assert found == {"generator-0": (0.75, 0.5), "trainer-1": (0.5, 0.5)}


def test_a_key_of_the_config_is_in_no_event(run):
    log(run, "controller", (0, "ERROR", "httpx", "401 for key sk-1, " + "x" * 5000))
    (event,) = timeline(run)["events"]
    assert (
        event["text"].startswith("401 for key (hidden), xxx")
        and len(event["text"]) == MOST_CHARACTERS
    )


def test_torn_and_foreign_lines_are_passed_over_and_the_end_of_a_long_log_is_read(run):
    (run.folder / "logs/controller.jsonl").write_text(
        "[]\n7\n\xff\nnull\n{}\n" + "x" * LOG_BYTES + "\n"
    )
    log(run, "controller", (1, "ERROR", OURS + "actor", "the last"))
    with (run.folder / "logs/controller.jsonl").open("a") as file:
        file.write('{"time": "torn')
    (run.folder / "logs/empty.jsonl").touch()
    (run.folder / "logs/folder.jsonl").mkdir()
    found = timeline(run)
    assert [event["text"] for event in found["events"]] == ["the last"]
    assert [(p["process"], p["last"]) for p in found["processes"]] == [
        ("controller", "2026-01-01T00:00:01.000+00:00"),
        ("empty", None),
    ]


def test_a_link_is_no_log_and_neither_is_what_lies_behind_one(run, tmp_path):
    log(run, "other", (0, "ERROR", "x", "the secret"))
    (run.folder / "logs").rename(tmp_path / "elsewhere")
    (run.folder / "logs").mkdir()
    (run.folder / "logs/link.jsonl").symlink_to(tmp_path / "elsewhere/other.jsonl")
    assert timeline(run)["processes"] == [] and timeline(run)["events"] == []
    (run.folder / "logs/link.jsonl").unlink()
    (run.folder / "logs").rmdir()
    (run.folder / "logs").symlink_to(tmp_path / "elsewhere")
    assert timeline(run)["processes"] == []


def test_the_logger_of_deaths_is_the_one_that_restarts_write_to():
    assert deaths_logger.name == DEATHS
