"""What this library reads in tyro's printed errors."""

import contextlib
import io
from dataclasses import dataclass, field

import pytest
import tyro

from torchtitan.experiments.rl.config.command_line import error_message


@dataclass
class Inner:
    rate: float = 0.5


@dataclass
class Config:
    steps: int = 1
    inner: Inner = field(default_factory=Inner)


def printed(words: list[str], encoding: str) -> str:
    """What tyro prints on stderr; the encoding of stdout decides what it draws the box with."""
    errors, output = io.StringIO(), io.TextIOWrapper(io.BytesIO(), encoding=encoding)
    with (
        contextlib.redirect_stderr(errors),
        contextlib.redirect_stdout(output),
        pytest.raises(SystemExit),
    ):
        tyro.cli(Config, args=words)
    return errors.getvalue()


@pytest.mark.parametrize("encoding", ["utf-8", "ascii"])
@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--stepz", "3"], "Unrecognized options: --stepz, 3; perhaps you meant --steps"),
        (["--steps", "many"], "Error parsing --steps"),
        (["--inner.rate", "fast"], "Error parsing --inner.rate"),
    ],
)
def test_tyros_box_reduces_to_the_sentence_in_it(words, message, encoding):
    found = error_message(printed(words, encoding))
    assert found.startswith(message) and "\n" not in found and "help" not in found, (
        f"tyro prints its errors in another layout: {printed(words, encoding)}"
    )
