"""Marks by which programs of other people's code are found: real processes that are killed."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from torchtitan.experiments.rl.process import foreign

PROGRAM = """
import subprocess, sys, time
child = subprocess.Popen(["sleep", "600"], start_new_session=True, stdout=subprocess.DEVNULL)
print(child.pid, flush=True)
time.sleep(600)
"""
"""A program that starts a process in a session of its own."""


def start(mark: str) -> list[int]:
    """Return the pids of a program with a mark, and of the process that it has started."""
    program = subprocess.Popen(
        foreign.marked([sys.executable, "-c", PROGRAM], mark),
        env=dict(os.environ) | foreign.variables_of(mark),
        stdout=subprocess.PIPE,
        text=True,
    )
    return [program.pid, int(program.stdout.readline())]


def living(pids: list[int]) -> list[int]:
    return [pid for pid in pids if _state(pid) not in ("", "Z")]


def _state(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return ""


@pytest.mark.parametrize("prlimit", [foreign.PRLIMIT, None], ids=["limit", "variable"])
def test_a_mark_ends_one_program_and_its_first_half_all_programs_of_the_process(
    prlimit, monkeypatch
):
    monkeypatch.setattr(foreign, "PRLIMIT", prlimit)
    monkeypatch.setattr(
        foreign, "_watched_pid", 0
    )  # a first half that no other test's programs have
    monkeypatch.setattr(foreign, "_process_digits", "")
    marks = [foreign.new_mark() for _ in range(3)]
    assert {len(mark) for mark in marks} == {18}
    assert len(set(marks)) == 3 and len({mark[:9] for mark in marks}) == 1
    first, second, third = (start(mark) for mark in marks)
    assert living([*first, *second, *third]) == [*first, *second, *third]
    foreign.kill_marked(marks[0])
    assert living([*first, *second, *third]) == [*second, *third]
    foreign.kill_marked(marks[0][:9])
    assert living([*second, *third]) == []
