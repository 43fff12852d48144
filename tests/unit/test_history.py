"""The history of a run's folder: its starts, its resumes, and how it ended."""

import json

import pytest

from torchtitan.experiments.rl.command.history import (
    HISTORY_FILE,
    read_history,
    write_end,
    write_start,
)

LONGEST = "\U0001f600" * 1000
"""As many characters as a cause has at most, of four bytes each."""


def test_a_run_that_was_started_and_failed_has_its_cause_word_for_word(tmp_path):
    write_start(tmp_path, 0)
    assert read_history(tmp_path).end is None
    write_end(tmp_path, "failed", LONGEST)
    history = read_history(tmp_path)
    assert history.end is not None and (history.end.how, history.end.why) == ("failed", LONGEST)
    assert [start.step for start in history.starts] == [0] and history.resumes == []


def test_the_end_is_written_where_the_disk_has_no_byte_left(tmp_path):
    """The start has reserved its room."""
    write_start(tmp_path, 0)
    size = (tmp_path / HISTORY_FILE).stat().st_size
    write_end(tmp_path, "failed", LONGEST)
    assert (tmp_path / HISTORY_FILE).stat().st_size == size


def test_a_start_that_a_full_disk_refuses_names_the_file(tmp_path):
    (tmp_path / HISTORY_FILE).symlink_to("/dev/full")
    with pytest.raises(OSError, match=rf"No space left on device: '{tmp_path}/history.jsonl'"):
        write_start(tmp_path, 0)


def test_a_resume_begins_where_the_killed_command_left_off(tmp_path):
    write_start(tmp_path, 0)  # and was killed
    write_start(tmp_path, 20)
    write_end(tmp_path, "stopped", "SIGINT")
    write_start(tmp_path, 30)
    history = read_history(tmp_path)
    assert [start.step for start in history.resumes] == [20, 30] and history.end is None
    write_end(tmp_path, "done", None)
    history = read_history(tmp_path)
    assert history.end is not None and history.end.how == "done"
    lines = (tmp_path / HISTORY_FILE).read_text().splitlines()
    assert [json.loads(line)["event"] for line in lines if line.strip()] == [
        "start",
        "start",
        "end",
        "start",
        "end",
    ]


def test_a_resume_from_an_earlier_checkpoint_takes_later_resumes_back(tmp_path):
    for step in (0, 20, 30, 10):
        write_start(tmp_path, step)
    assert [start.step for start in read_history(tmp_path).resumes] == [10]


def test_a_folder_of_an_older_run_and_foreign_lines_have_no_history(tmp_path):
    assert read_history(tmp_path).starts == []
    write_end(tmp_path, "done", None)  # there is no start to end
    assert not (tmp_path / HISTORY_FILE).exists()
    lines = b'7\n{"step": "x"}\n\xff\n{"event": "end", "time": 1e99, "how": "done", "why": null}\n{"time": 1, "step": 0'
    (tmp_path / HISTORY_FILE).write_bytes(lines)
    assert read_history(tmp_path).starts == [] and read_history(tmp_path).end is None
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / HISTORY_FILE).symlink_to(tmp_path / HISTORY_FILE)
    assert read_history(tmp_path / "other").starts == []


def test_the_end_of_a_run_stays_where_the_start_of_a_resume_could_not_be_written(tmp_path):
    write_start(tmp_path, 0)
    write_end(tmp_path, "failed", "KeyError: 'the 150th example'")
    write_end(tmp_path, "failed", "No space left on device")  # of a command that has no start
    end = read_history(tmp_path).end
    assert end is not None and end.why == "KeyError: 'the 150th example'"


def test_a_damaged_line_is_skipped(tmp_path):
    write_start(tmp_path, 0)
    damaged = b'{"event":"start","time":1,"step":0,"host":"\xff"}\n'
    (tmp_path / HISTORY_FILE).write_bytes(damaged + (tmp_path / HISTORY_FILE).read_bytes())
    assert len(read_history(tmp_path).starts) == 1
