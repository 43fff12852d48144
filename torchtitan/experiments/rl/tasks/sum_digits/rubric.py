"""1 for the right sum, else 0."""

from dataclasses import dataclass

from torchtitan.experiments.rl.rollouts.types import Rollout
from torchtitan.experiments.rl.rubrics.rubric import RewardFn, Rubric, last_assistant_text
from torchtitan.experiments.rl.tasks.answers import number_of
from torchtitan.experiments.rl.tasks.sum_digits.data import answer_text


class SumDigitsRubric(Rubric):
    @dataclass(kw_only=True, slots=True)
    class Config(Rubric.Config):
        exact: bool = False
        """The reply has to be the sum and nothing else: what the tiny models have learned. False: its final answer counts,
        however it is written."""

    config: Config

    def register_funcs(self) -> list[RewardFn]:
        return [RewardFn(exact if self.config.exact else found, name="correct")]


# Async, so they run on the event loop: for one comparison, the thread a sync function gets would cost more than the work.
async def exact(rollout: Rollout, digits: list[int]) -> float:
    return float(last_assistant_text(rollout).strip() == answer_text(digits))


async def found(rollout: Rollout, digits: list[int]) -> float:
    return float(number_of(rollout) == sum(digits))
