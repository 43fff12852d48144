"""Who runs a group: this process, or a mesh of workers (`actors/rollout_worker.py`)."""

from typing import Protocol

from torchtitan.experiments.rl.rollouts.policy import PolicyClient, SamplingConfig
from torchtitan.experiments.rl.rollouts.types import DataSample, RolloutGroup
from torchtitan.experiments.rl.tasks.task import Task


class GroupRunner(Protocol):
    async def run(self, task: Task, sample: DataSample, *, group_id: str) -> tuple[RolloutGroup, str | None]:
        """Run and score the training group of ``sample``. Returns it, and why it can't be trained on, or None.

        User code that fails ends in a rollout's status; what is raised here is our own fault.
        """

    async def measure(
        self, task: Task, sample: DataSample, *, group_id: str, sampling: SamplingConfig, group_size: int
    ) -> RolloutGroup:
        """Run and reward rollouts of the policy itself, without credit: for validation."""


class LocalRunner:
    """Runs groups on this process's event loop."""

    def __init__(self, policy: PolicyClient, *, seed: int):
        self._policy, self._seed = policy, seed

    async def run(self, task: Task, sample: DataSample, *, group_id: str) -> tuple[RolloutGroup, str | None]:
        """See GroupRunner."""
        group = await task.run_group(sample, self._policy, group_id=group_id, seed=self._seed)
        return group, await task.score_group(group)

    async def measure(
        self, task: Task, sample: DataSample, *, group_id: str, sampling: SamplingConfig, group_size: int
    ) -> RolloutGroup:
        """See GroupRunner."""
        group = await task.run_group(
            sample,
            self._policy,
            group_id=group_id,
            seed=self._seed,
            sampling=sampling,
            group_size=group_size,
            credit=False,
        )
        await task.score_rewards(group)
        return group
