"""1 for the right answer if the calculator was used, else 0. Each of the two conditions is logged too."""

from torchtitan.experiments.rl.rollouts.types import Rollout, RolloutStatus
from torchtitan.experiments.rl.rubrics.rubric import RewardFn, Rubric, env_components
from torchtitan.experiments.rl.tasks.answers import number_of
from torchtitan.experiments.rl.tasks.calculator.data import answer


class CalculatorRubric(Rubric):
    def register_funcs(self) -> list[RewardFn]:
        return [RewardFn(solved), RewardFn(right, weight=0.0), RewardFn(called, weight=0.0)]


async def solved(rollout: Rollout, expression: str) -> float:
    return await right(rollout, expression) * await called(rollout, expression)


async def right(rollout: Rollout, expression: str) -> float:
    """Whether the final message gives the answer. A rollout that was cut off has no final message."""
    return float(rollout.status is RolloutStatus.COMPLETED and number_of(rollout) == answer(expression))


async def called(rollout: Rollout, expression: str) -> float:
    """Whether some call gave a number."""
    return float(env_components(rollout).get("calculated", 0.0) > 0)
