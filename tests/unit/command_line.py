"""What tests of the command assert."""

import pytest

DRY_OR_NOT = pytest.mark.parametrize("dry_run", [[], ["--dry-run"]], ids=["run", "dry run"])
LIMIT_S = 10.0
"""In which the command refuses a config."""


def assert_one_line(err: str, *parts: str) -> None:
    """The frames of the user's code may follow the line."""
    err, _, _ = err.partition("Traceback (most recent call last):\n")
    assert err.startswith("error: ") and err.endswith("\n") and err.count("\n") == 1, err
    for part in parts:
        assert part in err
