"""Asks for the value of an expression, which the model has to compute with a tool.

    What is 12 * 7 - 3? ...   ->   calculator(12 * 7 - 3)   ->   81   ->   81

Copy this file for a task with tools. The calculator itself is in `calculator_program.py`.
"""

import random
from dataclasses import dataclass, field
from typing import Annotated, Any

from annotated_types import Interval
from renderers import Message

from torchtitan.experiments.rl.bounds import AtMost
from torchtitan.experiments.rl.data.dataset import Dataset, MadeDataset, Split, split_of_text
from torchtitan.experiments.rl.envs.message_env import MessageEnv, ResetOutput, StepOutput
from torchtitan.experiments.rl.envs.renderer_env import RendererEnvConfig
from torchtitan.experiments.rl.rollouts.policy import SamplingConfig
from torchtitan.experiments.rl.rollouts.types import DataSample, Rollout, RolloutStatus
from torchtitan.experiments.rl.rubrics.rubric import RewardFn, Rubric
from torchtitan.experiments.rl.tasks.answers import number_of
from torchtitan.experiments.rl.tasks.examples.calculator_program import (
    CALCULATOR,
    ERROR,
    evaluate,
    prompt_text,
    tool_message,
)
from torchtitan.experiments.rl.tasks.task import Task

OPERATORS = "+-*"
"""Operators of an expression. Without division, every answer is an integer."""


def make_examples(
    count: int,
    *,
    split: Split,
    seed: int = 0,
    min_operands: int = 2,
    max_operands: int = 4,
    max_operand: int = 999,
) -> list[str]:
    """Return `count` expressions of numbers up to `max_operand`, every length equally likely.

    A larger `count` adds expressions at the end.
    """
    stream = random.Random(f"calculator/{split}/{seed}")

    def draw() -> str:
        operands = stream.randint(min_operands, max_operands)
        while True:
            expression = str(stream.randint(0, max_operand))
            for _ in range(operands - 1):
                expression += f" {stream.choice(OPERATORS)} {stream.randint(0, max_operand)}"
            if split_of_text(expression) == split:
                return expression

    return [draw() for _ in range(count)]


class CalculatorEnv(MessageEnv):
    """Env that answers the model's calls until the model answers without one.

    Each call that gave a number gives 1 as component "calculated". A tool message tells the model
    of its mistake, so that it can try again. An exception would make the mistake an error of the
    env, and the rollout would be lost to training.
    """

    def __init__(self, expression: str):
        self.expression = expression

    async def reset(self) -> ResetOutput:
        question = {"role": "user", "content": prompt_text(self.expression)}
        return ResetOutput(messages=[question], tools=[CALCULATOR])

    async def step_message(self, message: Message) -> StepOutput:
        answers: list[Any] = [tool_message(call) for call in message.get("tool_calls", [])]
        calculated = sum(not answer["content"].startswith(ERROR) for answer in answers)
        for _ in message.get("malformed_tool_calls", []):
            # What the renderer can't parse has no id that the answer could name.
            answers.append({"role": "tool", "content": "Error: invalid tool call"})
        return StepOutput(
            env_messages=answers, done=not answers, reward_components={"calculated": calculated}
        )


class CalculatorRubric(Rubric):
    """Rubric that rewards a right answer after a call. Its other functions are only logged."""

    def register_funcs(self) -> list[RewardFn]:
        return [
            RewardFn(solved, takes="rollout"),
            RewardFn(right, weight=0.0, takes="rollout"),
            RewardFn(called, weight=0.0, takes="rollout"),
        ]


async def solved(rollout: Rollout, expression: str) -> float:
    """Return 1 if the answer is right and the calculator was used, else 0."""
    return await right(rollout, expression) * await called(rollout, expression)


async def right(rollout: Rollout, expression: str) -> float:
    """Return 1 if the final message gives the answer, else 0.

    A rollout that was cut off has no final message.
    """
    is_whole = rollout.status is RolloutStatus.COMPLETED
    return float(is_whole and number_of(rollout) == evaluate(expression))


async def called(rollout: Rollout, expression: str) -> float:
    """Return 1 if some call gave a number, else 0.

    It looks for the tool's answers in the prompts too: those of a program are in no env's messages.
    """
    messages = [
        message for turn in rollout.turns for message in (*turn.prompt_messages, *turn.env_messages)
    ]
    answers = [str(message["content"]) for message in messages if message["role"] == "tool"]
    return float(any(not answer.startswith(ERROR) for answer in answers))


Operands = Annotated[int, Interval(ge=2, le=20)]
"""Number of operands within the calculator's limit: 20 factors of 999 have 117 characters."""


class CalculatorDataset(MadeDataset):
    """Dataset of expressions."""

    @dataclass(kw_only=True, slots=True)
    class Config(MadeDataset.Config):
        min_operands: Annotated[Operands, AtMost("max_operands")] = 2
        max_operands: Operands = 4
        """Maximum number of operands in an expression."""
        max_operand: Annotated[int, Interval(ge=9, le=999)] = 999

        @property
        def turns_needed(self) -> int:
            return 2  # a call and an answer

    make = staticmethod(make_examples)


class CalculatorTask(Task):
    """Task whose rollouts are calls of the calculator and an answer."""

    @dataclass(kw_only=True, slots=True)
    class Config(Task.Config):
        dataset: Dataset.Config = field(default_factory=CalculatorDataset.Config)
        validation: Dataset.Config | None = field(
            default_factory=lambda: CalculatorDataset.Config(split="validation", count=64, seed=1)
        )
        rubric: Rubric.Config = field(default_factory=CalculatorRubric.Config)
        env: RendererEnvConfig = field(
            default_factory=lambda: RendererEnvConfig(max_turns=4, max_rollout_tokens=1024)
        )
        sampling: SamplingConfig = field(default_factory=lambda: SamplingConfig(max_tokens=128))

    def make_env(self, sample: DataSample) -> CalculatorEnv:
        return CalculatorEnv(sample.env_input)
