"""Replay of finished groups: what a step trained on is trained on again, with the credit it had.

    step 7   256 rollouts: 192 in fresh groups, 64 in groups of the store
             the fresh groups go into the store

Credit, weights and log-probabilities stay those of the time when the group was finished. A replayed
token has the loss of a fresh one, with ρ = exp(logp - generator_logp) of the log-probability that
the generator gave it then. `ExampleReplay` (`data/replay.py`) is another thing: it has the policy
answer an example again.
"""

import logging
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated

import numpy as np
from annotated_types import Ge, Le, Lt

from torchtitan.experiments.rl.bounds import NonEmptyStr, PositiveInt
from torchtitan.experiments.rl.errors import ConfigError, MissingError
from torchtitan.experiments.rl.rollouts.filters import ZERO_ADVANTAGE
from torchtitan.experiments.rl.rollouts.record_file import ROLLOUTS_FILE
from torchtitan.experiments.rl.rollouts.recorder import read_rollouts
from torchtitan.experiments.rl.rollouts.records import TRAINED
from torchtitan.experiments.rl.rollouts.samples import check_samples
from torchtitan.experiments.rl.rollouts.types import Rollout, RolloutGroup

logger = logging.getLogger(__name__)


@dataclass(kw_only=True, slots=True)
class GroupReplayConfig:
    fraction: Annotated[float, Ge(0), Lt(1)] = 0.0
    """Share of a step's rollouts that are replayed, in whole groups. While fewer are stored, steps
    are smaller. With 0 nothing is stored or replayed."""
    capacity: Annotated[int, Ge(1), Le(1_000_000)] = 256
    """Maximum number of stored groups. The oldest leave first."""
    max_age: PositiveInt = 8
    """Maximum number of versions between the sampling of a replayed group's oldest token and its
    training. For fresh groups it is max_offpolicy_steps."""
    most_replays: PositiveInt = 1
    """Maximum number of times that a group is replayed."""
    path: NonEmptyStr | None = None
    """Another run's folder, or its rollouts.jsonl.gz. The groups that it trained on are stored
    before the first step, as if version 0 had sampled them."""

    def rollouts(self, rollouts_per_step: int) -> int:
        """Return the number of rollouts of a step that are replayed.

        Raises:
            ConfigError: none or all of them are, with a fraction above 0.
        """
        count = round(self.fraction * rollouts_per_step)
        if self.fraction and not 0 < count < rollouts_per_step:
            cure = (
                f"gives {count} of {rollouts_per_step} rollouts a step: a step needs fresh ones "
                "and replayed ones"
            )
            raise ConfigError("replay.fraction", self.fraction, cure)
        return count

    def validate(self, *, rollouts_per_step: int) -> None:
        """Refuse fields that do not fit together, and a path without a file.

        Raises:
            ConfigError: names field, value and cure.
        """
        self.rollouts(rollouts_per_step)
        if self.path is None:
            return
        if not self.fraction:
            raise ConfigError(
                "replay.path", self.path, "nothing is replayed: set replay.fraction above 0"
            )
        file = recorded_at(self.path)
        if not file.is_file():
            raise MissingError(
                "replay.path", self.path, f"no rollouts were recorded there ({file})"
            )


@dataclass(kw_only=True, slots=True)
class StoredGroup:
    """Group that may be replayed."""

    group: RolloutGroup
    """The group, with the rollouts that were trained on."""
    version: int
    """Version that sampled its oldest token."""
    replays: int = 0
    """Number of times that it was replayed."""


class GroupReplay:
    """The store of groups. The same groups, steps and seed give the same replays."""

    def __init__(
        self, config: GroupReplayConfig, *, rollouts_per_step: int, seed: int, load: bool = True
    ):
        """Make the store, empty or with what another run has recorded.

        Args:
            rollouts_per_step: number of rollouts of a step, fresh and replayed ones together.
            load: True to begin with what was recorded at ``config.path``.

        Raises:
            ConfigError: nothing was recorded there, or nothing of it can be replayed.
        """
        self.config = config
        self._count = config.rollouts(rollouts_per_step)
        """Number of rollouts of a step that are replayed."""
        self._seed = seed
        self._stored: dict[str, StoredGroup] = {}
        """Stored groups by id, oldest first."""
        self.fresh_rollouts = rollouts_per_step - self._count
        """Number of rollouts of a step that are not replayed."""
        if load and config.path is not None:
            self._load(recorded_at(config.path))
            logger.info("%d groups of %s are stored", len(self), config.path)

    def __len__(self) -> int:
        return len(self._stored)

    def add(self, groups: Iterable[RolloutGroup]) -> None:
        """Store the groups that a step has trained on.

        A group without a signal, or one that the policy did not sample, is not stored.
        """
        if not self._count:
            return
        for group in groups:
            version = _oldest_version(group)
            if version is not None and not all(ZERO_ADVANTAGE.matches(group)):
                self._stored[group.group_id] = StoredGroup(group=group, version=version)
        for group_id in list(self._stored)[: -self.config.capacity]:  # the oldest
            del self._stored[group_id]

    def draw(self, version: int) -> list[RolloutGroup]:
        """Return the replayed groups of the step that trains ``version``.

        Different groups are drawn, each with the same chance, until they have the step's share of
        rollouts. Rollouts of a group that a filter dropped do not count.
        """
        self._stored = {
            group_id: entry
            for group_id, entry in self._stored.items()
            if version - entry.version <= self.config.max_age
        }
        random = np.random.default_rng([self._seed, version])
        group_ids = list(self._stored)
        groups: list[RolloutGroup] = []
        rollouts = 0
        for place in random.permutation(len(group_ids)).tolist():
            if rollouts >= self._count:
                break
            entry = self._stored[group_ids[place]]
            groups.append(_replayed(entry.group))
            rollouts += len(entry.group.rollouts)
        return groups

    def count(self, replayed: Iterable[RolloutGroup]) -> None:
        """Count groups that were drawn, once a step was trained on them; forget those used up.

        A step that fails has replayed nothing: a resumed run draws the same groups again.
        """
        for group in replayed:
            entry = self._stored[group.group_id]
            entry.replays += 1
            if entry.replays >= self.config.most_replays:
                del self._stored[group.group_id]

    def _load(self, file: Path) -> None:
        """Store what another run trained on."""
        try:
            groups = _trained_groups(file, newest=2 * self.config.capacity)
        except OSError as error:
            raise ConfigError("replay.path", self.config.path, f"can't be read: {error}") from None
        except ValueError as error:
            raise ConfigError("replay.path", self.config.path, f"can't be used: {error}") from None
        self.add(groups)
        if not self._stored:
            raise ConfigError(
                "replay.path",
                self.config.path,
                "has no group that was trained on with rl or ref_kl",
            )

    # ---- checkpointing

    def state(self) -> list[tuple[str, int, int]]:
        """Return id, version and number of replays of each stored group."""
        return [(name, entry.version, entry.replays) for name, entry in self._stored.items()]

    def groups(self) -> list[RolloutGroup]:
        return [entry.group for entry in self._stored.values()]

    def restore(
        self, state: Sequence[tuple[str, int, int]], groups: Mapping[str, RolloutGroup]
    ) -> None:
        """Continue from a checkpoint.

        Args:
            state: what `state` returned.
            groups: groups of the checkpoint by id, the stored ones among them.
        """
        self._stored = {
            name: StoredGroup(group=groups[name], version=version, replays=replays)
            for name, version, replays in state
        }


def recorded_at(path: str) -> Path:
    """Return the file of recorded rollouts that a path names."""
    named = Path(path).expanduser()
    return named / ROLLOUTS_FILE if named.is_dir() else named


def _oldest_version(group: RolloutGroup) -> int | None:
    """Return the version that sampled the group's oldest token.

    None if no token was sampled, or if a frozen model sampled some.
    """
    sampled = [
        sample.policy_versions[sample.loss_mask]
        for rollout in group.rollouts
        for sample in rollout.samples
    ]
    versions = np.concatenate(sampled) if sampled else np.zeros(0, np.int32)
    if not len(versions) or versions.min() < 0:
        return None
    return int(versions.min())


def _replayed(group: RolloutGroup) -> RolloutGroup:
    """Return a copy of the group whose tokens no replica answers for.

    They say nothing about the weights that generators hold now.
    """
    rollouts = [
        replace(rollout, samples=[replace(sample, replicas=None) for sample in rollout.samples])
        for rollout in group.rollouts
    ]
    return replace(group, rollouts=rollouts).freeze()


def _trained_groups(file: Path, *, newest: int) -> list[RolloutGroup]:
    """Return the groups that another run trained on, as groups of this run.

    Args:
        newest: number of groups that are kept. A run's records may be larger than memory.
    """
    groups: dict[str, RolloutGroup] = {}
    for record in read_rollouts(file):
        rollout = record.rollout
        if record.outcome != TRAINED or not rollout.samples or rollout.static:
            continue
        _adopt(rollout)
        check_samples([rollout])
        assert rollout.data_sample is not None, "every rollout of a run has an example"
        group = groups.get(rollout.group_id)
        if group is None:
            group = groups[rollout.group_id] = RolloutGroup(
                group_id=rollout.group_id,
                task_name=rollout.task_name,
                data_sample=rollout.data_sample,
                rollouts=[],
            )
        group.rollouts.append(rollout)
        if len(groups) > newest:
            del groups[next(iter(groups))]
    return list(groups.values())


def _adopt(rollout: Rollout) -> None:
    """Remove from another run's rollout what means nothing in this one: versions, ids, experts."""
    rollout.group_id = f"recorded/{rollout.group_id}"
    for sample in rollout.samples:
        sample.rollout_id = rollout.rollout_id
        sample.policy_versions = np.where(sample.loss_mask, 0, -1).astype(np.int32)
        sample.routes = None
