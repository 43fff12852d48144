"""Checks of per-token streams where they arise: the errors name the stream, the value and what is wanted.

`batching/batcher.py` checks the alignment of the samples of a step again. What is not a finite number is found here only.
"""

import math
from typing import Any

import numpy as np

from torchtitan.experiments.rl.batching.sample_checks import check_sample
from torchtitan.experiments.rl.types import CREDIT_STREAMS, STREAMS, TrainingSample
from torchtitan.experiments.rl.user_code.calls import is_finite_number

FLOAT32_MAX = float(np.finfo(np.float32).max)


def finite_float(value: Any) -> float | None:
    """The value as a float; None where it is no finite number that float32, the type of advantages, holds."""
    try:
        number = float(value) if is_finite_number(value) else None
    except BaseException:  # the value is the user's, and so is its __float__
        return None
    return number if number is not None and abs(number) <= FLOAT32_MAX else None


def first_non_finite(values: np.ndarray) -> int | None:
    """Index of the first NaN or infinity of a float [T]; None where all are finite."""
    if math.isfinite(np.add.reduce(values)):  # one pass instead of two; a NaN or infinity is never summed away
        return None
    wrong = np.flatnonzero(~np.isfinite(values))
    return int(wrong[0]) if len(wrong) else None  # None: finite values whose sum overflows


def checked_stream(name: str, values: Any, length: int) -> np.ndarray:
    """The values as an array of the stream's declared dtype: [length].

    Raises:
        ValueError: not one number for each token; says what was wanted and what was given.
    """
    dtype = STREAMS[name].dtype
    if type(values) is np.ndarray and values.dtype == dtype and values.shape == (length,):
        return values
    wanted = f"want {length} numbers, one for each token"
    try:
        array = np.asarray(values)
    except BaseException:  # lists of unequal lengths; a user's class may raise anything
        raise ValueError(f"{name} is a {type(values).__name__} that is no array: {wanted}") from None
    if array.dtype.kind not in "biuf":
        raise ValueError(f"{name} has a {type(values).__name__} of dtype {array.dtype}: {wanted}")
    if array.shape != (length,):
        raise ValueError(f"{name} has shape {array.shape}: {wanted}")
    with np.errstate(over="ignore", invalid="ignore"):  # too large for float32 becomes infinite, which is refused after this
        return array.astype(dtype)


def check_streams(sample: TrainingSample) -> None:
    """Refuse what an algorithm has set that no loss can compute with, and give each stream its declared dtype.

    Raises:
        ValueError: a stream that is not one number for each token, or not finite on a token that trains on it.
    """
    for name in CREDIT_STREAMS:
        values = getattr(sample, name)
        if values is not None:
            setattr(sample, name, checked_stream(name, values, len(sample)))
    for name in ("rl_weights", "ce_weights", "ref_kl_weights"):
        _check_finite(sample, name, None)
    _check_finite(sample, "advantages", sample.rl_weights, sample.loss_mask)
    _check_finite(sample, "ref_logprobs", sample.ref_kl_weights)


def check_trainable(sample: TrainingSample) -> None:
    """Refuse a sample that its algorithm has left unfit to train on.

    Raises:
        ValueError: names the rollout or the stream.
    """
    check_streams(sample)
    check_sample(sample)


def _check_finite(sample: TrainingSample, name: str, weights: np.ndarray | None, mask: np.ndarray | None = None) -> None:
    """
    Args:
        weights: the stream is read where they are not 0; None: everywhere.
        mask: bool [L]. The stream is read there alone.
    """
    values = getattr(sample, name)
    if values is None or first_non_finite(values) is None:
        return
    read = np.ones(len(values), bool) if weights is None else weights != 0
    if mask is not None:
        read &= mask
    wrong = np.flatnonzero(read & ~np.isfinite(values))
    if len(wrong):
        raise ValueError(f"{name} is {values[wrong[0]]} at token {wrong[0]}, want a finite number that {values.dtype} holds")
