"""Hands out examples again whose groups had a learning signal, among fresh ones.

next     fresh sampler or store ──example──▶ group
observe  group ──if its rewards differ──▶ store
"""

from dataclasses import dataclass, field
from typing import Annotated, Any, Literal

import numpy as np
from annotated_types import Ge, Gt, Le

from torchtitan.experiments.rl.bounds import Cure
from torchtitan.experiments.rl.data.dataset import Examples, find_examples
from torchtitan.experiments.rl.data.sampler import SampleStrategy, ShuffledCursor
from torchtitan.experiments.rl.errors import ConfigError
from torchtitan.experiments.rl.rollouts.rounding import are_equal, reaches
from torchtitan.experiments.rl.rollouts.types import DataSample, RolloutGroup


class ExampleReplay(SampleStrategy):
    """Strategy that hands out the examples of stored groups again, among fresh ones.

    A group is stored if it was informative: its rewards differ, so that some advantage is not 0,
    and their mean lies between the bounds. With probability ``fraction`` the next example is that
    of a stored group, each with the same chance. Otherwise, or while none is stored, it is a fresh
    one.

    Only the example is replayed (`rollouts/group_replay.py` replays whole groups). The current
    policy samples its rollouts, so nothing is trained twice, and the bound on staleness holds as
    for any other group.

    A stored group leaves the store when its example is handed out. The new group is stored if it is
    informative too. So an example leaves once the policy has mastered it, and the store follows
    what the policy solves sometimes.
    """

    @dataclass(kw_only=True, slots=True)
    class Config(SampleStrategy.Config):
        fresh: SampleStrategy.Config = field(default_factory=ShuffledCursor.Config)
        """Sampler of fresh examples. It observes every group, replays included."""
        fraction: Annotated[float, Gt(0), Le(1), Cure("for 0, use the fresh sampler")] = 0.25
        """Share of replays while something is stored; above 0, at most 1."""
        capacity: Annotated[int, Ge(1), Le(1_000_000)] = 1024
        """Maximum number of stored groups."""
        keep: Literal["recent", "variance"] = "recent"
        """Groups that stay when there are more: the latest, or those whose rewards vary most."""
        mean_above: float | None = None
        """Mean reward above which a group may be stored; None for any."""
        mean_below: float | None = None
        """Mean reward below which a group may be stored; None for any."""

        def validate(self, *, field: str) -> None:
            above, below = self.mean_above, self.mean_below
            if above is not None and below is not None and not above < below:
                raise ConfigError(
                    f"{field}.mean_below", below, f"must be above mean_above = {above:g}"
                )
            self.fresh.validate(field=f"{field}.fresh")

    config: Config

    def __init__(self, config: Config, *, dataset: Examples, seed: int):
        super().__init__(config, dataset=dataset, seed=seed)
        self.fresh: SampleStrategy = config.fresh.build(dataset=dataset, seed=seed)
        self._draws = 0
        self._stored: dict[str, tuple[DataSample, float]] = {}
        """Example and variance of the rewards of each stored group, by the example's id, the oldest
        first."""

    def next(self) -> DataSample:
        # Each draw has a random stream of its own, so that a checkpoint saves only their number.
        random = np.random.default_rng([self.seed, self._draws])
        if self._stored and random.random() < self.config.fraction:
            sample_ids = list(self._stored)
            sample, _ = self._stored.pop(sample_ids[random.integers(len(sample_ids))])
        else:
            sample = self.fresh.next()
        self._draws += 1
        return sample

    def observe(self, group: RolloutGroup) -> None:
        self.fresh.observe(group)
        sample = group.data_sample
        self._stored.pop(sample.sample_id, None)
        rewards = np.array(group.rewards, np.float64)
        if self._is_informative(rewards):
            self._stored[sample.sample_id] = (sample, float(rewards.var()))
        if len(self._stored) > self.config.capacity:
            del self._stored[self._least_wanted()]

    def state_dict(self) -> dict[str, Any]:
        return self.origin() | {
            "draws": self._draws,
            "stored": [[sample_id, variance] for sample_id, (_, variance) in self._stored.items()],
            "fresh": self.fresh.state_dict(),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from what ``state_dict`` returned.

        This reads the dataset once, from its start to the last example that was stored.

        Raises:
            ConfigError: the state is of another strategy, dataset or seed.
        """
        self.check_origin(state)
        wanted = {sample_id for sample_id, _ in state["stored"]}
        samples = find_examples(self.dataset, wanted)
        missing = sorted(wanted - samples.keys())
        if missing:
            cure = "the checkpoint stored it: resume with the same examples"
            raise ConfigError("dataset", f"no example {missing[0]!r}", cure)
        self.fresh.load_state_dict(state["fresh"])
        self._draws = state["draws"]
        self._stored = {
            sample_id: (samples[sample_id], variance) for sample_id, variance in state["stored"]
        }

    def _least_wanted(self) -> str:
        """Return the id of the example that leaves a full store; the oldest one of equals."""
        if self.config.keep == "recent":
            return next(iter(self._stored))
        return min(self._stored, key=lambda sample_id: self._stored[sample_id][1])

    def _is_informative(self, rewards: np.ndarray) -> bool:
        """Return True if the rewards differ, and their mean lies between the bounds."""
        if rewards.size == 0 or are_equal(rewards):
            return False
        mean = float(rewards.mean())
        above = self.config.mean_above
        below = self.config.mean_below
        too_low = above is not None and reaches(above, mean)
        too_high = below is not None and reaches(mean, below)
        return not too_low and not too_high
