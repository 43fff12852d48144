"""REINFORCE++: the reward itself, normalised over the batch of a step and not over a group."""

from typing import ClassVar

import numpy as np

from torchtitan.experiments.rl.algorithms.base import Algorithm, centered
from torchtitan.experiments.rl.rollouts.types import RolloutGroup


class ReinforcePP(Algorithm):
    """REINFORCE++ with its global baseline (Hu et al., arXiv:2501.03262).

        A = r,   A' = (A - mean(A)) / std(A)    over all tokens of the optimizer step that feed rl

    An algorithm sees one group at a time, so it sets A. The trainer has the whole step and makes A'
    of it: ``trainer.loss.normalize_advantages``, which ``config.recipes.reinforce_pp`` sets, and
    without which a config is refused. The paper's KL penalty in the reward is not there: ``kl_tau``
    of the loss ``DPPO`` holds the policy near the generator's.
    """

    batch_normalized: ClassVar[bool] = True

    def score_group(self, group: RolloutGroup) -> None:
        for rollout in group.scored:
            rollout.assign_advantages(float(rollout.reward or 0.0))


class ReinforcePPBaseline(ReinforcePP):
    """The paper's variant for several rollouts of an example, with the group's mean as baseline.

    A = r - mean(r) of the group,   A' as above
    """

    group_relative: ClassVar[bool] = True

    def score_group(self, group: RolloutGroup) -> None:
        if not group.scored:
            return
        for rollout, advantage in zip(group.scored, centered(np.array(group.rewards)), strict=True):
            rollout.assign_advantages(float(advantage))
