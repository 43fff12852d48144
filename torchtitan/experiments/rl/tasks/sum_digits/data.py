"""Lists of digits and their sums: what the `sum_digits` task asks and what it expects.

    Sum of the digits: 4 8 2 7   ->   21

Everything follows from the arguments, in any process and on any machine: the seed names the stream of
lists, and a checksum of the question (never `hash()`, which is salted per process) names its split, so
no list of digits is ever in both.
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
    """The split these digits belong to, the same whatever the seed."""
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
