"""Figures of an evaluation with their uncertainty, by task and slice, and of two models on the same examples.

Attempts at one example are not independent. So an example counts as one observation, whose value is the mean over its attempts
(Miller, arXiv:2411.00640, section 2.2).
"""

import itertools
import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from torchtitan.experiments.rl.controller.validation import pass_at_k
from torchtitan.experiments.rl.rollouts.types import RolloutGroup

Z = 1.959964
"""Two-sided 95 % of the normal distribution."""
T = (12.7062, 4.30265, 3.18245, 2.77645, 2.57058, 2.44691, 2.36462, 2.30600, 2.26216, 2.22814)
"""The same of Student's distribution with 1 to 10 degrees of freedom."""
MOST_SLICES = 12
"""Of one field of an example's info. A field with more values is a label of its own for almost every example."""
EXACT_SIGNS = 14
"""Examples that differ, up to which all ways to flip their signs are tried: 16,384."""
DRAWS = 20_000
"""Sign flips that are drawn where there are more."""


@dataclass(kw_only=True, slots=True)
class Example:
    """What one model got for one example."""

    example: str
    """Its group's id, which is the same for every model."""
    sample_id: str
    rewards: list[float]
    """Of the attempts that were scored."""
    attempts: int
    facts: dict[str, Any] = field(default_factory=dict)
    """Those fields of its info that may name a slice."""


def example_of(group: RolloutGroup) -> Example:
    """
    Returns:
        Plain values only: the example's own may be of any class.
    """
    sample = group.data_sample
    info = sample.info if isinstance(sample.info, dict) else {}
    facts = {str(name): value for name, value in info.items() if isinstance(value, str | bool | int)}
    return Example(
        example=group.group_id,
        sample_id=str(sample.sample_id),
        rewards=[float(reward) for reward in group.rewards],
        attempts=len(group.rollouts),
        facts=facts,
    )


def task_figures(examples: Sequence[Example], *, attempts: int, pass_reward: float) -> dict[str, Any]:
    """avg@k and pass@k of a task with 95 % intervals, overall and by slice."""
    return _figures(examples, attempts, pass_reward) | {
        "slices": {
            name: {str(value): _figures(part, attempts, pass_reward) for value, part in parts.items()}
            for name, parts in slices_of(examples).items()
        }
    }


def slices_of(examples: Sequence[Example]) -> dict[str, dict[Any, list[Example]]]:
    """Examples by each value of each field of their info that divides them into at least two parts, and not one by one."""
    found: dict[str, dict[Any, list[Example]]] = {}
    for name in sorted({name for example in examples for name in example.facts}):
        counts = Counter(example.facts.get(name) for example in examples)
        if 2 <= len(counts) <= min(MOST_SLICES, len(examples) // 2):
            values = sorted(counts, key=lambda value: (str(type(value)), value))
            found[name] = {value: [e for e in examples if e.facts.get(name) == value] for value in values}
    return found


def _figures(examples: Sequence[Example], attempts: int, pass_reward: float) -> dict[str, Any]:
    scored = [example.rewards for example in examples if example.rewards]
    figures: dict[str, Any] = {
        "examples": len(examples),
        "failed": sum(example.attempts - len(example.rewards) for example in examples),
        f"avg@{attempts}": _estimate([float(np.mean(rewards)) for rewards in scored]),
    }
    for k in sorted({1, attempts}):
        passing = [
            pass_at_k(len(rewards), sum(reward >= pass_reward for reward in rewards), min(k, len(rewards)))
            for rewards in scored
        ]
        figures[f"pass@{k}"] = _estimate(passing)
    return figures


def _estimate(values: Sequence[float]) -> dict[str, float | None]:
    if not values:
        return {"value": None, "low": None, "high": None}
    low, high = interval(values)
    return {"value": float(np.mean(values)), "low": low, "high": high}


def interval(values: Sequence[float]) -> tuple[float | None, float | None]:
    """95 % interval of the mean of ``values``, one for each example.

    Of values in 0..1 it is Wilson's (1927), with as many observations as would give their variance if each were 0 or 1, so that
    20 of 20 right is 0.84 to 1 and not 1 to 1. Of others it is the mean and its standard errors; of one such value, unknown.
    Where the width comes from the values' own variance, few values make it wider, by Student's distribution.
    """
    x = np.asarray(values, np.float64)
    n, mean = len(x), float(x.mean())
    variance = float(x.var(ddof=1)) if n > 1 else math.inf
    if x.min() < 0 or x.max() > 1:
        if n < 2:
            return None, None
        half = student(n - 1) * math.sqrt(variance / n)
        return mean - half, mean + half
    full = mean * (1 - mean)
    spread = student(n - 1) ** 2 * variance / (n * full) if 0 < variance < full else Z * Z / n
    middle = (mean + spread / 2) / (1 + spread)
    half = math.sqrt(spread * full + spread * spread / 4) / (1 + spread)
    return max(0.0, middle - half), min(1.0, middle + half)


def student(freedom: int) -> float:
    """Two-sided 95 % of Student's distribution. Above 10 degrees of freedom by Fisher's expansion, right to 1e-4."""
    if freedom <= len(T):
        return T[freedom - 1]
    v = freedom
    third = (3 * Z**7 + 19 * Z**5 + 17 * Z**3 - 15 * Z) / (384 * v**3)
    return Z + (Z**3 + Z) / (4 * v) + (5 * Z**5 + 16 * Z**3 + 3 * Z) / (96 * v**2) + third


def paired(first: Sequence[Example], second: Sequence[Example]) -> dict[str, Any]:
    """Mean difference of the second model from the first, over the examples that both were scored on, and its test.

    The test flips signs: if the models were alike, each example's difference were as likely with the other sign. ``p_value`` is
    the share of flips whose mean is at least as far from 0 (two-sided).
    """
    before = {example.example: float(np.mean(example.rewards)) for example in first if example.rewards}
    after = {example.example: float(np.mean(example.rewards)) for example in second if example.rewards}
    both = [example for example in before if example in after]
    differences = np.array([after[example] - before[example] for example in both], np.float64)
    if not len(differences):
        return {"examples": 0, "difference": None, "low": None, "high": None, "p_value": None, "won": [], "lost": []}
    mean, n = float(differences.mean()), len(differences)
    half = student(n - 1) * math.sqrt(float(differences.var(ddof=1)) / n) if n > 1 else None
    return {
        "examples": n,
        "difference": mean,
        "low": None if half is None else mean - half,
        "high": None if half is None else mean + half,
        "p_value": sign_flip_p(differences),
        "won": [example for example, d in zip(both, differences, strict=True) if d > 0],
        "lost": [example for example, d in zip(both, differences, strict=True) if d < 0],
    }


def sign_flip_p(differences: np.ndarray) -> float:
    """Two-sided p-value of the sign-flip test. Exact for few differences; else of ``DRAWS`` flips, always the same ones."""
    d = differences[differences != 0]
    if not len(d):
        return 1.0
    seen = abs(d.sum()) - 1e-12
    if len(d) <= EXACT_SIGNS:
        signs = np.array(list(itertools.product((1.0, -1.0), repeat=len(d))))
        return float(np.mean(np.abs(signs @ d) >= seen))
    random, far = np.random.default_rng(0), 0
    for _ in range(0, DRAWS, 1000):
        signs = random.integers(0, 2, (1000, len(d))) * 2.0 - 1.0
        far += int(np.sum(np.abs(signs @ d) >= seen))
    return (1 + far) / (1 + DRAWS)


def result_lines(result: dict[str, Any]) -> list[str]:
    """Of what ``--json`` prints."""
    lines: list[str] = []
    for model in result["models"]:
        lines.append(f"model       {model['model']}")
        for task, figures in model["tasks"].items():
            failed = f", {figures['failed']} attempts failed" if figures["failed"] else ""
            lines.append(
                f"{task:<12}{figures['examples']} examples, {figures['attempts']} attempts at temperature "
                f"{figures['temperature']:g}{failed}"
            )
            lines += _estimates(figures, indent=12)
            for sliced_by, parts in figures["slices"].items():
                for value, part in parts.items():
                    lines.append(f"{'':<12}{sliced_by} = {value} ({part['examples']})")
                    lines += _estimates(part, indent=14)
        lines.append(f"records     {model['folder']}")
    for task, compared in (result["comparison"] or {}).items():
        if compared["difference"] is None:
            lines.append(f"compared    {task}: no example was scored for both")
            continue
        between = "" if compared["low"] is None else f" ({compared['low']:+.3f} to {compared['high']:+.3f})"
        lines.append(
            f"compared    {task}: second less first {compared['difference']:+.3f}{between}, p = {compared['p_value']:.3g}; "
            f"{len(compared['won'])} of {compared['examples']} examples better, {len(compared['lost'])} worse"
        )
    return [*lines, "Intervals are of 95 %, over examples."]


def _estimates(figures: dict[str, Any], *, indent: int) -> list[str]:
    lines = []
    for name, value in figures.items():
        if isinstance(value, dict) and "value" in value:
            if value["value"] is None:
                lines.append(f"{'':<{indent}}{name:<9}nothing was scored")
            else:
                between = "" if value["low"] is None else f"  ({value['low']:.3f} to {value['high']:.3f})"
                lines.append(f"{'':<{indent}}{name:<9}{value['value']:.3f}{between}")
    return lines
