"""The pages Overview, Ledger, Timeline and Evaluations, from the index and the logs.

``hints`` says what is wrong with a run, the worst first: each with the figure behind it and the field to turn. Limits that the
terminal warns by too are in ``observability/metrics.py``.
"""

import json
import math
import re
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from fnmatch import filter as named
from itertools import accumulate, chain
from pathlib import Path
from statistics import fmean
from typing import Any, Literal

import numpy as np

from torchtitan.experiments.rl.observability import IDLE, LAG_S, WAITING
from torchtitan.experiments.rl.tools.report.run import Json, ReportedRun

Series = Mapping[str, Sequence[tuple[int, float]]]
"""By metric: (step, value), in the order of steps."""
RECENT = 10
"""Steps that a hint about the present looks at."""
LEAST_STEPS = 20
"""Before it, a reward that does not rise says nothing."""
LEAST_POINTS = 8
TINY = 1e-9
VALIDATION, REWARD, EQUAL = "validation/reward", "rollout/reward_mean", "rollout/groups_all_equal"
CAPPED = "{:.1%} of the tokens have an importance ratio above ratio_max, and teach nothing"
TOO_HIGH = {
    "mismatch/share_of_bound_max": (
        0.5,
        "Trainer and generators disagree: {:.0%} of the bound at which the run ends",
        "generator.weight_update = recompute, a lower trainer.optimizer.lr or max_offpolicy_steps",
    ),
    "rl/ratio_capped_fraction": (
        0.001,
        CAPPED,
        "trainer.optimizer.lr, max_offpolicy_steps (lower one)",
    ),
    "ref_kl/ratio_capped_fraction": (
        0.001,
        CAPPED,
        "trainer.optimizer.lr, max_offpolicy_steps (lower one)",
    ),
    "rollout/status/truncated_length": (
        0.2,
        "{:.0%} of the rollouts were cut off at their token limit",
        "tasks.NAME.sampling.max_tokens, tasks.NAME.env.max_rollout_tokens",
    ),
    "perf/event_loop_lag_max_s": (
        LAG_S,
        "Something blocks the event loop for {:.1f} s a step",
        "rollout_workers (more); envs and rewards that compute: plain functions",
    ),
}
"""By metric: the mean over recent steps that is too high, what is seen, and what to turn."""
WATCHED = (
    VALIDATION,
    REWARD,
    EQUAL,
    *TOO_HIGH,
    "mismatch_kl/all",
    "policy/entropy",
    "time/*_s",
    "perf/*/busy",
    "restarts/*",
)
"""Patterns of the metrics that hints read."""
SOLVED = 0.95
"""Mean reward from which on a task has no more to teach."""


@dataclass(slots=True, frozen=True)
class Hint:
    severity: Literal["error", "warning", "note"]
    text: str
    """What is seen, with its figure."""
    field: str
    """What to turn, or where to look."""
    metric: str
    """The figure's name in metrics.jsonl."""


def hints(
    series: Series, state: Mapping[str, Any], ledger: Mapping[str, Mapping[str, int]]
) -> list[Hint]:
    """
    Args:
        state: of ``ReportedRun.state``.
        ledger: rollouts by task and column.
    """
    found = [*_ended(state), *_ledger(ledger), *_reward(series, state), *_figures(series)]
    return sorted(found, key=lambda hint: ("error", "warning", "note").index(hint.severity))


def _means(series: Series, part: slice, *, least: int = 1) -> Mapping[str, float]:
    """Of each metric the mean over a part of its steps; nan where it has fewer than ``least``."""
    found = {
        name: [value for _, value in points[part]]
        for name, points in series.items()
        if len(points) >= least
    }
    return defaultdict(lambda: math.nan, {name: fmean(values) for name, values in found.items()})


class Curve:
    """A reward over steps, and what can be told from its noise."""

    def __init__(self, points: Sequence[tuple[int, float]]):
        """``points``: at least ``LEAST_POINTS``, over ``LEAST_STEPS`` steps."""
        self.steps, self.values = np.array(points, np.float64).T
        self.count, self.window = len(self.values), max(1, len(self.values) // 8)
        self.means = np.convolve(self.values, np.full(self.window, 1 / self.window), "valid")
        """Of neighbours."""
        self.start, self.end = float(self.means[0]), float(self.means[-1])
        # Standard deviation of one value, from the differences of neighbours. The largest tenth is left out, where the reward
        # itself may have jumped; the squares of the others are 0.62 of all, where they are normal.
        squares = np.sort(np.diff(self.values) ** 2)
        kept = squares[: -max(1, len(squares) // 10)]
        # All of them, where the reward is rarely anything but zero.
        self.noise = math.sqrt((kept.mean() / 0.62 if kept.any() else squares.mean()) / 2)

    def rises(self) -> bool:
        """Whether some part of it is above what was before by more than noise explains. The largest distance of the sum of
        values from a straight line, in units of noise times the root of their number, is above 1.63 for one in 200 of the
        curves that are noise alone (Kolmogorov)."""
        furthest = np.cumsum(self.values.mean() - self.values).max()
        return bool(furthest > 1.63 * self.noise * math.sqrt(self.count) + TINY)

    def falls_from(self) -> float | None:
        """The best mean of neighbours, where the last one has lost more than half of what was gained, or a tenth of what was
        there at first; four standard errors at least."""
        best = float(self.means.max())
        least = max(
            0.5 * (best - self.start),
            0.1 * abs(self.start),
            4 * self.noise * math.sqrt(2 / self.window),
            TINY,
        )
        return best if best - self.end > least else None

    def stays_flat(self, last_step: int | None) -> bool:
        """Whether it does not rise noticeably until the last step (None: for as long as now), even if its slope is 2.5 standard
        errors above the one that is seen. One that falls is not flat, and one of ``SOLVED`` need not rise."""
        centered = self.steps - self.steps.mean()
        spread = centered @ centered
        slope = centered @ (self.values - self.values.mean()) / spread
        seen = self.steps[-1] - self.steps[0]
        horizon = min(max(last_step or 0, self.steps[-1]) - self.steps[0], 10 * seen)
        most = (slope + 2.5 * self.noise / math.sqrt(spread)) * horizon
        return bool(self.values.mean() < SOLVED and -TINY <= most < noticeable(self.start))


def noticeable(reward: float) -> float:
    """How much more than ``reward`` is a rise that a person would call one."""
    return max(0.02, 0.2 * abs(reward))


def _ended(state: Mapping[str, Any]) -> Iterable[Hint]:
    if state.get("state") == "stalled":
        text = f"Stalled: nothing was written for {state['silent_s']:,.0f} s, after step {state['step']}"
        yield Hint("error", text, "logs/controller.jsonl says what it waits for", "step")
    if state.get("state") == "stopped" and state.get("steps") is not None:
        text = f"Stopped after step {state['step'] or 0} of {state['steps']}"
        yield Hint(
            "warning", text, "--resume with this folder goes on, if it has a checkpoint", "step"
        )


def _ledger(ledger: Mapping[str, Mapping[str, int]]) -> Iterable[Hint]:
    for task, columns in ledger.items():
        ended = sum(columns.values())
        for column, what, field in (
            ("failed", "failed", "the Ledger's box opens them, each with its cause"),
            ("oversized", "were longer than a row", "batcher.row_length"),
        ):
            count = sum(number for name, number in columns.items() if name.startswith(column))
            if count > 0.05 * ended:
                text = (
                    f"{count / ended:.0%} of the rollouts of {task} {what} ({count:,} of {ended:,})"
                )
                yield Hint(
                    "error" if count > 0.5 * ended else "warning",
                    text,
                    field,
                    f"ledger/{task}/{column}",
                )


def _reward(series: Series, state: Mapping[str, Any]) -> Iterable[Hint]:
    curves = {
        name: Curve(points)
        for name in (VALIDATION, REWARD)
        if len(points := series.get(name, ())) >= LEAST_POINTS
        and points[-1][0] - points[0][0] >= LEAST_STEPS
    }
    for name, curve in curves.items():
        if (best := curve.falls_from()) is not None:
            text = f"The reward falls: {best:.3g} at its best, {curve.end:.3g} now"
            yield Hint("warning", text, "trainer.optimizer.lr (lower it)", name)
            return
    validation = [value for _, value in series.get(VALIDATION, ())]
    gained = bool(validation) and validation[-1] - validation[0] > noticeable(validation[0])
    if gained or any(curve.rises() for curve in curves.values()):
        return
    for name, curve in curves.items():
        if curve.stays_flat(state.get("steps")):
            text = f"The reward is flat: {curve.start:.3g} at first, {curve.end:.3g} now"
            yield Hint(
                "warning",
                text,
                "the rollouts: what does the model answer? then trainer.optimizer.lr",
                name,
            )
            return


def _figures(series: Series) -> Iterable[Hint]:
    now, early = (
        _means(series, slice(-RECENT, None)),
        _means(series, slice(RECENT), least=LEAST_STEPS),
    )
    for name, points in series.items():
        if name.startswith("restarts/") and points and (count := points[-1][1]) > 0:
            part = name.partition("/")[2]
            text = f"{part} died and was restarted {'once' if count == 1 else f'{count:.0f} times'}"
            yield Hint("warning", text, f"logs/ of {part}; supervision.max_restarts", name)
    for name, (most, text, field) in TOO_HIGH.items():
        if now[name] > most:
            yield Hint("warning", text.format(now[name]), field, name)
    name = "mismatch_kl/all"
    if now[name] > 0.1 and now[name] > 3 * early[name]:
        text = f"The mismatch rises: {early[name]:.2g} nats a token at first, {now[name]:.2g} now"
        yield Hint("warning", text, "trainer.optimizer.lr, max_offpolicy_steps (lower one)", name)
    # Equal rewards and no entropy are what is left of a task that the run has solved.
    if not (now[REWARD] >= SOLVED > series[REWARD][0][1]):
        yield from _teaches_nothing(now, early)
    generators = [
        name for name in series if name.startswith("perf/generator_") and name.endswith("/busy")
    ]
    if not generators or not now["time/step_s"] > 0:
        return
    idle, waiting = (
        1 - fmean(now[name] for name in generators),
        now["time/wait_s"] / now["time/step_s"],
    )
    if idle > 1 - IDLE and waiting > WAITING:
        text = f"Generators idle {idle:.0%} of the time, and the trainer waits {waiting:.0%} of a step: slow envs"
        field = f"rollout_workers, if perf/event_loop_lag_max_s is above {LAG_S:g}; else the envs wait for something"
        yield Hint("warning", text, field, generators[0])
    elif idle > 1 - IDLE:
        text = f"Generators idle {idle:.0%} of the time: the trainer is the slower side"
        field = "trainer.ranks (more), generator.replicas (fewer), max_offpolicy_steps (1 or 2)"
        yield Hint("note", text, field, generators[0])
    elif waiting > 0.7 and not now[EQUAL] >= 0.5:  # else there is little to train on
        text = (
            f"The trainer waits {waiting:.0%} of a step for rollouts, and the generators are busy"
        )
        yield Hint(
            "note", text, "generator.replicas (more), sampling.max_tokens (fewer)", "time/wait_s"
        )


def _teaches_nothing(now: Mapping[str, float], early: Mapping[str, float]) -> Iterable[Hint]:
    if now[EQUAL] > 0.8:
        field = "tasks.NAME.dataset: " + (
            "harder examples" if now[REWARD] > 0.5 else "easier examples, or a reward with steps"
        )
        yield Hint(
            "warning",
            f"{now[EQUAL]:.0%} of the groups have equal rewards: they teach nothing",
            field,
            EQUAL,
        )
    name = "policy/entropy"
    if now[name] < 0.02 and now[name] < early[name] / 10:
        text = f"The entropy has collapsed: {early[name]:.2g} nats at first, {now[name]:.2g} now"
        yield Hint(
            "warning", text, "trainer.optimizer.lr (lower it), or more rollouts a step", name
        )


MOST_POINTS = 1000
"""Of one line of a chart; longer ones are thinned out, with their first and last point kept."""
CHARTS = (
    ("Reward of training rollouts", "reward", "rollout/reward_mean", "rollout/*/reward_mean"),
    ("Validation", "reward", "validation/reward", "validation/*/reward"),
    ("Loss", "loss", "loss/total"),
    ("Learning rate", "a step", "train/lr"),
    ("Throughput", "tokens/s", "perf/trained_tokens_per_s", "perf/generated_tokens_per_s"),
    (
        "Time of a step",
        "s",
        *(f"time/{part}_s" for part in ("wait", "train", "sync", "validate", "checkpoint", "step")),
    ),
    ("Use of processes", "share of the time", "perf/*/busy"),
    ("Policy age", "versions", "policy/age_mean", "policy/age_max"),
    (
        "Mismatch of trainer and generators",
        "nats a token",
        "mismatch_kl/all",
        "experts/mismatch_kl_*",
    ),
    ("Experts that trainer and generators agree on", "share", "experts/*agree*"),
    ("Busiest expert of a layer", "even shares", "experts/*/load_max"),
    ("Entropy", "nats", "policy/entropy"),
    ("Length", "tokens", "rollout/completion_tokens_mean", "rollout/completion_tokens_max"),
    ("Advantages", "advantage", "advantage/*/mean", "advantage/*/min", "advantage/*/max"),
    ("Groups without a signal", "share of groups", "rollout/groups_all_equal"),
    ("Gradient norm", "norm", "train/grad_norm"),
)
"""Of the Overview: title, unit and patterns of the metrics' names."""
OF_A_TASK = ("rollout/*/reward_mean", "validation/*/reward")
"""Of a run with one task, these are the same as the task's sum."""

Points = list[tuple[int, float | None]]


def overview(run: ReportedRun) -> Json:
    """State, hints, the charts with their lines, the names of all metrics, and the seconds after which each step ended."""
    known, several = metric_names(run), len(run.tasks()) > 1
    drawn = {
        title: [
            name
            for pattern in own
            if several or pattern not in OF_A_TASK
            for name in named(known, pattern)
        ]
        for title, _, *own in CHARTS
    }
    watched = [name for pattern in WATCHED for name in named(known, pattern)]
    found = series(run, [*chain(watched, *drawn.values())])
    charts = [
        {
            "title": title,
            "unit": unit,
            "xLabel": "policy version" if title == "Validation" else "step",
            "lines": {name: thinned(found[name]) for name in drawn[title]},
        }
        for title, unit, *_ in CHARTS
        if drawn[title]
    ]
    state = run.state()
    finite = {name: [(x, y) for x, y in points if y is not None] for name, points in found.items()}
    step_s = found.get("time/step_s", [])
    ended_s = accumulate(value or 0.0 for _, value in step_s)
    return {
        "name": run.name,
        "state": state,
        "hints": [asdict(hint) for hint in hints(finite, state, ledger_counts(run))],
        "charts": charts,
        "metrics": known,
        "ended_s": [(0, 0.0), *zip((step for step, _ in step_s), ended_s, strict=True)],
    }


def metric_names(run: ReportedRun, *, like: str = "%") -> list[str]:
    return [
        row[0]
        for row in run.rows(
            "SELECT DISTINCT name FROM metrics WHERE name LIKE ? ORDER BY name", (like,)
        )
    ]


def series(run: ReportedRun, names: Sequence[str]) -> dict[str, Points]:
    """(step, value) of each metric, as in metrics.jsonl, but a validation's at the version that it measured; a value that is
    null there is None."""
    marks = ", ".join("?" * len(names))
    query = f"SELECT name, step, value FROM points WHERE name IN ({marks}) ORDER BY name, step"
    return {name: list(points.items()) for name, points in table(run, query, names).items()}


def chart_line(run: ReportedRun, name: str) -> Points:
    """What a chart of the metric has."""
    return thinned(series(run, [name]).get(name, []))


def thinned(points: Points) -> Points:
    """At most ``MOST_POINTS`` of them, evenly, the first and the last among them."""
    if len(points) <= MOST_POINTS:
        return points
    return [points[round(i * (len(points) - 1) / (MOST_POINTS - 1))] for i in range(MOST_POINTS)]


def table(run: ReportedRun, query: str, values: Sequence[str] = ()) -> dict[str, dict[Any, Any]]:
    """Of a query of three columns, the third by the other two."""
    found: dict[str, dict[Any, Any]] = {}
    for first, second, value in run.rows(query, list(values)):
        found.setdefault(first, {})[second] = value
    return found


def ledger_counts(run: ReportedRun) -> dict[str, dict[str, int]]:
    """Lines of ledger.jsonl by task and column."""
    return table(run, "SELECT task, column_, COUNT(*) FROM ledger GROUP BY task, column_")


def ledger(run: ReportedRun) -> Json:
    """Where every rollout went: by task, and by the version at which it ended."""
    recorded = table(run, "SELECT task, outcome, COUNT(*) FROM rollouts GROUP BY task, outcome")
    over_time = "SELECT column_, ended, COUNT(*) FROM ledger WHERE task = ? GROUP BY column_, ended ORDER BY ended"
    tasks = []
    for task, columns in ledger_counts(run).items():
        found = series(run, [f"ledger/{task}/dispatched", f"ledger/{task}/open"])
        counts = {name.rpartition("/")[2]: points[-1][1] for name, points in found.items()}
        tasks.append(
            {
                "task": task,
                "dispatched": int(counts.get("dispatched") or sum(columns.values())),
                "open": int(counts.get("open") or 0),
                "columns": columns,
                "recorded": recorded.get(task, {}),
                "lines": {
                    name: thinned(list(own.items()))
                    for name, own in table(run, over_time, [task]).items()
                },
            }
        )
    return {"tasks": tasks}


def config_differences(runs: Sequence[ReportedRun]) -> dict[str, list[Any]]:
    """Of each config field in which the runs differ, each run's value; of one run, all its fields."""
    configs = [run.config() for run in runs]
    names = sorted({name for config in configs for name in config})
    values = {name: [config.get(name) for config in configs] for name in names}
    return {
        name: row
        for name, row in values.items()
        if len(runs) == 1 or any(value != row[0] for value in row)
    }


LOG_BYTES = 256 * 1024
"""Read of each log, from its end."""
MOST_EVENTS = 200
MOST_CHARACTERS = 1_000
"""Of an event."""
OURS = "torchtitan.experiments.rl."
DEATHS = f"{OURS}fleet.restarts.deaths"
"""Logger of deaths and hangs of processes. The console prints them by itself, so their level is INFO."""
_GRAVE = ("ERROR", "CRITICAL")


def timeline(run: ReportedRun) -> Json:
    """Restarts by part; use, last sign of life, deaths, hangs and errors of the processes; the traces of profiled steps."""
    busy = series(run, metric_names(run, like="perf/%/busy"))
    lines = {path.stem: list(_lines(path)) for path in logs(run.folder)}
    events = sorted(
        (line for own in lines.values() for line in own if _is_event(line)),
        key=lambda line: line["time"],
    )
    return {
        "restarts": series(run, metric_names(run, like="restarts/%")),
        "busy": {name: thinned(points) for name, points in busy.items()},
        "processes": [_process(name, own, busy) for name, own in lines.items()],
        "events": [
            {name: line[name] for name in ("time", "process", "level")}
            | {"text": run.without_secrets(line["message"])[:MOST_CHARACTERS]}
            for line in reversed(events[-MOST_EVENTS:])
        ],
        "traces": [path.name for path in traces(run.folder)],
    }


def traces(folder: Path) -> list[Path]:
    """Files of profiled steps; a link is none."""
    return _files(folder, "trace-steps-*-*.json")


def logs(folder: Path) -> list[Path]:
    """Of the run's processes; a link is none, nor is what lies in a linked folder."""
    return [] if (folder / "logs").is_symlink() else _files(folder / "logs", "*.jsonl")


def _files(folder: Path, pattern: str) -> list[Path]:
    return sorted(path for path in folder.glob(pattern) if path.is_file() and not path.is_symlink())


def _lines(path: Path) -> Iterator[dict[str, str]]:
    """Whole lines at the end of a log, each with the texts ``time``, ``level``, ``logger``, ``process`` and ``message``."""
    try:
        with path.open("rb") as file:
            size = file.seek(0, 2)
            file.seek(max(0, size - LOG_BYTES))
            data = file.read(LOG_BYTES)
    except OSError:
        return
    for line in data.split(b"\n")[1 if size > LOG_BYTES else 0 : -1]:
        try:
            record = json.loads(line)
        except ValueError:  # a process that was killed in mid-write
            continue
        if isinstance(record, dict):
            yield {
                name: str(record.get(name, ""))
                for name in ("time", "level", "logger", "process", "message")
            }


def _is_event(line: dict[str, str]) -> bool:
    ours = line["logger"].startswith(OURS)
    return (
        line["level"] in _GRAVE or (ours and line["level"] == "WARNING") or line["logger"] == DEATHS
    )


def _process(name: str, lines: list[dict[str, str]], busy: dict[str, Points]) -> Json:
    """``name``: of its log. The use of generator-0 is perf/generator_0/busy, that of trainer-0 perf/trainer_rank_0/busy."""
    metric = re.sub(r"^trainer_", "trainer_rank_", name.replace("-", "_"))
    known = [value for _, value in busy.get(f"perf/{metric}/busy", []) if value is not None]
    levels = [line["level"] for line in lines]
    return {
        "process": name,
        "last": lines[-1]["time"] if lines else None,
        "warnings": levels.count("WARNING"),
        "errors": sum(map(levels.count, _GRAVE)),
        "busy": known[-1] if known else None,
        "busy_mean": sum(known) / len(known) if known else None,
    }


MOST_CHANGES = 200
"""Examples of a list: won, or lost."""
Evaluated = tuple[ReportedRun, int, str]
"""A run, its number, and what the ids of an evaluation's groups end with: its version, or "20.final" of the final policy."""


def evaluations(run: ReportedRun) -> Json:
    """Every evaluation of the run: its metrics, by the version that it measured."""
    rows: dict[int, Json] = {}
    for name, version, reported, value in run.rows(
        "SELECT * FROM points WHERE name LIKE 'validation/%' AND value IS NOT NULL ORDER BY reported"
    ):
        row = rows.setdefault(reported, {"version": version, "reported": reported, "metrics": {}})
        row["metrics"][name] = value
    shares = [
        name
        for name in metric_names(run, like="validation/%")
        if re.search(r"/(avg@|pass@)\d+$", name)
    ]
    return {
        "evaluations": list(rows.values()),
        "lines": series(run, shares),
        "recorded": recorded(run),
    }


def recorded(run: ReportedRun) -> list[Json]:
    """The evaluations of which the run has rollouts, oldest first."""
    rows = run.rows(
        "SELECT evaluation AS label, MIN(step) AS version, COUNT(DISTINCT group_id) AS examples FROM rollouts "
        "WHERE evaluation IS NOT NULL GROUP BY evaluation ORDER BY version, MIN(place)"
    )
    return [dict(row) for row in rows]


def changes(before: Evaluated, after: Evaluated) -> Json:
    """Examples of which the mean reward of their attempts rose (``won``) or fell (``lost``), the largest change first.

    Compared are examples that both evaluations have, with a reward in both. ``chance``: how often at least as uneven numbers of
    won and lost examples would come of tosses of a coin (two-sided sign test).
    """
    first, second = _attempts(before), _attempts(after)
    pairs = [(old, second[example]) for example, old in first.items() if example in second]
    rows = [
        {
            "task": old["task"],
            "example": old["sample_id"],
            "change": new["reward"] - old["reward"],
            "before": old,
            "after": new,
        }
        for old, new in pairs
        if old["sample_id"] == new["sample_id"] and None not in (old["reward"], new["reward"])
    ]
    rows.sort(key=lambda row: -abs(row["change"]))
    won, lost = ([row for row in rows if row["change"] * sign > 0] for sign in (1, -1))
    return {
        "won": won[:MOST_CHANGES],
        "lost": lost[:MOST_CHANGES],
        "counts": {"won": len(won), "lost": len(lost), "same": len(rows) - len(won) - len(lost)},
        "left_out": len(first.keys() | second.keys()) - len(rows),
        "chance": sign_test(len(won), len(lost)),
    }


def sign_test(won: int, lost: int) -> float:
    """Two-sided: of n tosses of a coin, the chance of at most min(won, lost) heads or as few tails."""
    n = won + lost
    tail = sum(math.comb(n, k) for k in range(min(won, lost) + 1))
    return min(1.0, float(2 * tail / 2**n))


def _attempts(evaluated: Evaluated) -> dict[str, Json]:
    """By the id of the example's group less the evaluation's label: keys of its rollouts, and their mean reward. It is rounded,
    because a sum depends on the order of its terms."""
    run, number, label = evaluated
    rows = run.rows(
        "SELECT group_id, task, sample_id, group_concat(place || '-' || line) AS keys, round(avg(reward), 12) AS reward "
        "FROM rollouts WHERE evaluation = ? GROUP BY group_id, task ORDER BY task, place",
        (label,),
    )
    return {
        row["group_id"].removesuffix(label): {**row, "run": number, "keys": row["keys"].split(",")}
        for row in rows
    }
