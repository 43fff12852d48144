"""The page Evaluations: what each measured, and the examples that one won or lost against another."""

import math
import re
from dataclasses import dataclass
from typing import Any

from torchtitan.experiments.rl.report.overview import Points, metric_names, series
from torchtitan.experiments.rl.report.run import ReportedRun

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
