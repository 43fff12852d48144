"""The config of a run as plain JSON: every field, and the class that each part builds."""

import dataclasses
from typing import Any

from torchtitan.experiments.rl.compat.torchtitan import built_class


def resolved_config(value: Any) -> Any:
    """Dataclasses become dicts, with ``class`` naming what a Config builds; functions and classes their qualified names."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        fields = {field.name: resolved_config(getattr(value, field.name)) for field in dataclasses.fields(value)}
        return {"class": _qualified_name(built_class(value)), **fields}
    if isinstance(value, dict):
        return {str(key): resolved_config(entry) for key, entry in value.items()}
    if isinstance(value, list | tuple):
        return [resolved_config(entry) for entry in value]
    if value is None or isinstance(value, str | int | float | bool):
        return value
    return _qualified_name(value) if callable(value) else repr(value)


def _qualified_name(value: Any) -> str:
    return f"{value.__module__}.{getattr(value, '__qualname__', type(value).__qualname__)}"
