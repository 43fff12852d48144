"""Values of user code as JSON: rows of a dataset, messages, metadata, answers of agents.

A value that JSON can hold is written as it is; tuples become lists, and numpy's numbers and arrays
become Python's. Of any other value a text is written, its ``repr``, so that recording a rollout
never fails because of what a user put into it.
"""

import json
import math
from collections.abc import Callable
from typing import Any

import numpy as np

MAX_DEPTH = 20
"""Maximum nesting that is kept of a value that JSON can't hold. What lies deeper becomes a text."""
MAX_INT_BITS = 14_000
"""Maximum size of an int. Python refuses to write one of more than 4,300 digits."""


def json_text(
    value: Any,  # noqa: ANN401 - of a user's
    *,
    substitute: Callable[[Any], Any] | None = None,
) -> str:
    """Return the JSON text of a value, in ASCII.

    ASCII also holds half of a character, which a model may say and UTF-8 can't encode.

    Args:
        substitute: makes a value that JSON can hold of one that it can't. By default each part of
            the value that JSON can't hold becomes a text.
    """
    try:
        return _dumps(value)
    except (TypeError, ValueError, RecursionError):
        return _dumps((substitute or _with_texts)(value))


def json_value(value: Any) -> Any:  # noqa: ANN401 - of a user's
    """Return a value as it is read from its JSON text. It can be sent to any process."""
    return json.loads(json_text(value))


def is_json(value: object) -> bool:
    """Return True if JSON can hold the whole value: `json_value` returns one that is equal to it.

    A tuple and an array are none: they are read again as lists.

    Raises:
        RecursionError: the value contains itself, or is nested too deep.
    """
    if isinstance(value, np.generic):
        value = value.item()
    if isinstance(value, dict):
        return all(isinstance(key, str) for key in value) and all(map(is_json, value.values()))
    if isinstance(value, list):
        return all(map(is_json, value))
    if isinstance(value, float):
        return math.isfinite(value)
    return isinstance(value, str | int | None)


def shown(value: object) -> str:
    """Return the ``repr`` of an object, or a text that says why it has none."""
    try:
        return repr(value)
    except Exception as error:  # noqa: BLE001 - a user's class
        return f"<{type(value).__name__}, whose repr raised {type(error).__name__}>"


def _to_python(value: object) -> object:
    if isinstance(value, np.generic | np.ndarray):
        return value.tolist()
    raise TypeError(f"{type(value).__name__} is not JSON")


# A NaN is refused, because JSON has none: json_text writes it as a text.
_dumps = json.JSONEncoder(separators=(",", ":"), allow_nan=False, default=_to_python).encode


def _with_texts(value: object, ancestors: tuple[int, ...] = ()) -> object:
    """Return a value with a text in place of each part that JSON can't hold.

    Args:
        ancestors: ids of the dicts and lists that the value lies in. One that holds itself ends in
            a text.
    """
    if isinstance(value, np.generic | np.ndarray):
        value = value.tolist()
    if isinstance(value, int) and value.bit_length() > MAX_INT_BITS:
        return f"<int of {value.bit_length()} bits>"
    if isinstance(value, str | int | None):
        return value
    if isinstance(value, float) and math.isfinite(value):
        return value
    is_too_deep = id(value) in ancestors or len(ancestors) == MAX_DEPTH
    if isinstance(value, dict) and not is_too_deep:
        inside = (*ancestors, id(value))
        return {str(key): _with_texts(entry, inside) for key, entry in value.items()}
    if isinstance(value, list | tuple) and not is_too_deep:
        inside = (*ancestors, id(value))
        return [_with_texts(entry, inside) for entry in value]
    return shown(value)
