"""Asks for the sum of some digits: the smallest complete task. Copy this file to start your own.

    Sum of the digits: 4 8 2 7   ->   21

The file reads from the example to the task, and needs all five parts:

    make_examples        lists of digits, which follow from the arguments alone on any machine
    SumDigitsDataset     holds them, and describes each in `info`
    SumDigitsEnv         asks for a sum
    SumDigitsRubric      rewards the answer
    SumDigitsTask        brings these together, with the limits of a rollout

Three variations on the same sums follow: `SumDigitsDemonstrations` (supervised learning),
`JudgedSumDigitsRubric` (a judge decides) and `SumDigitsRoundsTask` (several turns).
"""

import random
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal

from annotated_types import Ge, Le
from renderers import Message

from torchtitan.experiments.rl.bounds import AtMost, Cure, PositiveInt
from torchtitan.experiments.rl.data.dataset import Dataset, MadeDataset, Split, split_of_text
from torchtitan.experiments.rl.envs.message_env import MessageEnv, ResetOutput, StepOutput
from torchtitan.experiments.rl.envs.renderer_env import RendererEnvConfig
from torchtitan.experiments.rl.generation.judge import Judge
from torchtitan.experiments.rl.rollouts.policy import PolicyClient, SamplingConfig
from torchtitan.experiments.rl.rollouts.types import DataSample, Rollout
from torchtitan.experiments.rl.rubrics.rubric import (
    RewardFn,
    Rubric,
    env_component,
    last_assistant_text,
    win_shares,
)
from torchtitan.experiments.rl.tasks.answers import number_of
from torchtitan.experiments.rl.tasks.task import Task


def prompt_text(digits: list[int]) -> str:
    """Return the user's message."""
    return "Sum of the digits: " + " ".join(map(str, digits))


def answer_text(digits: list[int]) -> str:
    """Return the right reply."""
    return str(sum(digits))


def make_examples(
    count: int, *, split: Split, seed: int = 0, min_digits: int = 2, max_digits: int = 5
) -> list[list[int]]:
    """Return `count` lists of `min_digits` to `max_digits` digits, every length equally likely.

    A larger `count` adds lists at the end. Short lists repeat: there are 100 of two digits.
    """
    stream = random.Random(f"sum_digits/{split}/{seed}")

    def draw() -> list[int]:
        length = stream.randint(min_digits, max_digits)
        while True:
            digits = [stream.randint(0, 9) for _ in range(length)]
            if split_of_text(prompt_text(digits)) == split:
                return digits

    return [draw() for _ in range(count)]


class SumDigitsEnv(MessageEnv):
    """Env that asks for the sum. The model's first reply ends the rollout."""

    def __init__(self, digits: list[int], *, instruction: str = ""):
        self.digits = digits
        self.instruction = instruction

    async def reset(self) -> ResetOutput:
        question = "\n\n".join(filter(None, (prompt_text(self.digits), self.instruction)))
        return ResetOutput(messages=[{"role": "user", "content": question}])

    async def step_message(self, message: Message) -> StepOutput:
        return StepOutput(env_messages=[], done=True)


class SumDigitsRubric(Rubric):
    """Rubric that gives 1 for the right sum, else 0."""

    @dataclass(kw_only=True, slots=True)
    class Config(Rubric.Config):
        exact: bool = False
        """True if the reply has to be the sum and nothing else, as the tiny models have learned. If
        False, its final answer counts, however it is written."""

    config: Config

    def register_funcs(self) -> list[RewardFn]:
        return [RewardFn(exact if self.config.exact else found, name="correct", takes="rollout")]


# Async functions run on the event loop. Sync ones run in a thread, which would cost more.
async def exact(rollout: Rollout, digits: list[int]) -> float:
    return float(last_assistant_text(rollout).strip() == answer_text(digits))


async def found(rollout: Rollout, digits: list[int]) -> float:
    return float(number_of(rollout) == sum(digits))


INSTRUCTION = 'End your reply with the line "Answer: N", where N is the sum.'


class SumDigitsDataset(MadeDataset):
    """Dataset of lists of digits. OPSD shows the policy the answer as a demonstration."""

    @dataclass(kw_only=True, slots=True)
    class Config(MadeDataset.Config):
        min_digits: Annotated[
            int, Ge(2), AtMost("max_digits"), Cure("lists of one digit are too few to split")
        ] = 2
        max_digits: Annotated[int, Ge(2), Le(1000)] = 5

    make = staticmethod(make_examples)

    def info(self, digits: list[int]) -> dict[str, Any]:
        return {"digits": len(digits), "demonstration": answer_text(digits)}


class SumDigitsTask(Task):
    """Task that asks for a sum and scores the one reply."""

    @dataclass(kw_only=True, slots=True)
    class Config(Task.Config):
        dataset: Dataset.Config = field(default_factory=SumDigitsDataset.Config)
        validation: Dataset.Config | None = field(
            default_factory=lambda: SumDigitsDataset.Config(split="validation", count=64, seed=1)
        )
        instruction: str = INSTRUCTION
        """Text below the question that says how to write the answer. The tiny models have learned
        questions without one ("")."""
        rubric: Rubric.Config = field(default_factory=SumDigitsRubric.Config)
        env: RendererEnvConfig = field(
            default_factory=lambda: RendererEnvConfig(max_turns=1, max_rollout_tokens=128)
        )
        sampling: SamplingConfig = field(default_factory=lambda: SamplingConfig(max_tokens=16))

    config: Config

    def make_env(self, sample: DataSample) -> SumDigitsEnv:
        return SumDigitsEnv(sample.env_input, instruction=self.config.instruction)


class SumDigitsDemonstrations(SumDigitsDataset):
    """Dataset of conversations: the question of each example, and its answer."""

    def __getitem__(self, index: int) -> DataSample:
        example = super().__getitem__(index)
        messages = [
            {"role": "user", "content": prompt_text(example.env_input)},
            {"role": "assistant", "content": answer_text(example.env_input)},
        ]
        return DataSample(
            sample_id=example.sample_id, env_input={"messages": messages}, info=example.info
        )


class JudgedSumDigitsRubric(Rubric):
    """Rubric whose rewards a judge decides: another model that is asked the same question.

    The config holds the judge's config. The rubric builds the judge and sets it up, and reward
    functions ask it.
    """

    @dataclass(kw_only=True, slots=True)
    class Config(Rubric.Config):
        judge: Annotated[Judge.Config, Cure("Judge.Config(model=HostedModel(path=...))")]
        mode: Literal["each", "pairwise"] = "each"
        """Reward of a reply: "each" gives 1 if it is the judge's own. "pairwise" gives the share of
        comparisons with the group's other replies that it wins."""

    config: Config

    def __init__(self, config: Config):
        super().__init__(config)
        self.judge: Judge = config.judge.build()

    def register_funcs(self) -> list[RewardFn]:
        truth = RewardFn(exact, weight=0.0, name="correct", takes="rollout")
        if self.config.mode == "each":
            return [RewardFn(self.agrees, takes="rollout"), truth]
        return [RewardFn(self.wins, group_level=True, takes="rollout"), truth]

    async def setup(self, policy: PolicyClient) -> None:
        await self.judge.setup(policy)

    async def agrees(self, rollout: Rollout, digits: list[int]) -> float:
        return float(last_assistant_text(rollout).strip() == await self._verdict(digits))

    async def wins(self, rollouts: list[Rollout], digits: list[int]) -> list[float]:
        replies = [last_assistant_text(rollout).strip() for rollout in rollouts]

        async def prefers(first: int, second: int) -> float:
            verdict = await self._verdict(digits)
            return 0.5 + 0.5 * ((replies[first] == verdict) - (replies[second] == verdict))

        return await win_shares(len(replies), prefers)

    async def _verdict(self, digits: list[int]) -> str:
        answer = await self.judge.chat([{"role": "user", "content": prompt_text(digits)}])
        return str(answer["content"]).strip()


class SumDigitsRoundsEnv(MessageEnv):
    """Env that asks for one sum a turn, and rewards each as it is answered.

    A right reply gives 1 / rounds as component "right", so a rollout's sum is in [0, 1].
    """

    def __init__(self, rounds: list[list[int]]):
        self.rounds = rounds
        self._round = 0

    async def reset(self) -> ResetOutput:
        return ResetOutput(messages=[{"role": "user", "content": prompt_text(self.rounds[0])}])

    async def step_message(self, message: Message) -> StepOutput:
        answer = answer_text(self.rounds[self._round])
        right = message["content"].strip() == answer
        self._round += 1
        reward = {"right": right / len(self.rounds)}
        if self._round == len(self.rounds):
            return StepOutput(env_messages=[], done=True, reward_components=reward)
        question = f"The sum is {answer}. {prompt_text(self.rounds[self._round])}"
        messages = [{"role": "user", "content": question}]
        return StepOutput(env_messages=messages, done=False, reward_components=reward)


def make_rounds(
    *,
    rounds: int,
    **arguments: Any,  # noqa: ANN401 - those of make_examples
) -> list[list[list[int]]]:
    """Return examples that consist of `rounds` lists each, without the lists that are left over."""
    lists = make_examples(**arguments)
    return [lists[end - rounds : end] for end in range(rounds, len(lists) + 1, rounds)]


class SumDigitsRoundsDataset(MadeDataset):
    """Dataset whose examples consist of `rounds` lists each.

    `count` is the number of lists, so there are `count // rounds` examples.
    """

    @dataclass(kw_only=True, slots=True)
    class Config(SumDigitsDataset.Config):
        rounds: PositiveInt = 2

        @property
        def turns_needed(self) -> int:
            return self.rounds

    make = staticmethod(make_rounds)


class SumDigitsRoundsTask(Task):
    """Task that asks for several sums in turn, rewarded as they are answered."""

    @dataclass(kw_only=True, slots=True)
    class Config(Task.Config):
        dataset: Dataset.Config = field(default_factory=SumDigitsRoundsDataset.Config)
        validation: Dataset.Config | None = field(
            default_factory=lambda: SumDigitsRoundsDataset.Config(
                split="validation", count=256, seed=1
            )
        )
        rubric: Rubric.Config = field(
            default_factory=lambda: Rubric.Config(reward_fns=[env_component("right")])
        )
        env: RendererEnvConfig = field(
            default_factory=lambda: RendererEnvConfig(max_turns=2, max_rollout_tokens=192)
        )
        sampling: SamplingConfig = field(default_factory=lambda: SamplingConfig(max_tokens=8))

    def make_env(self, sample: DataSample) -> SumDigitsRoundsEnv:
        return SumDigitsRoundsEnv(sample.env_input)
