"""Games of guessing a number: what the `guess_number` task plays.

    I am thinking of a number between 41 and 47. You have 3 guesses. ...

The games follow from the arguments alone, as in sum_digits. The splits differ by range, not by number: if some numbers of a
range were kept for validation, a policy could learn not to guess them.
"""

import random
import zlib
from dataclasses import dataclass
from typing import Literal

Split = Literal["train", "validation"]

VALIDATION_ONE_IN = 8
"""One range in this many, on average, is kept for validation."""


@dataclass(kw_only=True, slots=True, frozen=True)
class Game:
    low: int
    high: int
    """The last number of the range."""
    secret: int
    guesses: int
    """Replies that the model has. A reply without a number uses up a guess too."""


def opening_text(game: Game) -> str:
    """The user's first message."""
    return (
        f"I am thinking of a number between {game.low} and {game.high}. You have {guesses_text(game.guesses)}. "
        "Reply with one number per turn."
    )


def guesses_text(guesses: int) -> str:
    return "1 guess" if guesses == 1 else f"{guesses} guesses"


def split_of(low: int, high: int) -> Split:
    """The split of this range. It does not depend on the seed."""
    return "validation" if zlib.crc32(f"{low} {high}".encode()) % VALIDATION_ONE_IN == 0 else "train"


def first_numbers(*, split: Split, numbers: int, max_number: int) -> list[int]:
    """First numbers of the split's ranges of `numbers` numbers between 1 and `max_number`."""
    return [low for low in range(1, max_number - numbers + 2) if split_of(low, low + numbers - 1) == split]


def make_examples(
    count: int, *, split: Split, seed: int = 0, numbers: int = 100, max_number: int = 1000, guesses: int = 7
) -> list[Game]:
    """`count` games, every range of the split and every number in it equally likely.

    A longer call with the same arguments starts with the shorter one's games.
    """
    stream = random.Random(f"guess_number/{split}/{seed}")
    lows = first_numbers(split=split, numbers=numbers, max_number=max_number)

    def draw() -> Game:
        low = stream.choice(lows)
        return Game(low=low, high=low + numbers - 1, secret=low + stream.randrange(numbers), guesses=guesses)

    return [draw() for _ in range(count)]
