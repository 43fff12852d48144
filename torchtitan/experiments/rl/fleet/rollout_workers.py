"""Runs groups in processes of their own, if envs need more than one event loop.

    controller   rollout loop ─▶ WorkerRunner ──GroupRequest──▶ least busy RolloutWorker
    worker                                    ◀──GroupResult──  RolloutWorker ─▶ LocalRunner

A worker has its own tasks, renderer and generator clients. Tokens travel between generators and
worker; only whole groups travel between worker and controller, which keeps the samplers, the pacing
and the ledger.
"""

import asyncio
import logging
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from torchtitan.experiments.rl.ask.lag import clock_of_running_loop
from torchtitan.experiments.rl.ask.ordered import OrderedCalls
from torchtitan.experiments.rl.compat.monarch import call_actor
from torchtitan.experiments.rl.config.run_config import UserCodeLimits
from torchtitan.experiments.rl.envs.renderer import RendererConfig, build_context
from torchtitan.experiments.rl.errors import cause_of
from torchtitan.experiments.rl.generation.client import GeneratorClient
from torchtitan.experiments.rl.generation.endpoint import FrozenClients
from torchtitan.experiments.rl.generation.references import hosted_models
from torchtitan.experiments.rl.loops.group_runner import (
    GroupRequest,
    GroupRunner,
    LocalRunner,
    TaskSet,
)
from torchtitan.experiments.rl.process.actor import WatchedActor, reported_endpoint
from torchtitan.experiments.rl.process.lifetime import Lifetime, ProcessLost
from torchtitan.experiments.rl.process.logs import set_up_logging
from torchtitan.experiments.rl.rollouts.types import RolloutGroup
from torchtitan.experiments.rl.tasks.task import Task

logger = logging.getLogger(__name__)

CANCEL_GROUPS_S = 8.0
"""Seconds that cancelled groups may take. With the limit of closing the tasks, it must stay below
the controller's limit for a worker's shutdown."""


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
                result = await worker.life.call(call_actor(worker.actor.run, task.name, request))
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
        clock_of_running_loop().start()

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
        clock_of_running_loop().stop()
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
        lag_s, blocking_calls = clock_of_running_loop().lap()
        return GroupResult(group=group, event_loop_lag_s=lag_s, blocking_calls=blocking_calls)
