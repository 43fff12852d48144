"""Filters: which rollouts of a scored group take a place in the batch."""

import abc
import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import ClassVar, Literal

import numpy as np

from torchtitan.config import Configurable
from torchtitan.experiments.rl.bounds import check_config
from torchtitan.experiments.rl.configurable import UserConfigurable
from torchtitan.experiments.rl.errors import RunError
from torchtitan.experiments.rl.rollouts.sealed import is_own, sealed_group
from torchtitan.experiments.rl.rollouts.types import Rollout, RolloutGroup
from torchtitan.experiments.rl.types import TrainingSample
from torchtitan.experiments.rl.user_code.calls import cause_of


class Filter(UserConfigurable, abc.ABC):
    """Decides which rollouts of a group match; the config's mode decides whether a match drops them."""

    reads_credit: ClassVar[bool] = True
    """Whether it reads what an algorithm sets. Where no filter before the batch does, algorithms that ask models
    (``Algorithm.asks_models``) see only what the filters keep."""
    vocab_size: int | None = None
    """Token ids that the policy's model has; the run sets it."""

    @dataclass(kw_only=True, slots=True)
    class Config(Configurable.Config):
        mode: Literal["enforce", "monitor"] = "enforce"
        """enforce: matching rollouts are dropped. monitor: they are only counted."""

        def validate(self, *, field: str) -> None:
            """Refuse fields that can't work together, before any process starts.

            A subclass adds its checks after ``super(MyFilter.Config, self).validate(...)``: a slotted dataclass is made anew by
            its decorator, which a bare ``super()`` doesn't know.

            Args:
                field: path of this config, such as "pre_batch_filters[0]".

            Raises:
                ConfigError: naming the field at fault, its value and the cure.
            """

    def __init__(self, config: Config):
        self.config = config
        check_config(config, field=self.name)

    @property
    def name(self) -> str:
        """The class's name in snake case, as metrics and ledger columns have it."""
        return re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", type(self).__name__).lower()

    @abc.abstractmethod
    def matches(self, group: RolloutGroup) -> list[bool]:
        """One entry per rollout of ``group.scored``."""


class ZeroAdvantage(Filter):
    """Matches what has no learning signal: every advantage is 0 and no token feeds ce or ref_kl."""

    # Without advantages nothing matches, and an algorithm that asks models sets none.
    reads_credit: ClassVar[bool] = False

    @dataclass(kw_only=True, slots=True)
    class Config(Filter.Config):
        per: Literal["group", "rollout"] = "group"
        """Match a group in which no rollout has a signal, or each rollout without one. Tokens of the latter count in the loss's
        denominator and in ``kl_tau``, so that without them the others weigh more."""

    config: Config

    def matches(self, group: RolloutGroup) -> list[bool]:
        nothing = [all(map(_teaches_nothing, rollout.samples)) for rollout in group.scored]
        return nothing if self.config.per == "rollout" else [all(nothing)] * len(nothing)


def _teaches_nothing(sample: TrainingSample) -> bool:
    return (
        sample.advantages is not None
        and not np.count_nonzero(sample.advantages)
        and not any(weights is not None and np.any(weights) for weights in (sample.ce_weights, sample.ref_kl_weights))
    )


class Truncated(Filter):
    """Matches rollouts that a limit ended: a completion's length, a prompt's length, or the number of turns."""

    reads_credit: ClassVar[bool] = False

    def matches(self, group: RolloutGroup) -> list[bool]:
        return [rollout.status.is_truncated() for rollout in group.scored]


@dataclass(kw_only=True, slots=True)
class FilterResult:
    kept: list[Rollout] = field(default_factory=list)
    """Scored rollouts no enforcing filter matched."""
    dropped: list[tuple[Rollout, str]] = field(default_factory=list)
    """The others, each with the first enforcing filter that matched: a rollout is in one column of the ledger."""
    matched: Counter[str] = field(default_factory=Counter)
    """Matching rollouts by filter, monitors included; one rollout counts for every filter it matches."""
    tokens: Counter[str] = field(default_factory=Counter)
    """Tokens that were sampled in these: what a filter that enforces saves, and what a monitor would."""


def matches_of(entry: Filter, group: RolloutGroup) -> list[bool]:
    """What a filter returns for a group, one bool per rollout of ``group.scored``.

    Raises:
        TypeError: it returned no sequence of bools.
        ValueError: it returned another number of them.
        Exception: whatever it raised.
    """
    rewards = group.rewards
    matches = entry.matches(group if is_own(entry) else sealed_group(group))
    if not isinstance(matches, list | tuple | np.ndarray):
        raise TypeError(f"it returned {type(matches).__name__}, want a list of {len(rewards)} bools")
    if len(matches) != len(rewards):
        raise ValueError(f"it returned {len(matches)} entries, the group has {len(rewards)} scored rollouts")
    for match in matches:
        if not isinstance(match, bool | np.bool_ | int | np.integer):
            raise TypeError(f"it returned an entry of type {type(match).__name__}, want True or False")
    return [bool(match) for match in matches]


def combine(filters: Sequence[tuple[Filter, str]], group: RolloutGroup, matches: Sequence[list[bool]]) -> FilterResult:
    """Sort a group by what each filter matched.

    Args:
        filters: each with the name that it is counted under.
        matches: what each returned, in the same order.
    """
    result = FilterResult()
    for (_, name), entries in zip(filters, matches, strict=True):
        result.matched[name] += sum(entries)
        matching = (rollout for rollout, match in zip(group.scored, entries, strict=True) if match)
        result.tokens[name] += sum(rollout.completion_tokens for rollout in matching)
    for index, rollout in enumerate(group.scored):
        by = next(
            (
                name
                for (entry, name), entries in zip(filters, matches, strict=True)
                if entry.config.mode == "enforce" and entries[index]
            ),
            None,
        )
        if by is None:
            result.kept.append(rollout)
        else:
            result.dropped.append((rollout, by))
    return result


def apply_filters(filters: Sequence[Filter], group: RolloutGroup) -> FilterResult:
    """Run every filter on every scored rollout, so that no filter hides another's matches.

    Raises:
        RunError: a filter raised or returned a wrong type or number of entries. That is a fault of the run, not of a rollout.
    """
    named, matches = [], []
    for entry in filters:
        try:
            matches.append(matches_of(entry, group))
        except (Exception, SystemExit) as error:
            raise RunError(f"filter {entry.name} failed on group {group.group_id}: {cause_of(error)}") from error
        named.append((entry, entry.name))
    return combine(named, group, matches)
