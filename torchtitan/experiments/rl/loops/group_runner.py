"""Runs groups: on the controller's event loop, or in worker processes if envs need more than one.

    LocalRunner    rollout loop ─▶ Task.run_group ─▶ Task.score_group
    WorkerRunner   rollout loop ─▶ least busy RolloutWorker ─▶ LocalRunner there

A worker has its own tasks, renderer and generator clients. Tokens travel between generators and
worker; only whole groups travel between worker and controller, which keeps the samplers, the pacing
and the ledger.
"""

import asyncio
import functools
import logging
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from torchtitan.experiments.rl.ask.call import BLOCKING, ask, sentence
from torchtitan.experiments.rl.ask.ordered import OrderedCalls
from torchtitan.experiments.rl.compat.monarch import ask as ask_actor
from torchtitan.experiments.rl.config.run_config import UserCodeLimits
from torchtitan.experiments.rl.configurable import BuildContext
from torchtitan.experiments.rl.envs.renderer import RendererConfig, build_context
from torchtitan.experiments.rl.errors import RunError, UserCodeError, cause_of
from torchtitan.experiments.rl.generation.client import AdaptedPolicy, GeneratorClient
from torchtitan.experiments.rl.generation.endpoint import FrozenClients
from torchtitan.experiments.rl.generation.references import hosted_models
from torchtitan.experiments.rl.process import trace
from torchtitan.experiments.rl.process.actor import WatchedActor, reported_endpoint
from torchtitan.experiments.rl.process.lifetime import Lifetime, ProcessLost
from torchtitan.experiments.rl.process.logs import set_up_logging
from torchtitan.experiments.rl.process.trace import LoopLag
from torchtitan.experiments.rl.rollouts.policy import PolicyClient, SamplingConfig
from torchtitan.experiments.rl.rollouts.types import (
    DataSample,
    Rollout,
    RolloutGroup,
    RolloutStatus,
)
from torchtitan.experiments.rl.tasks.task import Task, frozen_sample

logger = logging.getLogger(__name__)

CANCEL_GROUPS_S = 8.0
"""Seconds that cancelled groups may take. With the limit of closing the tasks, it must stay below
the controller's limit for a worker's shutdown."""


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
            RunError: a setup failed, or took longer than its limit; names the task. That task
                counts as not set up, unless its setup returned too late.
        """
        for name, task in self.tasks.items():
            try:
                await ask(
                    task.setup,
                    with_own_adapter(policy, task),
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
    """Number of rollouts; None for the task's, which a task with its own ``run_group`` decides."""
    sampling: SamplingConfig | None = None
    """Sampling of the rollouts; None for the task's."""
    credit: bool = True
    """True if the algorithm gives credit; False for rewards alone, as validation wants them."""
    uncredited: RolloutGroup | None = None
    """Group that was run without credit, and gets it now."""
    policy_version: int = 0
    """Policy version that the generators hold now, of which a rollout worker hears in this way."""


class GroupRunner:
    """Runs the groups that the rollout loop and the validator ask for."""

    async def run(self, task: Task, request: GroupRequest) -> RolloutGroup:
        """Return the group, with a ``failure`` if it can't be trained on.

        User code that fails ends in a rollout's status. An exception is a fault of the library. For
        an uncredited group the result may be another object.
        """
        raise NotImplementedError

    def lap(self) -> tuple[float, int]:
        """Return what happened since the last call.

        Returns:
            The longest lag in seconds of other processes' event loops, and the number of calls of
            user code that held up an event loop beyond their limit.
        """
        raise NotImplementedError


def with_own_adapter(policy: PolicyClient, task: Task) -> PolicyClient:
    """Return the run's policy, with the task's adapter if it names one.

    A model that is only measured, such as an endpoint, has no adapters.
    """
    adapter = task.config.adapter
    return (
        AdaptedPolicy(policy, adapter)
        if adapter and isinstance(policy, GeneratorClient)
        else policy
    )


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


class LocalRunner(GroupRunner):
    """Runs groups on this process's event loop."""

    def __init__(self, policy: PolicyClient, *, seed: int):
        self._policy = policy
        self._seed = seed

    async def run(self, task: Task, request: GroupRequest) -> RolloutGroup:
        options: dict[str, Any] = {}  # a task's own run_group may not take them
        if request.group_size is not None:
            options = {
                "group_size": request.group_size,
                "sampling": request.sampling,
                "credit": request.credit,
            }
        with trace.lane("group", group=request.group_id):
            if request.uncredited is not None:
                with trace.span("score"):
                    await task.give_credit(request.uncredited, late=True)
                return request.uncredited
            try:
                example = frozen_sample(request.data_sample)
            except UserCodeError as error:
                return _group_without_example(task, request, f"task {task.name!r}: {error}")
            policy = with_own_adapter(self._policy, task)
            group = await task.run_group(
                example,
                policy,
                group_id=request.group_id,
                seed=self._seed,
                **options,
            )
            for rollout in group.rollouts:
                for sample in rollout.samples:
                    sample.amend(adapter=task.config.adapter)
            with trace.span("score"):
                await (task.score_group(group) if request.credit else task.score_rewards(group))
        return group.freeze()

    def lap(self) -> tuple[float, int]:
        return 0.0, BLOCKING.lap()


@dataclass(kw_only=True, slots=True)
class GroupResult:
    """Answer of a rollout worker."""

    group: RolloutGroup
    event_loop_lag_s: float
    """Longest lag of the worker's event loop since its last result."""
    blocking_calls: int = 0
    """Number of calls of user code that held up the worker's event loop beyond their limit."""


@dataclass(kw_only=True, slots=True)
class _Worker:
    """Rollout worker as the controller sees it."""

    actor: Any
    life: Lifetime
    open_rollouts: int = 0


class WorkerRunner(GroupRunner):
    """Sends each group to the worker with the fewest open rollouts.

    The groups of a worker that dies are run again, under the same ids, by another worker or by the
    next of the same index.
    """

    def __init__(self, policy: GeneratorClient):
        self._workers: dict[int, _Worker] = {}
        self._admitted = asyncio.Event()
        self._policy = policy
        self._lag_s = 0.0
        self._blocking_calls = 0

    def admit(self, index: int, actor: Any, life: Lifetime) -> None:  # noqa: ANN401 - Monarch's
        """Start sending groups to worker ``index``, which is set up."""
        self._workers[index] = _Worker(actor=actor, life=life)
        self._admitted.set()

    def lose(self, index: int) -> None:
        """Stop sending groups to worker ``index``, which is gone."""
        self._workers.pop(index, None)

    async def run(self, task: Task, request: GroupRequest) -> RolloutGroup:
        rollouts = request.group_size or task.config.group_size
        while True:
            worker = await self._least_busy()
            request.policy_version = self._policy.version
            worker.open_rollouts += rollouts
            try:
                result = await worker.life.call(ask_actor(worker.actor.run, task.name, request))
                break
            except ProcessLost as lost:
                logger.info("group %s is run again: %s", request.group_id, lost)
            finally:
                worker.open_rollouts -= rollouts
        self._lag_s = max(self._lag_s, result.event_loop_lag_s)
        self._blocking_calls += result.blocking_calls
        if request.uncredited is None:
            self._policy.generated_tokens += sum(
                rollout.completion_tokens for rollout in result.group.rollouts
            )
        return result.group.freeze()  # what another process sends can be changed

    def lap(self) -> tuple[float, int]:
        lag_s = self._lag_s
        blocking_calls = self._blocking_calls
        self._lag_s = 0.0
        self._blocking_calls = 0
        return lag_s, blocking_calls

    async def _least_busy(self) -> _Worker:
        """Return the worker with the fewest open rollouts; wait while every worker is gone."""
        while True:
            living = [
                worker for _, worker in sorted(self._workers.items()) if worker.life.cause is None
            ]
            if living:
                return min(living, key=lambda worker: worker.open_rollouts)
            self._admitted.clear()
            await self._admitted.wait()


class RolloutWorker(WatchedActor):
    """Actor that runs groups.

    Call `admit` for the replicas, `setup` once, and then `run` for any number of groups at a time.
    """

    def __init__(  # noqa: PLR0913 - what the controller tells a process that it spawns
        self,
        tasks: dict[str, Task.Config],
        *,
        renderer: RendererConfig,
        tokenizer_path: str,
        seed: int,
        run_dir: str,
        limits: UserCodeLimits,
        index: int,
        client_id: int,
        stops_at_texts: bool,
    ):
        """Connect to nothing yet.

        Args:
            index: number of the worker.
            client_id: id that no other client of the generators ever had in this run, so that no
                answer to a worker that died is taken for one to its successor.
            stops_at_texts: see EngineConfig.
        """
        super().__init__()
        self.process_name = f"rollout_worker {index}"
        set_up_logging(run_dir, f"rollout_worker-{index}")
        # The controller replaces a replica whose engine has stopped. Its requests wait here.
        self._frozen = FrozenClients(hosted_models(tasks), client_id=client_id)
        self._policy = GeneratorClient(
            client_id=client_id,
            stops_at_texts=stops_at_texts,
            frozen=self._frozen.find,
            on_stopped=lambda replica, cause: None,
        )
        self._clients = {"": self._policy} | self._frozen.generators
        self._runner = LocalRunner(self._policy, seed=seed)
        self._context = build_context(renderer, tokenizer_path, seed=seed)
        ordered = OrderedCalls(timeout_s=limits.call_timeout_s)
        self._task_set = TaskSet(tasks, ordered=ordered, limits=limits)
        self._running: set[asyncio.Task] = set()
        self._lag = LoopLag()

    @reported_endpoint
    async def admit(self, model: str, index: int, actor: Any) -> None:  # noqa: ANN401 - Monarch's
        """Start sending requests to a replica (`Replicas` says how models are named)."""
        with suppress(ProcessLost):  # ``lose`` follows
            await self._clients[model].admit(index, actor)

    @reported_endpoint
    async def lose(self, model: str, index: int) -> None:
        """Send the requests of a replica that is gone to another, or to it when it is back."""
        self._clients[model].lose(index)

    @reported_endpoint
    async def setup(self) -> None:
        """Build the tasks and set them up.

        Raises:
            RunError: a task failed; names it.
        """
        await self._task_set.build(self._context)
        await self._task_set.setup(self._policy)
        self._lag.start()

    @reported_endpoint
    async def run(self, task: str, request: GroupRequest) -> GroupResult:
        work = asyncio.create_task(
            self._run(self._task_set.tasks[task], request), name=request.group_id
        )
        self._running.add(work)
        work.add_done_callback(self._running.discard)
        return await work

    @reported_endpoint
    async def shutdown(self) -> list[str]:
        """Cancel what runs, so that every env is closed, and close the tasks that were set up.

        Returns:
            A line for each fault.
        """
        running = list(self._running)
        for work in running:
            work.cancel()
        if running:
            await asyncio.wait(running, timeout=CANCEL_GROUPS_S)
        self._lag.stop()
        faults = await self._task_set.close()
        self._policy.close()
        try:
            await self._frozen.close()
        except Exception as error:  # noqa: BLE001 - the other faults are reported too
            faults.append(f"closing the frozen models: {cause_of(error)}")
        return faults

    async def _run(self, task: Task, request: GroupRequest) -> GroupResult:
        self._policy.version = max(self._policy.version, request.policy_version)
        group = await self._runner.run(task, request)
        return GroupResult(
            group=group, event_loop_lag_s=self._lag.lap(), blocking_calls=BLOCKING.lap()
        )
