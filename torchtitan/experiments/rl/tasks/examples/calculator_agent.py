"""Arithmetic with a calculator, by agents: a program that loops over HTTP, and an agent that forks.

Copy this file for an agent of your own; `tasks/examples/calculator.py` is the same task as an env.
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


class ForkingCalculatorTask(AgentTask):
    """Calls the calculator once; then three branches of the conversation answer side by side, and most votes win."""

    branches = 3

    async def run_agent(self, sample: DataSample, endpoint: Endpoint) -> str:
        """See AgentTask."""
        messages: list[Any] = [{"role": "user", "content": prompt_text(sample.env_input)}]
        headers = {"Authorization": f"Bearer {endpoint.key}"}
        async with aiohttp.ClientSession(headers=headers) as session:

            async def ask() -> dict[str, Any]:
                body = {"model": endpoint.model, "messages": messages, "tools": [CALCULATOR]}
                async with session.post(f"{endpoint.url}/chat/completions", json=body) as response:
                    said = await response.json()
                    return (
                        said["choices"][0]["message"] if response.status == 200 else {"content": ""}
                    )

            said = await ask()
            if not said.get("tool_calls"):
                return said["content"]
            messages.append(said)
            messages += map(tool_message, said["tool_calls"])
            answers = await asyncio.gather(*(ask() for _ in range(self.branches)))
        ((most, _),) = Counter(said["content"] or "" for said in answers).most_common(1)
        return most


class VotedRubric(Rubric):
    def register_funcs(self) -> list[RewardFn]:
        return [RewardFn(voted, takes="rollout"), RewardFn(called, weight=0.0, takes="rollout")]


async def voted(rollout: Rollout, expression: str) -> float:
    """Whether the answer with most votes is right, after a call that gave a number."""
    return float(final_number(rollout.answer) == evaluate(expression)) * await called(
        rollout, expression
    )
