"""The reward is the mean over the rounds; a round that was not reached counts 0. A wrong list costs only its own round,
because the next is to be sorted from the names, not from the reply."""

from dataclasses import dataclass
from difflib import SequenceMatcher

from torchtitan.experiments.rl.bounds import NonNegativeFloat
from torchtitan.experiments.rl.rollouts.types import Rollout
from torchtitan.experiments.rl.rubrics.rubric import RewardFn, Rubric
from torchtitan.experiments.rl.tasks.alphabet_sort.data import sorted_lists
from torchtitan.experiments.rl.tasks.answers import final_list


class AlphabetSortRubric(Rubric):
    @dataclass(kw_only=True, slots=True)
    class Config(Rubric.Config):
        similarity_weight: NonNegativeFloat = 0.0
        """Weight of `similarity` beside the 1.0 of `exact`: for long lists, of which a model seldom gets all in order."""

        exact: bool = False
        """The reply has to be the list and nothing else: what the tiny models have learned. False: its last list counts, with
        whatever numbers, bullets and words stand around it."""

    config: Config

    def register_funcs(self) -> list[RewardFn]:
        return [RewardFn(self.exact), RewardFn(self.similarity, weight=self.config.similarity_weight)]

    # Async, so they run on the event loop: for lists this short, a sync function's thread would cost more than the work.
    async def exact(self, rollout: Rollout, rounds: list[list[str]]) -> float:
        """Share of the rounds whose reply has the sorted list."""
        return sum(reply == wanted for reply, wanted in self._replies(rollout, rounds)) / len(rounds)

    async def similarity(self, rollout: Rollout, rounds: list[list[str]]) -> float:
        """Mean over the rounds of 2 M / T: M the names in common, in order, and T those of reply and sorted list together."""
        pairs = self._replies(rollout, rounds)
        return sum(SequenceMatcher(None, reply, wanted, autojunk=False).ratio() for reply, wanted in pairs) / len(rounds)

    def _replies(self, rollout: Rollout, rounds: list[list[str]]) -> list[tuple[list[str], list[str]]]:
        """The list of each reply, with the right one."""
        texts = [turn.assistant_message["content"] for turn in rollout.turns]
        lists = [_lines(text) if self.config.exact else final_list(text) for text in texts]
        return list(zip(lists, sorted_lists(rounds)))  # noqa: B905  a rollout cut short has fewer replies


def _lines(text: str) -> list[str]:
    return [line.strip() for line in text.strip().splitlines()]
