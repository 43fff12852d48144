"""Runs groups: on this process's event loop, or on the least busy of a mesh of workers (`rollout_worker.py`)."""

import asyncio
import logging
from dataclasses import dataclass
from typing import Any, Protocol

from torchtitan.experiments.rl.compat.monarch import ask
from torchtitan.experiments.rl.generation.client import GeneratorClient
from torchtitan.experiments.rl.process import trace
from torchtitan.experiments.rl.process.lifetime import Lifetime, ProcessLost
from torchtitan.experiments.rl.rollouts.policy import PolicyClient, SamplingConfig
from torchtitan.experiments.rl.rollouts.types import DataSample, RolloutGroup
from torchtitan.experiments.rl.tasks.task import Task
from torchtitan.experiments.rl.user_code.calls import BLOCKING

logger = logging.getLogger(__name__)


class GroupRunner(Protocol):
    async def run(self, task: Task, sample: DataSample, *, group_id: str, credit: bool = True) -> RolloutGroup:
        """Run and score a training group of ``sample``. A group that can't be trained on has a ``failure``.

        User code that fails ends in a rollout's status; an exception raised here is a fault of the library.

        Args:
            credit: False: rewards alone; call ``credit`` next.
        """

    async def credit(self, task: Task, group: RolloutGroup) -> RolloutGroup:
        """Give a group credit that ``run`` gave none. Returns the group, which may be another object."""

    async def measure(
        self, task: Task, sample: DataSample, *, group_id: str, sampling: SamplingConfig, group_size: int
    ) -> RolloutGroup:
        """Run and reward rollouts of the policy itself, without credit: for validation."""

    def lap_lag_s(self) -> float:
        """Longest event-loop lag in seconds of other processes since the last call; 0 where there are none."""

    def lap_blocking_calls(self) -> int:
        """Calls of user code that held up an event loop beyond their limit, since the last call."""


class LocalRunner:
    """Runs groups on this process's event loop."""

    def __init__(self, policy: PolicyClient, *, seed: int):
        self._policy, self._seed = policy, seed

    async def run(self, task: Task, sample: DataSample, *, group_id: str, credit: bool = True) -> RolloutGroup:
        """See GroupRunner."""
        # A task's own run_group may not take them, and needs its group.
        own: dict[str, Any] = {} if task.needs_group else {"group_size": 1, "credit": credit}
        with trace.lane("group", group=group_id):
            group = await task.run_group(sample, self._policy, group_id=group_id, seed=self._seed, **own)
            with trace.span("score"):
                await (task.score_group(group) if credit else task.score_rewards(group))
        return group

    async def credit(self, task: Task, group: RolloutGroup) -> RolloutGroup:
        """See GroupRunner."""
        with trace.lane("group", group=group.group_id), trace.span("score"):
            await task.credit_group(group)
        return group

    async def measure(
        self, task: Task, sample: DataSample, *, group_id: str, sampling: SamplingConfig, group_size: int
    ) -> RolloutGroup:
        """See GroupRunner."""
        with trace.lane("group", group=group_id):
            group = await task.run_group(
                sample,
                self._policy,
                group_id=group_id,
                seed=self._seed,
                sampling=sampling,
                group_size=group_size,
                credit=False,
            )
            with trace.span("score"):
                await task.score_rewards(group)
        return group

    def lap_lag_s(self) -> float:
        """See GroupRunner."""
        return 0.0

    def lap_blocking_calls(self) -> int:
        """See GroupRunner."""
        return BLOCKING.lap()


@dataclass(kw_only=True, slots=True)
class Measurement:
    """How the rollouts of a group that is only measured are sampled."""

    sampling: SamplingConfig
    group_size: int


@dataclass(kw_only=True, slots=True)
class GroupRequest:
    """A group for a rollout worker to run."""

    task: str
    data_sample: DataSample
    group_id: str
    policy_version: int
    """Policy version that the generators hold now."""
    measurement: Measurement | None = None
    """None: a training group, sampled with the task's own config."""
    credit: bool = True
    """Of a training group: False has it rewarded alone."""
    group: RolloutGroup | None = None
    """A group that was run without credit, and gets it now."""


@dataclass(kw_only=True, slots=True)
class GroupResult:
    group: RolloutGroup
    event_loop_lag_s: float
    """Longest lag of the worker's event loop since its last result."""
    blocking_calls: int = 0
    """Calls of user code that held it up beyond their limit since then."""


@dataclass(kw_only=True, slots=True)
class _Worker:
    actor: Any
    life: Lifetime
    open_rollouts: int = 0


class WorkerRunner:
    """Sends each group to the worker with the fewest open rollouts. Envs, rubrics and algorithms run there.

    The groups of a worker that dies are run again, under the same ids, by another one or when it is back.
    """

    def __init__(self, policy: GeneratorClient):
        self._workers: dict[int, _Worker] = {}
        self._admitted = asyncio.Event()
        self._policy = policy
        self._lag_s = 0.0
        self._blocking_calls = 0

    def admit(self, index: int, actor: Any, life: Lifetime) -> None:
        """Give groups to worker ``index`` from now on. It is set up."""
        self._workers[index] = _Worker(actor=actor, life=life)
        self._admitted.set()

    def lose(self, index: int) -> None:
        """Give it no more."""
        self._workers.pop(index, None)

    async def run(self, task: Task, sample: DataSample, *, group_id: str, credit: bool = True) -> RolloutGroup:
        """See GroupRunner."""
        rollouts = task.config.group_size if task.needs_group else 1
        group = await self._send(task, sample, group_id, rollouts=rollouts, credit=credit)
        self._count(group)
        return group

    async def credit(self, task: Task, group: RolloutGroup) -> RolloutGroup:
        """See GroupRunner."""
        return await self._send(task, group.data_sample, group.group_id, rollouts=len(group.rollouts), group=group)

    async def measure(
        self, task: Task, sample: DataSample, *, group_id: str, sampling: SamplingConfig, group_size: int
    ) -> RolloutGroup:
        """See GroupRunner."""
        measurement = Measurement(sampling=sampling, group_size=group_size)
        group = await self._send(task, sample, group_id, rollouts=group_size, measurement=measurement)
        self._count(group)
        return group

    def lap_lag_s(self) -> float:
        """See GroupRunner."""
        lag_s, self._lag_s = self._lag_s, 0.0
        return lag_s

    def lap_blocking_calls(self) -> int:
        """See GroupRunner."""
        calls, self._blocking_calls = self._blocking_calls, 0
        return calls

    def _count(self, group: RolloutGroup) -> None:
        self._policy.generated_tokens += sum(rollout.completion_tokens for rollout in group.rollouts)

    async def _send(self, task: Task, sample: DataSample, group_id: str, *, rollouts: int, **what: Any) -> RolloutGroup:
        """``what`` is of the request."""
        while True:
            worker = await self._least_busy()
            request = GroupRequest(
                task=task.name,
                data_sample=sample,
                group_id=group_id,
                policy_version=self._policy.version,
                **what,
            )
            worker.open_rollouts += rollouts
            try:
                result = await worker.life.call(ask(worker.actor.run, request))
                break
            except ProcessLost as lost:
                logger.info("group %s is run again: %s", group_id, lost)
            finally:
                worker.open_rollouts -= rollouts
        self._lag_s = max(self._lag_s, result.event_loop_lag_s)
        self._blocking_calls += result.blocking_calls
        return result.group

    async def _least_busy(self) -> _Worker:
        """Waits while every worker is gone."""
        while True:
            living = [worker for _, worker in sorted(self._workers.items()) if worker.life.cause is None]
            if living:
                return min(living, key=lambda worker: worker.open_rollouts)
            self._admitted.clear()
            await self._admitted.wait()
