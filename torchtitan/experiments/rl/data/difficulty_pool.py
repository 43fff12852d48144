"""Draws examples by how hard they are for the policy, so that more groups have a learning signal.

A group whose rollouts all get the same reward has advantage 0 everywhere: an example the policy always or never solves costs
generation and changes nothing. Difficulty is the mean reward of the example's last group.
"""

from collections import OrderedDict
from dataclasses import dataclass
from typing import Any

from torchtitan.experiments.rl.bounds import NonNegativeFloat
from torchtitan.experiments.rl.data.dataset import Examples, count_examples
from torchtitan.experiments.rl.data.sampler import SampleStrategy, random_order
from torchtitan.experiments.rl.data.task_mix import pick_in_turn
from torchtitan.experiments.rl.errors import ConfigError
from torchtitan.experiments.rl.rollouts.types import DataSample, RolloutGroup

POOLS = ("unseen", "normal", "hard", "easy")
"""Where all pools with a weight are empty, the first of these that is not gives the example."""


class DifficultyPool(SampleStrategy):
    """Draws from four pools of examples in proportion to their weights.

    1. Every example starts unseen, in an order drawn from the seed. A group of it that is observed puts it into easy, normal or
       hard by the group's mean reward; a group in which nothing was scored puts it back where it was.
    2. Pools alternate by smooth weighted round robin, as tasks do (data/task_mix.py): shares hold over short stretches too. A
       pool with nothing to give neither gains nor loses by it.
    3. Within a pool, the example that has waited longest comes first. A drawn example is out until its group is observed,
       so two groups of one example are open at once only where there is nothing else to draw.
    4. An example not observed for as many draws as there are examples counts as lost: its group ended with the process
       that ran it. It goes back to its pool.

    ``next`` and ``observe`` take constant time, amortised; memory is per example seen. Groups of examples it never handed out
    are ignored.
    """

    @dataclass(kw_only=True, slots=True)
    class Config(SampleStrategy.Config):
        hard_up_to: float = 0.1
        """Mean reward up to which an example is hard."""
        easy_from: float = 0.9
        """Mean reward from which an example is easy; normal ones lie between."""
        unseen_weight: NonNegativeFloat = 0.3
        """Weights are how often each pool is drawn from, relative to the others that have an example to give; 0 is only when no
        other has."""
        normal_weight: NonNegativeFloat = 0.6
        hard_weight: NonNegativeFloat = 0.05
        """Above 0 so that examples the policy has begun to solve are noticed."""
        easy_weight: NonNegativeFloat = 0.05
        """Above 0 so that examples the policy no longer solves are noticed."""

        def weights(self) -> dict[str, float]:
            return {pool: getattr(self, f"{pool}_weight") for pool in POOLS}

        def validate(self, *, field: str) -> None:
            if not self.hard_up_to < self.easy_from:
                raise ConfigError(
                    f"{field}.easy_from",
                    self.easy_from,
                    f"must be above hard_up_to = {self.hard_up_to:g}",
                )
            if not any(self.weights().values()):
                raise ConfigError(
                    f"{field}.normal_weight",
                    self.normal_weight,
                    "at least one pool needs a weight above 0",
                )

    config: Config

    def __init__(self, config: Config, *, dataset: Examples, seed: int):
        super().__init__(config, dataset=dataset, seed=seed)
        self._weights = config.weights()
        self._count = count_examples(dataset)
        self._first_order = random_order(self._count, seed)
        self._cursor = 0
        """Examples of the first order that were handed out."""
        self._draws = 0
        self._credit = dict.fromkeys(POOLS, 0.0)
        # Ordered dicts, by sample id: their first item goes in constant time, which a plain dict's doesn't.
        self._pools: dict[str, OrderedDict[str, int]] = {pool: OrderedDict() for pool in POOLS}
        """Dataset index of each example that waits in a pool, longest first; in unseen, only those that were handed out."""
        self._out: OrderedDict[str, tuple[int, str, int]] = OrderedDict()
        """Dataset index, pool and draw number of each example whose group is open."""

    def next(self) -> DataSample:
        self._take_back_lost()
        pool = self._next_pool()
        if pool == "unseen" and self._cursor < self._count:
            index = int(self._first_order[self._cursor])
            self._cursor += 1
        else:
            _, index = self._pools[pool].popitem(last=False)
        sample = self.example(index)
        self._out[sample.sample_id] = (index, pool, self._draws)
        self._draws += 1
        return sample

    def observe(self, group: RolloutGroup) -> None:
        sample_id = group.data_sample.sample_id
        # Where it is late, it was taken back meanwhile.
        back = (
            (examples.pop(sample_id), name, 0)
            for name, examples in self._pools.items()
            if sample_id in examples
        )
        entry = self._out.pop(sample_id, None) or next(back, None)
        if entry is None:
            return
        index, pool, _ = entry
        rewards = group.rewards
        if rewards:
            pool = self._pool_of(sum(rewards) / len(rewards))
        self._pools[pool][sample_id] = index

    def pool_sizes(self) -> dict[str, int]:
        """Examples that wait in each pool; those whose group is open are in none."""
        sizes = {pool: len(examples) for pool, examples in self._pools.items()}
        sizes["unseen"] += self._count - self._cursor
        return sizes

    def state_dict(self) -> dict[str, Any]:
        return self.origin() | {
            "cursor": self._cursor,
            "draws": self._draws,
            "credit": dict(self._credit),
            "pools": {pool: dict(examples) for pool, examples in self._pools.items()},
            "out": {sample_id: list(entry) for sample_id, entry in self._out.items()},
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.check_origin(state)
        self._cursor, self._draws, self._credit = (
            state["cursor"],
            state["draws"],
            dict(state["credit"]),
        )
        self._pools = {pool: OrderedDict(state["pools"][pool]) for pool in POOLS}
        self._out = OrderedDict(
            (sample_id, tuple(entry)) for sample_id, entry in state["out"].items()
        )

    def _pool_of(self, mean_reward: float) -> str:
        if mean_reward <= self.config.hard_up_to:
            return "hard"
        return "easy" if mean_reward >= self.config.easy_from else "normal"

    def _take_back_lost(self) -> None:
        # With every example out, the oldest was drawn that many draws ago: a pool always has one after this.
        while self._out:
            sample_id, (index, pool, drawn) = next(iter(self._out.items()))
            if self._draws - drawn < self._count:
                return
            del self._out[sample_id]
            self._pools[pool][sample_id] = index

    def _next_pool(self) -> str:
        """The pool to draw from now."""
        stocked = [pool for pool, size in self.pool_sizes().items() if size]
        weighted = {pool: self._weights[pool] for pool in stocked if self._weights[pool]}
        return pick_in_turn(self._credit, weighted) if weighted else stocked[0]
