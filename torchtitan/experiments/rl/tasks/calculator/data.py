"""Arithmetic expressions: what the `calculator` task asks and what it expects.

    What is 47 * 86 - 9? ...   ->   4033

The examples follow from the arguments alone, as in sum_digits. A checksum of the expression gives its split, so none is in
both.
"""

import random
import zlib
from typing import Literal

from torchtitan.experiments.rl.tasks.calculator.arithmetic import evaluate

Split = Literal["train", "validation"]

OPERATORS = "+-*"
"""No division: every answer is an integer, written in one way."""
VALIDATION_ONE_IN = 8
"""One expression in this many, on average, is kept for validation."""


def prompt_text(expression: str) -> str:
    """The user's message."""
    return f"What is {expression}? Use the calculator, then give the final answer as a number."


def answer(expression: str) -> int | float:
    """The only right answer."""
    return evaluate(expression)


def split_of(expression: str) -> Split:
    """The split of this expression. It does not depend on the seed."""
    return "validation" if zlib.crc32(expression.encode()) % VALIDATION_ONE_IN == 0 else "train"


def make_examples(
    count: int, *, split: Split, seed: int = 0, min_operands: int = 2, max_operands: int = 4, max_operand: int = 999
) -> list[str]:
    """`count` expressions of `min_operands` to `max_operands` numbers from 0 to `max_operand`, every length equally likely.

    A longer call with the same arguments starts with the shorter one's expressions.
    """
    stream = random.Random(f"calculator/{split}/{seed}")

    def draw() -> str:
        operands = stream.randint(min_operands, max_operands)
        while True:
            expression = str(stream.randint(0, max_operand))
            for _ in range(operands - 1):
                expression += f" {stream.choice(OPERATORS)} {stream.randint(0, max_operand)}"
            if split_of(expression) == split:
                return expression

    return [draw() for _ in range(count)]
