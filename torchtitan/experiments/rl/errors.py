"""Errors a person reads as one line."""

from typing import Any


class ConfigError(ValueError):
    """A config that can't run: names the field, the value seen and the cure."""

    def __init__(self, field: str, value: Any, cure: str):
        self.field, self.value, self.cure = field, value, cure
        super().__init__(f"{field} = {value!r}: {cure}")


class RunError(RuntimeError):
    """A run that can't go on, in one line."""
