"""The pages Overview and Ledger: figures of metrics.jsonl and ledger.jsonl, through the index."""

from collections.abc import Sequence
from dataclasses import asdict
from itertools import accumulate
from typing import Any

from torchtitan.experiments.rl.report.hints import hints
from torchtitan.experiments.rl.report.run import ReportedRun

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
