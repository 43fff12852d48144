"""Turn-level credit: a turn's tokens are credited with the env's rewards from that turn on."""

from dataclasses import dataclass, field
from typing import ClassVar

import numpy as np

from torchtitan.experiments.rl.algorithms.base import Algorithm, centered
from torchtitan.experiments.rl.bounds import NonEmptyStr, NonNegativeFloat, Share
from torchtitan.experiments.rl.rollouts.types import Rollout, RolloutGroup


class TurnCredit(Algorithm):
    """Discounted returns of a conversation's turns (Ding et al., GTPO, arXiv:2511.14846).

        R_k = r_k + γ·R_(k+1)
        A_k = R_k - mean of R_k            over the group's scored rollouts that have a turn k

    for every token sampled in turn k. r_k is the sum of the env's rewards in turn k; the last turn
    also has outcome_weight·reward. ``normalize_std`` also divides by the standard deviation, as the
    paper does. The mean is by turn, because later turns have less left to earn. If only one rollout
    has reached a turn, it gets 0 there. See also Zeng et al., arXiv:2505.11821.
    """

    group_relative: ClassVar[bool] = True

    @dataclass(kw_only=True, slots=True)
    class Config(Algorithm.Config):
        gamma: Share = 1.0
        """γ: share of the next turn's return that a turn is credited with."""
        components: list[NonEmptyStr] = field(default_factory=list)
        """Names of the ``StepOutput.reward_components`` that count; empty for all of them."""
        outcome_weight: NonNegativeFloat = 0.0
        """Weight of the rubric's reward in the last turn. Leave it at 0 if the rubric only sums up
        the env's rewards."""
        normalize_std: bool = False
        """True to divide by the standard deviation (of the population) of the returns of a turn."""

    config: Config

    def score_group(self, group: RolloutGroup) -> None:
        if not self.config.outcome_weight and not any(
            self._rewarded(rollout) for rollout in group.scored
        ):
            named = f"among {self.config.components}" if self.config.components else "at all"
            raise ValueError(
                f"the env rewarded no turn of the group ({named}): return reward_components from "
                "step_message, or set outcome_weight"
            )
        returns = [self._returns(rollout) for rollout in group.scored]
        for rollout, advantages in zip(group.scored, self._advantages(returns), strict=True):
            sampled = [
                0 if turn.untrained else len(turn.completion.token_ids) for turn in rollout.turns
            ]
            rollout.assign_advantages(np.repeat(advantages, sampled).tolist())

    def _advantages(self, returns: list[np.ndarray]) -> list[np.ndarray]:
        """Return A_k of each turn of each rollout, whose R_k are ``returns``."""
        advantages = [np.zeros(len(turns)) for turns in returns]
        for k in range(max(map(len, returns), default=0)):
            rollouts = [index for index, turns in enumerate(returns) if len(turns) > k]
            at_k = np.array([returns[index][k] for index in rollouts])
            scale = np.std(at_k) + 1e-6 if self.config.normalize_std else 1.0
            for index, advantage in zip(rollouts, centered(at_k) / scale, strict=True):
                advantages[index][k] = advantage
        return advantages

    def _rewarded(self, rollout: Rollout) -> bool:
        return any(self._counts(name) for turn in rollout.turns for name in turn.reward_components)

    def _counts(self, name: str) -> bool:
        return not self.config.components or name in self.config.components

    def _returns(self, rollout: Rollout) -> np.ndarray:
        """Return R_k of each turn, float64 [turns]."""
        returns = np.array(
            [
                sum(value for name, value in turn.reward_components.items() if self._counts(name))
                for turn in rollout.turns
            ],
            float,
        )
        if len(returns) and rollout.reward is not None:
            returns[-1] += self.config.outcome_weight * rollout.reward
        for k in range(len(returns) - 2, -1, -1):
            returns[k] += self.config.gamma * returns[k + 1]
        return returns
