"""The RolloutWorker actor: runs and scores groups in a process of its own, so that envs scale past the controller's process.

A worker has its own tasks, renderer and generator clients. Tokens travel between generators and worker; only whole groups
travel between worker and controller, which keeps the samplers, the pacing and the ledger.
"""

import asyncio
import logging
from typing import Any

from monarch.actor import Actor, concurrent_endpoint, current_rank

from torchtitan.experiments.rl.controller.group_runner import GroupRequest, GroupResult, LocalRunner
from torchtitan.experiments.rl.envs.renderer import RendererConfig, build_renderer
from torchtitan.experiments.rl.generation.client import GeneratorClient
from torchtitan.experiments.rl.generation.frozen import FrozenClients
from torchtitan.experiments.rl.generation.references import hosted_models
from torchtitan.experiments.rl.observability.loop_lag import LoopLag
from torchtitan.experiments.rl.process.setup import freeze_objects, set_up_logging, unfreeze_objects
from torchtitan.experiments.rl.tasks.task import Task

logger = logging.getLogger(__name__)


class RolloutWorker(Actor):
    """``setup``, then ``run`` groups, any number at a time."""

    def __init__(
        self, tasks: dict[str, Task.Config], *, renderer: RendererConfig, tokenizer_path: str, seed: int, run_dir: str
    ):
        rank = current_rank().rank
        set_up_logging(run_dir, f"rollout_worker-{rank}")
        client_id = 1 + rank  # the controller's is 0
        self._frozen = FrozenClients(hosted_models(tasks), lockstep=False, client_id=client_id)
        self._policy = GeneratorClient(client_id=client_id, frozen=self._frozen.find)
        self._runner = LocalRunner(self._policy, seed=seed)
        built = build_renderer(renderer, tokenizer_path)
        self._tasks = {name: config.build(name=name, renderer=built, seed=seed) for name, config in tasks.items()}
        self._running: set[asyncio.Task] = set()
        self._lag = LoopLag()

    @concurrent_endpoint
    async def setup(self, generators: Any, replicas: int, hosted: list[Any]) -> None:
        """Connect to meshes that are set up, and set up the tasks."""
        await self._policy.connect(generators, replicas)
        self._frozen.adopt(hosted)
        await self._frozen.connect()
        for task in self._tasks.values():
            await task.setup(self._policy)
        freeze_objects()
        self._lag.start()

    @concurrent_endpoint
    async def run(self, request: GroupRequest) -> GroupResult:
        """Run and score one group."""
        work = asyncio.create_task(self._run(request), name=request.group_id)
        self._running.add(work)
        work.add_done_callback(self._running.discard)
        return await work

    @concurrent_endpoint
    async def shutdown(self) -> None:
        """Cancel what runs, so that every env is closed, and close the tasks."""
        for work in self._running:
            work.cancel()
        await asyncio.gather(*self._running, return_exceptions=True)
        self._lag.stop()
        unfreeze_objects()
        for task in self._tasks.values():
            await task.close()
        self._policy.close()
        await self._frozen.close()

    async def _run(self, request: GroupRequest) -> GroupResult:
        task, measurement = self._tasks[request.task], request.measurement
        self._policy.version = max(self._policy.version, request.policy_version)
        if measurement is None:
            group = await self._runner.run(task, request.data_sample, group_id=request.group_id)
        else:
            group = await self._runner.measure(
                task,
                request.data_sample,
                group_id=request.group_id,
                sampling=measurement.sampling,
                group_size=measurement.group_size,
            )
        return GroupResult(group=group, event_loop_lag_s=self._lag.lap())
