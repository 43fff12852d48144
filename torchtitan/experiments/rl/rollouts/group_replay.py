"""Replay of finished groups: what was trained on once is trained on again, with the credit it had.

    step 7   256 rollouts: 192 in fresh groups, 64 in groups of the store
             the fresh groups go into the store

Credit, weights and log-probabilities are those of the time when the group was finished. A replayed token has the loss of a
fresh one, with ρ = exp(logp - generator_logp) of the log-probability that the generator gave it then. `ExampleReplay`
(`data/replay.py`) is another thing: it has the policy answer an example again.
"""

import logging
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated

import numpy as np
from annotated_types import Ge, Lt

from torchtitan.experiments.rl.bounds import NonEmptyStr, PositiveInt
from torchtitan.experiments.rl.errors import ConfigError, MissingError
from torchtitan.experiments.rl.rollouts.filters import ZERO_ADVANTAGE
from torchtitan.experiments.rl.rollouts.record_file import ROLLOUTS_FILE
from torchtitan.experiments.rl.rollouts.recorder import read_rollouts
from torchtitan.experiments.rl.rollouts.types import RolloutGroup

logger = logging.getLogger(__name__)


@dataclass(kw_only=True, slots=True)
class GroupReplayConfig:
    fraction: Annotated[float, Ge(0), Lt(1)] = 0.0
    """Share of a step's rollouts that are replayed, in whole groups. While fewer are stored, steps are smaller.
    0: nothing is stored or replayed."""
    capacity: PositiveInt = 256
    """Groups stored; beyond, the oldest leave."""
    max_age: PositiveInt = 8
    """Versions between the sampling of a replayed group's oldest token and its training; of fresh groups it is
    max_offpolicy_steps."""
    most_replays: PositiveInt = 1
    """Times a group is replayed."""
    path: NonEmptyStr | None = None
    """Another run's folder, or its rollouts.jsonl.gz: the groups that it trained on are stored before the first step, as if
    version 0 had sampled them."""

    def rollouts(self, rollouts_per_step: int) -> int:
        """Return the number of rollouts of a step that are replayed.

        Raises:
            ConfigError: none or all of them, of a fraction above 0.
        """
        count = round(self.fraction * rollouts_per_step)
        if self.fraction and not 0 < count < rollouts_per_step:
            cure = f"gives {count} of {rollouts_per_step} rollouts a step: a step needs fresh ones and replayed ones"
            raise ConfigError("replay.fraction", self.fraction, cure)
        return count

    def validate(self, *, rollouts_per_step: int) -> None:
        """
        Raises:
            ConfigError: fields that do not fit together, or no such file.
        """
        self.rollouts(rollouts_per_step)
        if self.path is None:
            return
        if not self.fraction:
            raise ConfigError(
                "replay.path", self.path, "nothing is replayed: set replay.fraction above 0"
            )
        if not recorded_at(self.path).is_file():
            raise MissingError(
                "replay.path",
                self.path,
                f"no rollouts were recorded there ({recorded_at(self.path)})",
            )


@dataclass(kw_only=True, slots=True)
class StoredGroup:
    group: RolloutGroup
    """With the rollouts that were trained on."""
    version: int
    """Of its oldest sampled token."""
    replays: int = 0


class GroupReplay:
    """The store. Deterministic: the same groups, steps and seed give the same replays."""

    def __init__(
        self, config: GroupReplayConfig, *, rollouts_per_step: int, seed: int, load: bool = True
    ):
        """
        Args:
            rollouts_per_step: fresh and replayed ones together.
            load: begin with what is at ``config.path``.

        Raises:
            ConfigError: nothing was recorded there, or nothing of it can be replayed.
        """
        self.config = config
        self._count = config.rollouts(rollouts_per_step)
        """Number of rollouts of a step that are replayed."""
        self._seed = seed
        self._stored: dict[str, StoredGroup] = {}
        """By group id, oldest first."""

        self.fresh_rollouts = rollouts_per_step - self._count
        """Number of rollouts of a step that are not replayed."""
        if load and config.path is not None:
            logger.info(
                "%d groups of %s are stored", self._load(recorded_at(config.path)), config.path
            )

    def __len__(self) -> int:
        return len(self._stored)

    def add(self, groups: Iterable[RolloutGroup]) -> None:
        """Groups that a step has trained on. One without a signal, or that the policy did not sample, is not stored."""
        for group in groups if self._count else ():
            versions = [
                sample.policy_versions[sample.loss_mask]
                for rollout in group.rollouts
                for sample in rollout.samples
            ]
            sampled = np.concatenate(versions) if versions else np.zeros(0, np.int32)
            if not len(sampled) or sampled.min() < 0 or all(ZERO_ADVANTAGE.matches(group)):
                continue
            self._stored[group.group_id] = StoredGroup(group=group, version=int(sampled.min()))
        for name in list(self._stored)[: -self.config.capacity]:  # the oldest
            del self._stored[name]

    def draw(self, version: int) -> list[RolloutGroup]:
        """Return the replayed groups of the step that trains ``version``.

        Different groups are drawn, each with the same chance, until they have the step's share of rollouts. What filters dropped
        of a group does not count.
        """
        self._stored = {
            k: entry
            for k, entry in self._stored.items()
            if version - entry.version <= self.config.max_age
        }
        random = np.random.default_rng([self._seed, version])
        names = list(self._stored)
        groups: list[RolloutGroup] = []
        rollouts = 0
        for place in random.permutation(len(names)).tolist():
            if rollouts >= self._count:
                break
            entry = self._stored[names[place]]
            groups.append(_replayed(entry.group))
            rollouts += len(entry.group.rollouts)
            entry.replays += 1
            if entry.replays >= self.config.most_replays:
                del self._stored[names[place]]
        return groups

    def _load(self, file: Path) -> int:
        """Store what another run trained on. Returns how many groups are stored."""
        groups: dict[str, RolloutGroup] = {}
        try:
            for record in read_rollouts(file):
                rollout = record.rollout
                if record.outcome != "trained" or not rollout.samples or rollout.static:
                    continue
                group_id = rollout.group_id = f"recorded/{rollout.group_id}"
                for sample in (
                    rollout.samples
                ):  # versions, ids and experts of another run mean nothing in this one
                    sample.rollout_id = rollout.rollout_id
                    sample.policy_versions = np.where(sample.loss_mask, 0, -1).astype(np.int32)
                    sample.routes = None
                assert rollout.data_sample is not None, "every rollout of a run has an example"
                group = groups.setdefault(
                    group_id,
                    RolloutGroup(
                        group_id=group_id,
                        task_name=rollout.task_name,
                        data_sample=rollout.data_sample,
                        rollouts=[],
                    ),
                )
                group.rollouts.append(rollout)
                if (
                    len(groups) > 2 * self.config.capacity
                ):  # the newest are kept; a run's records may fill the memory
                    groups.pop(next(iter(groups)))
        except OSError as error:
            raise ConfigError("replay.path", self.config.path, f"can't be read: {error}") from None
        self.add(groups.values())
        if not self._stored:
            raise ConfigError(
                "replay.path",
                self.config.path,
                "has no group that was trained on with rl or ref_kl",
            )
        return len(self._stored)

    def state(self) -> list[tuple[str, int, int]]:
        """Id, version and replays of each stored group."""
        return [(name, entry.version, entry.replays) for name, entry in self._stored.items()]

    def groups(self) -> list[RolloutGroup]:
        return [entry.group for entry in self._stored.values()]

    def restore(
        self, state: Sequence[tuple[str, int, int]], groups: Mapping[str, RolloutGroup]
    ) -> None:
        """Continue from a checkpoint; ``groups`` holds the stored ones."""
        self._stored = {
            name: StoredGroup(group=groups[name], version=version, replays=replays)
            for name, version, replays in state
        }


def recorded_at(path: str) -> Path:
    """The file of recorded rollouts that a path names."""
    named = Path(path).expanduser()
    return named / ROLLOUTS_FILE if named.is_dir() else named


def _replayed(group: RolloutGroup) -> RolloutGroup:
    """A copy whose tokens no replica answers for: they say nothing about the weights that generators hold now."""
    rollouts = [
        replace(rollout, samples=[replace(sample, replicas=None) for sample in rollout.samples])
        for rollout in group.rollouts
    ]
    return replace(group, rollouts=rollouts).freeze()
