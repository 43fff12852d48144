"""DAPO's credit: GRPO with the standard deviation, and a penalty on overlong answers."""

from dataclasses import dataclass

import numpy as np

from torchtitan.experiments.rl.algorithms.grpo import GRPO
from torchtitan.experiments.rl.bounds import PositiveInt
from torchtitan.experiments.rl.errors import ConfigError
from torchtitan.experiments.rl.rollouts.types import RolloutGroup


class DAPO(GRPO):
    """Credit of DAPO (Yu et al., arXiv:2503.14476, eq. 9 and 13).

        r' = r - clip((c - (L - B)) / B, 0, 1)
        A = (r' - mean(r')) / std(r')

    where c is the number of the rollout's sampled tokens, L ``overlong_limit`` and B
    ``overlong_buffer``. The rest of decoupled clip and dynamic sampling policy optimization belongs
    to the run, and ``config.recipes.dapo`` sets it: the loss ``PPOClip`` with clip_high 0.28, and
    the filter ``ZeroAdvantage`` before the batch, which is its dynamic sampling. Its token-level
    loss is what every run has.
    """

    @dataclass(kw_only=True, slots=True)
    class Config(GRPO.Config):
        normalize_std: bool = True
        overlong_limit: PositiveInt | None = None
        """L: number of sampled tokens from which the penalty is 1. Set it to
        ``sampling.max_tokens`` in a task of one turn. None for no penalty."""
        overlong_buffer: PositiveInt = 4096
        """B: number of tokens below the limit over which the penalty rises from 0 to 1."""

        def validate(self, *, field: str, **task_fields) -> None:
            super(DAPO.Config, self).validate(field=field, **task_fields)
            if self.overlong_limit is not None and self.overlong_buffer > self.overlong_limit:
                cure = (
                    f"must be at most overlong_limit = {self.overlong_limit}: else an empty answer "
                    "has a penalty"
                )
                raise ConfigError(f"{field}.overlong_buffer", self.overlong_buffer, cure)

    config: Config

    def shaped_rewards(self, group: RolloutGroup) -> np.ndarray:
        rewards = super().shaped_rewards(group)
        if self.config.overlong_limit is None:
            return rewards
        lengths = np.array([rollout.completion_tokens for rollout in group.scored])
        begin = self.config.overlong_limit - self.config.overlong_buffer
        return rewards - np.clip((lengths - begin) / self.config.overlong_buffer, 0, 1)
