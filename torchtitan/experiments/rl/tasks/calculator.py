"""Arithmetic with a tool that the model must call. Copy this file for a task with tools.

What the model writes for the tool may be anything. It is parsed and never run, and only numbers and operators count. Every
result is bounded before the next operation, so that ``9**9**9`` is refused in microseconds instead of filling the memory.
"""

import ast
import json
import math
import operator
import random
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Annotated, Any

from annotated_types import Interval
from renderers import Message, ToolCall

from torchtitan.experiments.rl.bounds import AtMost
from torchtitan.experiments.rl.data.dataset import Dataset, MadeDataset, Split, split_of_text
from torchtitan.experiments.rl.envs.message_env import MessageEnv, ResetOutput, StepOutput
from torchtitan.experiments.rl.envs.renderer_env import RendererEnvConfig
from torchtitan.experiments.rl.rollouts.policy import SamplingConfig
from torchtitan.experiments.rl.rollouts.types import DataSample, Rollout, RolloutStatus
from torchtitan.experiments.rl.rubrics.rubric import RewardFn, Rubric, env_components
from torchtitan.experiments.rl.tasks.answers import number_of
from torchtitan.experiments.rl.tasks.task import Task

MAX_CHARACTERS = 200
"""Also bounds how deep the parser and `evaluate` recurse."""
MAX_BITS = 256
"""Of an integer, and of a power's exponent as a number: far above what a question needs, far below what takes time."""

OPERATIONS: dict[type[ast.operator] | type[ast.unaryop], Callable[..., Any]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
    ast.Pow: operator.pow,
    ast.UAdd: operator.pos,
    ast.USub: operator.neg,
}


class ExpressionError(ValueError):
    """The calculator does not evaluate this text. The env sends the message to the model."""


def evaluate(expression: str) -> int | float:
    """The value of an expression of numbers, ``+ - * / // % **`` and parentheses.

    Raises:
        ExpressionError: it is anything else, divides by zero, or a value on the way is too large.
    """
    if len(expression) > MAX_CHARACTERS:
        raise ExpressionError("expression too long")
    try:
        return _value(ast.parse(expression.strip(), mode="eval").body)
    except ZeroDivisionError:
        raise ExpressionError("division by zero") from None
    except OverflowError:
        raise ExpressionError("number too large") from None
    # Null bytes, lone surrogates, a hundred open parentheses: the parser has several ways to refuse.
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        raise error if isinstance(error, ExpressionError) else ExpressionError("invalid expression") from None


def number_text(value: int | float) -> str:
    """Integers in full, other numbers with ten significant digits."""
    if isinstance(value, int) or (value.is_integer() and abs(value) < 1e15):
        return str(int(value))
    return f"{value:.10g}"


def _value(node: ast.expr) -> int | float:
    match node:
        case ast.Constant(value=int() | float() as value) if not isinstance(value, bool):
            return _bounded(value)
        case ast.UnaryOp(op=op, operand=operand) if type(op) in OPERATIONS:
            return OPERATIONS[type(op)](_value(operand))
        case ast.BinOp(left=left, op=op, right=right) if type(op) in OPERATIONS:
            a, b = _value(left), _value(right)
            # An integer of n bits is at least 2 ** (n - 1).
            bits = a.bit_length() - 1 if isinstance(a, int) else 0
            if isinstance(op, ast.Pow) and (abs(b) > MAX_BITS or bits * abs(b) > MAX_BITS):
                raise ExpressionError("number too large")
            return _bounded(OPERATIONS[type(op)](a, b))
    raise ExpressionError("invalid expression")


def _bounded(value: int | float | complex) -> int | float:
    if isinstance(value, complex):
        raise ExpressionError("not a real number")
    if not math.isfinite(value) or (isinstance(value, int) and value.bit_length() > MAX_BITS):
        raise ExpressionError("number too large")
    return value


OPERATORS = "+-*"
"""No division: every answer is an integer, written in one way."""


def prompt_text(expression: str) -> str:
    """The user's message."""
    return f"What is {expression}? Use the calculator, then give the final answer as a number."


def make_examples(
    count: int, *, split: Split, seed: int = 0, min_operands: int = 2, max_operands: int = 4, max_operand: int = 999
) -> list[str]:
    """`count` expressions of `min_operands` to `max_operands` numbers from 0 to `max_operand`, every length equally likely.

    A longer call with the same arguments starts with the shorter one's expressions.
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


NAME, ERROR = "calculator", "Error"
CALCULATOR = {
    "type": "function",  # with its wrapping, because that is what models saw in training
    "function": {
        "name": NAME,
        "description": "Evaluate an arithmetic expression and return the result.",
        "parameters": {"type": "object", "properties": {"expression": {"type": "string"}}, "required": ["expression"]},
    },
}


class CalculatorEnv(MessageEnv):
    """Gives 1, as component "calculated", for each call that gave a number. The rubric asks for at least one.

    A tool message tells the model of its mistake, so it can try again. An exception would make the mistake an error of
    the env, and the rollout would be lost to training.
    """

    def __init__(self, expression: str):
        self.expression = expression

    async def reset(self) -> ResetOutput:
        return ResetOutput(messages=[{"role": "user", "content": prompt_text(self.expression)}], tools=[CALCULATOR])

    async def step_message(self, message: Message) -> StepOutput:
        answers: list[Any] = [tool_message(call) for call in message.get("tool_calls", [])]
        calculated = sum(not answer["content"].startswith(ERROR) for answer in answers)
        # These have no id to answer to: the renderer could not even tell where their parts begin.
        answers += [{"role": "tool", "content": "Error: invalid tool call"} for _ in message.get("malformed_tool_calls", [])]
        return StepOutput(env_messages=answers, done=not answers, reward_components={"calculated": calculated})


def tool_message(call: ToolCall) -> dict[str, str]:
    """The calculator's answer to a well-formed tool call: a number, or what is wrong."""
    try:
        content = calculate(call)
    except ExpressionError as error:
        content = f"{ERROR}: {error}"
    return {"role": "tool", "tool_call_id": call["id"], "name": call["function"]["name"], "content": content}


def calculate(call: ToolCall) -> str:
    """What a well-formed tool call asks for.

    Raises:
        ExpressionError: another tool, other arguments, or no expression it can evaluate.
    """
    if call["function"]["name"] != NAME:
        raise ExpressionError("unknown tool")
    try:
        arguments = json.loads(call["function"]["arguments"])
    except (ValueError, RecursionError):
        arguments = None
    if not isinstance(arguments, dict) or not isinstance(arguments.get("expression"), str):
        raise ExpressionError("invalid arguments")
    return number_text(evaluate(arguments["expression"]))


class CalculatorRubric(Rubric):
    def register_funcs(self) -> list[RewardFn]:
        return [RewardFn(solved), RewardFn(right, weight=0.0), RewardFn(called, weight=0.0)]


async def solved(rollout: Rollout, expression: str) -> float:
    return await right(rollout, expression) * await called(rollout, expression)


async def right(rollout: Rollout, expression: str) -> float:
    """Whether the final message gives the answer. A rollout that was cut off has no final message."""
    return float(rollout.status is RolloutStatus.COMPLETED and number_of(rollout) == evaluate(expression))


async def called(rollout: Rollout, expression: str) -> float:
    """Whether some call gave a number."""
    return float(env_components(rollout).get("calculated", 0.0) > 0)


Operands = Annotated[int, Interval(ge=2, le=20)]
"""What stays within the calculator's bounds: 20 factors of 999 have 200 bits and 118 characters."""


class CalculatorDataset(MadeDataset):
    @dataclass(kw_only=True, slots=True)
    class Config(MadeDataset.Config):
        min_operands: Annotated[Operands, AtMost("max_operands")] = 2
        max_operands: Operands = 4
        """Numbers in an expression."""
        max_operand: Annotated[int, Interval(ge=9, le=999)] = 999

        @property
        def turns_needed(self) -> int:
            return 2  # a call and an answer

    make = staticmethod(make_examples)


class CalculatorTask(Task):
    @dataclass(kw_only=True, slots=True)
    class Config(Task.Config):
        dataset: Dataset.Config = field(default_factory=CalculatorDataset.Config)
        validation: Dataset.Config | None = field(
            default_factory=lambda: CalculatorDataset.Config(split="validation", count=64, seed=1)
        )
        rubric: Rubric.Config = field(default_factory=CalculatorRubric.Config)
        env: RendererEnvConfig = field(default_factory=lambda: RendererEnvConfig(max_turns=4, max_rollout_tokens=1024))
        sampling: SamplingConfig = field(default_factory=lambda: SamplingConfig(max_tokens=128))

    def make_env(self, sample: DataSample) -> CalculatorEnv:
        return CalculatorEnv(sample.env_input)
