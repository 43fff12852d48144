"""Digit sums in several turns: after each reply the env sends the right sum and the next question.

The smallest task whose env messages the policy can learn to predict, as Echo needs.
"""

from dataclasses import dataclass, field
from typing import Any

from renderers import Message

from torchtitan.experiments.rl.bounds import PositiveInt
from torchtitan.experiments.rl.data.dataset import Dataset, MadeDataset
from torchtitan.experiments.rl.envs.message_env import MessageEnv, ResetOutput, StepOutput
from torchtitan.experiments.rl.envs.renderer_env import RendererEnvConfig
from torchtitan.experiments.rl.rollouts.policy import SamplingConfig
from torchtitan.experiments.rl.rollouts.types import DataSample
from torchtitan.experiments.rl.rubrics.rubric import Rubric, env_component
from torchtitan.experiments.rl.tasks.sum_digits import SumDigitsDataset, answer_text, make_examples, prompt_text
from torchtitan.experiments.rl.tasks.task import Task


class SumDigitsRoundsEnv(MessageEnv):
    """Gives 1 / rounds, as component "right", for each right reply, so that a rollout's sum is in [0, 1]."""

    def __init__(self, rounds: list[list[int]]):
        self.rounds = rounds
        self._round = 0

    async def reset(self) -> ResetOutput:
        return ResetOutput(messages=[{"role": "user", "content": prompt_text(self.rounds[0])}])

    async def step_message(self, message: Message) -> StepOutput:
        answer = answer_text(self.rounds[self._round])
        right = message["content"].strip() == answer
        self._round += 1
        done = self._round == len(self.rounds)
        messages = (
            [] if done else [{"role": "user", "content": f"The sum is {answer}. {prompt_text(self.rounds[self._round])}"}]
        )
        return StepOutput(env_messages=messages, done=done, reward_components={"right": right / len(self.rounds)})


def make_rounds(*, rounds: int, **config: Any) -> list[list[list[int]]]:
    """Examples of ``rounds`` lists of sum_digits each."""
    lists = make_examples(**config)
    return [lists[end - rounds : end] for end in range(rounds, len(lists) + 1, rounds)]


class SumDigitsRoundsDataset(MadeDataset):
    """Examples of ``rounds`` lists of sum_digits each; ``env_input`` is a list of lists."""

    @dataclass(kw_only=True, slots=True)
    class Config(SumDigitsDataset.Config):
        rounds: PositiveInt = 2

    make = staticmethod(make_rounds)


class SumDigitsRoundsTask(Task):
    @dataclass(kw_only=True, slots=True)
    class Config(Task.Config):
        dataset: Dataset.Config = field(default_factory=SumDigitsRoundsDataset.Config)
        validation: Dataset.Config | None = field(
            default_factory=lambda: SumDigitsRoundsDataset.Config(split="validation", count=256, seed=1)
        )
        rubric: Rubric.Config = field(default_factory=lambda: Rubric.Config(reward_fns=[env_component("right")]))
        env: RendererEnvConfig = field(default_factory=lambda: RendererEnvConfig(max_turns=2, max_rollout_tokens=192))
        sampling: SamplingConfig = field(default_factory=lambda: SamplingConfig(max_tokens=8))

    def make_env(self, sample: DataSample) -> SumDigitsRoundsEnv:
        return SumDigitsRoundsEnv(sample.env_input)
