"""RLOO: a rollout's advantage is how much better it did than the mean of the others."""

import numpy as np

from torchtitan.experiments.rl.algorithms.base import GroupRewards, centered


class RLOO(GroupRewards):
    """REINFORCE leave-one-out (Ahmadian et al., arXiv:2402.14740).

        A_i = r_i - mean of r_j over j ≠ i  =  G/(G - 1)·(r_i - mean(r))

    over the group's G scored rollouts. The reward may have a length penalty (`GroupRewards`). The
    baseline of a rollout does not depend on that rollout, so the gradient is unbiased. GRPO's mean
    has the rollout in it, and its advantage is smaller by (G - 1)/G, which matters if groups differ
    in size. See also Kool et al., "Buy 4 REINFORCE Samples, Get a Baseline for Free!", 2019.
    """

    def advantages(self, rewards: np.ndarray) -> np.ndarray:
        # A single rollout has no other to be compared with, and gets 0.
        return centered(rewards) * (len(rewards) / max(len(rewards) - 1, 1))
