"""1 for the right final answer, else 0. Whether it was boxed, as the prompt asks, is logged too."""

from dataclasses import dataclass

from torchtitan.experiments.rl.bounds import PositiveFloat
from torchtitan.experiments.rl.rollouts.types import Rollout
from torchtitan.experiments.rl.rubrics.rubric import RewardFn, Rubric, last_assistant_text
from torchtitan.experiments.rl.tasks.answers import last_boxed
from torchtitan.experiments.rl.tasks.math.data import MathProblem


class MathRubric(Rubric):
    @dataclass(kw_only=True, slots=True)
    class Config(Rubric.Config):
        timeout_s: PositiveFloat = 10.0
        """For each comparison. One that takes longer makes its rollout an error, because the answer may be right."""

    def register_funcs(self) -> list[RewardFn]:
        from torchtitan.experiments.rl.tasks.math.answers import correct  # imports math-verify

        return [RewardFn(correct, isolate=True), RewardFn(boxed, weight=0.0), *super().register_funcs()]


async def boxed(rollout: Rollout, problem: MathProblem) -> float:
    return float(last_boxed(last_assistant_text(rollout)) is not None)
