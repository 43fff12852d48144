"""Plays a game of several turns, with a reward only at its end.

    I am thinking of a number between 41 and 47. You have 3 guesses. ...   ->   44
    Wrong: the number is higher than 44. You have 2 guesses left.          ->   46

Copy this file for an env that reacts to what the model does. The splits differ by range, not by
number: if some numbers of a range were kept for validation, a policy could learn not to guess them.
"""

import random
import re
from dataclasses import dataclass, field
from typing import Annotated

from annotated_types import Ge, Gt, Le
from renderers import Message

from torchtitan.experiments.rl.bounds import PositiveInt
from torchtitan.experiments.rl.data.dataset import Dataset, MadeDataset, Split, split_of_text
from torchtitan.experiments.rl.envs.message_env import MessageEnv, ResetOutput, StepOutput
from torchtitan.experiments.rl.envs.renderer_env import RendererEnvConfig
from torchtitan.experiments.rl.errors import ConfigError
from torchtitan.experiments.rl.rollouts.policy import SamplingConfig
from torchtitan.experiments.rl.rollouts.types import DataSample, Rollout
from torchtitan.experiments.rl.rubrics.rubric import RewardFn, Rubric, env_components
from torchtitan.experiments.rl.tasks.answers import final_number
from torchtitan.experiments.rl.tasks.task import Task


@dataclass(kw_only=True, slots=True, frozen=True)
class Game:
    """Game of the dataset."""

    low: int
    """First number of the range."""
    high: int
    """Last number of the range."""
    secret: int
    guesses: int
    """Number of replies that the model has. A reply without a number uses up a guess too."""


def opening_text(game: Game) -> str:
    """Return the user's first message."""
    return (
        f"I am thinking of a number between {game.low} and {game.high}. "
        f"You have {guesses_text(game.guesses)}. Reply with one number per turn."
    )


def guesses_text(guesses: int) -> str:
    return "1 guess" if guesses == 1 else f"{guesses} guesses"


def split_of(low: int, high: int) -> Split:
    """Return the split of this range, whatever the seed."""
    return split_of_text(f"{low} {high}")


def first_numbers(*, split: Split, numbers: int, max_number: int) -> list[int]:
    """Return the first number of each range of the split.

    The ranges are those of `numbers` consecutive numbers between 1 and `max_number`.
    """
    return [
        low
        for low in range(1, max_number - numbers + 2)
        if split_of(low, low + numbers - 1) == split
    ]


def make_examples(
    count: int,
    *,
    split: Split,
    seed: int = 0,
    numbers: int = 100,
    max_number: int = 1000,
    guesses: int = 7,
) -> list[Game]:
    """Return `count` games, every range of the split and every number in it equally likely.

    A larger `count` adds games at the end.
    """
    stream = random.Random(f"guess_number/{split}/{seed}")
    lows = first_numbers(split=split, numbers=numbers, max_number=max_number)

    def draw() -> Game:
        low = stream.choice(lows)
        secret = low + stream.randrange(numbers)
        return Game(low=low, high=low + numbers - 1, secret=secret, guesses=guesses)

    return [draw() for _ in range(count)]


class GuessNumberEnv(MessageEnv):
    """Env that answers each guess, and rewards in its last step: "found" is 1 or 0."""

    def __init__(self, game: Game, *, exact: bool = False):
        """Initialize the env.

        Args:
            game: an example of the dataset.
            exact: as for `guess_in`.
        """
        self.game = game
        self.exact = exact
        self._guesses_left = game.guesses

    async def reset(self) -> ResetOutput:
        return ResetOutput(messages=[{"role": "user", "content": opening_text(self.game)}])

    async def step_message(self, message: Message) -> StepOutput:
        guess = guess_in(message["content"], exact=self.exact)
        self._guesses_left -= 1
        is_found = guess == self.game.secret
        if is_found or self._guesses_left == 0:
            outcome = "Correct! The" if is_found else "Wrong: the"
            answer = f"{outcome} number was {self.game.secret}. Game over."
            return StepOutput(
                env_messages=[{"role": "user", "content": answer}],
                done=True,
                reward_components={"found": float(is_found)},
            )
        answer = f"Wrong: {self._hint(guess)}. You have {guesses_text(self._guesses_left)} left."
        return StepOutput(env_messages=[{"role": "user", "content": answer}], done=False)

    def _hint(self, guess: int | None) -> str:
        """Return what the model is told after a wrong guess, or after a reply without one."""
        if guess is None:
            return "reply with one number"
        direction = "higher" if guess < self.game.secret else "lower"
        return f"the number is {direction} than {guess}"


def guess_in(text: str, *, exact: bool = False) -> int | None:
    """Return the integer that a reply gives; None if it gives none, or one of over nine digits.

    Args:
        text: the reply.
        exact: True if the reply may have no other integer. If False, its final answer counts.
    """
    if exact:
        numbers = re.findall(r"-?\d+", text)
        return int(numbers[0]) if len(numbers) == 1 and len(numbers[0]) < 10 else None
    number = final_number(text)
    return int(number) if number is not None and abs(number) < 10**9 and number % 1 == 0 else None


class GuessNumberRubric(Rubric):
    """Rubric that rewards a number that was found, and more if it was found early."""

    @dataclass(kw_only=True, slots=True)
    class Config(Rubric.Config):
        discount: Annotated[float, Gt(0), Le(1)] = 1.0
        """Factor of the reward for each guess after the first."""

    config: Config

    def register_funcs(self) -> list[RewardFn]:
        return [
            RewardFn(self.discounted, takes="rollout"),
            RewardFn(found, weight=0.0, takes="rollout"),
        ]

    async def discounted(self, rollout: Rollout, game: Game) -> float:
        return await found(rollout, game) * self.config.discount ** (len(rollout.turns) - 1)


async def found(rollout: Rollout, game: Game) -> float:
    """Return "found" of the env's last step, and 0 for a rollout that was cut short."""
    return env_components(rollout).get("found", 0.0)


class GuessNumberDataset(MadeDataset):
    """Dataset of games."""

    @dataclass(kw_only=True, slots=True)
    class Config(MadeDataset.Config):
        numbers: Annotated[int, Ge(2)] = 100
        """Size of a game's range. Halving finds any of 2^g - 1 numbers in g guesses."""
        max_number: PositiveInt = 1000
        """Largest number of any range."""
        guesses: PositiveInt = 7

        @property
        def turns_needed(self) -> int:
            return self.guesses

        def validate(self, *, field: str) -> None:
            """Refuse bounds within which no game can be made.

            Raises:
                ConfigError: naming `max_number`.
            """
            if not first_numbers(
                split=self.split, numbers=self.numbers, max_number=self.max_number
            ):
                cure = f"leaves no range of {self.numbers} numbers to {self.split}: raise it"
                raise ConfigError(f"{field}.max_number", self.max_number, cure)

    make = staticmethod(make_examples)


class GuessNumberTask(Task):
    """Task that plays a game of several turns."""

    @dataclass(kw_only=True, slots=True)
    class Config(Task.Config):
        dataset: Dataset.Config = field(default_factory=GuessNumberDataset.Config)
        validation: Dataset.Config | None = field(
            default_factory=lambda: GuessNumberDataset.Config(split="validation", count=64, seed=1)
        )
        exact: bool = False
        """True if a guess has to be the only integer of its reply, as the tiny models have learned.
        If False, the reply's final answer counts."""
        rubric: Rubric.Config = field(default_factory=GuessNumberRubric.Config)
        env: RendererEnvConfig = field(
            default_factory=lambda: RendererEnvConfig(max_turns=8, max_rollout_tokens=1024)
        )
        sampling: SamplingConfig = field(default_factory=lambda: SamplingConfig(max_tokens=128))

    config: Config

    def make_env(self, sample: DataSample) -> GuessNumberEnv:
        return GuessNumberEnv(sample.env_input, exact=self.config.exact)
