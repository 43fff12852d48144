"""Runs the groups that the rollout loop and the validator ask for, on this process's event loop.

    rollout loop, validator ──GroupRequest──▶ GroupRunner ──▶ RolloutGroup
                                              LocalRunner: Task.run_group ─▶ Task.score_group

`fleet/rollout_workers.py` has the other runner, which sends requests to processes that each have a
LocalRunner.
"""

import asyncio
import functools
from dataclasses import dataclass
from typing import Any

from torchtitan.experiments.rl.ask.call import ask, sentence
from torchtitan.experiments.rl.ask.ordered import OrderedCalls
from torchtitan.experiments.rl.config.run_config import UserCodeLimits
from torchtitan.experiments.rl.configurable import BuildContext
from torchtitan.experiments.rl.errors import RunError, UserCodeError
from torchtitan.experiments.rl.process import trace
from torchtitan.experiments.rl.rollouts.policy import PolicyClient, SamplingConfig
from torchtitan.experiments.rl.rollouts.types import (
    DataSample,
    Rollout,
    RolloutGroup,
    RolloutStatus,
)
from torchtitan.experiments.rl.tasks.scoring import gives_credit, refuse_unfit
from torchtitan.experiments.rl.tasks.task import Task, frozen_sample


class TaskSet:
    """Tasks of a run, in the process that runs the rollouts.

    Call `build`, then `setup`, and at the end `close`.
    """

    def __init__(
        self,
        configs: dict[str, Task.Config],
        *,
        ordered: OrderedCalls,
        limits: UserCodeLimits,
    ):
        self.tasks: dict[str, Task] = {}
        self._configs = configs
        self._ordered = ordered
        self._limits = limits
        self._to_close: list[Task] = []

    async def build(self, context: BuildContext) -> None:
        """Build every task, in the thread that calls samplers and datasets.

        Some of them, such as a database connection, work only in the thread that made them.

        Raises:
            RunError: a task, its dataset or another part of it failed, or took longer than its
                limit; names the task.
        """
        for name, config in self._configs.items():
            build = functools.partial(config.build, name=name, context=context)
            owner = f"task {name!r} can't be built"
            self.tasks[name] = await self._ordered.call(
                build, owner=owner, timeout_s=self._limits.setup_timeout_s
            )

    async def setup(self, policy: PolicyClient) -> None:
        """Set up every task.

        Raises:
            RunError: a setup failed, or took longer than its limit; names the task. `close` closes
                that task only if its setup returned, after the limit.
        """
        for name, task in self.tasks.items():
            try:
                await ask(
                    task.setup,
                    _policy_of(task, policy),
                    timeout_s=self._limits.setup_timeout_s,
                )
            except UserCodeError as error:
                if error.returned:
                    self._to_close.append(task)
                raise RunError(
                    f"task {name!r}: {type(task).__name__}.setup: {sentence(error)}"
                ) from error
            self._to_close.append(task)

    async def close(self) -> list[str]:
        """Close each task that was set up, once, side by side.

        Returns:
            A line for each task whose close failed.
        """
        tasks = self._to_close
        self._to_close = []
        faults = await asyncio.gather(*(self._close(task) for task in tasks))
        return [fault for fault in faults if fault is not None]

    async def _close(self, task: Task) -> str | None:
        try:
            await ask(task.close, timeout_s=self._limits.close_timeout_s)
        except UserCodeError as error:
            return f"task {task.name!r}: {type(task).__name__}.close: {sentence(error)}"
        return None


@dataclass(kw_only=True, slots=True)
class GroupRequest:
    """Order to run and score a group, or to give credit to one that has run."""

    data_sample: DataSample
    group_id: str
    group_size: int | None = None
    """Number of rollouts. None leaves it to the task's ``run_group``, which by default runs the
    task's ``group_size``. An override that takes no ``group_size`` works too: it is passed none."""
    sampling: SamplingConfig | None = None
    """Sampling of the rollouts; None for the task's."""
    credit: bool = True
    """True if the algorithm gives credit; False for rewards alone, as validation wants them."""
    evaluates: bool = False
    """True for an evaluation, which the task's ``validation_rubric`` rewards if there is one."""
    uncredited: RolloutGroup | None = None
    """Group that was run without credit, and gets it now."""
    policy_version: int = 0
    """Policy version that the generators hold when the request is sent to a rollout worker, which
    hears of it in no other way. Runners of this process don't read it."""


class GroupRunner:
    """Runs the groups that the rollout loop and the validator ask for."""

    async def run(self, task: Task, request: GroupRequest) -> RolloutGroup:
        """Return the group, with a ``failure`` if it can't be trained on.

        User code that fails ends in a rollout's status. An exception is a fault of the library. An
        uncredited group is changed in place, or returned as another object by a worker.
        """
        raise NotImplementedError

    def lap(self) -> tuple[float, int]:
        """Return how much the event loops of other processes were held up since the last call.

        Returns:
            Their longest lag in seconds, and the number of steps of user code that held up one of
            them for the whole limit of a call.
        """
        raise NotImplementedError


def _policy_of(task: Task, policy: PolicyClient) -> PolicyClient:
    """Return the run's policy, with the task's adapter if it names one."""
    adapter = task.config.adapter
    return policy.with_adapter(adapter) if adapter else policy


def _group_without_example(task: Task, request: GroupRequest, cause: str) -> RolloutGroup:
    """Return a group whose rollouts have failed, because no env can be given its example."""
    sample = DataSample(sample_id=request.data_sample.sample_id, env_input=None)
    rollouts = [
        Rollout(
            group_id=request.group_id,
            index_in_group=index,
            task_name=task.name,
            data_sample=sample,
            status=RolloutStatus.ERROR,
            error=cause,
        )
        for index in range(request.group_size or task.config.group_size)
    ]
    return RolloutGroup(
        group_id=request.group_id,
        task_name=task.name,
        data_sample=sample,
        rollouts=rollouts,
        failure=cause,
    ).freeze()


def _options(request: GroupRequest) -> dict[str, Any]:
    """Return the arguments of ``run_group`` that a request sets.

    The others are left out: the ``run_group`` of a user's task may not take them.
    """
    options: dict[str, Any] = {}
    if request.group_size is not None:
        options["group_size"] = request.group_size
    if request.sampling is not None:
        options["sampling"] = request.sampling
    if not request.credit:
        options["credit"] = False
    return options


def _check_credit(task: Task, group: RolloutGroup) -> None:
    """Fail a group that can't be trained on, if the library has not made and checked its samples.

    `GroupRun` makes samples, and `tasks/scoring.py` checks the credit of their tokens.
    """
    steps = ("run_group", "score_group", "give_credit")
    is_own = any(getattr(type(task), step, None) is not getattr(Task, step) for step in steps)
    if group.failure is None and (is_own or not gives_credit(task.algorithm)):
        refuse_unfit(group, task.config.adapter)


class LocalRunner(GroupRunner):
    """Runs groups on this process's event loop."""

    def __init__(self, policy: PolicyClient, *, seed: int):
        self._policy = policy
        self._seed = seed

    async def run(self, task: Task, request: GroupRequest) -> RolloutGroup:
        with trace.lane("group", group=request.group_id):
            if request.uncredited is not None:
                group = request.uncredited
                with trace.span("score"):
                    await task.give_credit(group, late=True)
                    _check_credit(task, group)
                return group
            try:
                example = frozen_sample(request.data_sample)
            except UserCodeError as error:
                return _group_without_example(task, request, f"task {task.name!r}: {error}")
            group = await task.run_group(
                example,
                _policy_of(task, self._policy),
                group_id=request.group_id,
                seed=self._seed,
                **_options(request),
            )
            with trace.span("score"):
                if request.credit:
                    await task.score_group(group)
                    _check_credit(task, group)
                elif request.evaluates and task.validation_rubric is not None:
                    await task.score_rewards(group, rubric=task.validation_rubric)
                else:
                    await task.score_rewards(group)
        return group.freeze()

    def lap(self) -> tuple[float, int]:
        return 0.0, 0
