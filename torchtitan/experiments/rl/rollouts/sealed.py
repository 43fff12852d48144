"""Tells code of this library from a user's."""

from typing import Any

LIBRARY = f"{__name__.rpartition('.rollouts.')[0]}."


def is_own(part: Any) -> bool:
    """Return True if a function or an object is of this library."""
    return str(getattr(getattr(part, "func", part), "__module__", "")).startswith(LIBRARY)
