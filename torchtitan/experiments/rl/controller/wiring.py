"""The run's actors, from a checked config to clients of everything: trainer, generators, hosted models, rollout workers."""

import asyncio
import itertools
import logging
import os
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, Literal

import numpy as np
from monarch.actor import Actor, ProcMesh

from torchtitan.experiments.rl.config.placement import Place, Placement
from torchtitan.experiments.rl.config.plan import RunPlan
from torchtitan.experiments.rl.config.run_config import RunConfig
from torchtitan.experiments.rl.controller.group_runner import GroupRunner, LocalRunner, WorkerRunner
from torchtitan.experiments.rl.controller.part import Part, PartProcess
from torchtitan.experiments.rl.controller.provision import place_run, shut_down, spawn_on, start_trainer
from torchtitan.experiments.rl.controller.replicas import Replicas
from torchtitan.experiments.rl.controller.restarts import Restarts
from torchtitan.experiments.rl.controller.rollout_worker import RolloutWorker
from torchtitan.experiments.rl.controller.supervision import Supervisor
from torchtitan.experiments.rl.controller.task_set import TaskSet
from torchtitan.experiments.rl.controller.weight_readers import WeightReaders, first_generators
from torchtitan.experiments.rl.errors import RunError
from torchtitan.experiments.rl.generation.client import GeneratorClient
from torchtitan.experiments.rl.generation.config import GeneratorConfig
from torchtitan.experiments.rl.generation.frozen import FrozenClients
from torchtitan.experiments.rl.generation.generator import Generator
from torchtitan.experiments.rl.generation.references import hosted_models
from torchtitan.experiments.rl.hosts.pool import HostPool
from torchtitan.experiments.rl.observability.waits import Waits
from torchtitan.experiments.rl.process.lifetime import Lifetime
from torchtitan.experiments.rl.training.checkpoints import TrainerStart
from torchtitan.experiments.rl.training.client import TrainerClient
from torchtitan.experiments.rl.training.trainer import PolicyTrainer
from torchtitan.experiments.rl.weights.reader import WeightReader
from torchtitan.experiments.rl.weights.sync import CanaryBound, WeightSync

logger = logging.getLogger(__name__)


class RunActors:
    """``start``, then ``start_runner``; ``close`` stops whatever was started."""

    trainer: TrainerClient
    weights: WeightSync

    def __init__(
        self,
        config: RunConfig,
        plan: RunPlan,
        *,
        run_dir: Path,
        restarts: Restarts | None = None,
        hosts: HostPool | None = None,
        on_failure: Callable[[Exception], None],
        on_death: Callable[[str], None] = lambda line: None,
        waits: Waits | None = None,
    ):
        """
        Args:
            restarts: as Supervisor's.
            hosts: where the processes run. None: on this host.
            on_failure: called with the error of a part that can't go on.
            on_death: called with a line for people about each part that died and is made again.
            waits: is told what ``start`` waits for.
        """
        self._config, self._plan, self._run_dir, self._hosts = config, plan, run_dir, hosts
        self._hosted, lockstep = hosted_models(config.tasks), config.max_offpolicy_steps == 0
        self.supervisor = Supervisor(
            config.supervision, restarts=restarts, on_death=on_death, on_failure=self.fail, waits=waits
        )
        self._frozen = FrozenClients(self._hosted, lockstep=lockstep, on_failure=on_failure, on_stopped=self._stopped)
        self.policy = GeneratorClient(
            lockstep=lockstep, on_failure=on_failure, on_stopped=partial(self._stopped, ""), frozen=self._frozen.find
        )
        self._replicas = Replicas({"": self.policy} | self._frozen.generators)
        self._generating: dict[tuple[str, int], Part] = {}
        """By model and replica, as in ``Replicas``."""
        self._readers: list[Part] = []
        self._workers: list[Part] = []
        self._worker_runner = WorkerRunner(self.policy)
        self._client_ids = itertools.count(1)  # the controller's is 0
        self._trainer: tuple[ProcMesh, Any] | None = None
        self._placement = plan.placement

    async def start(self, text: np.ndarray, trainer_start: TrainerStart | None = None) -> None:
        """Spawn and connect trainer, generators and hosted models, and check that the first two agree on the weights.

        Args:
            text: WeightSync's.
            trainer_start: the trainer's weights are those of this checkpoint, and the generators get them. None: both load
                the model's hub folder.

        Raises:
            RunError: they don't agree.
        """
        config, plan = self._config, self._plan
        self._watch_hosts()
        placement = self._placement = place_run(config, plan, self._hosts)
        procs, owner = spawn_on(self._hosts, "trainer", placement.trainer, plan.device, run_dir=self._run_dir)
        trainers = procs.spawn(
            "trainer",
            PolicyTrainer,
            config.trainer,
            model=config.model,
            device=plan.device,
            max_seq_len=config.batcher.row_length,
            rows=config.batcher.rows_per_microbatch,
            total_steps=config.steps,
            run_dir=str(self._run_dir),
            generator_dtype=config.generator.engine.torch_dtype,
            start=trainer_start,
            yields_memory=config.generator.engine.sleep,
        )
        self._trainer = owner, trainers
        self._add_generators(placement)
        life = Lifetime("trainer")

        async def start_guarded_trainer() -> set[str]:
            with self.supervisor.waits.wait("the trainer to start"):
                for rank in range(plan.trainer_ranks):
                    await self.supervisor.guard(f"trainer rank {rank}", trainers.slice(procs=rank), life)
                return await start_trainer(procs, trainers)

        # The generators of the policy come first.
        trainer_hosts, *hosts = await asyncio.gather(
            start_guarded_trainer(), *(self.supervisor.start(part) for part in self._generating.values())
        )
        readers = await self._start_readers(trainer_hosts, hosts[: plan.generator_replicas])
        self.trainer = TrainerClient(trainers, self._run_dir, life, keep_logprobs=config.recorder.trainer_logprobs)
        await self.trainer.connect()
        self.weights = WeightSync(
            trainers,
            self.policy,
            text=text,
            bound=CanaryBound(config.generator.engine.dtype),
            copies=readers,
        )
        with self.supervisor.waits.wait("the first weights to reach the generators"):
            if trainer_start is not None:
                await self.weights.publish_start(trainer_start.step)
                self.policy.version = trainer_start.step
            await asyncio.gather(*map(self.supervisor.connect, self._generating.values()))
        logger.info("trainer and generators agree on version %d", self.policy.version)

    async def start_generators(self, *, policy: bool = True) -> None:
        """Without a trainer: spawn and connect the generators, unless ``policy`` is False, and the hosted models."""
        placement = self._placement = place_run(self._config, self._plan, self._hosts)
        self._add_generators(placement if policy else replace(placement, generators=()))
        await asyncio.gather(*(self.supervisor.start(part) for part in self._generating.values()))
        await asyncio.gather(*map(self.supervisor.connect, self._generating.values()))

    async def start_runner(self, task_set: TaskSet) -> GroupRunner:
        """Set the tasks up where their rollouts will run: here, or in workers that are spawned now.

        Raises:
            RunError: a task failed; names it.
        """
        if not self._config.rollout_workers:
            await task_set.setup(self.policy)
            return LocalRunner(self.policy, seed=self._config.seed)
        self._workers = [self._worker(index, where) for index, where in enumerate(self._placement.rollout_workers)]
        await asyncio.gather(*map(self.supervisor.start, self._workers))
        await asyncio.gather(*map(self.supervisor.connect, self._workers))
        return self._worker_runner

    @property
    def trainer_lost(self) -> bool:
        """Ranks were on a host that died: those of other hosts wait for them, and answer no call."""
        return self._hosts is not None and any(place.host in self._hosts.dead for place in self._placement.trainer)

    def fail(self, failure: RunError) -> None:
        """Answer every open and future request of the rollouts with ``failure``."""
        self.policy.fail(failure)
        self._frozen.fail(failure)

    async def close(self) -> list[str]:
        """Stop every actor and process, whatever state they are in.

        Returns:
            What went wrong in the user's code meanwhile, a line each.
        """
        await self.supervisor.close()
        self.policy.close()
        try:
            await self._frozen.close()
        except Exception:
            logger.exception("closing the frozen models")
        # The workers' tasks close before the generators that they may ask.
        dead = self._hosts.dead if self._hosts is not None else {}
        parts = [*self._workers, *self._generating.values(), *self._readers]
        parts = [part for part in parts if part.host not in dead]
        processes = [part.process for part in parts if part.process is not None]
        actors, meshes = [process.actor for process in processes], [process.procs for process in processes]
        if self._trainer is not None and not self.trainer_lost:
            meshes.append(self._trainer[0])
            if self.supervisor.lost is None:  # else every rank of it was killed
                actors.append(self._trainer[1])
        return await shut_down(actors, meshes)

    def _watch_hosts(self) -> None:
        """End the run when a host dies: nothing on it answers, and nothing is made again there."""
        if self._hosts is not None:
            loop = asyncio.get_running_loop()

            def host_died(line: str) -> None:
                with suppress(RuntimeError):  # the event loop is closed: the run has ended
                    loop.call_soon_threadsafe(self.supervisor.end_run, RunError(line))

            self._hosts.on_death(host_died)

    def _add_generators(self, placement: Placement) -> None:
        """Of the policy, which come first, and of the hosted models."""
        config = self._config
        for index, where in enumerate(placement.generators):
            name = f"generator {index}"
            self._add_generator("", index, name, config.generator, config.model.hf_assets_path, "generator", where)
        for number, (model, places) in enumerate(zip(self._hosted.values(), placement.hosted, strict=True)):
            own = GeneratorConfig(engine=model.engine, replicas=model.replicas)
            for index, where in enumerate(places):
                name = f"hosted model {model.path!r}" + (f" replica {index}" if len(places) > 1 else "")
                self._add_generator(model.path, index, name, own, model.path, f"hosted_{number}", where)

    def _add_generator(
        self, model: str, index: int, name: str, config: GeneratorConfig, path: str, role: str, where: Place
    ) -> None:
        async def connect(process: PartProcess) -> None:
            take_requests = partial(self._replicas.admit, model, index, process)
            if model or self._trainer is None:
                await take_requests()
            else:
                await self.weights.admit(index, process.actor, take_requests)
            await self._replicas.announce(model, index, process)

        self._generating[model, index] = Part(
            name=name,
            host=where.host,
            spawn=self._spawner(
                where,
                self._plan.device,
                Generator,
                config,
                lambda: {"model_path": path, "device": self._plan.device, "role": role, "index": index},
            ),
            set_up=lambda process: process.actor.setup.call_one(),
            connect=connect,
            disconnect=partial(self._replicas.lose, model, index),
        )

    async def _start_readers(self, trainer_hosts: set[str], generator_hosts: Sequence[str]) -> WeightReaders | None:
        """Spawn and connect a weight reader on each host that needs one, on the cores of its first generator.

        Args:
            generator_hosts: of each replica of the policy.
        """
        first = first_generators(trainer_hosts, generator_hosts)
        places = [self._placement.generators[index] for index in first]
        readers = WeightReaders(f"host_{place.host}" for place in places)
        for number, place in enumerate(places):
            self._readers.append(self._reader(readers, f"host_{place.host}", number, place))
        await asyncio.gather(*map(self.supervisor.start, self._readers))
        await asyncio.gather(*map(self.supervisor.connect, self._readers))
        return readers if self._readers else None

    def _reader(self, readers: WeightReaders, host: str, number: int, where: Place) -> Part:
        if self._plan.device == "cpu":
            cores = where.devices
        elif self._hosts is None:
            cores = tuple(sorted(os.sched_getaffinity(0)))
        else:
            cores = self._hosts.hosts[where.host].cores

        def spawn_reader(name: str) -> tuple[ProcMesh, Any]:
            procs, _ = spawn_on(self._hosts, name, [Place(where.host, cores)], "cpu", run_dir=self._run_dir)
            return procs, procs.spawn(name, WeightReader, run_dir=str(self._run_dir), index=number)

        return Part(
            name=f"weight reader {number}",
            host=where.host,
            spawn=spawn_reader,
            set_up=lambda process: process.actor.setup.call_one(),
            connect=partial(readers.admit, host),
            disconnect=partial(readers.lose, host),
        )

    def _worker(self, index: int, where: Place) -> Part:
        config = self._config

        def arguments() -> dict[str, Any]:
            return {
                "renderer": config.renderer,
                "tokenizer_path": config.model.hf_assets_path,
                "seed": config.seed,
                "limits": config.user_code,
                "index": index,
                "client_id": next(self._client_ids),
            }

        async def set_up(process: PartProcess) -> None:
            await self._replicas.tell(process)
            await process.actor.setup.call_one()

        async def connect(process: PartProcess) -> None:
            self._worker_runner.admit(index, process.actor, process.life)

        def disconnect() -> None:
            self._worker_runner.lose(index)
            self._replicas.forget(part.process)

        part = Part(
            name=f"rollout worker {index}",
            host=where.host,
            spawn=self._spawner(where, "cpu", RolloutWorker, config.tasks, arguments),
            set_up=set_up,
            connect=connect,
            disconnect=disconnect,
            blocks=True,
        )
        return part

    def _spawner(
        self,
        where: Place,
        device: Literal["cpu", "cuda"],
        actor_class: type[Actor],
        config: Any,
        arguments: Callable[[], dict[str, Any]],
    ) -> Callable[[str], tuple[ProcMesh, Any]]:
        """Spawns one process, and an actor in it; ``arguments`` are computed for each."""

        def spawn_part(name: str) -> tuple[ProcMesh, Any]:
            procs, _ = spawn_on(self._hosts, name, [where], device, run_dir=self._run_dir)
            return procs, procs.spawn(name, actor_class, config, run_dir=str(self._run_dir), **arguments())

        return spawn_part

    def _stopped(self, model: str, index: int, cause: str) -> None:
        """The engine of a replica can't go on: its process is made again."""
        process = self._generating[model, index].process
        assert process is not None
        process.life.kill(f"its engine stopped: {cause}")
