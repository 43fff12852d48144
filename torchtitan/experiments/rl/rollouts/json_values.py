"""Arrays and whatever a user's record holds, as JSON: exactly where JSON can hold it, as text where it can't."""

import json
import math
from typing import Any

import numpy as np

MAX_DEPTH = 20
"""Levels of a value that JSON can't hold which are kept; it may contain itself."""


def encoded_stream(array: np.ndarray, dtype: type) -> list | dict[str, list]:
    """Its values, or ``{"runs": [[count, value], ...]}`` where that is shorter."""
    array = np.asarray(array, dtype)
    bits = bits_of(array, dtype)
    starts = np.flatnonzero(np.concatenate([[True], bits[1:] != bits[:-1]])) if len(array) else np.empty(0, int)
    if 2 * len(starts) >= len(array):
        return _values(array)
    counts = np.diff(np.append(starts, len(array))).tolist()
    return {"runs": [list(run) for run in zip(counts, _values(array[starts]), strict=True)]}


def decoded_stream(values: list | dict[str, list] | None, dtype: type) -> np.ndarray | None:
    """The array of `encoded_stream`, bit for bit."""
    if values is None:
        return None
    if isinstance(values, dict):
        counts, values = zip(*values["runs"], strict=True)
        return np.repeat(decoded_stream(list(values), dtype), counts)
    if dtype is np.float32:
        values = [float(value) for value in values]
    return np.array(values, dtype)


def _values(array: np.ndarray) -> list:
    if array.dtype != np.float32:
        return array.tolist()
    # 9 digits name a float32; the float made of them prints as no more.
    numbers = [float(f"{value:.9g}") for value in array.tolist()]
    return numbers if np.isfinite(array).all() else [value if math.isfinite(value) else str(value) for value in numbers]


def bits_of(array: np.ndarray, dtype: type) -> np.ndarray:
    """For comparing: a NaN equals itself, 0.0 is not -0.0."""
    array = np.ascontiguousarray(array, dtype)
    return array.view(np.int32) if dtype is np.float32 else array


def is_json(value: Any) -> bool:
    """Whether JSON holds it, tuples as lists and numpy's values as Python's."""
    try:
        _dumps(value, default=_plain)
    except (TypeError, ValueError, RecursionError):
        return False
    return True


def json_bytes(value: Any) -> bytes:
    """JSON text of anything, in UTF-8."""
    try:
        text = _dumps(value, default=_plain_or_shown)
    except (TypeError, ValueError, RecursionError):
        text = _dumps(_purified(value))
    try:
        return text.encode()
    except UnicodeEncodeError:  # half a character, as a model may say it: not UTF-8, but JSON can escape it
        return json.dumps(json.loads(text)).encode()


def _dumps(value: Any, **options: Any) -> str:
    return json.dumps(value, ensure_ascii=False, separators=(",", ":"), allow_nan=False, **options)


def _plain(value: Any) -> Any:
    if isinstance(value, np.generic | np.ndarray):
        return value.tolist()
    raise TypeError(f"{type(value).__name__} is not JSON")


def _plain_or_shown(value: Any) -> Any:
    return value.tolist() if isinstance(value, np.generic | np.ndarray) else shown(value)


def _purified(value: Any, depth: int = 0) -> Any:
    """What JSON can't hold, where it stands, as text."""
    if isinstance(value, str | int | None) or (isinstance(value, float) and math.isfinite(value)):
        return value
    if isinstance(value, dict) and depth < MAX_DEPTH:
        return {str(key): _purified(entry, depth + 1) for key, entry in value.items()}
    if isinstance(value, list | tuple) and depth < MAX_DEPTH:
        return [_purified(entry, depth + 1) for entry in value]
    return shown(value)


def shown(value: Any) -> str:
    try:
        return repr(value)
    except Exception as error:  # a user's class
        return f"<{type(value).__name__}, whose repr raised {type(error).__name__}>"
