"""The Evaluator actor: starts generators, or asks a server, and evaluates every task once, as a run does of version 0."""

import asyncio
import logging
import sys
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
from monarch.actor import Actor

from torchtitan.experiments.rl.compat.monarch import process_death
from torchtitan.experiments.rl.config.plan import RunPlan
from torchtitan.experiments.rl.config.run_config import RunConfig
from torchtitan.experiments.rl.controller.group_runner import GroupRunner, LocalRunner
from torchtitan.experiments.rl.controller.task_set import TaskSet
from torchtitan.experiments.rl.controller.validation import Validator
from torchtitan.experiments.rl.controller.wiring import RunActors
from torchtitan.experiments.rl.envs.renderer import build_renderer
from torchtitan.experiments.rl.errors import RunError
from torchtitan.experiments.rl.evaluate.figures import example_of
from torchtitan.experiments.rl.generation.endpoint import EndpointClient
from torchtitan.experiments.rl.generation.references import FrozenModel
from torchtitan.experiments.rl.models.hub import HubConfig
from torchtitan.experiments.rl.observability.console import write_line
from torchtitan.experiments.rl.printable import printable_line
from torchtitan.experiments.rl.process.setup import set_up_logging
from torchtitan.experiments.rl.rollouts.policy import ModelClient, ModelReference, PolicyClient, PolicySession, SamplingConfig
from torchtitan.experiments.rl.rollouts.types import DataSample, RolloutGroup
from torchtitan.experiments.rl.tasks.task import Task
from torchtitan.experiments.rl.user_code.endpoint import reported_endpoint
from torchtitan.experiments.rl.user_code.gate import Gate

logger = logging.getLogger(__name__)


class EndpointPolicy:
    """Implements rollouts.policy.PolicyClient over a server. Its tokens have policy version -1, as a frozen model's."""

    version = 0

    def __init__(self, model: FrozenModel, hosted: PolicyClient):
        """``hosted``: gives the frozen models that the tasks name."""
        self.client, self._hosted = EndpointClient(model), hosted

    def session(self, *, rollout_id: str, seed: int, sampling: SamplingConfig, stop_token_ids: list[int]) -> PolicySession:
        """See ModelClient.session."""
        return self.client.session(rollout_id=rollout_id, seed=seed, sampling=sampling, stop_token_ids=stop_token_ids)

    async def score(self, token_ids: np.ndarray) -> np.ndarray:
        """See ModelClient.score."""
        return await self.client.score(token_ids)

    def frozen(self, model: ModelReference) -> ModelClient:
        """See PolicyClient.frozen."""
        return self._hosted.frozen(model)


class ObservedRunner:
    """Implements GroupRunner.measure: calls ``on_group`` with each group that was measured."""

    def __init__(self, runner: GroupRunner, on_group: Callable[[RolloutGroup], None]):
        self._runner, self._on_group = runner, on_group

    async def run(self, task: Task, sample: DataSample, *, group_id: str, credit: bool = True) -> RolloutGroup:
        """See GroupRunner."""
        return await self._runner.run(task, sample, group_id=group_id, credit=credit)

    async def credit(self, task: Task, group: RolloutGroup) -> RolloutGroup:
        """See GroupRunner."""
        return await self._runner.credit(task, group)

    async def measure(
        self, task: Task, sample: DataSample, *, group_id: str, sampling: SamplingConfig, group_size: int
    ) -> RolloutGroup:
        """See GroupRunner."""
        group = await self._runner.measure(task, sample, group_id=group_id, sampling=sampling, group_size=group_size)
        self._on_group(group)
        return group

    def lap_lag_s(self) -> float:
        """See GroupRunner."""
        return self._runner.lap_lag_s()

    def lap_blocking_calls(self) -> int:
        """See GroupRunner."""
        return self._runner.lap_blocking_calls()


class Evaluator(Actor):
    part = ""
    """See ``reported_endpoint``."""

    def __init__(self, config: RunConfig, plan: RunPlan, *, run_dir: str, endpoint: FrozenModel | None):
        """
        Args:
            endpoint: the policy is this server's model. None: generators on the config's model.
        """
        self._config, self._plan, self._run_dir, self._endpoint = config, plan, Path(run_dir), endpoint
        self._failure: Exception | None = None

    @reported_endpoint
    async def measure(self) -> dict[str, Any]:
        """Evaluate every task once, and stop everything.

        Returns:
            ``metrics``, those of a run's validation, and ``examples``: by task, the fields of an ``Example`` for each.
        """
        self._loop = asyncio.get_running_loop()
        set_up_logging(self._run_dir, "evaluator")
        config = self._config
        self._actors = actors = RunActors(config, self._plan, run_dir=self._run_dir, on_failure=self._fail, on_death=_note)
        gate = Gate(timeout_s=config.user_code.call_timeout_s, synchronous=config.max_offpolicy_steps == 0)
        tasks = TaskSet(config.tasks, gate=gate, limits=config.user_code, seed=config.seed)
        recorder = config.recorder.build(run_dir=self._run_dir)
        policy = None if self._endpoint is None else EndpointPolicy(self._endpoint, actors.policy)
        validator: Validator | None = None
        examples: dict[str, list[dict[str, Any]]] = {name: [] for name in config.tasks}

        def measured(group: RolloutGroup) -> None:
            examples[group.task_name].append(asdict(example_of(group)))

        try:
            renderer = build_renderer(config.renderer, config.model.hf_assets_path)
            await tasks.build(renderer, vocab_size=HubConfig.read(config.model.hf_assets_path).size("vocab_size"))
            await actors.supervisor.unless_failed(actors.start_generators(policy=policy is None))
            if policy is None:
                runner = await actors.start_runner(tasks)
            else:
                await tasks.setup(policy)
                runner = LocalRunner(policy, seed=config.seed)
            observed = ObservedRunner(runner, measured)
            validator = Validator(tasks.tasks, observed, config.validation, on_failure=self._fail, gate=gate, recorder=recorder)
            validator.start(0)
            await actors.supervisor.unless_failed(validator.wait())
            reports = validator.take()
            if self._failure is not None or not reports:
                raise self._failure or RunError("nothing was measured")
            return {"metrics": reports[0].metrics, "examples": examples}
        finally:
            if validator is not None:
                await validator.close()
            for fault in [*await tasks.close(), *await actors.close()]:
                logger.warning("%s", fault)
            if policy is not None:
                await policy.client.close()
            await asyncio.to_thread(recorder.close)

    def __supervise__(self, failure: Any) -> bool:
        """See Controller.__supervise__."""
        self._loop.call_soon_threadsafe(lambda death: self._actors.supervisor.died(death), process_death(failure))
        return True

    def _fail(self, error: Exception) -> None:
        self._failure = self._failure or error


def _note(line: str) -> None:
    write_line(sys.stderr, printable_line(line))
