"""A game of several turns with a reward only at its end. Copy this file for an env that reacts to what the model does.

    I am thinking of a number between 41 and 47. You have 3 guesses. ...

The splits differ by range, not by number: if some numbers of a range were kept for validation, a policy could learn not to
guess them.
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
    return split_of_text(f"{low} {high}")


def first_numbers(*, split: Split, numbers: int, max_number: int) -> list[int]:
    """First numbers of the split's ranges of `numbers` numbers between 1 and `max_number`."""
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
    """`count` games, every range of the split and every number in it equally likely.

    A longer call with the same arguments starts with the shorter one's games.
    """
    stream = random.Random(f"guess_number/{split}/{seed}")
    lows = first_numbers(split=split, numbers=numbers, max_number=max_number)

    def draw() -> Game:
        low = stream.choice(lows)
        return Game(
            low=low, high=low + numbers - 1, secret=low + stream.randrange(numbers), guesses=guesses
        )

    return [draw() for _ in range(count)]


class GuessNumberEnv(MessageEnv):
    """Gives a reward at the end only: component "found" is 1 or 0 in the last step."""

    def __init__(self, game: Game, *, exact: bool = False):
        self.game, self.exact = game, exact
        self._left = game.guesses

    async def reset(self) -> ResetOutput:
        return ResetOutput(messages=[{"role": "user", "content": opening_text(self.game)}])

    async def step_message(self, message: Message) -> StepOutput:
        guess, secret = guess_in(message["content"], exact=self.exact), self.game.secret
        self._left -= 1
        found = guess == secret
        if found or not self._left:
            answer = f"{'Correct! The' if found else 'Wrong: the'} number was {secret}. Game over."
        else:
            direction = "" if guess is None else "higher" if guess < secret else "lower"
            hint = (
                f"the number is {direction} than {guess}" if direction else "reply with one number"
            )
            answer = f"Wrong: {hint}. You have {guesses_text(self._left)} left."
        done = found or not self._left
        return StepOutput(
            env_messages=[{"role": "user", "content": answer}],
            done=done,
            reward_components={"found": float(found)} if done else {},
        )


def guess_in(text: str, *, exact: bool = False) -> int | None:
    """The integer that the text gives as its answer, or, where ``exact``, the only one in it; None where there is none.

    None too for one of more than nine digits.
    """
    if exact:
        numbers = re.findall(r"-?\d+", text)
        return int(numbers[0]) if len(numbers) == 1 and len(numbers[0]) < 10 else None
    number = final_number(text)
    return int(number) if number is not None and abs(number) < 10**9 and number % 1 == 0 else None


class GuessNumberRubric(Rubric):
    @dataclass(kw_only=True, slots=True)
    class Config(Rubric.Config):
        discount: Annotated[float, Gt(0), Le(1)] = 1.0
        """Factor for each guess after the first."""

    config: Config

    def register_funcs(self) -> list[RewardFn]:
        return [
            RewardFn(self.discounted, takes="rollout"),
            RewardFn(found, weight=0.0, takes="rollout"),
        ]

    async def discounted(self, rollout: Rollout, game: Game) -> float:
        return await found(rollout, game) * self.config.discount ** (len(rollout.turns) - 1)


async def found(rollout: Rollout, game: Game) -> float:
    """Whether the env's last step gave "found". A rollout that was cut short has none."""
    return env_components(rollout).get("found", 0.0)


class GuessNumberDataset(MadeDataset):
    @dataclass(kw_only=True, slots=True)
    class Config(MadeDataset.Config):
        numbers: Annotated[int, Ge(2)] = 100
        """Numbers in a game's range. Halving it finds every one of 2^g - 1 numbers within g guesses."""
        max_number: PositiveInt = 1000
        """Largest number of any range."""
        guesses: PositiveInt = 7

        @property
        def turns_needed(self) -> int:
            return self.guesses

        def validate(self, *, field: str) -> None:
            """Raises ConfigError where no game can be made."""
            if not first_numbers(
                split=self.split, numbers=self.numbers, max_number=self.max_number
            ):
                cure = f"leaves no range of {self.numbers} numbers to {self.split}: raise it"
                raise ConfigError(f"{field}.max_number", self.max_number, cure)

    make = staticmethod(make_examples)


class GuessNumberTask(Task):
    @dataclass(kw_only=True, slots=True)
    class Config(Task.Config):
        dataset: Dataset.Config = field(default_factory=GuessNumberDataset.Config)
        validation: Dataset.Config | None = field(
            default_factory=lambda: GuessNumberDataset.Config(split="validation", count=64, seed=1)
        )
        exact: bool = False
        """A guess is the only integer of its reply: what the tiny models have learned. False: the reply's final answer."""
        rubric: Rubric.Config = field(default_factory=GuessNumberRubric.Config)
        env: RendererEnvConfig = field(
            default_factory=lambda: RendererEnvConfig(max_turns=8, max_rollout_tokens=1024)
        )
        sampling: SamplingConfig = field(default_factory=lambda: SamplingConfig(max_tokens=128))

    config: Config

    def make_env(self, sample: DataSample) -> GuessNumberEnv:
        return GuessNumberEnv(sample.env_input, exact=self.config.exact)
