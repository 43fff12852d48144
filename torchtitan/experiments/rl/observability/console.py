"""What a run prints: a header, one line a step, what it waits for, a summary. All but the paths of users fits 80 columns.

The `*_lines` functions turn records into text and print nothing; `Console` prints them. ASCII only, because a terminal's
encoding is not ours to choose. Colours, and a line that is drawn again in place, only on a terminal.
"""

import logging
import os
import shlex
import shutil
import sys
import textwrap
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import TextIO

from torchtitan.experiments.rl.printable import one_sentence, printable_line
from torchtitan.experiments.rl.process.modules import module_words
from torchtitan.experiments.rl.process.terminal import LiveLine, can_redraw, columns, has_colours

BOLD, GREEN, RESET = "\033[1m", "\033[32m", "\033[0m"
logger = logging.getLogger(__name__)

FEW_EXAMPLES = 30
"""Number of examples below which an evaluation's reward says little: of 30 right or wrong answers it is off by up to 0.18."""
WIDTH = 80
LABEL_WIDTH = 12
TITLE_EVERY = 40
"""Steps between two rows of column titles, so that titles are always on the screen."""
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
}  # title: width
RECENT = 20
"""Steps that the estimate is made of: answers grow longer as a policy learns, so older ones say little."""
BASIS = 3
"""Steps before there is an estimate."""
BAR = 20
"""Columns of the bar."""
LABEL = "waiting for "
FIRST_AT_S = (5.0, 15.0, 30.0)
"""Seconds after which a line is printed; after these it is every ``THEN_EVERY_S``."""
THEN_EVERY_S = 60.0


class Progress:
    def __init__(self, clock: Callable[[], float] = time.monotonic):
        """``clock`` gives seconds."""
        self._clock = clock
        self._durations: deque[float] = deque(maxlen=RECENT)
        self._steps = self.total = 0
        self._last_at: float | None = None

    def begin(self, steps_done: int, total_steps: int) -> None:
        """Training begins, or begins again after ``steps_done`` steps. Its first step compiles and warms up: it is left out."""
        self._steps, self.total, self._last_at = steps_done, total_steps, None

    def step(self, step: int) -> None:
        now = self._clock()
        if self._last_at is not None:
            self._durations.append(now - self._last_at)
        self._steps, self._last_at = step, now

    def step_s(self) -> float | None:
        """Median of the recent steps, in which evaluations and checkpoints do not count; None before there is a basis."""
        return median(self._durations) if len(self._durations) >= BASIS else None

    def seconds_left(self) -> float | None:
        """None before there is a basis."""
        step_s, left = self.step_s(), self.total - self._steps
        if step_s is None or self._last_at is None:
            return None
        # The step that is under way may take longer than the median: the others are still to come.
        return max(0.0, step_s * (left - 1), step_s * left - (self._clock() - self._last_at))

    def line(self) -> str:
        """At most 79 columns; "" before training begins."""
        if not self.total:
            return ""
        done = BAR * min(self._steps, self.total) // self.total
        line = f"{f'{self._steps}/{self.total}':>11} [{'#' * done}{'-' * (BAR - done)}]"
        if (left_s := self.seconds_left()) and (step_s := self.step_s()):
            line += f"  {step_s:.{'2g' if step_s < 10 else '0f'}} s a step, about {_duration(left_s)} left"
        return line


class Waits:
    """What the run waits for, and since when."""

    def __init__(self, clock: Callable[[], float] = time.monotonic):
        """``clock`` gives seconds."""
        self._clock = clock
        self._began: dict[str, float] = {}
        self._since, self._said = 0.0, 0

    @contextmanager
    def wait(self, what: str) -> Iterator[None]:
        """The block waits for ``what``."""
        self.begin(what)
        try:
            yield
        finally:
            self.end(what)

    def begin(self, what: str) -> None:
        """``what`` completes the words "waiting for"."""
        now = self._clock()
        if not self._began:
            self._since, self._said = now, 0
        self._began[what] = now

    def end(self, what: str) -> None:
        """It is there, or nobody waits for it any more. What was never begun may end."""
        self._began.pop(what, None)

    def close(self) -> None:
        """Nothing is waited for any more."""
        self._began.clear()

    def due(self) -> bool:
        """Whether to print ``line`` now: some seconds after the wait began, and then each minute. Ask it each second."""
        later = self._said - len(FIRST_AT_S)
        at_s = FIRST_AT_S[self._said] if later < 0 else THEN_EVERY_S * (later + 1)
        due = bool(self._began) and self._clock() - self._since >= at_s
        self._said += due
        return due

    def line(self) -> str:
        """What is waited for, the longest wait first, in one line of at most 80 columns where one name is not longer. "" where
        that is nothing.
        """
        now, line = self._clock(), ""
        items = [f"{what} ({now - began:.0f} s)" for what, began in self._began.items()]
        for shown in range(len(items), 0, -1):
            more = len(items) - shown
            line = LABEL + ", ".join(items[:shown]) + (f" and {more} more" if more else "")
            if len(line) <= WIDTH:
                break
        return line


@dataclass(kw_only=True, slots=True)
class RunSummary:
    steps: int
    total_steps: int
    wall_time_s: float
    """Of this command, which may have resumed the run."""
    start_val_reward: float | None
    final_val_reward: float | None
    ledger: Mapping[str, int]
    """Rollouts dispatched and the columns they ended in, in reading order. Columns that are 0 are left out."""
    files: Mapping[str, Path]
    """Files by what they hold: metrics, checkpoints, logs. Those in the run's folder are named from there."""
    stopped_by: str | None = None
    """Why the run ended before its last step; None where it did not."""
    not_saved: str | None = None
    """Why the last state is in no checkpoint; None where it is in one."""
    run_dir: Path | None = None
    val_examples: int | None = None
    """Number of examples in the last evaluation; None where there was none."""
    steps_before: int = 0
    """Of ``steps``, those that the run had when this command resumed it."""


def header_lines(
    run_dir: Path, *, config: str, model: str, sizes: Mapping[str, object]
) -> list[str]:
    """
    Args:
        config: its name.
        model: where its weights come from, and its parameters.
        sizes: of the run by name, in the order they are printed: steps, rollouts a step, trainer ranks, generators.
    """
    return [
        _labelled("run", run_dir.name),
        _labelled("config", config),
        _labelled("model", model),
        *_wrapped("sizes", [f"{name} {value}" for name, value in sizes.items()]),
        _labelled("folder", near(run_dir)),
        "",
    ]


def title_line() -> str:
    return " ".join(title.rjust(width) for title, width in _COLUMNS.items())


def step_line(
    step: int, total: int, metrics: Mapping[str, float], val: tuple[float, int] | None = None
) -> str:
    """
    Args:
        metrics: of the step. No reward: none is given (distillation, supervised).
        val: reward of an evaluation that ended in the step, and the version of the policy that it began with.
    """
    cells = (
        f"{step}/{total}",
        _reward(metrics.get("rollout/reward_mean")),
        "" if val is None else f"{_reward(val[0])}@{val[1]}",
        _count(metrics["perf/trained_tokens_per_s"]),
        f"{metrics['policy/age_mean']:.2f}/{metrics['policy/age_max']}",
        *(_seconds(metrics.get(f"time/{name}_s", 0.0)) for name in ("wait", "train", "sync")),
        str(metrics["batch/dropped_groups"]),
    )
    return " ".join(
        cell.rjust(width) for cell, width in zip(cells, _COLUMNS.values(), strict=True)
    ).rstrip()


def summary_lines(summary: RunSummary) -> list[str]:
    end = f"stopped by {summary.stopped_by}" if summary.stopped_by else "done"
    own = f", {summary.steps - summary.steps_before} of them" if summary.steps_before else ""
    took = f"{summary.steps} of {summary.total_steps}{own} in {_duration(summary.wall_time_s)}"
    facts = {"steps": f"{took}, {end}"}
    first, last = summary.start_val_reward, summary.final_val_reward
    if first is not None and last is not None:
        facts["validation"] = f"reward {_reward(first)} -> {_reward(last)} ({last - first:+.3f})"
        if summary.val_examples is not None and summary.val_examples < FEW_EXAMPLES:
            facts["validation"] += f" ({counted_examples(summary.val_examples)})"
    lines = ["", *(_labelled(*fact) for fact in facts.items())]
    lines += _wrapped(
        "rollouts",
        [f"{count:,} {_in_words(column)}" for column, count in summary.ledger.items() if count],
    )
    facts = {} if summary.run_dir is None else {"folder": near(summary.run_dir)}
    facts |= {name: str(_within(summary.run_dir, path)) for name, path in summary.files.items()}
    if summary.not_saved is not None:
        facts["not saved"] = one_sentence(summary.not_saved)
    return [*lines, *(_labelled(*fact) for fact in (facts | _next_commands(summary)).items())]


def counted_examples(count: int) -> str:
    return f"{count} example{'s' * (count != 1)}"


def _in_words(column: str) -> str:
    """A task's column of the ledger, ``<task>/<column>``: "sum_digits trained on"."""
    task, _, name = column.partition("/")
    kind, _, detail = name.partition("/")
    detail = detail.rpartition("/")[2].replace("_", " ")
    said = {
        "trained": "trained on",
        "filtered": f"left out ({detail})",
        "failed": f"failed ({detail})",
        "untrained": "not finished at the end",
    }
    return f"{task} {said.get(kind, name)}"


def _next_commands(summary: RunSummary) -> dict[str, str]:
    """What the person who runs it can do next, by label."""
    if summary.run_dir is None:
        return {}
    folder = shlex.quote(near(summary.run_dir))
    commands = {"see it": f"{typed_command('report')} {folder}"}
    if summary.stopped_by is None and "policy" in summary.files:
        commands["try it"] = f"{typed_command('play')} --model {folder}"
        if summary.start_val_reward is not None or summary.final_val_reward is not None:
            commands["measure it"] = f"{typed_command('evaluate')} --model {folder}"
    if "checkpoint" in summary.files:
        more = f" --steps {2 * summary.total_steps}" if summary.stopped_by is None else ""
        commands["go on with"] = f"{typed_command('grpo')} --resume {folder}{more}"
    return commands


class Console:
    """Prints a run to a stream, a line at a time. On a terminal the last line is live: it says what the run waits for, or how
    far it is, and is erased in the end.
    """

    def __init__(self, stream: TextIO | None = None):
        self._stream = stream if stream is not None else sys.stdout
        self._colours = has_colours(self._stream)
        self._live = LiveLine(self._stream) if can_redraw(self._stream) else None
        self.waits = Waits()
        self._progress = Progress()
        self._steps_printed = 0

    def draw(self) -> None:
        """Show what the run waits for, or how far it is where that is nothing: in the live line, or in lines now and then where
        there is no live line. Call it each second.
        """
        waiting = self.waits.line()
        if self._live is not None:
            self._live.show(printable_line(waiting or self._progress.line()))
        elif self.waits.due():
            self.note(waiting)

    def close(self) -> None:
        """Erase the live line. Nothing is drawn afterwards."""
        if self._live is not None:
            self._live.end()

    def begin(self, steps_done: int, total_steps: int) -> None:
        self._progress.begin(steps_done, total_steps)

    def header(
        self, run_dir: Path, *, config: str, model: str, sizes: Mapping[str, object]
    ) -> None:
        self._print(
            *map(printable_line, header_lines(run_dir, config=config, model=model, sizes=sizes))
        )

    def step(
        self, step: int, metrics: Mapping[str, float], val: tuple[float, int] | None = None
    ) -> None:
        if self._steps_printed % TITLE_EVERY == 0:
            self._print(self._coloured(title_line(), BOLD))
        self._steps_printed += 1
        self._progress.step(step)
        line = step_line(step, self._progress.total, metrics, val)
        self._print(line if val is None else self._coloured(line, GREEN))

    def note(self, text: str, traceback: str = "") -> None:
        """Print a line outside the table, such as that a run was resumed, and a traceback under it."""
        text, width = printable_line(text), columns(self._stream)
        if (
            self._live is not None and len(text) > width
        ):  # elsewhere it stays whole: a line is a message there
            text = textwrap.fill(
                text, width, subsequent_indent="  ", break_long_words=False, break_on_hyphens=False
            )
        self._print(text, *map(printable_line, traceback.splitlines()))

    def summary(self, summary: RunSummary) -> None:
        self.close()
        self._print(*map(printable_line, summary_lines(summary)))

    def _coloured(self, text: str, colour: str) -> str:
        return f"{colour}{text}{RESET}" if self._colours else text

    def _print(self, *lines: str) -> None:
        write_line(self._stream, "\n".join(lines))
        if self._live is not None:
            self.draw()


def write_line(stream: TextIO, text: str) -> None:
    """Write ``text`` and a line end. A stream that can't be written (a closed pipe or terminal, a full disk) is sent to nowhere
    from then on, with a line in the log: no run ends because nobody reads what it prints.
    """
    try:
        # One write and a flush: lines stay whole beside other processes' output, and appear when piped through tee.
        stream.write(text + "\n")
        stream.flush()
    except (OSError, ValueError) as error:  # ValueError: it is closed
        logger.warning("the console can't be written any more (%s); the run goes on", error)
        try:
            os.dup2(
                os.open(os.devnull, os.O_WRONLY), stream.fileno()
            )  # else Python fails at exit, on what is still buffered
        except (OSError, ValueError):
            pass


def typed_command(module: str) -> str:
    """Return the command line that starts a command of the library ("grpo", "report"), as this process was started."""
    script = Path(sys.argv[0])
    if script.name.startswith("rl-"):  # of src/torchtitan_rl/commands.py
        return _typed(script.with_name("rl-train" if module == "grpo" else f"rl-{module}"))
    return f"{_typed(Path(sys.executable))} {' '.join(module_words(module))}"


def _typed(program: Path) -> str:
    """A program as people type it: by its name where PATH has it, else by its path."""
    found = shutil.which(program.name)
    if found is not None and os.path.abspath(found) == os.path.abspath(program):
        return program.name
    return shlex.quote(near(program.absolute()))


def near(path: Path | str) -> str:
    """A path as people write it: from the current folder where it is in there."""
    return str(_within(Path.cwd(), Path(path)))


def _within(folder: Path | None, path: Path) -> Path:
    return path.relative_to(folder) if folder is not None and path.is_relative_to(folder) else path


def _labelled(label: str, text: str) -> str:
    return f"{label:<{LABEL_WIDTH - 1}} {text}"


def _wrapped(label: str, items: list[str]) -> list[str]:
    """Items after a label, broken between them and continued under the first."""
    lines = textwrap.wrap(
        ", ".join(item.replace(" ", "\xa0") for item in items),  # at which textwrap does not break
        WIDTH,
        initial_indent=_labelled(label, ""),
        subsequent_indent=" " * LABEL_WIDTH,
        break_long_words=False,
        break_on_hyphens=False,
    )
    return [line.replace("\xa0", " ") for line in lines]


def _reward(value: float | None) -> str:
    return "-" if value is None else f"{value:.3f}"


def _seconds(value: float) -> str:
    """Three significant digits until 100 s: a 20 ms sync and a 20-minute step share the column."""
    return f"{value:.{2 - (value >= 10) - (value >= 100)}f}"


def _count(value: float) -> str:
    return (
        f"{value / 1e6:.1f}M"
        if value >= 1e6
        else f"{value / 1e3:.1f}k"
        if value >= 1e3
        else f"{value:.0f}"
    )


def _duration(seconds: float) -> str:
    """The two largest units that it has."""
    left, parts = round(seconds), list[str]()
    if left < 60:
        return f"{seconds:.3g} s"
    for size, unit in ((86400, "d"), (3600, "h"), (60, "min"), (1, "s")):
        count, left = divmod(left, size)
        if count or parts:
            parts.append(f"{count} {unit}")
    return " ".join(parts[:2])
