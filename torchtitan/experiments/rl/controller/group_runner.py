"""Who runs a group: this process, or the least busy of a mesh of workers (`controller/rollout_worker.py`)."""

from typing import Any, Protocol

from torchtitan.experiments.rl.controller.rollout_worker import GroupRequest
from torchtitan.experiments.rl.generation.client import GeneratorClient
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

    def lap_lag_s(self) -> float:
        """Longest time since the last call that an event loop of other processes was held up; 0 where there are none."""


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

    def lap_lag_s(self) -> float:
        return 0.0


class WorkerRunner:
    """Hands each group to the worker with the fewest open rollouts. Envs, rubrics and algorithms run there."""

    def __init__(self, mesh: Any, workers: int, policy: GeneratorClient):
        self._workers = [mesh.slice(procs=index) for index in range(workers)]
        self._open = [0] * workers
        self._policy = policy
        self._lag_s = 0.0

    async def run(self, task: Task, sample: DataSample, *, group_id: str) -> tuple[RolloutGroup, str | None]:
        """See GroupRunner."""
        return await self._ask(task.config.group_size, task, sample, group_id)

    async def measure(
        self, task: Task, sample: DataSample, *, group_id: str, sampling: SamplingConfig, group_size: int
    ) -> RolloutGroup:
        """See GroupRunner."""
        group, _ = await self._ask(group_size, task, sample, group_id, sampling=sampling, measured_size=group_size)
        return group

    def lap_lag_s(self) -> float:
        """See GroupRunner."""
        lag_s, self._lag_s = self._lag_s, 0.0
        return lag_s

    async def _ask(
        self, rollouts: int, task: Task, sample: DataSample, group_id: str, **fields: Any
    ) -> tuple[RolloutGroup, str | None]:
        request = GroupRequest(
            task=task.name, data_sample=sample, group_id=group_id, policy_version=self._policy.version, **fields
        )
        index = min(range(len(self._workers)), key=self._open.__getitem__)
        self._open[index] += rollouts
        try:
            result = await self._workers[index].run.call_one(request)
        finally:
            self._open[index] -= rollouts
        self._lag_s = max(self._lag_s, result.event_loop_lag_s)
        self._policy.generated_tokens += sum(rollout.completion_tokens for rollout in result.group.rollouts)
        return result.group, result.problem
