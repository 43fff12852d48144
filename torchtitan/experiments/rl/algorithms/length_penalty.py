"""A length penalty that rewards short answers among the right ones: the base of algorithms that compare a group's rewards."""

from dataclasses import dataclass
from typing import Annotated, ClassVar, Literal

import numpy as np
from annotated_types import Ge

from torchtitan.experiments.rl.algorithms.base import Algorithm
from torchtitan.experiments.rl.bounds import Cure
from torchtitan.experiments.rl.errors import ConfigError
from torchtitan.experiments.rl.rollouts.samples import turn_spans
from torchtitan.experiments.rl.rollouts.types import Rollout, RolloutGroup
from torchtitan.experiments.rl.types import ROLE_IDS

TokenWeight = Annotated[float, Ge(0), Cure("a negative cost rewards length")]


class GroupRewards(Algorithm):
    """Compares the rewards of a group, after a length penalty in groups where the best reward R is above 0:

        r' = r·(1 + clamp(1 - cost / c̄, 0, 1))    for rollouts with r = R, of which c̄ is the mean cost;  r' = r for others

    It never lowers a reward, so it can't make a wrong answer the better one. A subclass computes advantages of
    ``shaped_rewards``.
    """

    group_relative: ClassVar[bool] = True

    @dataclass(kw_only=True, slots=True)
    class Config(Algorithm.Config):
        length_penalty: Literal["none", "tokens", "turns"] = "none"
        """What a rollout costs: weighted tokens, or its turns."""
        completion_token_weight: TokenWeight = 1.0
        """Cost of a sampled token, for "tokens"."""
        tool_token_weight: TokenWeight = 1.0
        """Cost of a token in a tool's response, for "tokens"."""

        def needs_roles(self) -> str | None:
            return "tool_token_weight" if self.length_penalty == "tokens" and self.tool_token_weight > 0 else None

        def validate(self, *, field: str, **context) -> None:
            super(GroupRewards.Config, self).validate(field=field, **context)
            if self.length_penalty == "tokens" and not (self.completion_token_weight or self.tool_token_weight):
                raise ConfigError(
                    f"{field}.length_penalty", self.length_penalty, "both token weights are 0, so nothing has a cost: raise one"
                )

    config: Config

    def shaped_rewards(self, group: RolloutGroup) -> np.ndarray:
        """r': float64 [G], one for each scored rollout, of which there is at least one."""
        rewards = np.array(group.rewards)
        if self.config.length_penalty == "none":
            return rewards
        return shorten(rewards, np.array([self.cost(rollout) for rollout in group.scored]))

    def cost(self, rollout: Rollout) -> float:
        """What the length penalty counts: turns, or weighted tokens."""
        if self.config.length_penalty == "turns":
            return len(rollout.turns)
        completion = self.config.completion_token_weight * rollout.completion_tokens
        return completion + self.config.tool_token_weight * tool_response_tokens(rollout)


def centered(rewards: np.ndarray) -> np.ndarray:
    """r - mean(r), float64 [G]; exactly 0 where all are equal.

    Shifted first: the mean of equal floats may differ from them in the last bit, and a zero-advantage filter would miss it.
    """
    shifted = rewards - rewards[0]
    return shifted - shifted.mean()


def shorten(rewards: np.ndarray, costs: np.ndarray) -> np.ndarray:
    """Rewards [G] with the length bonus of the GRPO docstring; the same rewards where none is above 0 or nothing has a cost."""
    best = rewards == rewards.max()
    mean_cost = costs[best].mean()
    if rewards.max() <= 0 or mean_cost <= 0:
        return rewards
    bonus = np.clip(1 - costs / mean_cost, 0, 1)
    return np.where(best, rewards * (1 + bonus), rewards)


def tool_response_tokens(rollout: Rollout) -> int:
    """Body tokens of tool messages the rollout was given. A prompt that starts a sample of its own counts its tools again."""
    count = 0
    for turn, span in zip(rollout.turns, turn_spans(rollout.turns), strict=True):
        if span is not None:
            added = slice(span.new, span.completion)
            count += int(np.sum((turn.prompt_role_ids[added] == ROLE_IDS["tool"]) & turn.prompt_is_content[added]))
    return count
