"""Draws examples by how hard they are for the policy, so that more groups have a learning signal.

A group whose rollouts all get the same reward has advantage 0 everywhere: an example that the
policy always or never solves costs generation and changes nothing. The difficulty of an example is
the mean reward of its last group.

    unseen ─┐                              ┌─▶ easy
    easy   ─┤                              │
    normal ─┼─ next ─▶ group ─ observe ────┼─▶ normal
    hard   ─┘                              └─▶ hard
"""

from collections import OrderedDict
from dataclasses import dataclass
from typing import Any

from torchtitan.experiments.rl.bounds import NonNegativeFloat
from torchtitan.experiments.rl.data.dataset import Examples, count_examples
from torchtitan.experiments.rl.data.sampler import SampleStrategy, random_order
from torchtitan.experiments.rl.data.task_mix import pick_in_turn
from torchtitan.experiments.rl.errors import ConfigError
from torchtitan.experiments.rl.rollouts.rounding import reaches
from torchtitan.experiments.rl.rollouts.types import DataSample, RolloutGroup

POOLS = ("unseen", "normal", "hard", "easy")
"""Names of the pools. If all pools with a weight are empty, the first of these that is not gives
the example."""


class DifficultyPool(SampleStrategy):
    """Strategy that draws from four pools of examples in proportion to their weights.

    1. Every example starts unseen, in an order drawn from the seed. When a group of an example is
       observed, the example goes into easy, normal or hard by the group's mean reward. A group in
       which nothing was scored puts the example back where it was.
    2. Pools alternate by smooth weighted round robin, as tasks do (data/task_mix.py), so that
       shares hold over short stretches too. An empty pool neither gains nor loses credit.
    3. Within a pool, the example that has waited longest comes first. A drawn example is out until
       its group is observed, so two groups of one example are open at once only if there is nothing
       else to draw.
    4. An example that is not observed for as many draws as there are examples counts as lost: its
       group ended with the process that ran it. The example goes back to its pool.

    ``next`` and ``observe`` take constant time, amortized, and memory grows with the examples seen.
    Groups of examples that this strategy never handed out are ignored.
    """

    @dataclass(kw_only=True, slots=True)
    class Config(SampleStrategy.Config):
        hard_up_to: float = 0.1
        """Mean reward up to which an example is hard."""
        easy_from: float = 0.9
        """Mean reward from which an example is easy. Normal ones lie between the two bounds."""
        unseen_weight: NonNegativeFloat = 0.3
        """Share of the draws that this pool gets, relative to the other pools that have an example.
        A pool of weight 0 gives one only if no other has any."""
        normal_weight: NonNegativeFloat = 0.6
        """Share of the draws, as for unseen examples."""
        hard_weight: NonNegativeFloat = 0.05
        """Share of the draws. Above 0, examples are noticed that the policy has begun to solve."""
        easy_weight: NonNegativeFloat = 0.05
        """Share of the draws. Above 0, examples are noticed that the policy no longer solves."""

        def weights(self) -> dict[str, float]:
            """Return the weight of each pool."""
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
        """Number of examples of the first order that were handed out."""
        self._draws = 0
        self._credit = dict.fromkeys(POOLS, 0.0)
        # An ordered dict gives up its first item in constant time, which a plain dict does not.
        self._pools: dict[str, OrderedDict[str, int]] = {pool: OrderedDict() for pool in POOLS}
        """Dataset index of each example that waits in a pool, by id, the longest first. In unseen,
        only examples that were handed out before."""
        self._out: OrderedDict[str, tuple[int, str, int]] = OrderedDict()
        """Dataset index, pool and draw number of each example whose group is open, by id."""

    def next(self) -> DataSample:
        self._take_back_lost()
        pool = self._next_pool()
        is_new = pool == "unseen" and self._cursor < self._count
        if is_new:
            index = int(self._first_order[self._cursor])
        else:
            index = next(iter(self._pools[pool].values()))
        # Before it counts as handed out: a resumed run asks again for what could not be read.
        sample = self.example(index)
        if is_new:
            self._cursor += 1
        else:
            self._pools[pool].popitem(last=False)
        self._out[sample.sample_id] = (index, pool, self._draws)
        self._draws += 1
        return sample

    def observe(self, group: RolloutGroup) -> None:
        sample_id = group.data_sample.sample_id
        place = self._remove(sample_id)
        if place is None:
            return
        index, pool = place
        rewards = group.rewards
        if rewards:
            pool = self._pool_of(sum(rewards) / len(rewards))
        self._pools[pool][sample_id] = index

    def pool_sizes(self) -> dict[str, int]:
        """Return the number of examples that wait in each pool. Those handed out wait in none."""
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
        self._cursor = state["cursor"]
        self._draws = state["draws"]
        self._credit = dict(state["credit"])
        self._pools = {pool: OrderedDict(state["pools"][pool]) for pool in POOLS}
        self._out = OrderedDict(
            (sample_id, tuple(entry)) for sample_id, entry in state["out"].items()
        )

    def _remove(self, sample_id: str) -> tuple[int, str] | None:
        """Take an example out of where it is.

        Returns:
            Its dataset index and its pool; None if it was never handed out.
        """
        if sample_id in self._out:
            index, pool, _ = self._out.pop(sample_id)
            return index, pool
        # A group that is observed late: its example counted as lost, and waits in its pool again.
        for pool, examples in self._pools.items():
            if sample_id in examples:
                return examples.pop(sample_id), pool
        return None

    def _pool_of(self, mean_reward: float) -> str:
        """Return the pool of examples with this mean reward."""
        if reaches(self.config.hard_up_to, mean_reward):
            return "hard"
        return "easy" if reaches(mean_reward, self.config.easy_from) else "normal"

    def _take_back_lost(self) -> None:
        """Put the examples that count as lost back into their pools.

        Some pool has an example after this: if all examples are out, the oldest was drawn as many
        draws ago as there are examples.
        """
        while self._out:
            sample_id, (index, pool, draw) = next(iter(self._out.items()))
            if self._draws - draw < self._count:
                return
            del self._out[sample_id]
            self._pools[pool][sample_id] = index

    def _next_pool(self) -> str:
        """Return the pool to draw from now."""
        stocked = [pool for pool, size in self.pool_sizes().items() if size]
        weighted = {pool: self._weights[pool] for pool in stocked if self._weights[pool]}
        return pick_in_turn(self._credit, weighted) if weighted else stocked[0]
