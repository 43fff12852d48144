"""Scored by the generator that made the puzzle: 1 for a solution, down to 0, or between where the generator says so.

In a child process, whichever the generator. Nine of the scorers evaluate what the model wrote (with eval: binary_matrix,
n_queens, spiral_matrix, string_insertion; with sympy's parser, which is eval too: countdown, intermediate_integration,
polynomial_multiplication, puzzle24, simple_integration), so an answer may hang or end the process that scores it. A child
process is no sandbox: leave those nine out where a model must not run code on the machine.
"""

import functools
from dataclasses import dataclass

from torchtitan.experiments.rl.bounds import PositiveFloat
from torchtitan.experiments.rl.rollouts.types import Rollout
from torchtitan.experiments.rl.rubrics.rubric import RewardFn, Rubric, last_assistant_text
from torchtitan.experiments.rl.tasks.reasoning_gym.answers import answer_in
from torchtitan.experiments.rl.tasks.reasoning_gym.data import Puzzle


class PuzzleRubric(Rubric):
    @dataclass(kw_only=True, slots=True)
    class Config(Rubric.Config):
        answer_tag: str | None = "answer"
        """The answer is what the final message has between the last pair of these tags, <answer> and </answer>; without a pair
        it earns 0. None: the whole message is the answer."""
        timeout_s: PositiveFloat = 10.0
        """For each answer. One that takes longer to score makes its rollout an error."""

    config: Config

    def register_funcs(self) -> list[RewardFn]:
        from torchtitan.experiments.rl.tasks.reasoning_gym.scoring import solved  # imports reasoning_gym

        tag = self.config.answer_tag
        return [
            RewardFn(functools.partial(solved, answer_tag=tag), name="solved", isolate=True),
            RewardFn(functools.partial(answered, answer_tag=tag), name="answered", weight=0.0),
            *super().register_funcs(),
        ]


async def answered(rollout: Rollout, puzzle: Puzzle, *, answer_tag: str | None) -> float:
    """1 if the message has an answer, else 0."""
    return float(bool(answer_in(last_assistant_text(rollout), answer_tag)))
