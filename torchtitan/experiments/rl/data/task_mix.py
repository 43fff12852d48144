"""Decides which task gives the next group."""

import abc
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from torchtitan.config import Configurable
from torchtitan.experiments.rl.configurable import UserConfigurable
from torchtitan.experiments.rl.rollouts.types import RolloutGroup


class TaskMix(UserConfigurable, abc.ABC):
    """Mix that names tasks, without end, in proportion to their weights. It is deterministic.

    Example::

        from torchtitan.experiments.rl.data.task_mix import TaskMix

        class InTurn(TaskMix):  # whatever the weights
            picks = 0

            def next(self):
                self.picks += 1
                return list(self.weights)[(self.picks - 1) % len(self.weights)]

            def state_dict(self):
                return {"picks": self.picks}

            def load_state_dict(self, state):
                self.picks = state["picks"]
    """

    @dataclass(kw_only=True, slots=True)
    class Config(Configurable.Config):
        pass

    def __init__(self, config: Config, *, weights: dict[str, float]):
        """Initialize the mix.

        Args:
            config: config of the mix.
            weights: weight of each task by name, above 0.
        """
        self.config = config
        self.weights = dict(weights)

    @abc.abstractmethod
    def next(self) -> str:
        """Return the name of the next task."""

    def observe(self, group: RolloutGroup) -> None:
        """Take note of a group of any task that has ended, for mixes that depend on rewards.

        ``group.rewards`` is empty if no rollout was scored.
        """

    def state_dict(self) -> dict[str, Any]:
        """Return the JSON values from which a resumed run goes on with the same next task."""
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from what ``state_dict`` returned."""


def pick_in_turn(credit: dict[str, float], weights: Mapping[str, float]) -> str:
    """Return the next name by smooth weighted round robin, nginx's rule for upstream servers.

    At each pick each name gains its weight as credit. The name with the most credit is picked, the
    first of equals, and pays the sum of the weights.

    Args:
        credit: credit of each name, which is changed.
        weights: weight of each name that may be picked.
    """
    for name, weight in weights.items():
        credit[name] += weight
    picked = max(weights, key=credit.__getitem__)
    credit[picked] -= sum(weights.values())
    return picked


class WeightedRoundRobin(TaskMix):
    """Mix that picks tasks by smooth weighted round robin (``pick_in_turn``).

    After any number of picks a task has had its share to within one pick per other task. With
    random draws, a stretch of a run could belong to one task.
    """

    def __init__(self, config: TaskMix.Config, *, weights: dict[str, float]):
        super().__init__(config, weights=weights)
        self._credit = dict.fromkeys(weights, 0.0)

    def next(self) -> str:
        return pick_in_turn(self._credit, self.weights)

    def state_dict(self) -> dict[str, Any]:
        return {"credit": dict(self._credit)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from what ``state_dict`` returned.

        Tasks that are new since then start without credit, and credit of tasks that are gone is
        dropped.
        """
        self._credit = {name: state["credit"].get(name, 0.0) for name in self.weights}
