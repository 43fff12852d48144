"""The processes of a run: started, connected to each other, and stopped.

`start` brings up a run that trains, in this order, so that nobody asks a process that is not there:

    1. spawn the trainer's ranks and every generator, side by side
    2. spawn the weight readers, on hosts that generate and lack a part of the trainer
    3. publish the trainer's weights, unless the generators loaded the same from the hub folder
    4. connect each generator, once it proved that it holds the trainer's weights
    5. `start_runner`: spawn the rollout workers, and set the tasks up where their rollouts run

`start_generators` brings up a fleet without a trainer, for evaluations.
"""

import asyncio
import itertools
import logging
from collections.abc import Callable, Collection, Coroutine, Sequence
from contextlib import suppress
from functools import partial
from typing import Any

import numpy as np
from monarch.actor import ProcMesh

from torchtitan.experiments.rl.compat.torchtitan import built_class
from torchtitan.experiments.rl.errors import RunError
from torchtitan.experiments.rl.fleet.context import RunContext
from torchtitan.experiments.rl.fleet.hosts import check_host_memory, place_run
from torchtitan.experiments.rl.fleet.replicas import Replicas
from torchtitan.experiments.rl.fleet.role import Role
from torchtitan.experiments.rl.fleet.roles import (
    GeneratorRole,
    ReplicaRole,
    RolloutWorkerRole,
    WeightReaderRole,
    cores_at,
    host_name,
)
from torchtitan.experiments.rl.fleet.rollout_workers import WorkerRunner
from torchtitan.experiments.rl.fleet.spawn import shut_down, spawn_on, start_trainer
from torchtitan.experiments.rl.fleet.supervisor import Supervisor
from torchtitan.experiments.rl.fleet.weight_readers import WeightReaders, first_generators
from torchtitan.experiments.rl.generation.client import GeneratorClient
from torchtitan.experiments.rl.generation.config import GeneratorConfig
from torchtitan.experiments.rl.generation.endpoint import FrozenClients
from torchtitan.experiments.rl.generation.references import hosted_models
from torchtitan.experiments.rl.loops.group_runner import GroupRunner, LocalRunner, TaskSet
from torchtitan.experiments.rl.process.lifetime import Lifetime
from torchtitan.experiments.rl.process.setup import trainer_environment
from torchtitan.experiments.rl.training.checkpoints import TrainerStart
from torchtitan.experiments.rl.training.client import TrainerClient
from torchtitan.experiments.rl.training.trainer import PolicyTrainer
from torchtitan.experiments.rl.weights.sync import CanaryBound, WeightSync

logger = logging.getLogger(__name__)


class Fleet:
    """All processes of a run. `close` stops whatever was started."""

    trainer: TrainerClient
    """Client of the trainer; set by `start`."""
    weights: WeightSync
    """Way of new versions from the trainer to the generators; set by `start`."""

    def __init__(self, context: RunContext, *, on_failure: Callable[[Exception], None]):
        """Start nothing yet.

        Args:
            on_failure: called with the error of a client that can't go on.
        """
        config = context.config
        self._context = context
        self._placement = context.plan.placement
        self._hosted = hosted_models(config.tasks)
        self.supervisor = Supervisor(context.restarts, context.console, on_failure=self.fail)
        lockstep = context.synchronous and all(
            getattr(built_class(task), "in_lockstep", True) for task in config.tasks.values()
        )
        self._frozen = FrozenClients(
            self._hosted,
            lockstep=lockstep,
            on_failure=on_failure,
            on_stopped=self._kill_replica,
        )
        self.policy = GeneratorClient(
            lockstep=lockstep,
            stops_at_texts=config.generator.engine.stops_at_texts,
            on_failure=on_failure,
            on_stopped=partial(self._kill_replica, ""),
            frozen=self._frozen.find,
        )
        """Client of the policy's generators."""
        self._replicas = Replicas({"": self.policy} | self._frozen.generators)
        self._generators: dict[tuple[str, int], ReplicaRole] = {}
        """Roles by model, named as in `Replicas`, and index. Those of the policy come first."""
        self._worker_runner = WorkerRunner(self.policy)
        self._trainer_ranks: Any = None
        """Mesh of the PolicyTrainer actors."""
        self._trainer_procs: ProcMesh | None = None
        """Mesh to stop the trainer's processes by."""

    async def start(self, canary: np.ndarray, trainer_start: TrainerStart | None = None) -> None:
        """Start and connect trainer, generators and hosted models.

        Args:
            canary: text that trainer and generators score to compare weights (see WeightSync).
            trainer_start: checkpoint that the trainer's weights come from, for which the generators
                get them too; None if both load the model's hub folder.

        Raises:
            RunError: trainer and generators don't agree on the weights.
        """
        config = self._context.config
        plan = self._context.plan
        waits = self._context.console.waits
        self._end_run_with_its_hosts()
        self._placement = place_run(plan, self._context.hosts)
        check_host_memory(plan, self._placement, self._context.hosts)

        procs = self._spawn_trainer(trainer_start)
        self._add_policy_generators(GeneratorRole)
        self._add_hosted_models()
        life = Lifetime("trainer")
        start_trainer_ranks = self._start_trainer(procs, life)
        start_generators = map(self.supervisor.start, self._generators.values())
        if config.generator.engine.sleep:
            # An engine is awake when it starts, and the trainer compiles by taking steps: on one
            # GPU there is no room for both.
            trainer_hosts = await start_trainer_ranks
            generator_hosts = await side_by_side(*start_generators)
        else:
            trainer_hosts, *generator_hosts = await side_by_side(
                start_trainer_ranks, *start_generators
            )
        readers = await self._start_readers(
            trainer_hosts, generator_hosts[: config.generator.replicas]
        )

        self.trainer = TrainerClient(
            self._trainer_ranks,
            self._context.run_dir,
            life,
            keep_logprobs=config.recorder.trainer_logprobs,
        )
        await self.trainer.connect()
        self.weights = WeightSync(
            self._trainer_ranks,
            self.policy,
            text=canary,
            bound=CanaryBound(config.generator.engine.dtype),
            copies=readers,
            one_buffer=plan.weights_on_devices,
        )
        for role in self._generators.values():
            if isinstance(role, GeneratorRole):
                role.weights = self.weights
        with waits.wait("the first weights to reach the generators"):
            # The generators loaded the model's hub folder, which lacks a checkpoint's training, and
            # the adapters.
            generators_are_behind = trainer_start is not None or config.trainer.lora is not None
            if generators_are_behind:
                version = 0 if trainer_start is None else trainer_start.step
                await self.weights.publish_start(version)
                self.policy.version = version
            await side_by_side(*map(self.supervisor.connect, self._generators.values()))
        logger.info("trainer and generators agree on version %d", self.policy.version)

    async def start_generators(self, *, policy: bool = True) -> None:
        """Start and connect generators and hosted models, without a trainer.

        Args:
            policy: False to start the hosted models alone.
        """
        self._placement = place_run(self._context.plan, self._context.hosts)
        if policy:
            self._add_policy_generators(ReplicaRole)
        self._add_hosted_models()
        await self._start_all(self._generators.values())

    async def start_runner(self, task_set: TaskSet) -> GroupRunner:
        """Set the tasks up where their rollouts will run: here, or in workers that are spawned now.

        Raises:
            RunError: a task failed; names it.
        """
        config = self._context.config
        if not config.rollout_workers:
            await task_set.setup(self.policy)
            return LocalRunner(self.policy, seed=config.seed)
        client_ids = itertools.count(1)
        workers = [
            RolloutWorkerRole(
                name=f"rollout worker {index}",
                context=self._context,
                place=place,
                replicas=self._replicas,
                runner=self._worker_runner,
                index=index,
                client_ids=client_ids,
            )
            for index, place in enumerate(self._placement.rollout_workers)
        ]
        await self._start_all(workers)
        return self._worker_runner

    @property
    def trainer_unreachable(self) -> bool:
        """True if ranks were on a host that died: the others wait for them, and answer no call."""
        hosts = self._context.hosts
        return hosts is not None and any(
            place.host in hosts.dead for place in self._placement.trainer
        )

    def fail(self, failure: RunError) -> None:
        """Answer every open and future request of the rollouts with ``failure``."""
        self.policy.fail(failure)
        self._frozen.fail(failure)

    async def close(self) -> list[str]:
        """Stop every actor and process, whatever state they are in.

        Returns:
            A line for each fault of the user's code that an actor reports.
        """
        await self.supervisor.close()
        self.policy.close()
        try:
            await self._frozen.close()
        except Exception:
            logger.exception("closing the frozen models")
        dead_hosts = self._context.hosts.dead if self._context.hosts is not None else {}
        processes = [
            role.process
            for role in reversed(self.supervisor.roles)
            if role.place.host not in dead_hosts
        ]
        actors = [process.actor for process in processes]
        meshes = [process.procs for process in processes]
        if self._trainer_procs is not None and not self.trainer_unreachable:
            meshes.append(self._trainer_procs)
            if self._trainer_ranks is not None and self.supervisor.lost is None:
                actors.append(self._trainer_ranks)  # they were spawned, and none was killed
        return await shut_down(actors, meshes)

    # ---- the trainer

    def _spawn_trainer(self, trainer_start: TrainerStart | None) -> ProcMesh:
        """Spawn the trainer's processes, and its ranks in them."""
        context = self._context
        config = context.config
        plan = context.plan
        procs, self._trainer_procs = spawn_on(
            context.hosts,
            "trainer",
            self._placement.trainer,
            plan.device,
            run_dir=context.run_dir,
            environment=trainer_environment(
                plan.device, weights_on_devices=plan.weights_on_devices
            ),
        )
        self._trainer_ranks = procs.spawn(
            "trainer",
            PolicyTrainer,
            config.trainer,
            model=config.model,
            device=plan.device,
            max_seq_len=config.batcher.row_length,
            rows=config.batcher.rows_per_microbatch,
            total_steps=config.steps,
            run_dir=str(context.run_dir),
            generator_dtype=config.generator.engine.torch_dtype,
            start=trainer_start,
            yields_memory=config.generator.engine.sleep,
            leaves_bytes=0 if plan.shared_gpu is None else plan.shared_gpu.left,
            weights_on_device=plan.weights_on_devices,
            serve_adapters=bool(config.served),
            adapters=config.adapters,
        )
        return procs

    async def _start_trainer(self, procs: ProcMesh, life: Lifetime) -> set[str]:
        """Set up the trainer, whose death ends the run from now on.

        Args:
            life: lifetime of the trainer as a whole.

        Returns:
            Identities of its hosts.
        """
        with self._context.console.waits.wait("the trainer to start"):
            for rank in range(self._context.config.trainer.ranks):
                actor = self._trainer_ranks.slice(procs=rank)
                await self.supervisor.guard(f"trainer rank {rank}", actor, life)
            return await start_trainer(procs, self._trainer_ranks)

    def _end_run_with_its_hosts(self) -> None:
        """End the run when a host dies: nothing can be restarted there."""
        if self._context.hosts is None:
            return
        loop = asyncio.get_running_loop()

        def host_died(line: str) -> None:
            with suppress(RuntimeError):  # the event loop is closed: the run has ended
                loop.call_soon_threadsafe(self.supervisor.end_run, RunError(line))

        self._context.hosts.on_death(host_died)

    # ---- the other roles

    def _add_policy_generators(self, role_class: type[ReplicaRole]) -> None:
        for index, place in enumerate(self._placement.generators):
            self._generators["", index] = role_class(
                name=f"generator {index}",
                context=self._context,
                place=place,
                replicas=self._replicas,
                index=index,
                generator=self._context.config.generator,
            )

    def _add_hosted_models(self) -> None:
        models = zip(self._hosted.values(), self._placement.hosted, strict=True)
        for number, (model, places) in enumerate(models):
            generator = GeneratorConfig(engine=model.engine, replicas=model.replicas)
            for index, place in enumerate(places):
                name = f"hosted model {model.path!r}"
                if len(places) > 1:
                    name += f" replica {index}"
                self._generators[model.path, index] = ReplicaRole(
                    name=name,
                    context=self._context,
                    place=place,
                    replicas=self._replicas,
                    index=index,
                    generator=generator,
                    model=model.path,
                    log_name=f"hosted_{number}",
                )

    async def _start_readers(
        self, trainer_hosts: set[str], generator_hosts: Sequence[str]
    ) -> WeightReaders | None:
        """Start a weight reader on each host that needs one, on the cores of its first generator.

        Args:
            generator_hosts: host of each replica of the policy.
        """
        first = first_generators(trainer_hosts, generator_hosts)
        if not first:
            return None
        places = [self._placement.generators[index] for index in first]
        readers = WeightReaders(map(host_name, places), len(trainer_hosts))
        await self._start_all(
            [
                WeightReaderRole(
                    name=f"weight reader {number}",
                    context=self._context,
                    place=cores_at(place, self._context),
                    readers=readers,
                    index=number,
                )
                for number, place in enumerate(places)
            ]
        )
        return readers

    async def _start_all(self, roles: Collection[Role]) -> None:
        await side_by_side(*map(self.supervisor.start, roles))
        await side_by_side(*map(self.supervisor.connect, roles))

    def _kill_replica(self, model: str, index: int, cause: str) -> None:
        """Kill a replica whose engine can't go on, so that the supervisor restarts it."""
        life = self._generators[model, index].process.life
        life.kill(f"its engine stopped: {cause}")


async def side_by_side(*work: Coroutine[Any, Any, Any]) -> list[Any]:
    """Return what each coroutine returns.

    The first error is raised once the others are cancelled and have ended: a role that is still
    being filled would spawn a process after the fleet is closed.
    """
    try:
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(coroutine) for coroutine in work]
    except BaseExceptionGroup as errors:
        raise errors.exceptions[0] from None
    return [task.result() for task in tasks]
