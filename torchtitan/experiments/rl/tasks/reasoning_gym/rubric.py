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
from torchtitan.experiments.rl.tasks.answers import last_tagged
from torchtitan.experiments.rl.tasks.reasoning_gym.data import Puzzle


class PuzzleRubric(Rubric):
    @dataclass(kw_only=True, slots=True)
    class Config(Rubric.Config):
        exact: bool = False
        """The whole message is the answer. False: its final answer counts, which the prompt asks for between <answer> and
        </answer>."""
        timeout_s: PositiveFloat = 10.0
        """For each answer. One that takes longer to score makes its rollout an error."""

    config: Config

    def register_funcs(self) -> list[RewardFn]:
        from torchtitan.experiments.rl.tasks.reasoning_gym.scoring import solved  # imports reasoning_gym

        return [
            RewardFn(functools.partial(solved, exact=self.config.exact), name="solved", isolate=True),
            RewardFn(tagged, weight=0.0),
            *super().register_funcs(),
        ]


async def tagged(rollout: Rollout, puzzle: Puzzle) -> float:
    """1 if the message has an answer between tags, as the prompt asks, else 0."""
    return float(bool(last_tagged(last_assistant_text(rollout))))
