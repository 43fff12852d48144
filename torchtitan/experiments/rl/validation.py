"""How good the policy is: greedy completions of the same held-out examples, each time."""

import asyncio
from dataclasses import dataclass, replace

import numpy as np

from torchtitan.experiments.rl.rollouts.policy import PolicyClient
from torchtitan.experiments.rl.rollouts.types import Rollout
from torchtitan.experiments.rl.tasks.task import Task


@dataclass(kw_only=True, slots=True)
class ValidationConfig:
    every: int = 10
    """Steps between two validations; before the first step and after the last there always is one. 0 turns all off."""
    samples: int = 128
    """Examples of each task's validation set, from its start; all of a smaller set."""
    temperature: float = 0.0
    """0 is greedy."""


@dataclass(kw_only=True, slots=True)
class ValidationReport:
    reward: float | None
    """Mean over tasks of their mean reward; None when no task has a validation set."""
    metrics: dict[str, float]


async def validate(tasks: dict[str, Task], policy: PolicyClient, config: ValidationConfig, *, seed: int) -> ValidationReport:
    """Run every task's held-out examples once. The weights must not change meanwhile.

    A rollout that failed has no reward: it is left out of the mean and counted.
    """
    rewards, metrics = [], {}
    for name, task in tasks.items():
        if task.validation is None:
            continue
        rollouts = await _rollouts(task, policy, config, seed)
        scored = [rollout.reward for rollout in rollouts if rollout.reward is not None]
        metrics[f"validation/{name}/failed"] = len(rollouts) - len(scored)
        metrics[f"validation/{name}/completion_tokens"] = float(np.mean([rollout.completion_tokens for rollout in rollouts]))
        if scored:
            metrics[f"validation/{name}/reward"] = float(np.mean(scored))
            rewards.append(metrics[f"validation/{name}/reward"])
    if rewards:
        metrics["validation/reward"] = float(np.mean(rewards))
    return ValidationReport(reward=metrics.get("validation/reward"), metrics=metrics)


async def _rollouts(task: Task, policy: PolicyClient, config: ValidationConfig, seed: int) -> list[Rollout]:
    sampling = replace(task.config.sampling, temperature=config.temperature)

    async def one(index: int) -> Rollout:
        group_id = f"validation-{task.name}-{index}"
        group = await task.run_group(
            task.validation[index], policy, group_id=group_id, seed=seed, sampling=sampling, group_size=1, credit=False
        )
        await task.score_rewards(group)
        return group.rollouts[0]

    return await asyncio.gather(*(one(index) for index in range(min(config.samples, len(task.validation)))))
