"""The pages Overview and Ledger: figures of metrics.jsonl and ledger.jsonl, through the index."""

import json
import math
import re
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from itertools import accumulate
from pathlib import Path
from typing import Any

from torchtitan.experiments.rl.tools.report.hints import hints
from torchtitan.experiments.rl.tools.report.run import ReportedRun

MOST_POINTS = 1000
"""Of one line of a chart; longer ones are thinned out, with their first and last point kept."""

Points = list[tuple[int, float | None]]


def charts(tasks: Sequence[str]) -> list[dict[str, Any]]:
    """What the Overview plots: title, unit and metrics, by the names that metrics.jsonl has."""
    several = tasks if len(tasks) > 1 else []
    advantages = [f"advantage/{task}/{part}" for task in tasks for part in ("mean", "min", "max")]
    validation = ["validation/reward", *(f"validation/{task}/reward" for task in several)]
    return [
        _chart(
            "Reward of training rollouts", "reward", ["rollout/reward_mean", *(f"rollout/{t}/reward_mean" for t in several)]
        ),
        _chart("Validation", "reward", validation, x="validation/step"),
        _chart("Loss", "loss", ["loss/total"]),
        _chart("Learning rate", "a step", ["train/lr"]),
        _chart("Throughput", "tokens/s", ["perf/trained_tokens_per_s", "perf/generated_tokens_per_s"]),
        _chart(
            "Time of a step",
            "s",
            [f"time/{part}_s" for part in ("wait", "train", "sync", "validate", "checkpoint", "step")],
        ),
        _chart("Use of processes", "share of the time", []),
        _chart("Policy age", "versions", ["policy/age_mean", "policy/age_max"]),
        _chart("Mismatch of trainer and generators", "nats a token", ["mismatch_kl/all"]),
        _chart("Entropy", "nats", ["policy/entropy"]),
        _chart("Length", "tokens", ["rollout/completion_tokens_mean", "rollout/completion_tokens_max"]),
        _chart("Advantages", "advantage", advantages),
        _chart("Groups without a signal", "share of groups", ["rollout/groups_all_equal"]),
        _chart("Gradient norm", "norm", ["train/grad_norm"]),
    ]


def overview(run: ReportedRun) -> dict[str, Any]:
    """State, hints, the charts with their lines, the names of all metrics, and the seconds after which each step ended."""
    plotted = charts(run.tasks())
    names = {name for chart in plotted for name in chart["metrics"]}
    watched = {
        "rollout/status/truncated_length",
        "mismatch/share_of_bound_max",
        "perf/event_loop_lag_max_s",
        "time/step_s",
        "validation/step",
    }
    busy = metric_names(run, like="perf/%/busy")
    restarts = metric_names(run, like="restarts/%")
    found = series(run, sorted(names | watched | set(busy) | set(restarts)))
    for chart in plotted:
        metrics = chart["metrics"] or busy
        step_of = dict(found.get(chart.pop("x"), []))
        lines = {name: found[name] for name in metrics if found.get(name)}
        if step_of:  # a validation is reported with a later step than the one whose policy it measured
            lines = {name: [(int(step_of.get(x) or x), y) for x, y in points] for name, points in lines.items()}
        chart["lines"] = {name: thinned(points) for name, points in lines.items()}
        del chart["metrics"]
    state = run.state()
    ended = ledger_counts(run)
    finite = {name: [(x, y) for x, y in points if y is not None] for name, points in found.items()}
    return {
        "name": run.name,
        "state": state,
        "hints": [asdict(hint) for hint in hints(finite, state, ended)],
        "charts": [chart for chart in plotted if chart["lines"]],
        "metrics": metric_names(run),
        "ended_s": ended_s(found.get("time/step_s", [])),
        "latest": {name: points[-1] for name, points in found.items() if points},
    }


def ended_s(step_s: Points) -> list[tuple[int, float]]:
    """(step, seconds of it and of all steps before), with step 0 at 0."""
    ends = accumulate(value or 0.0 for _, value in step_s)
    return [(0, 0.0), *zip((step for step, _ in step_s), ends, strict=True)]


def metric_names(run: ReportedRun, *, like: str = "%") -> list[str]:
    return [row[0] for row in run.index.rows("SELECT DISTINCT name FROM metrics WHERE name LIKE ? ORDER BY name", (like,))]


def series(run: ReportedRun, names: Sequence[str]) -> dict[str, Points]:
    """(step, value) of each metric, as in metrics.jsonl; a value that is null there is None."""
    marks = ", ".join("?" * len(names))
    rows = run.index.rows(f"SELECT name, step, value FROM metrics WHERE name IN ({marks}) ORDER BY name, step", list(names))
    found: dict[str, Points] = {}
    for name, step, value in rows:
        found.setdefault(name, []).append((step, value))
    return found


def chart_line(run: ReportedRun, name: str) -> Points:
    """What a chart of the metric has; a validation's values at the versions that they measured."""
    found = series(run, [name, "validation/step"])
    version = dict(found.get("validation/step", [])) if name.startswith("validation/") else {}
    return thinned([(int(version.get(step) or step), value) for step, value in found.get(name, [])])


def thinned(points: Points, most: int = MOST_POINTS) -> Points:
    """At most so many of them, evenly, the first and the last among them."""
    if len(points) <= most:
        return points
    return [points[round(i * (len(points) - 1) / (most - 1))] for i in range(most)]


def ledger_counts(run: ReportedRun) -> dict[str, dict[str, int]]:
    """Lines of ledger.jsonl by task and column."""
    counts: dict[str, dict[str, int]] = {}
    for task, column, count in run.index.rows("SELECT task, column_, COUNT(*) FROM ledger GROUP BY task, column_"):
        counts.setdefault(task, {})[column] = count
    return counts


def ledger(run: ReportedRun) -> dict[str, Any]:
    """Where every rollout went: by task, and by the version at which it ended."""
    recorded: dict[str, dict[str, int]] = {}
    for task, outcome, count in run.index.rows("SELECT task, outcome, COUNT(*) FROM rollouts GROUP BY task, outcome"):
        recorded.setdefault(task, {})[outcome] = count
    over_time = run.index.rows("SELECT task, ended, column_, COUNT(*) FROM ledger GROUP BY task, ended, column_ ORDER BY ended")
    tasks = []
    for task, columns in sorted(ledger_counts(run).items()):
        newest = "SELECT value FROM metrics WHERE name = ? ORDER BY step DESC LIMIT 1"
        known = {name: run.index.rows(newest, (f"ledger/{task}/{name}",)) for name in ("dispatched", "open")}
        ended = sum(columns.values())
        by_version: dict[str, Points] = {}
        for name, version, column, count in over_time:
            if name == task:
                by_version.setdefault(column, []).append((version, count))
        tasks.append(
            {
                "task": task,
                "ended": ended,
                "dispatched": int(known["dispatched"][0][0]) if known["dispatched"] else ended,
                "open": int(known["open"][0][0]) if known["open"] else 0,
                "columns": columns,
                "recorded": recorded.get(task, {}),
                "lines": {column: thinned(points) for column, points in by_version.items()},
            }
        )
    return {"name": run.name, "tasks": tasks}


def config_differences(runs: Sequence[ReportedRun]) -> dict[str, list[Any]]:
    """Of each config field in which the runs differ, each run's value; of one run, all its fields."""
    configs = [run.config() for run in runs]
    names = sorted({name for config in configs for name in config})
    values = {name: [config.get(name) for config in configs] for name in names}
    return {name: row for name, row in values.items() if len(runs) == 1 or any(value != row[0] for value in row)}


def _chart(title: str, unit: str, metrics: Sequence[str], *, x: str = "") -> dict[str, Any]:
    """``x``: metric that gives the version; "": the step."""
    return {"title": title, "unit": unit, "metrics": list(metrics), "x": x, "xLabel": "policy version" if x else "step"}


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
    processes = [_process(name, own, busy) for name, own in sorted(lines.items())]
    events = sorted((line for own in lines.values() for line in own if _is_event(line)), key=lambda line: line["time"])
    return {
        "name": run.name,
        "restarts": series(run, metric_names(run, like="restarts/%")),
        "busy": {name: thinned(points) for name, points in busy.items()},
        "processes": processes,
        "events": [
            {name: line[name] for name in ("time", "process", "level")}
            | {"text": run.without_secrets(line["message"])[:MOST_CHARACTERS]}
            for line in reversed(events[-MOST_EVENTS:])
        ],
        "traces": [path.name for path in traces(run.folder)],
    }


def traces(folder: Path) -> list[Path]:
    """Files of profiled steps; a link is none."""
    return sorted(path for path in folder.iterdir() if TRACE.fullmatch(path.name) and path.is_file() and not path.is_symlink())


def logs(folder: Path) -> list[Path]:
    """Of the run's processes; a link is none, nor is what lies in a linked folder."""
    own = folder / "logs"
    return [] if own.is_symlink() else sorted(p for p in own.glob("*.jsonl") if p.is_file() and not p.is_symlink())


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


def _process(name: str, lines: list[dict[str, str]], busy: dict[str, Any]) -> dict[str, Any]:
    """``name``: of its log. The use of generator-0 is perf/generator_0/busy, that of trainer-0 perf/trainer_rank_0/busy."""
    metric = re.sub(r"^trainer_", "trainer_rank_", name.replace("-", "_"))
    known = [value for _, value in busy.get(f"perf/{metric}/busy", []) if value is not None]
    return {
        "process": name,
        "last": lines[-1]["time"] if lines else None,
        "warnings": sum(line["level"] == "WARNING" for line in lines),
        "errors": sum(line["level"] in _GRAVE for line in lines),
        "busy": known[-1] if known else None,
        "busy_mean": sum(known) / len(known) if known else None,
    }


MOST_CHANGES = 200
"""Examples of a list: won, or lost."""


@dataclass(kw_only=True, slots=True)
class Evaluation:
    run: ReportedRun
    number: int
    """Of the run."""
    label: str
    """What the ids of its groups end with: its version; "20.final" is that of the final policy."""


@dataclass(kw_only=True, slots=True)
class _Attempts:
    """At one example, in one evaluation."""

    sample_id: str | None
    keys: list[str]
    """Of the rollouts."""
    rewards: list[float]

    @property
    def mean(self) -> float:
        return math.fsum(self.rewards) / len(self.rewards)  # whatever their order


def evaluations(run: ReportedRun) -> dict[str, Any]:
    """Every evaluation of the run: its metrics, by the version that it measured."""
    found = series(run, metric_names(run, like="validation/%"))
    measured = found.pop("validation/step", [])
    rows, by_step = [], {name: dict(points) for name, points in found.items()}
    for step, version in measured:
        metrics = {name: values[step] for name, values in by_step.items() if values.get(step) is not None}
        rows.append({"version": version, "reported": step, "metrics": metrics})
    version_of = dict(measured)
    lines: dict[str, Points] = {}
    for name, points in found.items():
        if re.search(r"/(avg@|pass@)\d+$", name):
            lines[name] = [(int(version_of.get(step) or step), value) for step, value in points]
    return {"name": run.name, "evaluations": rows, "lines": lines, "recorded": recorded(run)}


def recorded(run: ReportedRun) -> list[dict[str, Any]]:
    """The evaluations of which the run has rollouts, oldest first."""
    rows = run.index.rows(
        "SELECT evaluation AS label, MIN(step) AS version, COUNT(DISTINCT group_id) AS examples FROM rollouts "
        "WHERE evaluation IS NOT NULL GROUP BY evaluation ORDER BY version, MIN(place)"
    )
    return [dict(row) for row in rows]


def changes(before: Evaluation, after: Evaluation) -> dict[str, Any]:
    """Examples of which the mean reward of their attempts rose (``won``) or fell (``lost``), the largest change first.

    Compared are examples that both evaluations have, with a reward in both. ``chance``: how often at least as uneven numbers of
    won and lost examples would come of tosses of a coin (two-sided sign test).
    """
    first, second = _attempts(before), _attempts(after)
    rows: list[dict[str, Any]] = []
    same = 0
    for example in first.keys() & second.keys():
        old, new = first[example], second[example]
        if old.sample_id != new.sample_id or not old.rewards or not new.rewards:
            continue
        if (change := new.mean - old.mean) == 0:
            same += 1
        else:
            row = {"task": example[0], "example": old.sample_id, "change": change, "place": example[1]}
            rows.append(row | {"before": _side(before, old), "after": _side(after, new)})
    rows.sort(key=lambda row: (-abs(row["change"]), row["task"], row.pop("place")))
    won, lost = ([row for row in rows if row["change"] * sign > 0] for sign in (1, -1))
    return {
        "won": won[:MOST_CHANGES],
        "lost": lost[:MOST_CHANGES],
        "counts": {"won": len(won), "lost": len(lost), "same": same},
        "left_out": len(first.keys() | second.keys()) - len(rows) - same,
        "chance": sign_test(len(won), len(lost)),
    }


def sign_test(won: int, lost: int) -> float:
    """Two-sided: of n tosses of a coin, the chance of at most min(won, lost) heads or as few tails."""
    n = won + lost
    tail = sum(math.comb(n, k) for k in range(min(won, lost) + 1))
    return min(1.0, float(2 * tail / 2**n))


def _attempts(evaluation: Evaluation) -> dict[tuple[str, int], _Attempts]:
    """By task and the example's place in the validation set, with which a group's id ends."""
    rows = evaluation.run.index.rows(
        "SELECT task, group_id, sample_id, place, line, reward FROM rollouts WHERE evaluation = ? ORDER BY place, line",
        (evaluation.label,),
    )
    found: dict[tuple[str, int], _Attempts] = {}
    for row in rows:
        example = re.search(r"-(\d+)@[^@]*$", row["group_id"])
        if example is None:
            continue
        own = found.setdefault((row["task"], int(example[1])), _Attempts(sample_id=row["sample_id"], keys=[], rewards=[]))
        own.keys.append(f"{row['place']}-{row['line']}")
        if row["reward"] is not None:
            own.rewards.append(row["reward"])
    return found


def _side(evaluation: Evaluation, attempts: _Attempts) -> dict[str, Any]:
    return {"run": evaluation.number, "keys": attempts.keys, "reward": attempts.mean}
