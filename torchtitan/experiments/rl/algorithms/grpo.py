"""GRPO: a rollout's advantage is how much better it did than its group."""

from dataclasses import dataclass

import numpy as np

from torchtitan.experiments.rl.algorithms.base import GroupRewards, centered


class GRPO(GroupRewards):
    """Group-relative policy optimization (Shao et al., arXiv:2402.03300).

        A = r - mean(r)

    over the group's scored rollouts. Every sampled token of a rollout has the same advantage. The
    reward may have a length penalty (`GroupRewards`). The paper also divides by std(r), which
    favours groups that are nearly all right or all wrong (Liu et al., arXiv:2503.20783), so that is
    off by default.
    """

    @dataclass(kw_only=True, slots=True)
    class Config(GroupRewards.Config):
        normalize_std: bool = False
        """True to divide by the group's standard deviation (of the population)."""

    config: Config

    def advantages(self, rewards: np.ndarray) -> np.ndarray:
        scale = np.std(rewards) + 1e-6 if self.config.normalize_std else 1.0
        return centered(rewards) / scale
