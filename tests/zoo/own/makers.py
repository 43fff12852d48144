"""Makes the kinds that one place has of its own."""

import dataclasses
from typing import Any

from tests.zoo.misbehaviour import WRONG_TYPES, Kind, changing

Own = dict[str, tuple[str, Kind]]

SURROGATE = "half \ud800 a character"
HUGE = "x " * 500_000


def refused(**kinds: Kind) -> Own:
    return {name.replace("_", " "): ("refused", kind) for name, kind in kinds.items()}


def harmless(**kinds: Kind) -> Own:
    return {name.replace("_", " "): ("harmless", kind) for name, kind in kinds.items()}


def wrong_types(*but: str) -> Own:
    """All but those that are right in the place."""
    return {
        name: ("refused", kind)
        for name, kind in WRONG_TYPES.items()
        if name.removeprefix("answers ") not in but
    }


def with_(**values: Any) -> Kind:
    """The honest record with other fields. A callable gives the value when it is needed."""
    return changing(
        lambda answer: dataclasses.replace(
            answer, **{k: v() if callable(v) else v for k, v in values.items()}
        )
    )


def meddling(act: Any) -> Kind:
    return Kind(meddle=act)


def said(content: Any, role: Any = "user") -> list:
    return [{"role": role, "content": content}]
