"""Names to sort, and more names to merge into the sorted list: what the `alphabet_sort` task asks and what it expects.

    Sort these names ...: Nora Alice      ->   Alice Nora
    Now add these names ...: Bob          ->   Alice Bob Nora

The examples follow from the arguments alone, as in sum_digits. A split has its own sets of opening names: no set, in any order,
is in both.
"""

import random
import zlib
from typing import Literal

Split = Literal["train", "validation"]

NAMES = """
    Alice Anderson Bob Brown Carol Clark David Davis Emma Evans Fisher Frank Garcia Grace Harris Henry Irene Jack Johnson Karen
    King Lewis Liam Maria Martin Nelson Nora Oliver Parker Paula Quinn Robert Roberts Sarah Smith Taylor Thomas Ursula Victor
    Walker Wendy Wilson Xavier Young Yvonne Zoe
""".split()

VALIDATION_ONE_IN = 8
"""One set of opening names in this many, on average, is kept for validation."""


def opening_text(names: list[str]) -> str:
    """The user's first message."""
    return "Sort these names in alphabetical order, one per line:\n" + "\n".join(names)


def more_text(names: list[str]) -> str:
    """The user's message in each later round."""
    return "Now add these names to the list and sort again:\n" + "\n".join(names)


def sorted_lists(rounds: list[list[str]]) -> list[list[str]]:
    """The right reply of each round: all names so far in alphabetical order."""
    return [sorted(sum(rounds[: end + 1], [])) for end in range(len(rounds))]


def split_of(opening: list[str]) -> Split:
    """The split of these opening names. It depends neither on their order nor on the seed."""
    checksum = zlib.crc32("\n".join(sorted(opening)).encode())
    return "validation" if checksum % VALIDATION_ONE_IN == 0 else "train"


def make_examples(
    count: int,
    *,
    split: Split,
    seed: int = 0,
    min_rounds: int = 2,
    max_rounds: int = 3,
    min_names: int = 2,
    max_names: int = 5,
) -> list[list[list[str]]]:
    """`count` examples of `min_rounds` to `max_rounds` lists of `min_names` to `max_names` names, every number equally likely.

    No name comes twice in an example. A longer call with the same arguments starts with the shorter one's examples.
    """
    stream = random.Random(f"alphabet_sort/{split}/{seed}")

    def draw() -> list[list[str]]:
        lengths = [stream.randint(min_names, max_names) for _ in range(stream.randint(min_rounds, max_rounds))]
        while True:
            names = iter(stream.sample(NAMES, sum(lengths)))
            rounds = [[next(names) for _ in range(length)] for length in lengths]
            if split_of(rounds[0]) == split:
                return rounds

    return [draw() for _ in range(count)]
