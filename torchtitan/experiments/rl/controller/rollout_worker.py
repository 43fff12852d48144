"""The RolloutWorker actor: runs and scores groups in a process of its own, so that envs scale past the controller's.

It has tasks, a renderer and clients of the generators of its own: tokens go between generators and worker, only whole groups
between worker and controller, which keeps the samplers, the pacing and the ledger.
"""

import asyncio
import logging
from dataclasses import dataclass
from typing import Any

from monarch.actor import Actor, concurrent_endpoint, current_rank

from torchtitan.experiments.rl.envs.renderer import RendererConfig, build_renderer
from torchtitan.experiments.rl.generation.client import GeneratorClient
from torchtitan.experiments.rl.generation.frozen import FrozenClients
from torchtitan.experiments.rl.generation.references import hosted_models
from torchtitan.experiments.rl.observability.logs import setup_process_logging
from torchtitan.experiments.rl.observability.loop_lag import LoopLag
from torchtitan.experiments.rl.rollouts.policy import SamplingConfig
from torchtitan.experiments.rl.rollouts.types import DataSample, RolloutGroup
from torchtitan.experiments.rl.tasks.task import Task

logger = logging.getLogger(__name__)


@dataclass(kw_only=True, slots=True)
class GroupRequest:
    """A group for a rollout worker to run."""

    task: str
    data_sample: DataSample
    group_id: str
    policy_version: int
    """What the generators hold now."""
    sampling: SamplingConfig | None = None
    """The task's when None."""
    measured_size: int | None = None
    """Rollouts of a group that is only measured, for validation; None: a training group, of the task's size."""


@dataclass(kw_only=True, slots=True)
class GroupResult:
    group: RolloutGroup
    problem: str | None
    """Why it can't be trained on."""
    event_loop_lag_s: float
    """Longest time since the worker's last result that its event loop was held up."""


class RolloutWorker(Actor):
    """``setup``, then ``run`` groups, any number at a time."""

    def __init__(
        self, tasks: dict[str, Task.Config], *, renderer: RendererConfig, tokenizer_path: str, seed: int, run_dir: str
    ):
        rank = current_rank().rank
        setup_process_logging(run_dir, f"rollout_worker-{rank}")
        self._seed = seed
        client_id = 1 + rank  # the controller's is 0
        self._frozen = FrozenClients(hosted_models(tasks), lockstep=False, client_id=client_id)
        self._policy = GeneratorClient(client_id=client_id, frozen=self._frozen.find)
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
        for task in self._tasks.values():
            await task.close()
        self._policy.close()
        await self._frozen.close()

    async def _run(self, request: GroupRequest) -> GroupResult:
        task, measured = self._tasks[request.task], request.measured_size is not None
        self._policy.version = max(self._policy.version, request.policy_version)
        group = await task.run_group(
            request.data_sample,
            self._policy,
            group_id=request.group_id,
            seed=self._seed,
            sampling=request.sampling,
            group_size=request.measured_size,
            credit=not measured,
        )
        problem = None
        if measured:
            await task.score_rewards(group)
        else:
            problem = await task.score_group(group)
        return GroupResult(group=group, problem=problem, event_loop_lag_s=self._lag.lap())
