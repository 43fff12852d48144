"""RLOO: a rollout's advantage is how much better it did than the mean of the others."""

from torchtitan.experiments.rl.algorithms.length_penalty import GroupRewards, centered
from torchtitan.experiments.rl.rollouts.types import RolloutGroup


class RLOO(GroupRewards):
    """REINFORCE leave-one-out (Ahmadian et al., arXiv:2402.14740; Kool et al., "Buy 4 REINFORCE Samples, Get a Baseline for
    Free!", 2019).

        A_i = r_i - mean of r_j over j ≠ i  =  G/(G - 1)·(r_i - mean(r))

    over the group's G scored rollouts; r may have a length penalty (``GroupRewards``). The baseline of a rollout does not
    depend on that rollout, so the gradient is unbiased; GRPO's, whose mean has the rollout in it, is smaller by (G - 1)/G,
    which matters where groups differ in size.
    """

    def score_group(self, group: RolloutGroup) -> None:
        count = len(group.scored)
        if not count:
            return
        # One survivor has no other to be compared with: 0.
        advantages = centered(self.shaped_rewards(group)) * (count / max(count - 1, 1))
        for rollout, advantage in zip(group.scored, advantages, strict=True):
            rollout.assign_advantages(float(advantage))
