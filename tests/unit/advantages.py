"""Advantages that an algorithm gives to rollouts whose rewards a test gives."""

from tests.fakes.rollouts import group_of, rewarded_rollout
from torchtitan.experiments.rl.algorithms.base import Algorithm
from torchtitan.experiments.rl.rollouts.types import Rollout


def advantages(config: Algorithm.Config, *rollouts: Rollout) -> list[float | None]:
    """Return the advantage of each rollout of a group.

    All sampled tokens of a rollout have to have it, and no other token may have any.
    """
    config.build().score_group(group_of(*rollouts))
    found = []
    for scored in rollouts:
        stream = scored.samples[0].advantages
        if stream is not None:
            assert stream[:2].tolist() == [0, 0] and len(set(stream[2:].tolist())) == 1
        found.append(None if stream is None else stream[2].item())
    return found


def of_rewards(config: Algorithm.Config, *rewards: float | None) -> list[float | None]:
    """Return the advantages of rollouts with these rewards."""
    return advantages(config, *map(rewarded_rollout, rewards))
