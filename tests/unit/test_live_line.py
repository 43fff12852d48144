"""The live line of a terminal: whatever is printed, and by whom, it is never left behind and never mixed with another."""

import io
import os
import pty
import subprocess
import sys
import termios
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.screen import Screen
from torchtitan.experiments.rl.observability.console import BASIS, Console, Progress, Waits
from torchtitan.experiments.rl.process.terminal import (
    ERASE,
    LiveLine,
    SharedTerminal,
    can_redraw,
    end_live_line,
    has_colours,
)

ROOT = Path(__file__).parents[2]


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.fixture
def terminal(monkeypatch) -> Terminal:
    monkeypatch.setenv("TERM", "xterm")
    return Terminal()


METRICS = {
    "rollout/reward_mean": 0.5,
    "perf/trained_tokens_per_s": 1e4,
    "policy/age_mean": 0.5,
    "policy/age_max": 1,
}
METRICS |= {"time/wait_s": 0.1, "time/train_s": 0.2, "time/sync_s": 0.01, "batch/dropped_groups": 0}


def what_happens() -> st.SearchStrategy[list[tuple[str, str]]]:
    words = st.text("abc xyz", min_size=1, max_size=30)
    event = st.one_of(
        st.tuples(st.just("draw"), st.one_of(st.just(""), words)),
        st.tuples(st.just("step"), st.just("")),
        st.tuples(st.just("note"), words),
        st.tuples(st.just("print"), words.map(lambda text: text + "\n")),
        st.tuples(st.just("begin a line"), words),
        st.tuples(st.just("another process"), words),
    )
    return st.lists(event, max_size=12)


@given(what_happens())
def test_what_stays_on_a_terminal_is_what_a_pipe_gets(events):
    def printed(stream: io.StringIO) -> str:
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("TERM", "xterm")
            shared = SharedTerminal(stream) if can_redraw(stream) else stream
            patch.setattr(sys, "stdout", shared)
            console, step, in_line = Console(), 0, False
            console.begin(0, 9)
            for kind, text in events:
                if kind == "draw":
                    console.waits.close()
                    if text:
                        console.waits.begin(text)
                    console.draw()
                elif kind == "step":
                    step += 1
                    console.step(step, METRICS)
                elif kind == "note":
                    console.note(text)
                elif kind in ("print", "begin a line"):
                    sys.stdout.write(text)
                elif (
                    not in_line
                ):  # else it is in the middle of the line of this process, wherever that goes
                    stream.write(f"{ERASE if can_redraw(stream) else ''}{text}\n")
                in_line = kind == "begin a line" or (
                    in_line and kind in ("draw", "another process")
                )
            console.close()
        return stream.getvalue()

    piped = printed(io.StringIO())
    assert "\r" not in piped and "\033" not in piped
    assert Screen().feed(printed(Terminal())).rows == [
        row for line in piped.split("\n") for row in rows_of(line)
    ]


def rows_of(line: str) -> list[str]:
    return [line[at : at + 80].rstrip() for at in range(0, len(line), 80)] or [""]


def test_the_live_line_is_redrawn_in_place_and_cut_at_the_edge(terminal):
    live = LiveLine(terminal)
    screen = Screen()
    for text in ("waiting for the trainer (1 s)", "short", "x" * 200):
        live.show(text)
        screen.feed(terminal.getvalue())
        assert screen.rows == [text[:79]]
        terminal.truncate(0), terminal.seek(0)
    live.end()
    live.show("nothing follows the end")
    assert screen.feed(terminal.getvalue()).rows == [""]


def test_nothing_is_drawn_once_the_command_is_about_to_end(terminal):
    console = Console(terminal)
    console.waits.begin("a step")
    console.draw()
    end_live_line()
    console.draw()
    assert Screen().feed(terminal.getvalue()).rows == [""]


def test_a_terminal_that_is_gone_ends_no_run(terminal):
    console = Console(terminal)
    terminal.close()
    console.waits.begin("a step")
    console.draw()
    console.note("resumed")
    console.close()


def test_waits_are_lines_only_where_no_live_line_shows_them(terminal):
    for stream, lines in (
        (terminal, []),
        (io.StringIO(), ["waiting for the trainer to start (5 s)"]),
    ):
        console, now = Console(stream), [0.0]
        console.waits = Waits(lambda: now[0])  # noqa: B023
        console.waits.begin("the trainer to start")
        for now[0] in range(9):
            console.draw()
        console.close()
        assert Screen().feed(stream.getvalue()).rows == [*lines, ""]


def test_a_long_note_breaks_between_words_on_a_terminal_and_is_one_line_in_a_file(terminal):
    note = "warning: " + "the examples are too easy or too hard for this model, " * 3
    for stream in (terminal, file := io.StringIO()):
        Console(stream).note(note)
    rows = Screen().feed(terminal.getvalue()).rows[:-1]
    assert (
        len(rows) == 3
        and max(map(len, rows)) <= 80
        and all(row.startswith("  ") for row in rows[1:])
    )
    assert " ".join(row.strip() for row in rows) == note.strip()
    assert file.getvalue() == note + "\n"


@pytest.mark.parametrize(
    ("term", "no_color", "redraws", "colours"),
    [
        ("xterm-256color", None, True, True),
        ("xterm-256color", "1", True, False),
        ("xterm-256color", "", True, True),  # no-color.org: an empty value counts as none
        ("dumb", None, False, False),
        ("", None, False, False),
        (None, None, False, False),
    ],
)
def test_escape_sequences_go_to_terminals_that_take_them_and_colours_where_they_are_wanted(
    monkeypatch, term, no_color, redraws, colours
):
    for name, value in (("TERM", term), ("NO_COLOR", no_color)):
        monkeypatch.delenv(name, raising=False) if value is None else monkeypatch.setenv(
            name, value
        )
    assert (can_redraw(Terminal()), has_colours(Terminal())) == (redraws, colours)
    assert not can_redraw(io.StringIO()) and not has_colours(io.StringIO())


SHOW = """
import os, sys
from tests.unit.test_live_line import METRICS
from torchtitan.experiments.rl.observability.console import Console
from torchtitan.experiments.rl.process.terminal import share_terminal
share_terminal()
share_terminal()
console = Console()
console.begin(0, 3)
console.waits.begin("generator 0 to start" + "!" * 200)
console.draw()
print("of an env")
console.waits.close()
console.draw()
for step in (1, 2, 3):
    print(f"warning {step}", file=sys.stderr)
    console.step(step, METRICS)
    os.system("true")
    console.draw()
console.close()
print("end")
"""


@pytest.mark.parametrize("columns", [80, 120])
@pytest.mark.parametrize(
    "environment", [{"TERM": "xterm"}, {"TERM": "xterm", "NO_COLOR": "1"}, {"TERM": "dumb"}]
)
def test_at_a_real_terminal_nothing_is_left_of_the_live_line(columns, environment):
    ours, theirs = pty.openpty()
    termios.tcsetwinsize(theirs, (24, columns))
    inherited = {name: value for name, value in os.environ.items() if name != "NO_COLOR"} | {
        "PYTHONPATH": str(ROOT)
    }
    run = subprocess.Popen(
        [sys.executable, "-c", SHOW], env=inherited | environment, stdout=theirs, stderr=theirs
    )
    os.close(theirs)
    written = b""
    while chunk := read(ours):
        written += chunk
    os.close(ours)
    assert run.wait(60) == 0, written
    text = written.decode()
    rows = Screen(columns).feed(text).rows
    beginnings = "of warning step 1/3 warning 2/3 warning 3/3 end"
    assert [row.split()[0] for row in rows if row] == beginnings.split()
    assert max(map(len, rows)) <= 80
    assert ("waiting for" in text) == (ERASE in text) == (environment["TERM"] != "dumb")
    assert ("\033[1m" in text) == (environment == {"TERM": "xterm"})


def read(descriptor: int) -> bytes:
    try:
        return os.read(descriptor, 2**16)
    except OSError:  # the other end is closed
        return b""


class Clock:
    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


def taken(progress: Progress, clock: Clock, *durations: float, first: int = 1) -> None:
    for step, duration in enumerate(durations, start=first):
        clock.now += duration
        progress.step(step)


def test_the_estimate_is_the_median_of_recent_steps_times_those_left():
    progress = Progress(clock := Clock())
    progress.begin(0, 10)
    # The first warms up. Of 2, 4, 100 the median is 4, and 6 steps are left.
    taken(progress, clock, 50.0, 2.0, 4.0, 100.0)
    assert progress.seconds_left() == 6 * 4
    clock.now += 3.0
    assert progress.seconds_left() == 1 + 5 * 4  # of the step under way 1 s is left
    clock.now += 30.0
    assert progress.seconds_left() == 5 * 4  # it takes longer, the others still take theirs
    assert progress.line() == "       4/10 [########------------]  4 s a step, about 20 s left"


def test_there_is_no_estimate_before_there_is_a_basis_and_after_the_end():
    progress = Progress(clock := Clock())
    assert progress.line() == "" and progress.seconds_left() is None
    progress.begin(0, BASIS + 1)
    for step in range(1, BASIS + 1):
        taken(progress, clock, 60.0, first=step)
        assert progress.seconds_left() is None and "left" not in progress.line()
    taken(progress, clock, 60.0, first=BASIS + 1)
    assert (
        progress.seconds_left() == 0.0 and progress.line() == "        4/4 [####################]"
    )


def test_the_time_in_which_a_run_is_built_again_is_no_step():
    progress = Progress(clock := Clock())
    progress.begin(0, 100)
    taken(progress, clock, 9.0, 2.0, 2.0, 2.0)
    clock.now += 500.0  # the trainer died, and the run goes on from step 2
    progress.begin(2, 100)
    assert (
        progress.seconds_left() is None and progress.line() == "      2/100 [--------------------]"
    )
    taken(progress, clock, 7.0, 2.0, first=3)
    assert progress.seconds_left() == 96 * 2
    assert progress.line().endswith("2 s a step, about 3 min 12 s left")
    progress.begin(0, 10_000)
    taken(progress, clock, 5.0, *[60.0] * 20)
    assert progress.line().endswith("60 s a step, about 6 d 22 h left")  # 9,979 minutes


@given(st.integers(0, 10**6), st.integers(1, 10**6), st.lists(st.floats(0, 1e5), max_size=30))
def test_a_line_of_any_run_fits_80_columns_and_its_estimate_is_not_negative(done, total, durations):
    progress = Progress(clock := Clock())
    progress.begin(done, total)
    taken(progress, clock, *durations, first=done + 1)
    assert len(progress.line()) < 80
    assert (progress.seconds_left() or 0.0) >= 0.0
