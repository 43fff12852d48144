"""Hands out examples again whose groups had a learning signal."""

from dataclasses import dataclass, field
from typing import Annotated, Any, Literal

import numpy as np
from annotated_types import Gt, Le

from torchtitan.experiments.rl.bounds import Cure, PositiveInt, check_config
from torchtitan.experiments.rl.data.dataset import Examples, find_examples
from torchtitan.experiments.rl.data.sampler import SampleStrategy, ShuffledCursor
from torchtitan.experiments.rl.errors import ConfigError
from torchtitan.experiments.rl.rollouts.types import DataSample, RolloutGroup


@dataclass(kw_only=True, slots=True)
class _Stored:
    sample: DataSample
    variance: float
    order: int


class ExampleReplay(SampleStrategy):
    """Hands out the examples of stored groups again, among fresh ones.

    A group is stored if it was informative: its rewards differ, so that some advantage is not 0, and their mean lies between
    the bounds. With probability ``fraction`` the next example is that of a stored group, any with the same chance; otherwise,
    or while none is stored, it is a fresh one.

    What is replayed is the example alone (`rollouts/group_replay.py` replays whole groups). Its rollouts are sampled anew by
    the current policy, so nothing is trained twice and the bound on how far off-policy tokens are holds as for any other
    group. A stored group is taken out when its example is handed out; it comes back with the new group, if that is informative
    too. So an example leaves once the policy has mastered it, and the store follows what the policy solves sometimes.
    """

    @dataclass(kw_only=True, slots=True)
    class Config(SampleStrategy.Config):
        fresh: SampleStrategy.Config = field(default_factory=ShuffledCursor.Config)
        """Where fresh examples come from; it observes every group, replays included."""
        fraction: Annotated[float, Gt(0), Le(1), Cure("for 0, use the fresh sampler")] = 0.25
        """Share of replays while something is stored; above 0, at most 1."""
        capacity: PositiveInt = 1024
        """Groups stored."""
        keep: Literal["recent", "variance"] = "recent"
        """Which groups stay once there are more: the latest, or those whose rewards vary most."""
        mean_above: float | None = None
        """A group is stored if its mean reward is above this; None: any."""
        mean_below: float | None = None
        """A group is stored if its mean reward is below this; None: any."""

        def validate(self, *, field: str) -> None:
            """See SampleStrategy.Config."""
            above, below = self.mean_above, self.mean_below
            if above is not None and below is not None and not above < below:
                raise ConfigError(f"{field}.mean_below", below, f"must be above mean_above = {above:g}")
            self.fresh.validate(field=f"{field}.fresh")

    config: Config

    def __init__(self, config: Config, *, dataset: Examples, seed: int):
        super().__init__(config, dataset=dataset, seed=seed)
        check_config(config, field="sampler")
        self.fresh: SampleStrategy = config.fresh.build(dataset=dataset, seed=seed)
        self._draws = 0
        self._stores = 0
        self._stored: list[_Stored] = []
        """In any order: what leaves is replaced by the last."""
        self._places: dict[str, int] = {}
        """Place in _stored, by sample id."""

    def next(self) -> DataSample:
        # A stream per draw: its number is all there is to save.
        random = np.random.default_rng([self.seed, self._draws])
        self._draws += 1
        if self._stored and random.random() < self.config.fraction:
            return self._take(int(random.integers(len(self._stored)))).sample
        return self.fresh.next()

    def observe(self, group: RolloutGroup) -> None:
        self.fresh.observe(group)
        place = self._places.get(group.data_sample.sample_id)
        if place is not None:
            self._take(place)
        rewards = np.array(group.rewards, np.float64)
        if not self._informative(rewards):
            return
        self._store(_Stored(sample=group.data_sample, variance=float(rewards.var()), order=self._stores))
        self._stores += 1
        if len(self._stored) > self.config.capacity:
            self._take(min(range(len(self._stored)), key=self._worth))

    def state_dict(self) -> dict[str, Any]:
        return self.origin() | {
            "draws": self._draws,
            "stores": self._stores,
            "stored": [[entry.sample.sample_id, entry.variance, entry.order] for entry in self._stored],
            "fresh": self.fresh.state_dict(),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from a state_dict. Reads the dataset once, from its start to the last example that was stored.

        Raises:
            ConfigError: the state is of another strategy, dataset or seed.
        """
        self.check_origin(state)
        samples = self._find({sample_id for sample_id, _, _ in state["stored"]})
        self.fresh.load_state_dict(state["fresh"])
        self._draws, self._stores = state["draws"], state["stores"]
        self._stored, self._places = [], {}
        for sample_id, variance, order in state["stored"]:
            self._store(_Stored(sample=samples[sample_id], variance=variance, order=order))

    def _informative(self, rewards: np.ndarray) -> bool:
        if rewards.size == 0 or rewards.min() == rewards.max():
            return False
        above, below, mean = self.config.mean_above, self.config.mean_below, rewards.mean()
        return bool((above is None or mean > above) and (below is None or mean < below))

    def _worth(self, place: int) -> tuple[float, int]:
        entry = self._stored[place]
        return (entry.variance if self.config.keep == "variance" else 0.0, entry.order)

    def _store(self, entry: _Stored) -> None:
        self._places[entry.sample.sample_id] = len(self._stored)
        self._stored.append(entry)

    def _take(self, place: int) -> _Stored:
        entry, last = self._stored[place], self._stored.pop()
        del self._places[entry.sample.sample_id]
        if last is not entry:
            self._stored[place] = last
            self._places[last.sample.sample_id] = place
        return entry

    def _find(self, sample_ids: set[str]) -> dict[str, DataSample]:
        found = find_examples(self.dataset, sample_ids)
        missing = sorted(sample_ids - found.keys())
        if missing:
            raise ConfigError(
                "dataset", f"no example {missing[0]!r}", "the checkpoint stored it: resume with the same examples"
            )
        return found


Replay = ExampleReplay
"""Its name before groups could be replayed."""
