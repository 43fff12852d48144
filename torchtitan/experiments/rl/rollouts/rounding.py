"""Compares rewards without being fooled by rounding.

A sum of floats depends on its order: 0.1 + 0.2 + 0.3 is 0.6000000000000001, and 0.3 + 0.2 + 0.1 is
0.6. Rewards that differ by that much alone are equal, and a mean of 0.8999999999999999 reaches a
threshold of 0.9.
"""

import math
from collections.abc import Sequence

import numpy as np

RELATIVE = 1e-9
"""Share of the larger of two values by which they may differ and count as equal."""
ABSOLUTE = 1e-12
"""Difference below which two values count as equal: terms may cancel, and leave 5e-17 for 0."""


def are_equal(values: Sequence[float] | np.ndarray) -> bool:
    """Return True if all values, of which there is at least one, differ by rounding alone."""
    return math.isclose(min(values), max(values), rel_tol=RELATIVE, abs_tol=ABSOLUTE)


def equal_to(values: np.ndarray, value: float) -> np.ndarray:
    """Return which of the values differ from a value by rounding alone, bool of their shape."""
    return np.asarray(np.isclose(values, value, rtol=RELATIVE, atol=ABSOLUTE))


def reaches(value: float, threshold: float) -> bool:
    """Return True if a value is at least a threshold, or below it by rounding alone."""
    return value >= threshold or are_equal([value, threshold])
