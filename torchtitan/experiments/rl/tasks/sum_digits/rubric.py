"""1 for a reply that is the right sum and nothing else, else 0."""

from torchtitan.experiments.rl.rollouts.types import Rollout
from torchtitan.experiments.rl.rubrics.rubric import RewardFn, Rubric, last_assistant_text
from torchtitan.experiments.rl.tasks.sum_digits.data import answer_text


class SumDigitsRubric(Rubric):
    def register_funcs(self) -> list[RewardFn]:
        return [RewardFn(correct)]


# Async, so it runs on the event loop: for one comparison, the thread a sync function gets would cost more than the work.
async def correct(rollout: Rollout, digits: list[int]) -> float:
    return float(last_assistant_text(rollout).strip() == answer_text(digits))
