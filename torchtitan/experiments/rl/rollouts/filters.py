"""Filters: which rollouts of a scored group take a place in the batch."""

import abc
import math
import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Annotated, ClassVar, Literal

import numpy as np
from annotated_types import Ge, Gt, Lt

from torchtitan.config import Configurable
from torchtitan.experiments.rl.bounds import NonNegativeFloat, PositiveInt, Share, check_config
from torchtitan.experiments.rl.configurable import BuildContext, UserConfigurable
from torchtitan.experiments.rl.rollouts.rounding import ABSOLUTE, RELATIVE
from torchtitan.experiments.rl.rollouts.types import Rollout, RolloutGroup
from torchtitan.experiments.rl.types import TrainingSample


class Filter(UserConfigurable, abc.ABC):
    """Decides which rollouts of a group match.

    The config's mode decides whether a match drops them. A filter that reads token ids may take
    ``context`` in its constructor, which has the size of the vocabulary
    (`configurable.BuildContext`).

    Example::

        from dataclasses import dataclass
        from torchtitan.experiments.rl.rollouts.filters import Filter

        class ManyTurns(Filter):
            reads_credit = False  # it reads no advantages

            @dataclass(kw_only=True, slots=True)
            class Config(Filter.Config):
                most: int = 8

            def matches(self, group):
                return [len(rollout.turns) > self.config.most for rollout in group.scored]
    """

    reads_credit: ClassVar[bool] = True
    """True if the filter reads what an algorithm sets. If no filter before the batch does,
    algorithms that ask models (``Algorithm.asks_models``) see only what the filters keep."""

    @dataclass(kw_only=True, slots=True)
    class Config(Configurable.Config):
        mode: Literal["enforce", "monitor"] = "enforce"
        """Effect of a match: "enforce" drops the rollout, "monitor" only counts it."""

        def validate(self, *, field: str) -> None:
            """Refuse fields that can't work together, before any process starts.

            A subclass adds its checks after ``super(MyFilter.Config, self).validate(...)``: a
            slotted dataclass is made anew by its decorator, which a bare ``super()`` doesn't know.

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
        """Class name in snake case, as metrics and ledger columns have it."""
        return re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", type(self).__name__).lower()

    @abc.abstractmethod
    def matches(self, group: RolloutGroup) -> list[bool]:
        """Return for each rollout of ``group.scored`` whether it matches."""


class ZeroAdvantage(Filter):
    """Matches rollouts without a learning signal.

    Every advantage is 0, and no token has a weight in the ce or ref_kl loss. An advantage that
    rounding explains is 0 too: one up to a billionth of the group's largest reward, or of 1 if that
    is less, and any up to 1e-12.
    """

    # Without advantages nothing matches, and an algorithm that asks models sets none.
    reads_credit: ClassVar[bool] = False

    @dataclass(kw_only=True, slots=True)
    class Config(Filter.Config):
        per: Literal["group", "rollout"] = "group"
        """Match a group in which no rollout has a signal, or each rollout without one. Tokens of
        the latter count in the loss's denominator and in ``kl_tau``, so that without them the
        others weigh more."""

    config: Config

    def matches(self, group: RolloutGroup) -> list[bool]:
        largest = max(map(abs, group.rewards), default=0.0)
        rounding = max(ABSOLUTE, RELATIVE * min(1.0, largest))
        nothing = [
            all(_teaches_nothing(sample, rounding) for sample in rollout.samples)
            for rollout in group.scored
        ]
        return nothing if self.config.per == "rollout" else [all(nothing)] * len(nothing)


ZERO_ADVANTAGE = ZeroAdvantage(ZeroAdvantage.Config())


def _teaches_nothing(sample: TrainingSample, rounding: float) -> bool:
    return (
        sample.advantages is not None
        and not np.any(np.abs(sample.advantages) > rounding)
        and not any(
            weights is not None and np.any(weights)
            for weights in (sample.ce_weights, sample.ref_kl_weights)
        )
    )


class Truncated(Filter):
    """Matches rollouts that a limit ended.

    The limit is a completion's length, a prompt's length, or the number of turns.
    """

    reads_credit: ClassVar[bool] = False

    def matches(self, group: RolloutGroup) -> list[bool]:
        return [rollout.status.is_truncated() for rollout in group.scored]


@dataclass(kw_only=True, slots=True)
class FilterResult:
    """Scored rollouts of a group, sorted by what each filter matched."""

    kept: list[Rollout] = field(default_factory=list)
    """Scored rollouts that no enforcing filter matched."""
    dropped: list[tuple[Rollout, str]] = field(default_factory=list)
    """The others, each with the first enforcing filter that matched: a rollout is in one column of
    the ledger."""
    matched: Counter[str] = field(default_factory=Counter)
    """Number of matching rollouts by filter, monitors included. A rollout counts for every filter
    it matches."""
    tokens: Counter[str] = field(default_factory=Counter)
    """Number of tokens that were sampled in these rollouts: what an enforcing filter saves, and
    what a monitor would."""


def matches_of(entry: Filter, group: RolloutGroup) -> list[bool]:
    """Return what a filter says of a group, one bool per rollout of ``group.scored``.

    Raises:
        TypeError: the filter returned no sequence of bools.
        ValueError: the filter returned another number of bools.
        Exception: whatever the filter raised.
    """
    rewards = group.rewards
    matches = entry.matches(group)
    if not isinstance(matches, list | tuple | np.ndarray):
        raise TypeError(
            f"it returned {type(matches).__name__}, want a list of {len(rewards)} bools"
        )
    if len(matches) != len(rewards):
        raise ValueError(
            f"it returned {len(matches)} entries, the group has {len(rewards)} scored rollouts"
        )
    for match in matches:
        if not isinstance(match, bool | np.bool_ | int | np.integer):
            raise TypeError(
                f"it returned an entry of type {type(match).__name__}, want True or False"
            )
    return [bool(match) for match in matches]


def combine(
    filters: Sequence[tuple[Filter, str]], group: RolloutGroup, matches: Sequence[list[bool]]
) -> FilterResult:
    """Sort the scored rollouts of a group by what each filter matched.

    Args:
        filters: filters, each with the name that it is counted under.
        matches: result of `matches_of` for each filter, in the same order.
    """
    result = FilterResult()
    for (_, name), entries in zip(filters, matches, strict=True):
        result.matched[name] += sum(entries)
        matching = (rollout for rollout, match in zip(group.scored, entries, strict=True) if match)
        result.tokens[name] += sum(rollout.completion_tokens for rollout in matching)
    for index, rollout in enumerate(group.scored):
        enforced = [
            name
            for (entry, name), entries in zip(filters, matches, strict=True)
            if entry.config.mode == "enforce" and entries[index]
        ]
        if enforced:
            result.dropped.append((rollout, enforced[0]))
        else:
            result.kept.append(rollout)
    return result


class Gibberish(Filter):
    """Matches rollouts with tokens that are rare in any text and were very unlikely here.

    The rule is that of the Code World Model report (arXiv 2510.02387, section 5.2): a token is
    gibberish if its id is high, for byte-pair vocabularies list tokens in the order they were
    merged, commonest first, and if its log-probability is lower than that of a uniform draw from
    the vocabulary by a margin, log p < -log(vocab_size) - margin. Names and foreign words are rare
    but likely in their context, and sampling errors are unlikely but common tokens: the rule takes
    both conditions.
    """

    reads_credit: ClassVar[bool] = False

    @dataclass(kw_only=True, slots=True)
    class Config(Filter.Config):
        rare_from: Annotated[float, Ge(0), Lt(1)] = 0.66
        """Share of the vocabulary's ids that are not rare: of Qwen3's 151,936 ids, those from
        100,278 on are. Special tokens often have the highest ids, but are likely in their
        places."""
        margin: NonNegativeFloat = 2.0
        """Distance below the log-probability of a uniform draw, in nats."""
        tokens: PositiveInt = 1
        """Number of such tokens from which a rollout matches."""

    config: Config

    def __init__(self, config: Config, *, context: BuildContext):
        super().__init__(config)
        self._vocab_size = context.vocab_size

    def matches(self, group: RolloutGroup) -> list[bool]:
        return [self._gibberish(rollout) >= self.config.tokens for rollout in group.scored]

    def _gibberish(self, rollout: Rollout) -> int:
        unlikely = -math.log(self._vocab_size) - self.config.margin
        found = 0
        for turn in rollout.turns:
            rare = turn.completion.token_ids >= self.config.rare_from * self._vocab_size
            if np.count_nonzero(rare):
                found += int(np.count_nonzero(rare & (turn.completion.logprobs < unlikely)))
        return found


class Repetition(Filter):
    """Matches rollouts that repeat themselves.

    A rollout matches if one of these holds:

    1. A run of ``window`` tokens was sampled, each with a probability above ``probability``: the
       rule by which MiniMax-M1 (arXiv 2506.13585, section 3.2) stopped generation. In a loop the
       probability of the next token grows with each repetition, and other text does not have such
       probabilities for as long.
    2. Fewer than the share ``distinct_ngrams`` of the rollout's n-grams are distinct, if that is
       set. It finds loops with an unlikely token in them and identical calls over several turns,
       but also repetition that the prompt demands.
    """

    reads_credit: ClassVar[bool] = False

    @dataclass(kw_only=True, slots=True)
    class Config(Filter.Config):
        window: Annotated[int, Ge(2)] = 3000
        """Number of tokens in a row."""
        probability: Annotated[float, Gt(0), Lt(1)] = 0.99
        distinct_ngrams: Share = 0.0
        """Least share of distinct n-grams among all; a text repeated ten times has 0.1. With 0
        nothing is checked."""
        ngram: PositiveInt = 16
        """Number of tokens of an n-gram: enough that phrases and table rows don't count."""
        min_ngrams: Annotated[int, Ge(2)] = 512
        """Number of n-grams below which a rollout is too short to be judged."""

    config: Config

    def matches(self, group: RolloutGroup) -> list[bool]:
        return [
            self._long_likely_run(rollout) or self._too_few_distinct(rollout)
            for rollout in group.scored
        ]

    def _long_likely_run(self, rollout: Rollout) -> bool:
        likely = math.log(self.config.probability)
        window = self.config.window
        long = [
            turn.completion.logprobs
            for turn in rollout.turns
            if len(turn.completion.logprobs) >= window
        ]
        return any(longest_run(logprobs > likely) >= window for logprobs in long)

    def _too_few_distinct(self, rollout: Rollout) -> bool:
        if not self.config.distinct_ngrams:
            return False
        texts = [turn.completion.token_ids for turn in rollout.turns]
        if (
            sum(max(0, len(token_ids) - self.config.ngram + 1) for token_ids in texts)
            < self.config.min_ngrams
        ):
            return False
        hashes = np.concatenate([ngram_hashes(token_ids, self.config.ngram) for token_ids in texts])
        hashes.sort()  # np.unique takes 15 times as long: 2.5 ms for 32,768
        distinct = 1 + np.count_nonzero(hashes[1:] != hashes[:-1])
        return bool(distinct < self.config.distinct_ngrams * len(hashes))


def longest_run(flags: np.ndarray) -> int:
    """Return the largest number of consecutive True of a bool [T]."""
    breaks = np.flatnonzero(~flags)
    return int(np.diff(breaks, prepend=-1, append=len(flags)).max()) - 1


def ngram_hashes(token_ids: np.ndarray, n: int) -> np.ndarray:
    """Return a polynomial hash, modulo 2^64, of the n tokens from each token on.

    Returns:
        uint64 [T - n + 1]; empty if T < n.
    """
    ids = token_ids.astype(np.uint64)
    count = max(len(ids) - n + 1, 0)
    hashes = np.zeros(count, np.uint64)
    for offset in range(n):
        hashes = hashes * np.uint64(0x9E3779B97F4A7C15) + ids[offset : offset + count]
    return hashes
