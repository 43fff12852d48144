"""A question and a tool. The env answers tool calls, also malformed ones, until a message of the model has none."""

import json

from renderers import Message, ToolCall

from torchtitan.experiments.rl.envs.message_env import MessageEnv, ResetOutput, StepOutput
from torchtitan.experiments.rl.tasks.calculator.arithmetic import ExpressionError, evaluate, number_text
from torchtitan.experiments.rl.tasks.calculator.data import prompt_text

NAME = "calculator"
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
        answers, calculated = [], 0
        for call in message.get("tool_calls", []):
            try:
                content = calculate(call)
                calculated += 1
            except ExpressionError as error:
                content = f"Error: {error}"
            answers.append({"role": "tool", "tool_call_id": call["id"], "name": call["function"]["name"], "content": content})
        # These have no id to answer to: the renderer could not even tell where their parts begin.
        answers += [{"role": "tool", "content": "Error: invalid tool call"} for _ in message.get("malformed_tool_calls", [])]
        return StepOutput(env_messages=answers, done=not answers, reward_components={"calculated": calculated})


def calculate(call: ToolCall) -> str:
    """The calculator's answer to a well-formed tool call.

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
