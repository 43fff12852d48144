"""What a run prints: a header, one line a step, what it waits for, a summary.

The functions ``header_facts``, ``step_line`` and ``summary_facts`` turn records into text and print
nothing; ``Console`` prints them. What the library writes is ASCII, because a terminal's encoding is
not ours to choose, and a step's line fits 80 columns.

A terminal gets colours, lists that are broken between words, and a status line that is drawn again
in place (`observability/live.py`). Anything else gets whole lines without escape codes.
"""

import logging
import os
import shlex
import shutil
import sys
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, TextIO

from torchtitan.experiments.rl.printable import one_sentence, printable_line
from torchtitan.experiments.rl.process.modules import module_words
from torchtitan.experiments.rl.process.output import NotePort, can_redraw, has_colours

if TYPE_CHECKING:
    from torchtitan.experiments.rl.observability.live import LiveTerminal

logger = logging.getLogger(__name__)

FEW_EXAMPLES = 30
"""Number of examples below which an evaluation's reward says little: of 30 right or wrong answers
it is off by up to 0.18."""
WIDTH = 80
"""Number of columns of a step's line, and of a line about waiting."""
LABEL_WIDTH = 12
"""Number of columns of a fact's label, the blank behind it included."""
NOTE_INDENT = 2
"""Number of blanks before the second line of a note."""
TITLE_EVERY = 40
"""Number of steps between two rows of titles, so that titles are always on the screen."""
_COLUMNS = {
    "step": 11,
    "reward": 7,
    "val": 10,
    "tokens/s": 8,
    "age": 8,
    "wait s": 6,
    "train s": 7,
    "sync s": 6,
    "dropped": 7,
}
"""Widths of the columns by their titles."""
MEASURES = {"reward": "rollout/reward_mean", "nll": "ce/nll", "loss": "loss/total"}
"""Metrics that the second column may show, by its title. A run on demonstrations alone has no
reward, and shows the negative log-likelihood of their tokens."""
RECENT = 20
"""Number of steps behind an estimate: replies grow longer as a policy learns, so older steps say
little."""
BASIS = 3
"""Minimum number of steps behind an estimate."""
BAR = 20
"""Number of columns of the progress bar."""
FIRST_AT_S = (5.0, 15.0, 30.0)
"""Seconds into a wait at which lines say what is waited for; then ``THEN_EVERY_S`` apart."""
THEN_EVERY_S = 60.0

Facts = dict[str, str | list[str]]
"""Facts by their labels. A list is broken between words where a terminal ends. A text stays whole,
because it may be a path or a command, which people copy."""


class Progress:
    """Estimates how long a training takes."""

    def __init__(self, clock: Callable[[], float] = time.monotonic):
        """Begin with no step.

        Args:
            clock: returns seconds.
        """
        self.total = 0
        """Number of steps of the run; 0 before training begins."""
        self._clock = clock
        self._durations: deque[float] = deque(maxlen=RECENT)
        self._steps = 0
        self._last_at: float | None = None

    def begin(self, steps_done: int, total_steps: int) -> None:
        """Begin training, or begin it again, after ``steps_done`` steps.

        The first step compiles and warms up, so its duration does not count.
        """
        self._steps = steps_done
        self.total = total_steps
        self._last_at = None

    def step(self, step: int) -> None:
        """Count a step that has ended now."""
        now = self._clock()
        if self._last_at is not None:
            self._durations.append(now - self._last_at)
        self._steps = step
        self._last_at = now

    def step_s(self) -> float | None:
        """Return the median duration of the recent steps; None if they are too few.

        It is a median because evaluations and checkpoints make single steps longer.
        """
        return median(self._durations) if len(self._durations) >= BASIS else None

    def seconds_left(self) -> float | None:
        """Return an estimate of the time until the last step ends; None if there is no basis."""
        step_s = self.step_s()
        if step_s is None or self._last_at is None:
            return None
        steps_left = self.total - self._steps
        spent_s = self._clock() - self._last_at
        # The step under way may take longer than the median: the others are still to come.
        return max(0.0, step_s * (steps_left - 1), step_s * steps_left - spent_s)

    def line(self) -> str:
        """Return a line of at most 79 columns; empty before training begins."""
        if not self.total:
            return ""
        done = BAR * min(self._steps, self.total) // self.total
        line = f"{f'{self._steps}/{self.total}':>11} [{'#' * done}{'-' * (BAR - done)}]"
        step_s = self.step_s()
        left_s = self.seconds_left()
        if step_s and left_s:
            digits = ".2g" if step_s < 10 else ".0f"
            line += f"  {step_s:{digits}} s a step, about {_duration(left_s)} left"
        return line


class Waits:
    """What the run waits for, and since when."""

    def __init__(self, clock: Callable[[], float] = time.monotonic):
        """Begin with nothing to wait for.

        Args:
            clock: returns seconds.
        """
        self._clock = clock
        self._began: dict[str, float] = {}
        """Times at which waits began, by what is waited for."""
        self._since = 0.0
        """Time since which something has been waited for without a pause."""
        self._lines = 0
        """Number of lines about this time that were due."""

    @contextmanager
    def wait(self, what: str) -> Iterator[None]:
        """Wait for ``what`` in the block."""
        self.begin(what)
        try:
            yield
        finally:
            self.end(what)

    def begin(self, what: str) -> None:
        """Begin to wait for ``what``, which completes the words "waiting for"."""
        now = self._clock()
        if not self._began:
            self._since = now
            self._lines = 0
        self._began[what] = now

    def end(self, what: str) -> None:
        """Stop waiting for ``what``, which need not have been waited for."""
        self._began.pop(what, None)

    def close(self) -> None:
        """Stop waiting for anything."""
        self._began.clear()

    def due(self) -> bool:
        """Return whether to print ``line`` now: after some seconds of waiting, then each minute.

        Call it each second. It returns True once for each time.
        """
        minutes = self._lines - len(FIRST_AT_S)
        at_s = FIRST_AT_S[self._lines] if minutes < 0 else THEN_EVERY_S * (minutes + 1)
        is_due = bool(self._began) and self._clock() - self._since >= at_s
        self._lines += is_due
        return is_due

    def line(self) -> str:
        """Return what is waited for, the longest wait first; empty if that is nothing.

        The line has at most 80 columns, unless the first name alone is longer.
        """
        now = self._clock()
        # A copy, because another thread may begin or end a wait.
        items = [f"{what} ({now - began:.0f} s)" for what, began in list(self._began.items())]
        line = ""
        for shown in range(len(items), 0, -1):
            more = len(items) - shown
            line = f"waiting for {', '.join(items[:shown])}" + (f" and {more} more" if more else "")
            if len(line) <= WIDTH:
                break
        return line


@dataclass(kw_only=True, slots=True)
class BestCheckpoint:
    """The checkpoint that is the best by a metric of the evaluations."""

    path: Path
    metric: str
    value: float
    step: int


@dataclass(kw_only=True, slots=True)
class Course:
    """First and last value of what the steps of a run without rewards show."""

    measure: str
    """Title of the column: a key of MEASURES."""
    first: float
    first_step: int
    last: float
    last_step: int

    def __str__(self) -> str:
        return (
            f"{_reward(self.first)} at step {self.first_step} -> "
            f"{_reward(self.last)} at step {self.last_step}"
        )


@dataclass(kw_only=True, slots=True)
class RunSummary:
    """What a run says at its end."""

    steps: int
    total_steps: int
    wall_time_s: float
    """Duration of this command, which may have resumed the run."""
    start_val_reward: float | None
    final_val_reward: float | None
    ledger: Mapping[str, int]
    """Number of rollouts dispatched, and in each column that they ended in, in reading order.
    Columns that are 0 are left out of the text."""
    files: Mapping[str, Path]
    """Files by what they hold: metrics, checkpoints, logs. Those in the run's folder are named from
    there."""
    stopped_by: str | None = None
    """Reason that the run ended before its last step; None if it did not."""
    ended_early: bool = False
    """True if the run was complete before its last step: nothing was left to learn, or ``stop_at``
    was reached."""
    more_patience: int | None = None
    """Value of ``stop_at.patience`` to go on with, where a run has gained after it was ended by
    that; None if it has not."""
    best: BestCheckpoint | None = None
    """Checkpoint that is kept as the best one; None if none is."""
    not_saved: str | None = None
    """Reason that no checkpoint has the last state; None if one has it."""
    start_val_failures: tuple[int, int] = (0, 0)
    """Number of failed attempts and of all attempts of the first evaluation."""
    final_val_failures: tuple[int, int] = (0, 0)
    """Number of failed attempts and of all attempts of the last evaluation, if it is another."""
    course: Course | None = None
    """Course of what was minimized; None for a run with rewards."""
    run_dir: Path | None = None
    val_examples: int | None = None
    """Number of examples in the last evaluation; None if there was none."""
    steps_before: int = 0
    """Number of the ``steps`` that the run had when this command resumed it."""


def header_facts(run_dir: Path, *, config: str, model: str, sizes: Mapping[str, object]) -> Facts:
    """Return what a run says at its beginning.

    Args:
        run_dir: folder of the run.
        config: name of the config.
        model: folder of the model's weights, and its number of parameters.
        sizes: sizes of the run by name, in the order in which they are printed: steps, rollouts a
            step, trainer ranks, generators.
    """
    return {
        "run": run_dir.name,
        "config": config,
        "model": model,
        "sizes": [f"{name} {value}" for name, value in sizes.items()],
        "folder": near(run_dir),
    }


def measure_of(metrics: Mapping[str, float]) -> str:
    """Return the first of MEASURES that a step has."""
    return next((title for title, name in MEASURES.items() if name in metrics), "reward")


def title_line(measure: str = "reward") -> str:
    """Return the titles of a step's columns.

    Args:
        measure: key of MEASURES that the second column shows.
    """
    titles = {measure if title == "reward" else title: width for title, width in _COLUMNS.items()}
    return " ".join(title.rjust(width) for title, width in titles.items())


def step_line(
    step: int,
    total: int,
    metrics: Mapping[str, float],
    val: tuple[float, int] | None = None,
    measure: str = "reward",
) -> str:
    """Return the line of a step.

    Args:
        step: number of the step.
        total: number of steps of the run.
        metrics: metrics of the step.
        val: reward of an evaluation that ended in the step, and the version of the policy that it
            began with.
        measure: key of MEASURES that the second column shows; "-" in a step without it.
    """
    cells = (
        f"{step}/{total}",
        _reward(metrics.get(MEASURES[measure])),
        "" if val is None else f"{_reward(val[0])}@{val[1]}",
        _count(metrics["perf/trained_tokens_per_s"]),
        f"{metrics['policy/age_mean']:.2f}/{metrics['policy/age_max']}",
        *(_seconds(metrics.get(f"time/{name}_s", 0.0)) for name in ("wait", "train", "sync")),
        str(metrics["batch/dropped_groups"]),
    )
    return " ".join(
        cell.rjust(width) for cell, width in zip(cells, _COLUMNS.values(), strict=True)
    ).rstrip()


def summary_facts(summary: RunSummary) -> Facts:
    """Return what a run says at its end, with the commands that come next."""
    end = f"stopped by {summary.stopped_by}" if summary.stopped_by else "done"
    resumed = f", {summary.steps - summary.steps_before} of them" if summary.steps_before else ""
    steps = f"{summary.steps} of {summary.total_steps}{resumed}"
    facts: Facts = {"steps": f"{steps} in {_duration(summary.wall_time_s)}, {end}"}
    if validation := _validation_text(summary):
        facts["validation"] = validation
    if summary.course is not None:
        facts[summary.course.measure] = str(summary.course)
    columns = [f"{count:,} {_in_words(name)}" for name, count in summary.ledger.items() if count]
    if columns:
        facts["rollouts"] = columns
    if summary.run_dir is not None:
        facts["folder"] = near(summary.run_dir)
    facts |= {name: str(_within(summary.run_dir, path)) for name, path in summary.files.items()}
    if summary.best is not None:
        best = summary.best
        where = _within(summary.run_dir, best.path)
        facts["best"] = f"{where} ({best.metric} {best.value:.4g} at {best.step})"
    if summary.not_saved is not None:
        facts["not saved"] = one_sentence(summary.not_saved)
    return facts | _next_commands(summary)


def _validation_text(summary: RunSummary) -> str:
    """Return the first and the last evaluation in words; "" if there is nothing to say of them.

    The reward of the first alone is not repeated, unless some of its attempts failed.
    """
    first = summary.start_val_reward
    last = summary.final_val_reward
    has_last = last is not None or summary.final_val_failures[1] > 0
    failures = []
    if summary.start_val_failures[0]:
        failures.append(counted_failures(*summary.start_val_failures) + " at first" * has_last)
    if summary.final_val_failures[0]:
        failures.append(counted_failures(*summary.final_val_failures) + " at last")
    if not failures and (first is None or not has_last):
        return ""
    reward = f"reward {_reward(first)}"
    if has_last:
        reward += f" -> {_reward(last)}"
        if first is not None and last is not None:
            reward += f" ({last - first:+.3f})"
        if summary.val_examples is not None and summary.val_examples < FEW_EXAMPLES:
            reward += f" ({counted_examples(summary.val_examples)})"
    return "; ".join([reward, *failures])


def counted_failures(failed: int, attempts: int) -> str:
    """Return in words how many attempts of an evaluation have no reward."""
    return f"{failed:,} of {attempts:,} attempts failed"


def counted_examples(count: int) -> str:
    """Return a number of examples in words."""
    return f"{count} example{'s' * (count != 1)}"


def _in_words(column: str) -> str:
    """Return the words of a task's column of the ledger, such as "sum_digits trained on"."""
    task, _, name = column.partition("/")
    kind, _, detail = name.partition("/")
    detail = detail.rpartition("/")[2].replace("_", " ")
    words = {
        "trained": "trained on",
        "filtered": f"left out ({detail})",
        "failed": f"failed ({detail})",
        "untrained": "not finished at the end",
    }
    return f"{task} {words.get(kind, name)}"


def _next_commands(summary: RunSummary) -> dict[str, str]:
    """Return what the person who runs it can do next, by label."""
    if summary.run_dir is None:
        return {}
    folder = shlex.quote(near(summary.run_dir))
    commands = {"see it": f"{typed_command('report')} {folder}"}
    is_complete = summary.stopped_by is None or summary.ended_early
    if is_complete and "policy" in summary.files:
        commands["try it"] = f"{typed_command('play')} --model {folder}"
        if summary.start_val_reward is not None or summary.final_val_reward is not None:
            commands["measure it"] = f"{typed_command('evaluate')} --model {folder}"
    if summary.ended_early:  # a resume that asks for no more would end at once
        if summary.more_patience is not None and "checkpoint" in summary.files:
            more = f" --stop-at.patience {summary.more_patience}"
            commands["go on with"] = f"{typed_command('train')} --resume {folder}{more}"
        return commands
    if "checkpoint" in summary.files:
        more = f" --steps {2 * summary.total_steps}" if summary.stopped_by is None else ""
        commands["go on with"] = f"{typed_command('train')} --resume {folder}{more}"
    elif summary.stopped_by is not None:
        commands["begin again"] = f"{typed_command('train')} --resume {folder}"
    return commands


class Console:
    """Prints a run to a stream, a line at a time.

    On a terminal the last line is a status: it says what the run waits for, or how far it is.
    """

    _newest: "Console | None" = None

    def __init__(self, stream: TextIO | None = None):
        """Print nothing yet.

        Args:
            stream: None is this process's stdout.
        """
        self.waits = Waits()
        self.notes: NotePort | None = None
        """Port that other processes of the run send their notes to; None if nobody reads them."""
        self._stream = stream if stream is not None else sys.stdout
        self._terminal = self._live_terminal()
        self._progress = Progress()
        self._measure: str | None = None
        """Key of MEASURES that the second column shows; None before the first step."""
        self._steps_printed = 0
        """Number of steps since the column shows that."""
        Console._newest = self

    def draw(self) -> None:
        """Show what the run waits for, or else how far it is. Call it each second.

        A terminal shows either in its status. Elsewhere a line now and then says what the run waits
        for.
        """
        if self._terminal is not None:
            self._terminal.show()
        elif self.waits.due():
            self.note(self.waits.line())

    def close(self) -> None:
        """Erase the status. None is shown again."""
        if self._terminal is not None:
            self._terminal.close()

    def begin(self, steps_done: int, total_steps: int) -> None:
        """Begin to estimate how long the training takes."""
        self._progress.begin(steps_done, total_steps)

    def header(
        self, run_dir: Path, *, config: str, model: str, sizes: Mapping[str, object]
    ) -> None:
        """Print the header of a run; see ``header_facts``."""
        self._print_facts(header_facts(run_dir, config=config, model=model, sizes=sizes))
        self._print("")

    def step(
        self, step: int, metrics: Mapping[str, float], val: tuple[float, int] | None = None
    ) -> None:
        """Print the line of a step, in green if an evaluation ended in it; see ``step_line``.

        Once a step has had a reward, the column stays that of the reward.
        """
        measure = "reward" if self._measure == "reward" else measure_of(metrics)
        if measure != self._measure:
            self._measure = measure
            self._steps_printed = 0
        if self._steps_printed % TITLE_EVERY == 0:
            self._print(title_line(measure), style="bold")
        self._steps_printed += 1
        self._progress.step(step)
        line = step_line(step, self._progress.total, metrics, val, measure)
        self._print(line, style="" if val is None else "green")

    def note(self, text: str, traceback: str = "") -> None:
        """Print a line outside the table, such as that a run was resumed, and a traceback.

        On a terminal the line is broken between words. Elsewhere it stays whole: a line is a
        message there.
        """
        text = printable_line(text)
        if self._terminal is not None:
            self._terminal.print_wrapped(text, indent=NOTE_INDENT)
        else:
            self._print(text)
        if traceback:
            self._print("\n".join(map(printable_line, traceback.splitlines())))

    def summary(self, summary: RunSummary) -> None:
        """Erase the status, and print the summary of a run; see ``summary_facts``."""
        self.close()
        self._print("")
        self._print_facts(summary_facts(summary))

    def _live_terminal(self) -> "LiveTerminal | None":
        """Return the terminal behind the stream; None if it is none that can be redrawn."""
        if not can_redraw(self._stream):
            return None
        # The import takes 60 ms, and is of no use elsewhere.
        from torchtitan.experiments.rl.observability.live import LiveTerminal

        return LiveTerminal(self._stream, self._status_line, has_colours=has_colours(self._stream))

    def _status_line(self) -> str:
        return printable_line(self.waits.line() or self._progress.line())

    def _print_facts(self, facts: Facts) -> None:
        for label, fact in facts.items():
            text = printable_line(fact if isinstance(fact, str) else ", ".join(fact))
            column = f"{printable_line(label):<{LABEL_WIDTH - 1}} "
            if self._terminal is not None and isinstance(fact, list):
                self._terminal.print_wrapped(text, label=column, indent=LABEL_WIDTH)
            else:
                self._print(column + text)

    def _print(self, text: str, style: str = "") -> None:
        if self._terminal is not None:
            self._terminal.print(text, style=style)
        else:
            write_line(self._stream, text)


def end_status_line() -> None:
    """Erase the status line of this process, which is about to end, if it has one."""
    if Console._newest is not None:
        Console._newest.close()


def write_line(stream: TextIO, text: str) -> None:
    """Write ``text`` and a line end.

    A stream that can't be written (a closed pipe or terminal, a full disk) is sent to nowhere from
    then on, with a line in the log: no run ends because nobody reads what it prints.
    """
    try:
        # One write and a flush: lines stay whole beside other processes' output, and appear when
        # they are piped through tee.
        stream.write(text + "\n")
        stream.flush()
    except (OSError, ValueError) as error:  # ValueError: it is closed
        logger.warning("the console can't be written any more (%s); the run goes on", error)
        try:
            # Python would fail at exit, on what is still buffered.
            os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())
        except (OSError, ValueError):
            pass


def typed_command(module: str) -> str:
    """Return how a command of the library, such as "train" or "report", is started here.

    It is started as this process was, by an installed script or by an interpreter.
    """
    script = Path(sys.argv[0])
    if script.name.startswith("rl-"):  # of src/torchtitan_rl/commands.py
        return _typed(script.with_name(f"rl-{module}"))
    return f"{_typed(Path(sys.executable))} {' '.join(module_words(module))}"


def _typed(program: Path) -> str:
    """Return a program as people type it: by its name if PATH has it, else by its path."""
    found = shutil.which(program.name)
    if found is not None and os.path.abspath(found) == os.path.abspath(program):
        return program.name
    return shlex.quote(near(program.absolute()))


def near(path: Path | str) -> str:
    """Return a path as people write it: from the current folder if it is in there."""
    return str(_within(Path.cwd(), Path(path)))


def _within(folder: Path | None, path: Path) -> Path:
    return path.relative_to(folder) if folder is not None and path.is_relative_to(folder) else path


def _reward(value: float | None) -> str:
    return "-" if value is None else f"{value:.3f}"


def _seconds(value: float) -> str:
    """Return seconds with three significant digits until 100 s.

    So a sync of 20 ms and a step of 20 minutes share the column.
    """
    return f"{value:.{2 - (value >= 10) - (value >= 100)}f}"


def _count(value: float) -> str:
    if value >= 1e6:
        return f"{value / 1e6:.1f}M"
    return f"{value / 1e3:.1f}k" if value >= 1e3 else f"{value:.0f}"


def _duration(seconds: float) -> str:
    """Return a duration in the two largest units that it has."""
    left = round(seconds)
    if left < 60:
        return f"{seconds:.3g} s"
    parts: list[str] = []
    for size, unit in ((86400, "d"), (3600, "h"), (60, "min"), (1, "s")):
        count, left = divmod(left, size)
        if count or parts:
            parts.append(f"{count} {unit}")
    return " ".join(parts[:2])
