"""1 for finding the number within the allowed guesses, else 0. The config can lower the reward for each further guess."""

from dataclasses import dataclass
from typing import Annotated

from annotated_types import Gt, Le

from torchtitan.experiments.rl.rollouts.types import Rollout
from torchtitan.experiments.rl.rubrics.rubric import RewardFn, Rubric, env_components
from torchtitan.experiments.rl.tasks.guess_number.data import Game


class GuessNumberRubric(Rubric):
    @dataclass(kw_only=True, slots=True)
    class Config(Rubric.Config):
        discount: Annotated[float, Gt(0), Le(1)] = 1.0
        """Factor for each guess after the first."""

    config: Config

    def register_funcs(self) -> list[RewardFn]:
        return [RewardFn(self.discounted), RewardFn(found, weight=0.0)]

    async def discounted(self, rollout: Rollout, game: Game) -> float:
        return await found(rollout, game) * self.config.discount ** (len(rollout.turns) - 1)


async def found(rollout: Rollout, game: Game) -> float:
    """Whether the env's last step gave "found". A rollout that was cut short has none."""
    return env_components(rollout).get("found", 0.0)
