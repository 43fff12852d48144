"""Answers of the pages Overview and Ledger, and of the comparison of runs, from the index."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from fnmatch import filter as matching
from itertools import accumulate
from typing import Any

from torchtitan.experiments.rl.tools.report.hints import WATCHED, hints
from torchtitan.experiments.rl.tools.report.run import Json, ReportedRun
from torchtitan.experiments.rl.tools.report.series import (
    Points,
    metric_names,
    read_series,
    read_table,
    thinned,
)


@dataclass(slots=True, frozen=True)
class Chart:
    """A chart of the Overview."""

    title: str
    unit: str
    patterns: tuple[str, ...]
    """Patterns of the names of the metrics that it draws."""
    x_label: str = "step"

    def lines(self, names: Sequence[str], *, several_tasks: bool) -> list[str]:
        """Return which of a run's metrics the chart draws."""
        return [
            name
            for pattern in self.patterns
            if several_tasks or pattern not in TASK_PATTERNS
            for name in matching(names, pattern)
        ]

    def order(self, drawn: Sequence[str]) -> list[str]:
        """Return the names of all lines that the chart may have, by which each has its colour.

        Args:
            drawn: metrics that it draws in a run.
        """
        return list(dict.fromkeys([*(p for p in self.patterns if "*" not in p), *drawn]))


MOST_CAUSES = 20
"""Maximum number of causes of a task's failures that the Ledger lists."""
STEP_PARTS = ("wait", "train", "sync", "validate", "checkpoint", "step")
CHARTS = (
    Chart(
        "Reward of training rollouts",
        "reward",
        ("rollout/reward_mean", "rollout/*/reward_mean"),
    ),
    Chart(
        "Validation",
        "reward",
        ("validation/reward", "validation/*/reward"),
        x_label="policy version",
    ),
    Chart("Negative log-likelihood", "nats a token", ("ce/nll",)),
    Chart("Loss", "loss", ("loss/total",)),
    Chart("Learning rate", "a step", ("train/lr",)),
    Chart(
        "Throughput",
        "tokens/s",
        ("perf/trained_tokens_per_s", "perf/generated_tokens_per_s"),
    ),
    Chart("Time of a step", "s", tuple(f"time/{part}_s" for part in STEP_PARTS)),
    Chart("Use of processes", "share of the time", ("perf/*/busy",)),
    Chart("Policy age", "versions", ("policy/age_mean", "policy/age_max")),
    Chart(
        "Mismatch of trainer and generators",
        "nats a token",
        ("mismatch_kl/all", "experts/mismatch_kl_*"),
    ),
    Chart("Experts that trainer and generators agree on", "share", ("experts/*agree*",)),
    Chart("Busiest expert of a layer", "even shares", ("experts/*/load_max",)),
    Chart("Entropy", "nats", ("policy/entropy",)),
    Chart(
        "Length",
        "tokens",
        ("rollout/completion_tokens_mean", "rollout/completion_tokens_max"),
    ),
    Chart(
        "Advantages",
        "advantage",
        ("advantage/*/mean", "advantage/*/min", "advantage/*/max"),
    ),
    Chart("Groups without a signal", "share of groups", ("rollout/groups_all_equal",)),
    Chart("Gradient norm", "norm", ("train/grad_norm",)),
)
"""Charts of the Overview, from its top."""
TASK_PATTERNS = ("rollout/*/reward_mean", "validation/*/reward")
"""Patterns of metrics of one task. In a run with one task they are the same as those of all
tasks."""


def overview(run: ReportedRun) -> Json:
    """Return the answer of the page Overview.

    Returns:
        ``state`` of the run, ``hints``, ``charts`` with their lines, the names of all ``metrics``,
        and ``ended_s``: the seconds after which each step ended, for charts over time.
    """
    names = metric_names(run)
    several_tasks = len(run.tasks()) > 1
    drawn = {chart: chart.lines(names, several_tasks=several_tasks) for chart in CHARTS}
    watched = [name for pattern in WATCHED for name in matching(names, pattern)]
    causes = {task: rows[0]["cause"] for task, rows in failure_causes(run).items()}
    series = read_series(run, [*watched, *(name for lines in drawn.values() for name in lines)])
    charts = [
        {
            "title": chart.title,
            "unit": chart.unit,
            "xLabel": chart.x_label,
            "lines": {name: thinned(series[name]) for name in lines},
            "order": chart.order(lines),
        }
        for chart, lines in drawn.items()
        if lines
    ]
    state = run.state()
    finite = {
        name: [(step, value) for step, value in points if value is not None]
        for name, points in series.items()
    }
    return {
        "name": run.name,
        "state": state,
        "hints": [asdict(hint) for hint in hints(finite, state, ledger_counts(run), causes)],
        "charts": charts,
        "metrics": names,
        "ended_s": _ends(series.get("time/step_s", [])),
    }


def _ends(step_s: Points) -> list[tuple[int, float]]:
    """Return each step with the seconds from the start of the run to the step's end."""
    steps = [step for step, _ in step_s]
    ends_s = accumulate(seconds or 0.0 for _, seconds in step_s)
    return [(0, 0.0), *zip(steps, ends_s, strict=True)]


def ledger_counts(run: ReportedRun) -> dict[str, dict[str, int]]:
    """Return the number of lines of ledger.jsonl, by task and column."""
    return read_table(run, "SELECT task, column_, COUNT(*) FROM ledger GROUP BY task, column_")


def failure_causes(run: ReportedRun) -> dict[str, list[Json]]:
    """Return the causes of the training rollouts that failed, by task, the most frequent first.

    Returns:
        For each kind of cause, as the terminal tells them apart: the first ``cause`` that was
        recorded, the ``key`` of its rollout and the ``count`` of recorded rollouts.
    """
    causes: dict[str, list[Json]] = {}
    # Of the columns beside MIN, SQLite returns those of the row with the minimum.
    rows = run.rows(
        "SELECT task, error AS cause, place || '-' || line AS key, COUNT(*) AS count, "
        "MIN(place * 100000 + line) "
        "FROM rollouts WHERE kind IS NOT NULL AND evaluation IS NULL "
        "GROUP BY task, kind ORDER BY count DESC"
    )
    for row in rows:
        entry = {name: row[name] for name in ("cause", "key", "count")}
        causes.setdefault(row["task"], []).append(entry)
    return causes


def ledger_columns(run: ReportedRun) -> list[str]:
    """Return the columns of ledger.jsonl in which a rollout ended, sorted."""
    return [row[0] for row in run.rows("SELECT DISTINCT column_ FROM ledger ORDER BY column_")]


def ledger(run: ReportedRun) -> Json:
    """Return the answer of the page Ledger: where every rollout went, by task and by version."""
    query = "SELECT task, outcome, COUNT(*) FROM rollouts GROUP BY task, outcome"
    recorded = read_table(run, query)
    causes = failure_causes(run)
    tasks = [
        _ledger_of_task(run, task, columns, recorded.get(task, {}))
        | {"causes": causes.get(task, [])[:MOST_CAUSES]}
        for task, columns in ledger_counts(run).items()
    ]
    return {"tasks": tasks}


def _ledger_of_task(
    run: ReportedRun, task: str, columns: dict[str, int], recorded: dict[str, int]
) -> Json:
    """Return where the rollouts of one task went.

    Args:
        columns: number of rollouts that ended in each column of the ledger.
        recorded: number of rollouts that were recorded, by outcome.
    """
    series = read_series(run, [f"ledger/{task}/dispatched", f"ledger/{task}/open"])
    newest = {name.rpartition("/")[2]: int(points[-1][1] or 0) for name, points in series.items()}
    ended = sum(columns.values())
    dispatched = newest.get("dispatched", ended)
    still_open = newest.get("open", 0)
    if ended + still_open > dispatched:  # the ledger is ahead of the last step's metrics
        dispatched = max(dispatched, ended)
        still_open = dispatched - ended
    ended_by_version = read_table(
        run,
        "SELECT column_, ended, COUNT(*) FROM ledger WHERE task = ? "
        "GROUP BY column_, ended ORDER BY ended",
        [task],
    )
    return {
        "task": task,
        "dispatched": dispatched,
        "open": still_open,
        "columns": columns,
        "recorded": recorded,
        "lines": _with_zeros(ended_by_version),
    }


def _with_zeros(counts: dict[str, dict[int, int]]) -> dict[str, Points]:
    """Return each column's count at every version at which a rollout of the task ended.

    The versions beside these are there too, so that a line falls to 0 between them.
    """
    ended = set().union(*counts.values())
    beside = {version + 1 for version in ended} | {version - 1 for version in ended}
    versions = sorted(ended | {version for version in beside if min(ended) < version < max(ended)})
    return {
        column: thinned([(version, own.get(version, 0)) for version in versions])
        for column, own in counts.items()
    }


def config_differences(runs: Sequence[ReportedRun]) -> dict[str, list[Any]]:
    """Return each run's value of the config fields in which the runs differ.

    Of a single run all fields are returned.
    """
    configs = [run.config() for run in runs]
    names = sorted({name for config in configs for name in config})
    values = {name: [config.get(name) for config in configs] for name in names}
    return {
        name: row
        for name, row in values.items()
        if len(runs) == 1 or any(value != row[0] for value in row)
    }
