"""Answers of the page Evaluations: the metrics of each, and the examples that changed between two.

An evaluation is known by its label, which its groups' ids end with: the policy version that it
measured, or "20.final" for the final policy.
"""

import math
import re
from typing import NamedTuple

from torchtitan.experiments.rl.tools.report.rollouts import beginnings
from torchtitan.experiments.rl.tools.report.run import Json, ReportedRun
from torchtitan.experiments.rl.tools.report.series import Points, metric_names, read_series

MOST_CHANGES = 200
"""Maximum number of examples that are listed as won, and as lost."""


class ReportedEvaluation(NamedTuple):
    """An evaluation of a run."""

    run: ReportedRun
    number: int
    """Number of the run in the report."""
    label: str


def evaluations(run: ReportedRun) -> Json:
    """Return the answer of the page Evaluations.

    Returns:
        ``evaluations``: the metrics of each, in the order in which they were reported. ``lines``:
        the shares avg@k and pass@k over versions; two that are the same are one line, with both
        names. ``recorded``: see `recorded`. ``failures``: see `failures`.
    """
    rows: dict[int, Json] = {}
    query = (
        "SELECT * FROM points WHERE name LIKE 'validation/%' AND value IS NOT NULL "
        "ORDER BY reported"
    )
    for name, version, reported, value in run.rows(query):
        row = rows.setdefault(reported, {"version": version, "reported": reported, "metrics": {}})
        row["metrics"][name] = value
    names = metric_names(run, like="validation/%")
    shares = [name for name in names if re.search(r"/(avg@|pass@)\d+$", name)]
    return {
        "evaluations": list(rows.values()),
        "lines": _named_once(read_series(run, shares)),
        "recorded": recorded(run),
        "failures": failures(run, list(rows.values())),
    }


def failures(run: ReportedRun, rows: list[Json]) -> list[Json]:
    """Return each task's failed attempts of each evaluation, oldest first.

    Returns:
        ``version``, ``task``, number of ``failed`` attempts and of all ``attempts`` (None in runs
        of earlier versions of the library). ``cause``: the first recorded one, with the ``key`` of
        its rollout; None if none was recorded (``recorder.fraction``).
    """
    found = []
    for row in rows:
        for name, failed in row["metrics"].items():
            match = re.fullmatch(r"validation/(.+)/failed", name)
            if match is None or not failed:
                continue
            first = run.rows(
                "SELECT place || '-' || line AS key, coalesce(error, status) AS cause "
                "FROM rollouts WHERE evaluation IS NOT NULL AND task = ? AND version = ? "
                "AND reward IS NULL ORDER BY place, line LIMIT 1",
                (match[1], row["version"]),
            )
            cause = dict(first[0]) if first else {"key": None, "cause": None}
            attempts = row["metrics"].get(f"validation/{match[1]}/attempts")
            counts = {"task": match[1], "failed": failed, "attempts": attempts}
            found.append({"version": row["version"], **counts, **cause})
    return found


def _named_once(lines: dict[str, Points]) -> dict[str, Points]:
    """Return lines of which no two of a task are the same, as avg@1 and pass@1 often are."""
    names: dict[tuple[str, str], list[str]] = {}
    for name, points in lines.items():
        names.setdefault((name.rpartition("/")[0], str(points)), []).append(name)
    return {
        " and ".join([first, *(name.rpartition("/")[2] for name in others)]): lines[first]
        for first, *others in names.values()
    }


def recorded(run: ReportedRun) -> list[Json]:
    """Return the evaluations whose rollouts the run has recorded, oldest first."""
    rows = run.rows(
        "SELECT evaluation AS label, MIN(version) AS version, COUNT(DISTINCT group_id) AS examples "
        "FROM rollouts WHERE evaluation IS NOT NULL "
        "GROUP BY evaluation ORDER BY version, MIN(place)"
    )
    return [dict(row) for row in rows]


def changes(before: ReportedEvaluation, after: ReportedEvaluation) -> Json:
    """Compare two evaluations by the examples that both have, with a reward in both.

    Returns:
        ``won`` and ``lost``: the examples whose mean reward rose or fell, the largest change first,
        each with its question and the answer of the first attempt in both.
        ``counts`` of these, and of the ones that stayed the ``same``. ``left_out``: number of
        examples that were not compared. ``chance``: see `sign_test`.
    """
    first = _examples(before)
    second = _examples(after)
    rows = [
        _change(old, second[example])
        for example, old in first.items()
        if example in second and _are_comparable(old, second[example])
    ]
    rows.sort(key=lambda row: -abs(row["change"]))
    won = [row for row in rows if row["change"] > 0]
    lost = [row for row in rows if row["change"] < 0]
    return {
        "won": [_with_texts(row, before, after) for row in won[:MOST_CHANGES]],
        "lost": [_with_texts(row, before, after) for row in lost[:MOST_CHANGES]],
        "counts": {"won": len(won), "lost": len(lost), "same": len(rows) - len(won) - len(lost)},
        "left_out": len(first.keys() | second.keys()) - len(rows),
        "chance": sign_test(len(won), len(lost)),
    }


def sign_test(won: int, lost: int) -> float:
    """Return the chance of numbers at least as uneven if each example won or lost by a coin.

    This is the two-sided sign test.
    """
    count = won + lost
    tail = sum(math.comb(count, heads) for heads in range(min(won, lost) + 1))
    return min(1.0, float(2 * tail / 2**count))


def _examples(evaluated: ReportedEvaluation) -> dict[str, Json]:
    """Return the keys of each example's rollouts and their mean reward.

    The mean is rounded, because a sum depends on the order of its terms. Examples are known by the
    id of their group without the evaluation's label.
    """
    rows = evaluated.run.rows(
        "SELECT group_id, task, sample_id, group_concat(place || '-' || line) AS keys, "
        "round(avg(reward), 12) AS reward "
        "FROM rollouts WHERE evaluation = ? GROUP BY group_id, task ORDER BY task, place",
        (evaluated.label,),
    )
    return {
        row["group_id"].removesuffix(evaluated.label): {
            **row,
            "run": evaluated.number,
            "keys": row["keys"].split(","),
        }
        for row in rows
    }


def _with_texts(change: Json, before: ReportedEvaluation, after: ReportedEvaluation) -> Json:
    """Return a change with the beginnings of the question and of the answers."""
    old = beginnings(before.run, change["before"]["keys"][0])
    new = beginnings(after.run, change["after"]["keys"][0])
    return change | {
        "asked": new["asked"] or old["asked"],
        "before": change["before"] | {"answered": old["answered"]},
        "after": change["after"] | {"answered": new["answered"]},
    }


def _are_comparable(old: Json, new: Json) -> bool:
    has_rewards = old["reward"] is not None and new["reward"] is not None
    return has_rewards and old["sample_id"] == new["sample_id"]


def _change(old: Json, new: Json) -> Json:
    return {
        "task": old["task"],
        "example": old["sample_id"],
        "change": new["reward"] - old["reward"],
        "before": old,
        "after": new,
    }
