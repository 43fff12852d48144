"""Words for the command, and what tests of the command assert."""

import pytest

DEBUG = ["--config", "rl_grpo_qwen3_debug"]
"""Words that name the config of the demo."""
DRY_OR_NOT = pytest.mark.parametrize("dry_run", [[], ["--dry-run"]], ids=["run", "dry run"])


def assert_one_line(err: str, *parts: str) -> None:
    """Check that an error is one line with these parts.

    The frames of the user's code may follow it.
    """
    line, _, frames = err.partition("\n")
    assert line.startswith("error: "), err
    # A file that is no Python has a place and no frames.
    assert not frames or frames.startswith(("Traceback (most recent call last):\n", '  File "')), (
        err
    )
    for part in parts:
        assert part in line
