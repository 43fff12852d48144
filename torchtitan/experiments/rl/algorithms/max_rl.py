"""MaxRL: reinforcement learning that climbs the log of the success rate."""

import numpy as np

from torchtitan.experiments.rl.algorithms.base import GroupRewards, centered


class MaxRL(GroupRewards):
    """Maximum-likelihood reinforcement learning (Tajwar et al., arXiv:2602.02710, algorithm 1).

        m = mean(r),   A = (r - m) / m,   and 0 where m <= 0

    over the group's scored rollouts. Dividing by the mean turns the gradient of the success rate
    nearly into that of its logarithm: rare successes weigh more. Made for rewards of 0 and 1.
    """

    def advantages(self, rewards: np.ndarray) -> np.ndarray:
        mean = rewards.mean()
        # Rewards of both signs may cancel up to rounding. Such a mean counts as 0, not as 1e-17.
        positive = mean > 1e-9 * np.abs(rewards).max()
        return centered(rewards) / mean if positive else np.zeros_like(rewards)
