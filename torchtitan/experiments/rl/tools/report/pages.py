"""The pages Overview, Ledger, Timeline and Evaluations, from the index and the logs."""

import json
import math
import re
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from fnmatch import filter as named
from fnmatch import fnmatch
from itertools import accumulate
from pathlib import Path
from typing import Any

from torchtitan.experiments.rl.tools.report.hints import WATCHED, hints
from torchtitan.experiments.rl.tools.report.run import ReportedRun

MOST_POINTS = 1000
"""Of one line of a chart; longer ones are thinned out, with their first and last point kept."""
CHARTS = (
    ("Reward of training rollouts", "reward", "rollout/reward_mean", "rollout/*/reward_mean"),
    ("Validation", "reward", "validation/reward", "validation/*/reward"),
    ("Loss", "loss", "loss/total"),
    ("Learning rate", "a step", "train/lr"),
    ("Throughput", "tokens/s", "perf/trained_tokens_per_s", "perf/generated_tokens_per_s"),
    ("Time of a step", "s", *(f"time/{part}_s" for part in ("wait", "train", "sync", "validate", "checkpoint", "step"))),
    ("Use of processes", "share of the time", "perf/*/busy"),
    ("Policy age", "versions", "policy/age_mean", "policy/age_max"),
    ("Mismatch of trainer and generators", "nats a token", "mismatch_kl/all"),
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


def overview(run: ReportedRun) -> dict[str, Any]:
    """State, hints, the charts with their lines, the names of all metrics, and the seconds after which each step ended."""
    known, several = metric_names(run), len(run.tasks()) > 1
    patterns = {title: [p for p in own if several or p not in OF_A_TASK] for title, _, *own in CHARTS}
    watched = [*(pattern for own in patterns.values() for pattern in own), *WATCHED]
    found = series(run, [name for name in known if any(fnmatch(name, pattern) for pattern in watched)])
    charts = []
    for title, unit, *_ in CHARTS:
        if lines := {name: thinned(found[name]) for pattern in patterns[title] for name in named(known, pattern)}:
            x = "policy version" if title == "Validation" else "step"
            charts.append({"title": title, "unit": unit, "xLabel": x, "lines": lines})
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
    return [row[0] for row in run.index.rows("SELECT DISTINCT name FROM metrics WHERE name LIKE ? ORDER BY name", (like,))]


def series(run: ReportedRun, names: Sequence[str]) -> dict[str, Points]:
    """(step, value) of each metric, as in metrics.jsonl, but a validation's at the version that it measured; a value that is
    null there is None."""
    marks = ", ".join("?" * len(names))
    found: dict[str, Points] = {}
    for name, step, value in run.index.rows(
        f"SELECT name, step, value FROM points WHERE name IN ({marks}) ORDER BY name, step", list(names)
    ):
        found.setdefault(name, []).append((step, value))
    return found


def chart_line(run: ReportedRun, name: str) -> Points:
    """What a chart of the metric has."""
    return thinned(series(run, [name]).get(name, []))


def thinned(points: Points) -> Points:
    """At most ``MOST_POINTS`` of them, evenly, the first and the last among them."""
    if len(points) <= MOST_POINTS:
        return points
    return [points[round(i * (len(points) - 1) / (MOST_POINTS - 1))] for i in range(MOST_POINTS)]


def counts(run: ReportedRun, query: str) -> dict[str, dict[str, int]]:
    """Of a query of three columns, the third by the other two."""
    found: dict[str, dict[str, int]] = {}
    for first, second, count in run.index.rows(query):
        found.setdefault(first, {})[second] = count
    return found


def ledger_counts(run: ReportedRun) -> dict[str, dict[str, int]]:
    """Lines of ledger.jsonl by task and column."""
    return counts(run, "SELECT task, column_, COUNT(*) FROM ledger GROUP BY task, column_")


def ledger(run: ReportedRun) -> dict[str, Any]:
    """Where every rollout went: by task, and by the version at which it ended."""
    recorded = counts(run, "SELECT task, outcome, COUNT(*) FROM rollouts GROUP BY task, outcome")
    over_time = "SELECT column_, ended, COUNT(*) FROM ledger WHERE task = ? GROUP BY column_, ended ORDER BY ended"
    tasks = []
    for task, columns in ledger_counts(run).items():
        newest = {name.rpartition("/")[2]: points[-1][1] for name, points in series(run, _of_ledger(task)).items()}
        lines: dict[str, Points] = {}
        for column, version, count in run.index.rows(over_time, (task,)):
            lines.setdefault(column, []).append((version, count))
        tasks.append(
            {
                "task": task,
                "dispatched": int(newest.get("dispatched") or sum(columns.values())),
                "open": int(newest.get("open") or 0),
                "columns": columns,
                "recorded": recorded.get(task, {}),
                "lines": {column: thinned(points) for column, points in lines.items()},
            }
        )
    return {"tasks": tasks}


def _of_ledger(task: str) -> list[str]:
    return [f"ledger/{task}/{name}" for name in ("dispatched", "open")]


def config_differences(runs: Sequence[ReportedRun]) -> dict[str, list[Any]]:
    """Of each config field in which the runs differ, each run's value; of one run, all its fields."""
    configs = [run.config() for run in runs]
    names = sorted({name for config in configs for name in config})
    values = {name: [config.get(name) for config in configs] for name in names}
    return {name: row for name, row in values.items() if len(runs) == 1 or any(value != row[0] for value in row)}


TRACE = re.compile(r"trace-steps-\d+-\d+\.json")
LOG_BYTES = 256 * 1024
"""Read of each log, from its end."""
MOST_EVENTS = 200
MOST_CHARACTERS = 1_000
"""Of an event."""
OURS = "torchtitan.experiments.rl."
HEALTH = (f"{OURS}operations.supervision", f"{OURS}operations.hang_watch")
"""Loggers whose every line is about the life of a process."""
_GRAVE = ("ERROR", "CRITICAL")


def timeline(run: ReportedRun) -> dict[str, Any]:
    """Restarts by part; use, last sign of life, deaths, hangs and errors of the processes; the traces of profiled steps."""
    busy = series(run, metric_names(run, like="perf/%/busy"))
    lines = {path.stem: list(_lines(path)) for path in logs(run.folder)}
    events = sorted((line for own in lines.values() for line in own if _is_event(line)), key=lambda line: line["time"])
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
    return [path for path in _files(folder, "trace-steps-*.json") if TRACE.fullmatch(path.name)]


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
            yield {name: str(record.get(name, "")) for name in ("time", "level", "logger", "process", "message")}


def _is_event(line: dict[str, str]) -> bool:
    ours = line["logger"].startswith(OURS)
    return line["level"] in _GRAVE or (ours and line["level"] == "WARNING") or line["logger"].startswith(HEALTH)


def _process(name: str, lines: list[dict[str, str]], busy: dict[str, Points]) -> dict[str, Any]:
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


def evaluations(run: ReportedRun) -> dict[str, Any]:
    """Every evaluation of the run: its metrics, by the version that it measured."""
    rows: dict[int, dict[str, Any]] = {}
    for name, version, reported, value in run.index.rows(
        "SELECT * FROM points WHERE name LIKE 'validation/%' AND value IS NOT NULL ORDER BY reported"
    ):
        row = rows.setdefault(reported, {"version": version, "reported": reported, "metrics": {}})
        row["metrics"][name] = value
    shares = [name for name in metric_names(run, like="validation/%") if re.search(r"/(avg@|pass@)\d+$", name)]
    return {"evaluations": list(rows.values()), "lines": series(run, shares), "recorded": recorded(run)}


def recorded(run: ReportedRun) -> list[dict[str, Any]]:
    """The evaluations of which the run has rollouts, oldest first."""
    rows = run.index.rows(
        "SELECT evaluation AS label, MIN(step) AS version, COUNT(DISTINCT group_id) AS examples FROM rollouts "
        "WHERE evaluation IS NOT NULL GROUP BY evaluation ORDER BY version, MIN(place)"
    )
    return [dict(row) for row in rows]


def changes(before: Evaluated, after: Evaluated) -> dict[str, Any]:
    """Examples of which the mean reward of their attempts rose (``won``) or fell (``lost``), the largest change first.

    Compared are examples that both evaluations have, with a reward in both. ``chance``: how often at least as uneven numbers of
    won and lost examples would come of tosses of a coin (two-sided sign test).
    """
    first, second = _attempts(before), _attempts(after)
    rows = []
    for example in [example for example in first if example in second]:
        old, new = first[example], second[example]
        if old["sample_id"] == new["sample_id"] and None not in (old["reward"], new["reward"]):
            change = new["reward"] - old["reward"]
            rows.append({"task": old["task"], "example": old["sample_id"], "change": change, "before": old, "after": new})
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


def _attempts(evaluated: Evaluated) -> dict[str, dict[str, Any]]:
    """By the id of the example's group less the evaluation's label: keys of its rollouts, and their mean reward. It is rounded,
    because a sum depends on the order of its terms."""
    run, number, label = evaluated
    rows = run.index.rows(
        "SELECT group_id, task, sample_id, group_concat(place || '-' || line) AS keys, round(avg(reward), 12) AS reward "
        "FROM rollouts WHERE evaluation = ? GROUP BY group_id, task ORDER BY task, place",
        (label,),
    )
    return {row["group_id"].removesuffix(label): {**row, "run": number, "keys": row["keys"].split(",")} for row in rows}
