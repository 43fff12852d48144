"""The status line of a terminal: whatever is printed, and by whom, it is never left behind and never mixed with another."""

import io
import os
import pty
import signal
import subprocess
import sys
import termios
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.fakes.clock import Clock
from tests.fakes.terminal import Screen, Terminal
from torchtitan.experiments.rl.observability.console import (
    BASIS,
    Console,
    Progress,
    RunSummary,
    Waits,
    end_status_line,
)
from torchtitan.experiments.rl.observability.live import LiveTerminal
from torchtitan.experiments.rl.process.output import can_redraw, has_colours

ROOT = Path(__file__).parents[2]


@pytest.fixture
def terminal(monkeypatch) -> Terminal:
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "80")
    return Terminal()


METRICS = {
    "rollout/reward_mean": 0.5,
    "perf/trained_tokens_per_s": 1e4,
    "policy/age_mean": 0.5,
    "policy/age_max": 1,
}
METRICS |= {"time/wait_s": 0.1, "time/train_s": 0.2, "time/sync_s": 0.01, "batch/dropped_groups": 0}


def what_happens() -> st.SearchStrategy[list[tuple[str, str]]]:
    words = st.text("abc xyz[/]\u6570", min_size=1, max_size=30)
    event = st.one_of(
        st.tuples(st.just("draw"), st.one_of(st.just(""), words)),
        st.tuples(st.just("step"), st.just("")),
        st.tuples(st.just("note"), words),
        st.tuples(st.just("print"), words),
        st.tuples(st.just("begin a line"), words),
        st.tuples(st.just("warn"), words),
    )
    return st.lists(event, max_size=12)


@given(what_happens())
def test_what_stays_on_a_terminal_is_what_a_pipe_gets(events):
    """A line that has not ended stays out of the way of others: on a terminal it is printed when it ends."""

    def printed(stream: io.StringIO) -> str:
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("TERM", "xterm")
            patch.setenv("COLUMNS", "80")
            patch.setattr(sys, "stdout", stream)
            patch.setattr(sys, "stderr", stream)
            console, step, begun = Console(), 0, ""
            console.begin(0, 9)
            console.draw()
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
                elif kind == "warn":
                    sys.stderr.write(text + "\n")
                elif kind == "begin a line" and not can_redraw(stream):
                    begun += text
                elif kind == "begin a line":
                    print(text, end="", flush=True)
                else:
                    print(begun + text)
                    begun = ""
            console.close()
            if begun:
                print(begun)
            assert sys.stdout is sys.stderr is stream
        return stream.getvalue()

    piped = printed(io.StringIO())
    assert "\r" not in piped and "\033" not in piped
    rows = Screen().feed(printed(Terminal())).rows
    assert (
        rows == Screen().feed("".join(f"{line.rstrip()}\n" for line in piped.split("\n")[:-1])).rows
    )


def test_the_status_is_redrawn_in_place_and_cut_at_the_edge(terminal):
    status = ""
    live = LiveTerminal(terminal, lambda: status, has_colours=False)
    for status, row in (  # noqa: B007
        ("waiting for the trainer (1 s)", "waiting for the trainer (1 s)"),
        ("short", "short"),
        ("x" * 200, "x" * 80),
        ("\u6570" * 60, "\u6570" * 40),
        ("[bold]models[/] say", "[bold]models[/] say"),
    ):
        live.show()
        assert Screen().feed(terminal.getvalue()).rows == [row]
    live.close()
    status = "nothing follows the end"
    live.show()
    screen = Screen().feed(terminal.getvalue())
    assert screen.rows == [""] and screen.shows_cursor


def test_a_progress_bar_is_shown_in_its_newest_state_above_the_status(terminal, monkeypatch):
    monkeypatch.setattr(sys, "stderr", terminal)
    console = Console(terminal)
    console.waits.begin("the tasks to be set up")
    console.draw()
    for state in ("\r 10%", "\r 20%", "30%\r", "40%\r"):
        sys.stderr.write(state)
        sys.stderr.flush()
    waiting = "waiting for the tasks to be set up (0 s)"
    assert Screen().feed(terminal.getvalue()).rows == ["40%", waiting]
    console.note("resumed")
    assert Screen().feed(terminal.getvalue()).rows == ["resumed", "40%", waiting]
    sys.stderr.write("100%\nmore")
    assert Screen().feed(terminal.getvalue()).rows[:2] == ["resumed", "100%"]
    console.close()
    assert Screen().feed(terminal.getvalue()).rows == ["resumed", "100%", "more", ""]


def test_lines_that_threads_print_at_once_are_not_mixed(terminal, monkeypatch):
    monkeypatch.setattr(sys, "stdout", terminal)
    Console(terminal).draw()
    begun, ended = threading.Event(), threading.Event()

    def print_slowly() -> None:
        sys.stdout.write("one ")
        begun.set()
        ended.wait()
        sys.stdout.write("line\n")

    with ThreadPoolExecutor(1) as threads:
        slow = threads.submit(print_slowly)
        begun.wait()
        print("another", "line")
        ended.set()
        slow.result()
    end_status_line()
    assert Screen().feed(terminal.getvalue()).rows == ["another line", "one line", ""]


def test_the_status_is_of_now_whatever_is_printed(terminal):
    console = Console(terminal)
    console.begin(0, 4)
    console.draw()
    for step in (1, 2):
        console.step(step, METRICS)
        assert Screen().feed(terminal.getvalue()).rows[-1].split()[0] == f"{step}/4"


def test_nothing_is_drawn_once_the_command_is_about_to_end(terminal):
    console = Console(terminal)
    console.waits.begin("a step")
    console.draw()
    end_status_line()
    console.draw()
    assert Screen().feed(terminal.getvalue()).rows == [""]


def test_a_terminal_that_is_gone_ends_no_run(terminal, caplog):
    console = Console(terminal)
    console.draw()
    terminal.close()
    console.waits.begin("a step")
    console.draw()
    console.note("resumed")
    console.close()
    (record,) = caplog.records
    assert "can't be written any more" in record.message


def test_waits_are_lines_only_where_no_status_shows_them(terminal):
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


def test_a_note_with_a_path_that_is_wider_than_the_terminal_stays_whole(terminal):
    note = f"warning: the checkpoint is in /{'folder' * 20}, and can't be read"
    Console(terminal).note(note)
    assert terminal.getvalue() == f"{note}\n"


@pytest.mark.parametrize("columns", ["40", "80"])
def test_lists_are_broken_under_their_labels_on_a_terminal_and_commands_stay_whole(
    terminal, monkeypatch, columns
):
    monkeypatch.setenv("COLUMNS", columns)
    summary = RunSummary(
        steps=1,
        total_steps=1,
        wall_time_s=1.0,
        start_val_reward=None,
        final_val_reward=None,
        ledger={f"sums/failed/{cause}": 7 for cause in ("timeout", "error", "environment")},
        files={},
        run_dir=Path("/runs/" + "[bold]" * 9),
    )
    for stream in (terminal, file := io.StringIO()):
        Console(stream).summary(summary)
    failed = "7 sums failed (timeout), 7 sums failed (error), 7 sums failed (environment)"
    assert f"\nrollouts    {failed}\n" in file.getvalue()
    lines = terminal.getvalue().splitlines()
    (command,) = [line for line in lines if line.startswith("see it ")]
    assert command in file.getvalue().splitlines() and len(command) > 80
    first = next(row for row, line in enumerate(lines) if line.startswith("rollouts "))
    rows = lines[first : lines.index(f"folder      /runs/{'[bold]' * 9}")]
    assert len(rows) >= 2 and max(map(len, rows)) <= int(columns)
    assert all(row.startswith(" " * 12) for row in rows[1:])
    assert " ".join(row[12:] for row in rows) == failed


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


@pytest.mark.parametrize("stream", [io.StringIO(), io.TextIOWrapper(io.BytesIO(), "ascii")])
def test_variables_that_have_rich_colour_a_pipe_do_not_colour_ours(monkeypatch, stream):
    for name in ("FORCE_COLOR", "TTY_COMPATIBLE", "TTY_INTERACTIVE", "CLICOLOR_FORCE"):
        monkeypatch.setenv(name, "1")
    monkeypatch.setenv("TERM", "xterm")
    console = Console(stream)
    console.draw()
    console.note("[red]resumed[/]")
    stream.seek(0)
    assert stream.read() == "[red]resumed[/]\n"


def test_the_console_of_a_pipe_imports_no_rich():
    code = (
        "import sys\n"
        "from torchtitan.experiments.rl import train\n"
        "from torchtitan.experiments.rl.observability.console import Console\n"
        "Console().note('resumed')\n"
        "print([name for name in sys.modules if name.partition('.')[0] == 'rich'])"
    )
    printed = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True
    ).stdout
    assert printed == "resumed\n[]\n"


SHOW = f"""
import os, signal, sys, time
METRICS = {METRICS}
from torchtitan.experiments.rl.observability.console import Console
console = Console()
console.begin(0, 3)
console.waits.begin("generator 0 to start" + "!" * 200)
console.draw()
print("of an env")
console.waits.close()
console.draw()
for step in (1, 2, 3):
    print("warning", step, file=sys.stderr)
    console.step(step, METRICS)
    os.system("true")
    console.draw()
if os.environ.get("DIES"):
    os.kill(os.getpid(), signal.SIGKILL)
console.close()
print("end")
"""


def shown_at_a_terminal(columns: int, environment: dict[str, str]) -> tuple[int, str]:
    """The exit code of ``SHOW`` at a pseudo-terminal, and what it has written there."""
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
    return run.wait(60), written.decode()


@pytest.mark.parametrize("columns", [80, 120])
@pytest.mark.parametrize(
    "environment", [{"TERM": "xterm"}, {"TERM": "xterm", "NO_COLOR": "1"}, {"TERM": "dumb"}]
)
def test_at_a_real_terminal_nothing_is_left_of_the_status(columns, environment):
    code, text = shown_at_a_terminal(columns, environment)
    assert code == 0, text
    screen = Screen(columns).feed(text)
    beginnings = "of warning step 1/3 warning 2/3 warning 3/3 end"
    assert [row.split()[0] for row in screen.rows if row] == beginnings.split()
    assert max(map(len, screen.rows)) <= 80 and screen.shows_cursor
    is_dumb = environment["TERM"] == "dumb"
    assert ("waiting for" in text) == ("\033[2K" in text) == (not is_dumb)
    assert ("\033[1m" in text) == (environment == {"TERM": "xterm"})
    assert not is_dumb or "\033" not in text


def test_a_command_that_is_killed_leaves_a_cursor_that_is_seen():
    code, text = shown_at_a_terminal(80, {"TERM": "xterm", "DIES": "1"})
    assert code == -signal.SIGKILL
    assert Screen().feed(text).shows_cursor


def read(descriptor: int) -> bytes:
    try:
        return os.read(descriptor, 2**16)
    except OSError:  # the other end is closed
        return b""


def taken(progress: Progress, clock: Clock, *durations: float, first: int = 1) -> None:
    for step, duration in enumerate(durations, start=first):
        clock.now += duration
        progress.step(step)


def test_the_estimate_is_the_median_of_recent_steps_times_those_left():
    progress = Progress(clock := Clock(1000.0))
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
    progress = Progress(clock := Clock(1000.0))
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
    progress = Progress(clock := Clock(1000.0))
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
    progress = Progress(clock := Clock(1000.0))
    progress.begin(done, total)
    taken(progress, clock, *durations, first=done + 1)
    assert len(progress.line()) < 80
    assert (progress.seconds_left() or 0.0) >= 0.0
