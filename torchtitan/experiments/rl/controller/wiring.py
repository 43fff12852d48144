"""The run's actors, from a checked config to clients of everything: trainer, generators, hosted models, rollout workers."""

import logging
from collections.abc import Callable
from pathlib import Path

from torchtitan.experiments.rl.config.placement import plan_placement
from torchtitan.experiments.rl.config.plan import RunPlan
from torchtitan.experiments.rl.config.run_config import RunConfig
from torchtitan.experiments.rl.controller.group_runner import GroupRunner, LocalRunner, WorkerRunner
from torchtitan.experiments.rl.controller.provision import RunMeshes
from torchtitan.experiments.rl.controller.rollout_worker import RolloutWorker
from torchtitan.experiments.rl.controller.task_set import TaskSet
from torchtitan.experiments.rl.errors import RunError
from torchtitan.experiments.rl.generation.client import GeneratorClient
from torchtitan.experiments.rl.generation.frozen import FrozenClients
from torchtitan.experiments.rl.generation.generator import Generator
from torchtitan.experiments.rl.generation.references import hosted_models
from torchtitan.experiments.rl.models.policy import decoder_config, policy_spec
from torchtitan.experiments.rl.training.client import TrainerClient
from torchtitan.experiments.rl.training.trainer import PolicyTrainer
from torchtitan.experiments.rl.weights.sync import WeightSync, canary_tolerance

logger = logging.getLogger(__name__)


class RunActors:
    """``start``, then ``start_runner``; ``close`` stops whatever was started."""

    trainer: TrainerClient
    weights: WeightSync

    def __init__(self, config: RunConfig, plan: RunPlan, *, run_dir: Path, on_failure: Callable[[Exception], None]):
        """``on_failure`` is called with the error of a part that can't go on."""
        self._config, self._plan, self._run_dir = config, plan, run_dir
        lockstep = config.max_offpolicy_steps == 0
        self._frozen = FrozenClients(hosted_models(config.tasks), lockstep=lockstep, on_failure=on_failure)
        self.policy = GeneratorClient(lockstep=lockstep, on_failure=on_failure, frozen=self._frozen.find)
        self._meshes: RunMeshes | None = None

    async def start(self) -> None:
        """Spawn and connect trainer, generators and hosted models, and check that the first two agree on version 0.

        Raises:
            RunError: they don't.
        """
        config, plan, run_dir = self._config, self._plan, str(self._run_dir)
        placement = plan_placement(
            device=plan.device,
            trainer_ranks=plan.trainer_ranks,
            replicas=plan.generator_replicas,
            tensor_parallel_degree=plan.tensor_parallel_degree,
            hosted=tuple(hosted_models(config.tasks).values()),
            rollout_workers=config.rollout_workers,
        )
        meshes = self._meshes = RunMeshes(placement, plan.device)
        trainers = meshes.trainer_procs.spawn(
            "trainer",
            PolicyTrainer,
            config.trainer,
            model=config.model,
            device=plan.device,
            max_seq_len=config.batcher.row_length,
            total_steps=config.steps,
            run_dir=run_dir,
            generator_dtype=config.generator.engine.torch_dtype,
        )
        self._generators = meshes.generator_procs.spawn(
            "generator",
            Generator,
            config.generator,
            model_path=config.model.hf_assets_path,
            device=plan.device,
            run_dir=run_dir,
        )
        self._hosted = self._frozen.spawn(meshes.hosted_procs, device=plan.device, run_dir=run_dir)
        logger.info("processes spawned")
        remote_readers = await meshes.start(trainers, self._generators, self._hosted)
        logger.info("actors set up")
        await self.policy.connect(self._generators, config.generator.replicas)
        await self._frozen.connect()
        decoder = decoder_config(policy_spec(config.model, device=plan.device, max_seq_len=config.batcher.row_length))
        self.trainer = TrainerClient(trainers, run_dir=self._run_dir)
        await self.trainer.connect()
        self.weights = WeightSync(
            trainers,
            self.policy,
            vocab_size=decoder.vocab_size,
            remote_readers=remote_readers > 0,
            tolerance=canary_tolerance(config.generator.engine.dtype),
        )
        await self.weights.check_initial()
        logger.info("trainer and generators agree on version 0")

    async def start_runner(self, task_set: TaskSet) -> GroupRunner:
        """Set the tasks up where their rollouts will run: here, or in workers that are spawned now.

        Raises:
            RunError: a task failed; names it.
        """
        config = self._config
        if not config.rollout_workers:
            await task_set.setup(self.policy)
            return LocalRunner(self.policy, seed=config.seed)
        assert self._meshes is not None and self._meshes.rollout_worker_procs is not None, "start comes first"
        workers = self._meshes.rollout_worker_procs.spawn(
            "rollout_worker",
            RolloutWorker,
            config.tasks,
            renderer=config.renderer,
            tokenizer_path=config.model.hf_assets_path,
            seed=config.seed,
            run_dir=str(self._run_dir),
            limits=config.user_code,
        )
        self._meshes.add(workers)
        await workers.setup.call(self._generators, config.generator.replicas, self._hosted)
        return WorkerRunner(workers, config.rollout_workers, self.policy)

    def owns(self, actor: str) -> bool:
        """Whether ``actor`` is the name of one of the run's actors. Monarch has actors of its own in each process."""
        return self._meshes is not None and actor in self._meshes.actor_names

    def fail(self, failure: RunError) -> None:
        """Answer every open and future request of the rollouts with ``failure``."""
        self.policy.fail(failure)
        self._frozen.fail(failure)

    async def close(self) -> list[str]:
        """Stop every actor and process, whatever state they are in.

        Returns:
            What went wrong in the user's code meanwhile, a line each.
        """
        self.policy.close()
        try:
            await self._frozen.close()
        except Exception:
            logger.exception("closing the frozen models")
        return await self._meshes.close() if self._meshes is not None else []
