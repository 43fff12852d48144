"""1 for the right answer if the calculator was used, else 0. Each of the two conditions is logged too."""

import re
from decimal import Decimal

from torchtitan.experiments.rl.rollouts.types import Rollout, RolloutStatus
from torchtitan.experiments.rl.rubrics.rubric import RewardFn, Rubric, env_components, last_assistant_text
from torchtitan.experiments.rl.tasks.calculator.data import answer

NUMBER = re.compile(r"(?<![\d.])-?\d[\d,]*(?:\.\d+)?")


class CalculatorRubric(Rubric):
    def register_funcs(self) -> list[RewardFn]:
        return [RewardFn(solved), RewardFn(right, weight=0.0), RewardFn(called, weight=0.0)]


async def solved(rollout: Rollout, expression: str) -> float:
    return await right(rollout, expression) * await called(rollout, expression)


async def right(rollout: Rollout, expression: str) -> float:
    """Whether the last number of the final message is the answer. A rollout that was cut off has no final message."""
    numbers = NUMBER.findall(last_assistant_text(rollout))
    final = rollout.status is RolloutStatus.COMPLETED and bool(numbers)
    return float(final and Decimal(numbers[-1].replace(",", "")) == answer(expression))


async def called(rollout: Rollout, expression: str) -> float:
    """Whether some call gave a number."""
    return float(env_components(rollout).get("calculated", 0.0) > 0)
