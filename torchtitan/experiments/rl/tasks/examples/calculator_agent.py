"""Solves the calculator's task by agents: a program that loops over HTTP, and an agent that forks.

Copy this file for an agent of your own. `calculator.py` is the same task as an env, and
`calculator_program.py` is the program.
"""

import asyncio
from collections import Counter
from pathlib import Path
from typing import Any

import aiohttp

from torchtitan.experiments.rl.gateway.server import Endpoint
from torchtitan.experiments.rl.rollouts.types import DataSample, Rollout
from torchtitan.experiments.rl.rubrics.rubric import RewardFn, Rubric
from torchtitan.experiments.rl.tasks.agent import AgentTask
from torchtitan.experiments.rl.tasks.answers import final_number
from torchtitan.experiments.rl.tasks.examples.calculator import called
from torchtitan.experiments.rl.tasks.examples.calculator_program import (
    CALCULATOR,
    evaluate,
    prompt_text,
    tool_message,
)

PROGRAM = ["python", "-I", "-S", str(Path(__file__).with_name("calculator_program.py"))]
"""Command of the agent that is a program, for `agent_command_task`."""


class ForkingCalculatorTask(AgentTask):
    """Task whose agent calls the calculator once, and then lets three answers vote.

    The answers are branches of one conversation, sampled side by side. Most votes win.
    """

    branches = 3

    async def run_agent(self, sample: DataSample, endpoint: Endpoint) -> str:
        """See AgentTask."""
        messages: list[Any] = [{"role": "user", "content": prompt_text(sample.env_input)}]
        headers = {"Authorization": f"Bearer {endpoint.key}"}
        async with aiohttp.ClientSession(headers=headers) as session:
            message = await _complete(session, endpoint, messages)
            if not message.get("tool_calls"):
                return message["content"]
            messages += [message, *map(tool_message, message["tool_calls"])]
            answers = await asyncio.gather(
                *(_complete(session, endpoint, messages) for _ in range(self.branches))
            )
        ((winner, _),) = Counter(answer["content"] or "" for answer in answers).most_common(1)
        return winner


async def _complete(
    session: aiohttp.ClientSession, endpoint: Endpoint, messages: list[Any]
) -> dict[str, Any]:
    """Return the model's message after ``messages``, an empty one if the call is refused."""
    body = {"model": endpoint.model, "messages": messages, "tools": [CALCULATOR]}
    async with session.post(f"{endpoint.url}/chat/completions", json=body) as response:
        if response.status != 200:  # a limit of the rollout
            return {"content": ""}
        return (await response.json())["choices"][0]["message"]


class VotedRubric(Rubric):
    """Rubric that rewards the answer which the agent returns."""

    def register_funcs(self) -> list[RewardFn]:
        return [RewardFn(voted, takes="rollout"), RewardFn(called, weight=0.0, takes="rollout")]


async def voted(rollout: Rollout, expression: str) -> float:
    """Return 1 if the answer with most votes is right, after a call that gave a number, else 0."""
    is_right = final_number(rollout.answer) == evaluate(expression)
    return float(is_right) * await called(rollout, expression)
