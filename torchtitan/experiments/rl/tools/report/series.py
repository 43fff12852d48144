"""Reads metrics from the index of a run, as the pages' charts draw them."""

from collections.abc import Sequence
from typing import Any

from torchtitan.experiments.rl.tools.report.run import ReportedRun

MOST_POINTS = 1000
"""Maximum number of points of one line of a chart. A longer line is thinned out."""

Points = list[tuple[int, float | None]]
"""Step and value of a metric, in the order of the steps. A value that is null in metrics.jsonl is
None."""


def metric_names(run: ReportedRun, *, like: str = "%") -> list[str]:
    """Return the names of the run's metrics that a pattern of SQL's LIKE matches, sorted."""
    query = "SELECT DISTINCT name FROM metrics WHERE name LIKE ? ORDER BY name"
    return [row[0] for row in run.rows(query, (like,))]


def read_series(run: ReportedRun, names: Sequence[str]) -> dict[str, Points]:
    """Return the values of some metrics, by name.

    A validation stands at the policy version that it measured, which is earlier than the step that
    reports it.
    """
    marks = ", ".join("?" * len(names))
    query = f"SELECT name, step, value FROM points WHERE name IN ({marks}) ORDER BY name, step"
    return {name: list(points.items()) for name, points in read_table(run, query, names).items()}


def read_table(
    run: ReportedRun, query: str, values: Sequence[str] = ()
) -> dict[str, dict[Any, Any]]:
    """Return the third column of a query's rows, by the first and then by the second column."""
    table: dict[str, dict[Any, Any]] = {}
    for first, second, third in run.rows(query, list(values)):
        table.setdefault(first, {})[second] = third
    return table


def thinned(points: Points) -> Points:
    """Return at most `MOST_POINTS` of the points, evenly, the first and the last among them."""
    if len(points) <= MOST_POINTS:
        return points
    distance = (len(points) - 1) / (MOST_POINTS - 1)
    return [points[round(index * distance)] for index in range(MOST_POINTS)]


def chart_line(run: ReportedRun, name: str) -> Points:
    """Return the points that a chart of one metric draws."""
    return thinned(read_series(run, [name]).get(name, []))
