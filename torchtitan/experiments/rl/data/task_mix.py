"""Which task gives the next group."""

import abc
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from torchtitan.config import Configurable
from torchtitan.experiments.rl.configurable import UserConfigurable
from torchtitan.experiments.rl.rollouts.types import RolloutGroup


class TaskMix(UserConfigurable, abc.ABC):
    """Names tasks, without end, in proportion to their weights. Deterministic."""

    @dataclass(kw_only=True, slots=True)
    class Config(Configurable.Config):
        pass

    def __init__(self, config: Config, *, weights: dict[str, float]):
        """``weights``: of the tasks, by name; each is above 0."""
        self.config = config
        self.weights = dict(weights)

    @abc.abstractmethod
    def next(self) -> str:
        """Name of the next task."""

    def observe(self, group: RolloutGroup) -> None:
        """Take note of a scored group of any task, for mixes that depend on rewards."""

    def state_dict(self) -> dict[str, Any]:
        """What a resumed run needs to go on where this one is: plain JSON values."""
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from a state_dict."""


def pick_in_turn(credit: dict[str, float], weights: Mapping[str, float]) -> str:
    """Smooth weighted round robin, nginx's upstream rule: at each pick each name gains its weight in ``credit``, which is
    changed. The name with the most (the first, of equals) is picked and pays the sum of the weights."""
    for name, weight in weights.items():
        credit[name] += weight
    picked = max(weights, key=credit.__getitem__)
    credit[picked] -= sum(weights.values())
    return picked


class WeightedRoundRobin(TaskMix):
    """``pick_in_turn`` of the tasks.

    After any number of picks a task has had its share to within one pick per other task, so no stretch of a run belongs to one
    task, as with random draws it might.
    """

    def __init__(self, config: TaskMix.Config, *, weights: dict[str, float]):
        super().__init__(config, weights=weights)
        self._credit = dict.fromkeys(weights, 0.0)

    def next(self) -> str:
        return pick_in_turn(self._credit, self.weights)

    def state_dict(self) -> dict[str, Any]:
        return {"credit": dict(self._credit)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Tasks that are new since the checkpoint start without credit; credit of tasks that are gone is dropped."""
        self._credit = {name: state["credit"].get(name, 0.0) for name in self.weights}
