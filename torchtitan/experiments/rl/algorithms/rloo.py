"""RLOO: a rollout's advantage is how much better it did than the mean of the others."""

import numpy as np

from torchtitan.experiments.rl.algorithms.base import GroupRewards, centered


class RLOO(GroupRewards):
    """REINFORCE leave-one-out (Ahmadian et al., arXiv:2402.14740; Kool et al., "Buy 4 REINFORCE Samples, Get a Baseline for
    Free!", 2019).

        A_i = r_i - mean of r_j over j ≠ i  =  G/(G - 1)·(r_i - mean(r))

    over the group's G scored rollouts; r may have a length penalty (``GroupRewards``). The baseline of a rollout does not
    depend on that rollout, so the gradient is unbiased; GRPO's, whose mean has the rollout in it, is smaller by (G - 1)/G,
    which matters where groups differ in size.
    """

    def advantages(self, rewards: np.ndarray) -> np.ndarray:
        # One survivor has no other to be compared with: 0.
        return centered(rewards) * (len(rewards) / max(len(rewards) - 1, 1))
