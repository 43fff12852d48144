"""Hands out examples again whose groups had a learning signal."""

from dataclasses import dataclass, field
from typing import Annotated, Any, Literal

import numpy as np
from annotated_types import Gt, Le

from torchtitan.experiments.rl.bounds import Cure, PositiveInt
from torchtitan.experiments.rl.data.dataset import Examples, find_examples
from torchtitan.experiments.rl.data.sampler import SampleStrategy, ShuffledCursor
from torchtitan.experiments.rl.errors import ConfigError
from torchtitan.experiments.rl.rollouts.types import DataSample, RolloutGroup


class ExampleReplay(SampleStrategy):
    """Hands out the examples of stored groups again, among fresh ones.

    A group is stored if it was informative: its rewards differ, so that some advantage is not 0, and their mean lies between
    the bounds. With probability ``fraction`` the next example is that of a stored group, any with the same chance; otherwise,
    or while none is stored, it is a fresh one.

    What is replayed is the example alone (`rollouts/group_replay.py` replays whole groups). The current policy samples
    its rollouts, so nothing is trained twice and the bound on how far off-policy tokens are holds as for any other
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
        """Example and variance of the rewards of each stored group, by the example's id, oldest first."""

    def next(self) -> DataSample:
        # A stream per draw: its number is all there is to save.
        random = np.random.default_rng([self.seed, self._draws])
        self._draws += 1
        if self._stored and random.random() < self.config.fraction:
            names = list(self._stored)
            return self._stored.pop(names[random.integers(len(names))])[0]
        return self.fresh.next()

    def observe(self, group: RolloutGroup) -> None:
        self.fresh.observe(group)
        sample = group.data_sample
        self._stored.pop(sample.sample_id, None)
        rewards = np.array(group.rewards, np.float64)
        if self._informative(rewards):
            self._stored[sample.sample_id] = sample, float(rewards.var())
        if len(self._stored) > self.config.capacity:
            by_variance = self.config.keep == "variance"
            del self._stored[
                min(self._stored, key=lambda name: self._stored[name][1] * by_variance)
            ]  # of equals the oldest

    def state_dict(self) -> dict[str, Any]:
        return self.origin() | {
            "draws": self._draws,
            "stored": [[name, variance] for name, (_, variance) in self._stored.items()],
            "fresh": self.fresh.state_dict(),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from a state_dict. Reads the dataset once, from its start to the last example that was stored.

        Raises:
            ConfigError: the state is of another strategy, dataset or seed.
        """
        self.check_origin(state)
        wanted = {sample_id for sample_id, _ in state["stored"]}
        samples = find_examples(self.dataset, wanted)
        if missing := sorted(wanted - samples.keys()):
            cure = "the checkpoint stored it: resume with the same examples"
            raise ConfigError("dataset", f"no example {missing[0]!r}", cure)
        self.fresh.load_state_dict(state["fresh"])
        self._draws = state["draws"]
        self._stored = {
            sample_id: (samples[sample_id], variance) for sample_id, variance in state["stored"]
        }

    def _informative(self, rewards: np.ndarray) -> bool:
        if rewards.size == 0 or rewards.min() == rewards.max():
            return False
        above, below, mean = self.config.mean_above, self.config.mean_below, rewards.mean()
        return bool((above is None or mean > above) and (below is None or mean < below))
