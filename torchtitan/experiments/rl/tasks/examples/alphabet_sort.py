"""Asks to sort names, then to merge more names into the list, over several user turns.

    Sort these names ...: Nora Alice      ->   Alice Nora
    Now add these names ...: Bob          ->   Alice Bob Nora

Copy this file for a conversation that follows a script. No set of opening names is in both splits,
in any order.
"""

import random
from dataclasses import dataclass, field
from difflib import SequenceMatcher
from typing import Annotated, Any

from annotated_types import Ge
from renderers import Message

from torchtitan.experiments.rl.bounds import AtMost, NonNegativeFloat, PositiveInt
from torchtitan.experiments.rl.data.dataset import Dataset, MadeDataset, Split, split_of_text
from torchtitan.experiments.rl.envs.message_env import MessageEnv, ResetOutput, StepOutput
from torchtitan.experiments.rl.envs.renderer_env import RendererEnvConfig
from torchtitan.experiments.rl.errors import ConfigError
from torchtitan.experiments.rl.rollouts.policy import SamplingConfig
from torchtitan.experiments.rl.rollouts.types import DataSample, Rollout
from torchtitan.experiments.rl.rubrics.rubric import RewardFn, Rubric
from torchtitan.experiments.rl.tasks.answers import final_list
from torchtitan.experiments.rl.tasks.task import Task

Rounds = list[list[str]]
"""Names that each round of an example adds."""
NAMES = """
    Alice Anderson Bob Brown Carol Clark David Davis Emma Evans Fisher Frank Garcia Grace Harris
    Henry Irene Jack Johnson Karen King Lewis Liam Maria Martin Nelson Nora Oliver Parker Paula
    Quinn Robert Roberts Sarah Smith Taylor Thomas Ursula Victor Walker Wendy Wilson Xavier Young
    Yvonne Zoe
""".split()


def opening_text(names: list[str]) -> str:
    """Return the user's first message."""
    return "Sort these names in alphabetical order, one per line:\n" + "\n".join(names)


def more_text(names: list[str]) -> str:
    """Return the user's message of a later round."""
    return "Now add these names to the list and sort again:\n" + "\n".join(names)


def sorted_lists(rounds: Rounds) -> Rounds:
    """Return the right reply of each round: all names so far in alphabetical order."""
    return [sorted(sum(rounds[: end + 1], [])) for end in range(len(rounds))]


def split_of(opening: list[str]) -> Split:
    """Return the split of these opening names, whatever their order and the seed."""
    return split_of_text("\n".join(sorted(opening)))


def make_examples(
    count: int,
    *,
    split: Split,
    seed: int = 0,
    min_rounds: int = 2,
    max_rounds: int = 3,
    min_names: int = 2,
    max_names: int = 5,
) -> list[Rounds]:
    """Return `count` examples, every number of rounds and of names equally likely.

    No name comes twice in an example. A larger `count` adds examples at the end.
    """
    stream = random.Random(f"alphabet_sort/{split}/{seed}")

    def draw() -> Rounds:
        lengths = [
            stream.randint(min_names, max_names)
            for _ in range(stream.randint(min_rounds, max_rounds))
        ]
        while True:
            names = iter(stream.sample(NAMES, sum(lengths)))
            rounds = [[next(names) for _ in range(length)] for length in lengths]
            if split_of(rounds[0]) == split:
                return rounds

    return [draw() for _ in range(count)]


SYSTEM = "You are a helpful assistant. Answer with the sorted list only."


class AlphabetSortEnv(MessageEnv):
    """Env that asks for each round in turn, whatever the model has answered."""

    def __init__(self, rounds: Rounds):
        self.rounds = rounds
        self._answered = 0

    async def reset(self) -> ResetOutput:
        question = {"role": "user", "content": opening_text(self.rounds[0])}
        return ResetOutput(messages=[{"role": "system", "content": SYSTEM}, question])

    async def step_message(self, message: Message) -> StepOutput:
        self._answered += 1
        if self._answered == len(self.rounds):
            return StepOutput(env_messages=[], done=True)
        question = {"role": "user", "content": more_text(self.rounds[self._answered])}
        return StepOutput(env_messages=[question], done=False)


class AlphabetSortRubric(Rubric):
    """Rubric that compares the list of each reply with the sorted list."""

    @dataclass(kw_only=True, slots=True)
    class Config(Rubric.Config):
        similarity_weight: NonNegativeFloat = 0.0
        """Weight of `similarity` beside the 1.0 of `exact`, for long lists, which a model seldom
        gets wholly in order."""
        exact: bool = False
        """True if the reply has to be the list and nothing else, as the tiny models have learned.
        If False, its last list counts, with any numbers, bullets and words around it."""

    config: Config

    def register_funcs(self) -> list[RewardFn]:
        return [
            RewardFn(self.exact, takes="rollout"),
            RewardFn(self.similarity, weight=self.config.similarity_weight, takes="rollout"),
        ]

    # Async functions run on the event loop. Sync ones run in a thread, which would cost more.
    async def exact(self, rollout: Rollout, rounds: Rounds) -> float:
        """Return the share of the rounds whose reply has the sorted list."""
        pairs = self._replies(rollout, rounds)
        return sum(reply == wanted for reply, wanted in pairs) / len(rounds)

    async def similarity(self, rollout: Rollout, rounds: Rounds) -> float:
        """Return the mean similarity of reply and sorted list over the rounds.

        The similarity is 2 M / T, where M is the number of names that both have in one order, and T
        the number of names in both together.
        """
        ratios = [
            SequenceMatcher(None, reply, wanted, autojunk=False).ratio()
            for reply, wanted in self._replies(rollout, rounds)
        ]
        return sum(ratios) / len(rounds)

    def _replies(self, rollout: Rollout, rounds: Rounds) -> list[tuple[list[str], list[str]]]:
        """Return the list in each reply, with the right one. A rollout cut short has fewer."""
        texts = [turn.assistant_message["content"] for turn in rollout.turns]
        lists = [_lines(text) if self.config.exact else final_list(text) for text in texts]
        return list(zip(lists, sorted_lists(rounds), strict=False))


def _lines(text: str) -> list[str]:
    return [line.strip() for line in text.strip().splitlines()]


class AlphabetSortDataset(MadeDataset):
    """Dataset of scripts: the names that each round adds."""

    @dataclass(kw_only=True, slots=True)
    class Config(MadeDataset.Config):
        min_rounds: Annotated[PositiveInt, AtMost("max_rounds")] = 2
        max_rounds: PositiveInt = 3
        """Maximum number of rounds in an example. The model has one turn for each."""
        min_names: Annotated[int, Ge(2), AtMost("max_names")] = 2
        """Minimum number of names in each round. One name needs no sorting, and there are too few
        names for two splits of single ones."""
        max_names: Annotated[int, Ge(2)] = 5
        """Maximum number of names in each round."""

        @property
        def turns_needed(self) -> int:
            return self.max_rounds

        def validate(self, *, field: str) -> None:
            """Refuse bounds that need more names than there are.

            Raises:
                ConfigError: naming `max_names`.
            """
            if self.max_rounds * self.max_names > len(NAMES):
                cure = (
                    f"with max_rounds = {self.max_rounds} more than the {len(NAMES)} names there "
                    "are; lower either"
                )
                raise ConfigError(f"{field}.max_names", self.max_names, cure)

    make = staticmethod(make_examples)

    def info(self, rounds: Rounds) -> dict[str, Any]:
        return {"rounds": len(rounds), "names": sum(map(len, rounds))}


class AlphabetSortTask(Task):
    """Task of several user turns, scored as a whole at the end."""

    @dataclass(kw_only=True, slots=True)
    class Config(Task.Config):
        dataset: Dataset.Config = field(default_factory=AlphabetSortDataset.Config)
        validation: Dataset.Config | None = field(
            default_factory=lambda: AlphabetSortDataset.Config(split="validation", count=64, seed=1)
        )
        rubric: Rubric.Config = field(default_factory=AlphabetSortRubric.Config)
        env: RendererEnvConfig = field(
            default_factory=lambda: RendererEnvConfig(max_turns=8, max_rollout_tokens=1024)
        )
        sampling: SamplingConfig = field(default_factory=lambda: SamplingConfig(max_tokens=128))

    def make_env(self, sample: DataSample) -> AlphabetSortEnv:
        return AlphabetSortEnv(sample.env_input)
