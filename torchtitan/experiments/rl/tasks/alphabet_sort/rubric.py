"""The reward is the mean over the rounds; a round that was not reached counts 0. A wrong list costs only its own round,
because the next is to be sorted from the names, not from the reply."""

from dataclasses import dataclass
from difflib import SequenceMatcher

from torchtitan.experiments.rl.bounds import NonNegativeFloat
from torchtitan.experiments.rl.rollouts.types import Rollout
from torchtitan.experiments.rl.rubrics.rubric import RewardFn, Rubric
from torchtitan.experiments.rl.tasks.alphabet_sort.data import sorted_lists


class AlphabetSortRubric(Rubric):
    @dataclass(kw_only=True, slots=True)
    class Config(Rubric.Config):
        similarity_weight: NonNegativeFloat = 0.0
        """Weight of `similarity` beside the 1.0 of `exact`: for long lists, of which a model seldom gets all in order."""

    config: Config

    def register_funcs(self) -> list[RewardFn]:
        return [RewardFn(exact), RewardFn(similarity, weight=self.config.similarity_weight)]


# Async, so they run on the event loop: for lists this short, a sync function's thread would cost more than the work.
async def exact(rollout: Rollout, rounds: list[list[str]]) -> float:
    """Share of the rounds whose reply is the sorted list, a name a line, and nothing else."""
    return sum(reply == wanted for reply, wanted in _replies(rollout, rounds)) / len(rounds)


async def similarity(rollout: Rollout, rounds: list[list[str]]) -> float:
    """Mean over the rounds of 2 M / T: M the lines in common, in order, and T the lines of reply and sorted list together."""
    ratios = [SequenceMatcher(None, reply, wanted, autojunk=False).ratio() for reply, wanted in _replies(rollout, rounds)]
    return sum(ratios) / len(rounds)


def _replies(rollout: Rollout, rounds: list[list[str]]) -> list[tuple[list[str], list[str]]]:
    """The lines of each reply, with the lines of the right one."""
    texts = [turn.assistant_message["content"] for turn in rollout.turns]
    lines = [[line.strip() for line in text.strip().splitlines()] for text in texts]
    return list(zip(lines, sorted_lists(rounds)))  # noqa: B905  a rollout cut short has fewer replies
