"""1 for finding the number within the guesses allowed, else 0; less for a late find where the config says so."""

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
    """What the env said at the end; a rollout cut short found nothing."""
    return env_components(rollout).get("found", 0.0)
