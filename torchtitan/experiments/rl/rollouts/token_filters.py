"""Filters on the sampled tokens: noise, and repetition.

Both read ids and log-probabilities as they were sampled, turn by turn; a run of tokens ends with its turn. A rollout that
sampled nothing matches neither.
"""

import math
from dataclasses import dataclass
from typing import Annotated, ClassVar

import numpy as np
from annotated_types import Ge, Gt, Lt

from torchtitan.experiments.rl.bounds import NonNegativeFloat, PositiveInt, Share
from torchtitan.experiments.rl.rollouts.filters import Filter
from torchtitan.experiments.rl.rollouts.types import Rollout, RolloutGroup


class Gibberish(Filter):
    """Matches rollouts with tokens that are rare in any text and were very unlikely here.

    The rule is that of the Code World Model report (arXiv 2510.02387, section 5.2): a token is gibberish if its id is high, for
    byte-pair vocabularies list tokens in the order they were merged, commonest first, and if its log-probability is lower than
    that of a uniform draw from the vocabulary by a margin, log p < -log(vocab_size) - margin. Names and foreign words are rare
    but likely in their context, and sampling errors are unlikely but common tokens: the rule takes both conditions.
    """

    reads_credit: ClassVar[bool] = False

    @dataclass(kw_only=True, slots=True)
    class Config(Filter.Config):
        rare_from: Annotated[float, Ge(0), Lt(1)] = 0.66
        """Share of the vocabulary's ids that are not rare: of Qwen3's 151,936 ids, those from 100,278 on are. Special tokens
        often have the highest ids, but are likely in their places."""
        margin: NonNegativeFloat = 2.0
        """How far below the log-probability of a uniform draw, in nats."""
        tokens: PositiveInt = 1
        """Such tokens from which a rollout matches."""

    config: Config

    def matches(self, group: RolloutGroup) -> list[bool]:
        if self.vocab_size is None:
            raise ValueError("vocab_size is not set: how rare and how unlikely a token is depends on the policy's vocabulary")
        return [self._gibberish(rollout, self.vocab_size) >= self.config.tokens for rollout in group.scored]

    def _gibberish(self, rollout: Rollout, vocab_size: int) -> int:
        """Gibberish tokens of a rollout."""
        unlikely, found = -math.log(vocab_size) - self.config.margin, 0
        for turn in rollout.turns:
            rare = turn.completion.token_ids >= self.config.rare_from * vocab_size
            if np.count_nonzero(rare):
                found += int(np.count_nonzero(rare & (turn.completion.logprobs < unlikely)))
        return found


class Repetition(Filter):
    """Matches rollouts that repeat themselves.

    1. A run of ``window`` tokens, each sampled with a probability above ``probability``: the rule by which MiniMax-M1
       (arXiv 2506.13585, section 3.2) stopped generation. In a loop the probability of the next token grows with
       each repetition, and other text does not have such probabilities for as long.
    2. Where ``distinct_ngrams`` is set: fewer than that share of the rollout's n-grams are distinct. It finds loops with an
       unlikely token in them and identical calls over several turns, but also repetition that the prompt demands.
    """

    reads_credit: ClassVar[bool] = False

    @dataclass(kw_only=True, slots=True)
    class Config(Filter.Config):
        window: Annotated[int, Ge(2)] = 3000
        """Tokens in a row."""
        probability: Annotated[float, Gt(0), Lt(1)] = 0.99
        distinct_ngrams: Share = 0.0
        """Least share of distinct n-grams among all; a text repeated ten times has 0.1. 0: no check."""
        ngram: PositiveInt = 16
        """Tokens of an n-gram. Long enough that phrases and table rows don't count."""
        min_ngrams: Annotated[int, Ge(2)] = 512
        """Rollouts with fewer n-grams are too short to be judged."""

    config: Config

    def matches(self, group: RolloutGroup) -> list[bool]:
        return [self._long_likely_run(rollout) or self._too_few_distinct(rollout) for rollout in group.scored]

    def _long_likely_run(self, rollout: Rollout) -> bool:
        likely, window = math.log(self.config.probability), self.config.window
        long = [turn.completion.logprobs for turn in rollout.turns if len(turn.completion.logprobs) >= window]
        return any(longest_run(logprobs > likely) >= window for logprobs in long)

    def _too_few_distinct(self, rollout: Rollout) -> bool:
        if not self.config.distinct_ngrams:
            return False
        texts = [turn.completion.token_ids for turn in rollout.turns]
        if sum(max(0, len(token_ids) - self.config.ngram + 1) for token_ids in texts) < self.config.min_ngrams:
            return False
        hashes = np.concatenate([ngram_hashes(token_ids, self.config.ngram) for token_ids in texts])
        hashes.sort()  # np.unique takes 15 times as long: 2.5 ms for 32,768
        distinct = 1 + np.count_nonzero(hashes[1:] != hashes[:-1])
        return bool(distinct < self.config.distinct_ngrams * len(hashes))


def longest_run(flags: np.ndarray) -> int:
    """Most consecutive True of a bool [T]."""
    breaks = np.flatnonzero(~flags)
    return int(np.diff(breaks, prepend=-1, append=len(flags)).max()) - 1


def ngram_hashes(token_ids: np.ndarray, n: int) -> np.ndarray:
    """uint64 [T - n + 1]: a polynomial hash, modulo 2^64, of the n tokens from each token on; empty where T < n."""
    ids = token_ids.astype(np.uint64)
    count = max(len(ids) - n + 1, 0)
    hashes = np.zeros(count, np.uint64)
    for offset in range(n):
        hashes = hashes * np.uint64(0x9E3779B97F4A7C15) + ids[offset : offset + count]
    return hashes
