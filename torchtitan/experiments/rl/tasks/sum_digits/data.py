"""Lists of digits and their sums, for the `sum_digits` task.

    Sum of the digits: 4 8 2 7   ->   21

The lists follow from the arguments alone, in any process and on any machine. A checksum of the question gives
its split, so no list is in both. Python's `hash()` would not do: it differs between processes.
"""

import random
import zlib
from typing import Literal

Split = Literal["train", "validation"]

VALIDATION_ONE_IN = 8
"""One list of digits in this many, on average, is kept for validation."""


def prompt_text(digits: list[int]) -> str:
    """The user's message."""
    return "Sum of the digits: " + " ".join(map(str, digits))


def answer_text(digits: list[int]) -> str:
    """The only right reply."""
    return str(sum(digits))


def split_of(digits: list[int]) -> Split:
    """The split of these digits. It does not depend on the seed."""
    checksum = zlib.crc32(prompt_text(digits).encode())
    return "validation" if checksum % VALIDATION_ONE_IN == 0 else "train"


def make_examples(count: int, *, split: Split, seed: int = 0, min_digits: int = 2, max_digits: int = 5) -> list[list[int]]:
    """`count` lists of `min_digits` to `max_digits` digits, every length equally likely.

    A longer call with the same arguments starts with the shorter one's lists. Short lists repeat: there
    are only about a hundred of two digits.
    """
    if not 2 <= min_digits <= max_digits:
        raise ValueError(
            f"min_digits={min_digits}, max_digits={max_digits}: need 2 <= min_digits <= max_digits "
            "(lists of one digit are too few to split)"
        )
    stream = random.Random(f"sum_digits/{split}/{seed}")

    def draw() -> list[int]:
        length = stream.randint(min_digits, max_digits)
        while True:
            digits = [stream.randint(0, 9) for _ in range(length)]
            if split_of(digits) == split:
                return digits

    return [draw() for _ in range(count)]
