"""The game: the env answers "higher" or "lower" until the number is found or no guess is left."""

import re

from renderers import Message

from torchtitan.experiments.rl.envs.message_env import MessageEnv, ResetOutput, StepOutput
from torchtitan.experiments.rl.tasks.answers import final_number
from torchtitan.experiments.rl.tasks.guess_number.data import Game, guesses_text, opening_text


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
            hint = "reply with one number" if guess is None else f"the number is {_direction(guess, secret)} than {guess}"
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


def _direction(guess: int, secret: int) -> str:
    return "higher" if guess < secret else "lower"
