"""Checks of training samples. Errors name the stream, the value and what is wanted.

`check_trainable` checks a sample after its algorithm has given it credit. The batcher calls
`check_sample` on each sample of a step, because not all of them had such an algorithm.
"""

import math
from typing import Any

import numpy as np

from torchtitan.experiments.rl.types import CREDIT_STREAMS, STREAMS, TrainingSample

FLOAT32_MAX = float(np.finfo(np.float32).max)


def is_finite_number(value: Any) -> bool:  # noqa: ANN401 - a user's value
    """Return True for a number or bool of Python or numpy that is neither NaN nor infinite.

    Strings and arrays are not numbers.
    """
    try:
        is_scalar = hasattr(value, "__float__") and not getattr(value, "shape", ())
        return is_scalar and math.isfinite(value)
    except BaseException:  # noqa: BLE001 - the value is the user's, and so is its __float__
        return False


def finite_float(value: Any) -> float | None:  # noqa: ANN401 - a user's value
    """Return the value as a float; None if it is not a finite number that float32 holds."""
    try:
        number = float(value) if is_finite_number(value) else None
    except Exception:  # noqa: BLE001 - the value is the user's, and so is its __float__
        return None
    return number if number is not None and abs(number) <= FLOAT32_MAX else None


def first_non_finite(values: np.ndarray) -> int | None:
    """Return the index of the first NaN or infinity of a float [T]; None if all are finite."""
    # One pass instead of two: a NaN or an infinity is never summed away. numpy would warn of what
    # the caller's error says.
    with np.errstate(invalid="ignore", over="ignore"):
        total = np.add.reduce(values)
    if math.isfinite(total):
        return None
    wrong = np.flatnonzero(~np.isfinite(values))
    return int(wrong[0]) if len(wrong) else None  # None: finite values whose sum overflows


def checked_stream(name: str, values: Any, length: int) -> np.ndarray:  # noqa: ANN401 - the user's
    """Return the values as an array [length] of the stream's declared dtype.

    Raises:
        ValueError: the values are not one number for each token.
    """
    dtype = STREAMS[name].dtype
    if type(values) is np.ndarray and values.dtype == dtype and values.shape == (length,):
        return values
    wanted = f"want {length} numbers, one for each token"
    try:
        array = np.asarray(values)
    except BaseException:  # noqa: BLE001 - unequal lengths; a user's class may raise anything
        raise ValueError(
            f"{name} is a {type(values).__name__} that is no array: {wanted}"
        ) from None
    if array.dtype.kind not in "biuf":
        raise ValueError(f"{name} has a {type(values).__name__} of dtype {array.dtype}: {wanted}")
    if array.shape != (length,):
        raise ValueError(f"{name} has shape {array.shape}: {wanted}")
    # A number too large for float32 becomes infinite, which is refused after this.
    with np.errstate(over="ignore", invalid="ignore"):
        return array.astype(dtype)


def check_streams(sample: TrainingSample) -> None:
    """Give each stream that an algorithm has set its declared dtype.

    Raises:
        ValueError: a stream is not one number for each token, or is not finite on a token that
            trains on it.
    """
    for name in CREDIT_STREAMS:
        values = getattr(sample, name)
        if values is not None:
            setattr(sample, name, checked_stream(name, values, len(sample)))
    for name in CREDIT_STREAMS:
        if name == "advantages":
            _check_finite(sample, name, sample.rl_weights, sample.loss_mask)
        elif name == "ref_logprobs":
            _check_finite(sample, name, sample.ref_kl_weights)
        else:
            _check_finite(sample, name, None)


def check_trainable(sample: TrainingSample) -> None:
    """Raise if an algorithm has left a sample unfit to train on.

    Raises:
        ValueError: names the rollout or the stream.
    """
    check_streams(sample)
    check_sample(sample)


def _check_finite(
    sample: TrainingSample, name: str, weights: np.ndarray | None, mask: np.ndarray | None = None
) -> None:
    """Raise if a stream is not finite on a token that reads it.

    Args:
        weights: the stream is read where these are not 0; None for everywhere.
        mask: bool [L]; the stream is read only where it is True.
    """
    values = getattr(sample, name)
    if values is None or first_non_finite(values) is None:
        return
    read = np.ones(len(values), bool) if weights is None else weights != 0
    if mask is not None:
        read &= mask
    wrong = np.flatnonzero(read & ~np.isfinite(values))
    if len(wrong):
        raise ValueError(
            f"{name} is {values[wrong[0]]} at token {wrong[0]}, want a finite number that "
            f"{values.dtype} holds"
        )


NO_REFERENCE = "has tokens with a ref_kl weight and no ref_logprobs: its algorithm must set them"


def check_sample(sample: TrainingSample) -> None:
    """Raise if the streams of a sample do not fit each other.

    Raises:
        ValueError: the sample has no tokens, its streams are not aligned, or credit is missing or
            on the wrong tokens. Names the rollout.
    """
    length = len(sample.token_ids)
    if not length:
        raise ValueError(f"{_named(sample)} has no tokens")
    for stream in STREAMS:
        values = getattr(sample, stream)
        if values is not None and len(values) != length:
            raise ValueError(
                f"{_named(sample)} has {length} token_ids and {len(values)} {stream}: "
                "they must be aligned"
            )
    if missing := missing_credit(sample):
        raise ValueError(f"{_named(sample)} {missing}")
    if sample.reference_ids is not None and not _ends_alike(sample.reference_ids, sample):
        raise ValueError(
            f"{_named(sample)} has reference_ids that do not end as it does, from its first "
            "sampled token on"
        )
    check_weights(sample)


def check_weights(sample: TrainingSample) -> None:
    """Raise if a token without a loss has a weight, or a ref_kl weight has no reference.

    Raises:
        ValueError: names the rollout.
    """
    if _lacks_reference(sample):
        raise ValueError(f"{_named(sample)} {NO_REFERENCE}")
    first_rl = sample.loss_mask[0] and (sample.rl_weights is None or sample.rl_weights[0] != 0)
    others = (sample.ce_weights, sample.ref_kl_weights)
    if first_rl or any(weights is not None and weights[0] != 0 for weights in others):
        raise ValueError(
            f"{_named(sample)} trains its first token, which has no log-probability: "
            "nothing comes before it"
        )
    weights = sample.ref_kl_weights
    if weights is not None and np.any((weights != 0) & ~sample.loss_mask):
        raise ValueError(
            f"{_named(sample)} has a ref_kl weight on a token the policy did not sample, which has "
            "no importance ratio: weigh only sampled tokens (loss_mask)"
        )


def _named(sample: TrainingSample) -> str:
    return f"a sample of rollout {sample.rollout_id!r}"


def missing_credit(sample: TrainingSample) -> str | None:
    """Return what the sample's weights need and its algorithm has not set; None if all is there."""
    if sample.advantages is None:
        weights = 1 if sample.rl_weights is None else sample.rl_weights
        if np.any(sample.loss_mask & (np.asarray(weights) != 0)):
            return "has tokens with an rl weight and no advantages: its algorithm must assign them"
    return NO_REFERENCE if _lacks_reference(sample) else None


def _lacks_reference(sample: TrainingSample) -> bool:
    given = sample.ref_logprobs is not None or sample.reference_ids is not None
    return not given and sample.ref_kl_weights is not None and bool(np.any(sample.ref_kl_weights))


def _ends_alike(reference_ids: np.ndarray, sample: TrainingSample) -> bool:
    """Return True if the reference's tokens end as the sample does, with a token before these."""
    count = len(sample) - int(np.argmax(sample.loss_mask)) if sample.loss_mask.any() else 0
    tail = sample.token_ids[len(sample) - count :]
    return len(reference_ids) > count and np.array_equal(
        reference_ids[len(reference_ids) - count :], tail
    )
