"""The RolloutWorker actor: runs and scores groups in a process of its own, so that envs scale past the controller's process.

A worker has its own tasks, renderer and generator clients. Tokens travel between generators and worker; only whole groups
travel between worker and controller, which keeps the samplers, the pacing and the ledger.
"""

import asyncio
from contextlib import suppress
from typing import Any

from torchtitan.experiments.rl.config.run_config import UserCodeLimits
from torchtitan.experiments.rl.controller.closing import Closing
from torchtitan.experiments.rl.controller.group_runner import GroupRequest, GroupResult, LocalRunner
from torchtitan.experiments.rl.controller.task_set import TaskSet
from torchtitan.experiments.rl.envs.renderer import RendererConfig, build_renderer
from torchtitan.experiments.rl.generation.client import GeneratorClient
from torchtitan.experiments.rl.generation.frozen import FrozenClients
from torchtitan.experiments.rl.generation.references import hosted_models
from torchtitan.experiments.rl.models.hub import HubConfig
from torchtitan.experiments.rl.observability.loop_lag import LoopLag
from torchtitan.experiments.rl.process.garbage import freeze_objects, unfreeze_objects
from torchtitan.experiments.rl.process.lifetime import ProcessLost
from torchtitan.experiments.rl.process.setup import set_up_logging
from torchtitan.experiments.rl.tasks.task import Task
from torchtitan.experiments.rl.user_code.calls import BLOCKING
from torchtitan.experiments.rl.user_code.endpoint import reported_endpoint
from torchtitan.experiments.rl.user_code.gate import Gate
from torchtitan.experiments.rl.user_code.watched import WatchedActor

CANCEL_GROUPS_S = 8.0
"""How long cancelled groups may take; with the tasks' own limit it must stay below the controller's for a shutdown."""


class RolloutWorker(WatchedActor):
    """``admit`` replicas, ``setup``, then ``run`` groups, any number at a time."""

    def __init__(
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
    ):
        """
        Args:
            index: of the worker.
            client_id: distinct among all clients of the generators that there were in this run: answers to a worker that has
                died must not be taken for answers to the next.
        """
        super().__init__()
        self.part = f"rollout_worker {index}"
        set_up_logging(run_dir, f"rollout_worker-{index}")
        # The controller makes a replica again whose engine has stopped; its requests wait here meanwhile.
        self._frozen = FrozenClients(
            hosted_models(tasks), lockstep=False, client_id=client_id, on_stopped=lambda path, replica, cause: None
        )
        self._policy = GeneratorClient(client_id=client_id, frozen=self._frozen.find, on_stopped=lambda replica, cause: None)
        self._clients = {"": self._policy} | self._frozen.generators
        self._runner = LocalRunner(self._policy, seed=seed)
        self._renderer = build_renderer(renderer, tokenizer_path)
        self._vocab_size = HubConfig.read(tokenizer_path).size("vocab_size")
        gate = Gate(timeout_s=limits.call_timeout_s)
        self._task_set = TaskSet(tasks, gate=gate, limits=limits, seed=seed)
        self._running: set[asyncio.Task] = set()
        self._lag = LoopLag()

    @reported_endpoint
    async def admit(self, model: str, index: int, actor: Any) -> None:
        """Send requests to a replica from now on (``controller.replicas`` says how models are named)."""
        with suppress(ProcessLost):  # ``lose`` follows
            await self._clients[model].admit(index, actor)

    @reported_endpoint
    async def lose(self, model: str, index: int) -> None:
        """A replica is gone. Its requests start again elsewhere, or when it is admitted again."""
        self._clients[model].lose(index)

    @reported_endpoint
    async def setup(self) -> None:
        """Build the tasks and set them up.

        Raises:
            RunError: a task failed; names it.
        """
        await self._task_set.build(self._renderer, vocab_size=self._vocab_size)
        await self._task_set.setup(self._policy)
        freeze_objects()
        self._lag.start()

    @reported_endpoint
    async def run(self, request: GroupRequest) -> GroupResult:
        """Run and score one group."""
        work = asyncio.create_task(self._run(request), name=request.group_id)
        self._running.add(work)
        work.add_done_callback(self._running.discard)
        return await work

    @reported_endpoint
    async def shutdown(self) -> list[str]:
        """Cancel what runs, so that every env is closed, and close the tasks that were set up.

        Returns:
            What went wrong, a line each.
        """
        closing = Closing()
        running = list(self._running)
        for work in running:
            work.cancel()
        if running:
            await asyncio.wait(running, timeout=CANCEL_GROUPS_S)
        self._lag.stop()
        unfreeze_objects()
        for fault in await self._task_set.close():
            closing.add(fault)
        self._policy.close()
        await closing.close("the frozen models", self._frozen.close)
        return [str(fault) for fault in closing.faults]

    async def _run(self, request: GroupRequest) -> GroupResult:
        task, measurement = self._task_set.tasks[request.task], request.measurement
        self._policy.version = max(self._policy.version, request.policy_version)
        if request.group is not None:
            group = await self._runner.credit(task, request.group)
        elif measurement is None:
            group = await self._runner.run(task, request.data_sample, group_id=request.group_id, credit=request.credit)
        else:
            group = await self._runner.measure(
                task,
                request.data_sample,
                group_id=request.group_id,
                sampling=measurement.sampling,
                group_size=measurement.group_size,
            )
        return GroupResult(group=group, event_loop_lag_s=self._lag.lap(), blocking_calls=BLOCKING.lap())
