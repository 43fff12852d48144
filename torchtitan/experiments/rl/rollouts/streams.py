"""Checks of per-token streams where they arise: the errors name the stream, the value and what is wanted.

`batching/batcher.py` checks the alignment of the samples of a step again. What is not a finite number is found here only.
"""

import math
from typing import Any

import numpy as np

from torchtitan.experiments.rl.user_code.calls import is_finite_number

FLOAT32_MAX = float(np.finfo(np.float32).max)


def fits_float32(value: Any) -> bool:
    """Whether a value is a finite number that float32, the type of advantages, holds."""
    return is_finite_number(value) and abs(float(value)) <= FLOAT32_MAX


def first_non_finite(values: np.ndarray) -> int | None:
    """Index of the first NaN or infinity of a float [T]; None where all are finite."""
    if math.isfinite(values.sum()):  # one pass instead of two; a NaN or infinity is never summed away
        return None
    wrong = np.flatnonzero(~np.isfinite(values))
    return int(wrong[0]) if len(wrong) else None  # None: finite values whose sum overflows
