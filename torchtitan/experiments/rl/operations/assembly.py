"""A run, from a checked config to its end: its actors are spawned and connected, its loops built, and everything closed again.

A run whose trainer died is built again, as another ``Run`` (`actor.py`).
"""

import asyncio
import itertools
import logging
import os
from collections.abc import Awaitable, Callable, Collection, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from monarch.actor import Actor, ProcMesh

from torchtitan.experiments.rl.ask.call import ask, contained, sentence
from torchtitan.experiments.rl.compat.torchtitan import built_class
from torchtitan.experiments.rl.config.placement import Place, Placement
from torchtitan.experiments.rl.config.resume import save_config
from torchtitan.experiments.rl.configurable import build_with
from torchtitan.experiments.rl.controller.events import RunEvents
from torchtitan.experiments.rl.controller.group_runner import (
    GroupRunner,
    LocalRunner,
    RolloutWorker,
    TaskSet,
    WorkerRunner,
)
from torchtitan.experiments.rl.controller.groups import groups_per_pick
from torchtitan.experiments.rl.controller.ledger import Ledger
from torchtitan.experiments.rl.controller.loop import Parts, Schedule, build_loop
from torchtitan.experiments.rl.controller.rollout_loop import RolloutLoop
from torchtitan.experiments.rl.controller.selection import Selection
from torchtitan.experiments.rl.controller.training_loop import TrainingLoop
from torchtitan.experiments.rl.envs.renderer import build_context
from torchtitan.experiments.rl.errors import RunError, UserCodeError
from torchtitan.experiments.rl.generation.client import GeneratorClient
from torchtitan.experiments.rl.generation.config import GeneratorConfig
from torchtitan.experiments.rl.generation.endpoint import FrozenClients
from torchtitan.experiments.rl.generation.generator import Generator
from torchtitan.experiments.rl.generation.references import hosted_models
from torchtitan.experiments.rl.models.policy import model_positions
from torchtitan.experiments.rl.observability.console import RunSummary
from torchtitan.experiments.rl.operations.alarms import StallDetectors, mismatch_alarm
from torchtitan.experiments.rl.operations.checkpoints import Resumed, RunCheckpoints, trainer_start
from torchtitan.experiments.rl.operations.context import RunContext
from torchtitan.experiments.rl.operations.provision import (
    check_host_memory,
    place_run,
    shut_down,
    spawn_on,
    start_trainer,
)
from torchtitan.experiments.rl.operations.reports import RunReports, StepProfile
from torchtitan.experiments.rl.operations.supervision import (
    Part,
    PartProcess,
    Replicas,
    Supervisor,
    WeightReaders,
    first_generators,
)
from torchtitan.experiments.rl.process.host import Device
from torchtitan.experiments.rl.process.lifetime import Lifetime
from torchtitan.experiments.rl.process.setup import ENDS_THE_RUN
from torchtitan.experiments.rl.rollouts.group_replay import GroupReplay
from torchtitan.experiments.rl.rollouts.record_file import LEDGER_FILE, METRICS_FILE, ROLLOUTS_FILE
from torchtitan.experiments.rl.rollouts.recorder import RolloutRecorder
from torchtitan.experiments.rl.training.checkpoints import TrainerStart
from torchtitan.experiments.rl.training.client import TrainerClient
from torchtitan.experiments.rl.training.trainer import PolicyTrainer
from torchtitan.experiments.rl.weights.reader import WeightReader
from torchtitan.experiments.rl.weights.sync import CanaryBound, WeightSync

logger = logging.getLogger(__name__)

CANARY_MESSAGES = [
    {"role": "user", "content": "What is 17 + 25? Think first, then give the number."}
]
PART_TIMEOUT_S = 120.0
"""Of closing one part. Whatever a part waits for has a shorter limit."""


class Closing:
    """``close`` each part; ``faults`` has what went wrong, in order."""

    def __init__(self) -> None:
        self.faults: list[RunError] = []

    async def close(
        self,
        part: str,
        close: Callable[[], Awaitable[Any]],
        *,
        timeout_s: float | None = PART_TIMEOUT_S,
    ) -> None:
        """Await ``close()``, which may return a line for each fault of the user's code. Each fault is logged at once. Raises
        nothing but CancelledError of the caller."""

        async def closed() -> Any:
            return await close()

        try:
            faults = await ask(closed, timeout_s=timeout_s)
        except UserCodeError as error:
            faults = [f"closing {part}: {sentence(error)}"]
        for fault in faults or ():
            logger.error("%s", fault)
            self.faults.append(RunError(fault))


class RunActors:
    """``start``, then ``start_runner``; ``close`` stops whatever was started."""

    trainer: TrainerClient
    weights: WeightSync

    def __init__(self, context: RunContext, *, on_failure: Callable[[Exception], None]):
        """``on_failure`` is called with the error of a part that can't go on."""
        self._context = context
        config = context.config
        lockstep = context.synchronous and all(
            getattr(built_class(task), "in_lockstep", True) for task in config.tasks.values()
        )
        self._hosted = hosted_models(config.tasks)
        self.supervisor = Supervisor(context.restarts, context.console, on_failure=self.fail)
        self._frozen = FrozenClients(
            self._hosted, lockstep=lockstep, on_failure=on_failure, on_stopped=self._stopped
        )
        self.policy = GeneratorClient(
            lockstep=lockstep,
            stops_at_texts=config.generator.engine.stops_at_texts,
            on_failure=on_failure,
            on_stopped=partial(self._stopped, ""),
            frozen=self._frozen.find,
        )
        self._replicas = Replicas({"": self.policy} | self._frozen.generators)
        self._generating: dict[tuple[str, int], Part] = {}
        """By model and replica, as in ``Replicas``."""
        self._worker_runner = WorkerRunner(self.policy)
        self._client_ids = itertools.count(1)  # the controller's is 0
        self._trainer: tuple[ProcMesh, Any] | None = None
        self._placement = context.plan.placement

    async def start(self, text: np.ndarray, trainer_start: TrainerStart | None = None) -> None:
        """Spawn and connect trainer, generators and hosted models, and check that the first two agree on the weights.

        Args:
            text: WeightSync's.
            trainer_start: the trainer's weights are those of this checkpoint, and the generators get them. None: both load
                the model's hub folder.

        Raises:
            RunError: they don't agree.
        """
        context, config, plan = self._context, self._context.config, self._context.plan
        self._watch_hosts()
        placement = self._placement = place_run(plan, context.hosts)
        check_host_memory(plan, placement, context.hosts)
        procs, owner = spawn_on(
            context.hosts, "trainer", placement.trainer, plan.device, run_dir=context.run_dir
        )
        trainers = procs.spawn(
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
            weights_on_device=plan.weights_on_devices,
            serve_adapters=bool(config.served),
            adapters=config.adapters,
        )
        self._trainer = owner, trainers
        self._add_generators(placement)
        life = Lifetime("trainer")

        async def start_guarded_trainer() -> set[str]:
            with self._context.console.waits.wait("the trainer to start"):
                for rank in range(config.trainer.ranks):
                    await self.supervisor.guard(
                        f"trainer rank {rank}", trainers.slice(procs=rank), life
                    )
                return await start_trainer(procs, trainers)

        # The generators of the policy come first.
        trainer_hosts, *hosts = await asyncio.gather(
            start_guarded_trainer(), *map(self.supervisor.start, self._generating.values())
        )
        readers = await self._start_readers(trainer_hosts, hosts[: config.generator.replicas])
        self.trainer = TrainerClient(
            trainers, context.run_dir, life, keep_logprobs=config.recorder.trainer_logprobs
        )
        await self.trainer.connect()
        self.weights = WeightSync(
            trainers,
            self.policy,
            text=text,
            bound=CanaryBound(config.generator.engine.dtype),
            copies=readers,
            one_buffer=plan.weights_on_devices,
        )
        with self._context.console.waits.wait("the first weights to reach the generators"):
            version = 0 if trainer_start is None else trainer_start.step
            if (
                trainer_start is not None or config.trainer.lora is not None
            ):  # else they hold what the trainer does
                await self.weights.publish_start(version)
                self.policy.version = version
            await asyncio.gather(*map(self.supervisor.connect, self._generating.values()))
        logger.info("trainer and generators agree on version %d", self.policy.version)

    async def start_generators(self, *, policy: bool = True) -> None:
        """Without a trainer: spawn and connect the generators, unless ``policy`` is False, and the hosted models."""
        placement = self._placement = place_run(self._context.plan, self._context.hosts)
        self._add_generators(placement if policy else replace(placement, generators=()))
        await self._start_all(self._generating.values())

    async def start_runner(self, task_set: TaskSet) -> GroupRunner:
        """Set the tasks up where their rollouts will run: here, or in workers that are spawned now.

        Raises:
            RunError: a task failed; names it.
        """
        if not self._context.config.rollout_workers:
            await task_set.setup(self.policy)
            return LocalRunner(self.policy, seed=self._context.config.seed)
        await self._start_all(
            [
                self._worker(index, where)
                for index, where in enumerate(self._placement.rollout_workers)
            ]
        )
        return self._worker_runner

    async def _start_all(self, parts: Collection[Part]) -> None:
        await asyncio.gather(*map(self.supervisor.start, parts))
        await asyncio.gather(*map(self.supervisor.connect, parts))

    @property
    def trainer_lost(self) -> bool:
        """Ranks were on a host that died: those of other hosts wait for them, and answer no call."""
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
            What went wrong in the user's code meanwhile, a line each.
        """
        await self.supervisor.close()
        self.policy.close()
        try:
            await self._frozen.close()
        except Exception:
            logger.exception("closing the frozen models")
        dead = self._context.hosts.dead if self._context.hosts is not None else {}
        processes = [
            part.process for part in reversed(self.supervisor.parts) if part.host not in dead
        ]
        actors, meshes = (
            [process.actor for process in processes],
            [process.procs for process in processes],
        )
        if self._trainer is not None and not self.trainer_lost:
            meshes.append(self._trainer[0])
            if self.supervisor.lost is None:  # else every rank of it was killed
                actors.append(self._trainer[1])
        return await shut_down(actors, meshes)

    def _watch_hosts(self) -> None:
        """End the run when a host dies: nothing on it answers, and no part is restarted there."""
        if self._context.hosts is not None:
            loop = asyncio.get_running_loop()

            def host_died(line: str) -> None:
                with suppress(RuntimeError):  # the event loop is closed: the run has ended
                    loop.call_soon_threadsafe(self.supervisor.end_run, RunError(line))

            self._context.hosts.on_death(host_died)

    def _add_generators(self, placement: Placement) -> None:
        """Of the policy, which come first, and of the hosted models."""
        config = self._context.config
        for index, where in enumerate(placement.generators):
            self._add_generator(
                "", index, f"generator {index}", config.generator, "generator", where
            )
        for number, (model, places) in enumerate(
            zip(self._hosted.values(), placement.hosted, strict=True)
        ):
            own = GeneratorConfig(engine=model.engine, replicas=model.replicas)
            for index, where in enumerate(places):
                name = f"hosted model {model.path!r}" + (
                    f" replica {index}" if len(places) > 1 else ""
                )
                self._add_generator(model.path, index, name, own, f"hosted_{number}", where)

    def _add_generator(
        self, model: str, index: int, name: str, generator: GeneratorConfig, role: str, where: Place
    ) -> None:
        config, device = self._context.config, self._context.plan.device

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
            spawn=lambda label: self._spawn(
                label,
                where,
                device,
                Generator,
                config=generator,
                model_path=model or config.model.hf_assets_path,
                device=device,
                role=role,
                index=index,
                adapters=None if model or self._trainer is None else config.served,
                routes=not model
                and self._trainer is not None
                and config.trainer.router_replay != "off",
            ),
            connect=connect,
            disconnect=partial(self._replicas.lose, model, index),
        )

    async def _start_readers(
        self, trainer_hosts: set[str], generator_hosts: Sequence[str]
    ) -> WeightReaders | None:
        """Spawn and connect a weight reader on each host that needs one, on the cores of its first generator.

        Args:
            generator_hosts: of each replica of the policy.
        """
        first = first_generators(trainer_hosts, generator_hosts)
        places = [self._placement.generators[index] for index in first]
        readers = WeightReaders((f"host_{place.host}" for place in places), len(trainer_hosts))
        await self._start_all(
            [self._reader(readers, number, place) for number, place in enumerate(places)]
        )
        return readers if places else None

    def _reader(self, readers: WeightReaders, number: int, where: Place) -> Part:
        host = f"host_{where.host}"
        if self._context.plan.device == "cpu":
            cores = where.devices
        elif self._context.hosts is None:
            cores = tuple(sorted(os.sched_getaffinity(0)))
        else:
            cores = self._context.hosts.hosts[where.host].cores
        return Part(
            name=f"weight reader {number}",
            host=where.host,
            spawn=lambda label: self._spawn(
                label, Place(where.host, cores), "cpu", WeightReader, index=number
            ),
            connect=partial(readers.admit, host),
            disconnect=partial(readers.lose, host),
        )

    def _worker(self, index: int, where: Place) -> Part:
        config = self._context.config

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
            spawn=lambda label: self._spawn(
                label,
                where,
                "cpu",
                RolloutWorker,
                tasks=config.tasks,
                renderer=config.renderer,
                tokenizer_path=config.model.hf_assets_path,
                seed=config.seed,
                limits=config.user_code,
                index=index,
                client_id=next(self._client_ids),
                stops_at_texts=config.generator.engine.stops_at_texts,
            ),
            set_up=set_up,
            connect=connect,
            disconnect=disconnect,
            blocks=True,
        )
        return part

    def _spawn(
        self,
        label: str,
        where: Place,
        device: Device,
        actor_class: type[Actor],
        /,
        **arguments: Any,
    ) -> tuple[ProcMesh, Any]:
        """Spawns one process, and an actor in it."""
        run_dir = self._context.run_dir
        procs, _ = spawn_on(self._context.hosts, label, [where], device, run_dir=run_dir)
        return procs, procs.spawn(label, actor_class, run_dir=str(run_dir), **arguments)

    def _stopped(self, model: str, index: int, cause: str) -> None:
        """The engine of a replica can't go on: kill its process, so that the supervisor restarts it."""
        self._generating[model, index].process.life.kill(f"its engine stopped: {cause}")


@dataclass(slots=True)
class _Built:
    """What trains, and what says how the training went."""

    training: TrainingLoop
    rollouts: RolloutLoop
    checkpoints: RunCheckpoints
    reports: RunReports
    profile: StepProfile


class Run:
    """``run``, then ``settle``, after which ``summary`` says how it ended, then ``close``."""

    def __init__(self, context: RunContext, *, resumed: Resumed | None, init_from: Path | None):
        """
        Args:
            resumed: the run's own checkpoint that it goes on from.
            init_from: a checkpoint of another run, with whose weights this one begins.
        """
        config, run_dir = context.config, context.run_dir
        self._context, self._resumed, self._init_from = context, resumed, init_from
        self._failure: Exception | None = None
        self._actors = RunActors(context, on_failure=self._fail)
        self.supervisor = self._actors.supervisor
        self._tasks = TaskSet(config.tasks, ordered=context.ordered, limits=config.user_code)
        self._built: _Built | None = None
        self._building: asyncio.Task[_Built] | None = None
        self._closing = Closing()
        self._to_settle: list[tuple[str, Callable[[], Awaitable[Any]]]] = []
        """What writes the run's files and counts its rollouts, in the order it was built."""
        self._to_close: list[tuple[str, Callable[[], Awaitable[Any]]]] = [
            ("the actors", self._actors.close)
        ]
        """What the tasks may use until they are closed."""
        self._files = {
            "metrics": run_dir / METRICS_FILE,
            "records": run_dir / ROLLOUTS_FILE,
            "ledger": run_dir / LEDGER_FILE,
            "logs": run_dir / "logs",
        }

    @property
    def ended_early(self) -> str | None:
        """Why there is nothing left to learn."""
        return None if self._built is None else self._built.reports.why_ended_early

    @property
    def steps_done(self) -> int:
        """Optimizer steps since the run began."""
        if self._built is not None:
            return self._built.training.steps_done
        return self._resumed.state.step if self._resumed is not None else 0

    @property
    def writes_checkpoint(self) -> bool:
        """Whether a checkpoint is being written."""
        return self._built is not None and self._built.checkpoints.writing

    async def run(self) -> None:
        """Build everything, and train.

        Raises:
            ProcessLost: the trainer died.
            Exception: whatever else ended the run early. What could be saved is saved.
            CancelledError: it was stopped while it was built.
        """
        unless_failed = self.supervisor.unless_failed
        try:
            self._building = asyncio.create_task(contained(unless_failed(self._build())))
            await contained(unless_failed(self._train(await self._building)))
        except Exception as error:
            explained = await self.supervisor.explained(error)
            checkpoints = None if self._built is None else self._built.checkpoints
            if explained is self.supervisor.lost:
                if checkpoints is not None:
                    checkpoints.trainer_lost(explained)
                raise explained from None
            logger.exception("the run failed", extra=ENDS_THE_RUN)
            if checkpoints is not None and not self._actors.trainer_lost:
                # What was trained since the last checkpoint, as far as the trainer still answers.
                try:
                    await ask(checkpoints.finish, timeout_s=PART_TIMEOUT_S)
                except UserCodeError as unsaved:
                    logger.warning("the state before the error is not saved: %s", sentence(unsaved))
            raise (
                RunError(str(explained)) if isinstance(explained, UserCodeError) else explained
            ) from None

    def stop(self) -> None:
        """End after the step that is being taken, or at once while it is being built."""
        if self._building is not None:
            self._building.cancel()
        if self._built is not None:
            self._built.training.stop()

    def _fail(self, error: Exception) -> None:
        self._failure = self._failure or error
        if self._built is not None:
            self._built.rollouts.fail(error)

    async def _build(self) -> _Built:
        context, config, resumed = self._context, self._context.config, self._resumed
        step = 0 if resumed is None else resumed.state.step
        metrics = config.metrics.build(
            run_dir=context.run_dir,
            run_config=save_config(context.run_dir, config),
            resume_step=None if resumed is None else step,
        )
        self._to_close.append(("the metrics", partial(asyncio.to_thread, metrics.close)))
        known = build_context(config.renderer, config.model.hf_assets_path, seed=config.seed)
        await self._tasks.build(known)
        tasks, batcher = (
            self._tasks.tasks,
            config.batcher.build(positions=model_positions(config.model)),
        )
        selection = Selection(
            context.ordered,
            mix=await self._user_call(
                partial(
                    config.task_mix.build,
                    weights={name: task.weight for name, task in config.tasks.items()},
                ),
                "task_mix",
            ),
            tasks=tasks,
            **{
                slot: [
                    await self._user_call(partial(build_with, entry, known), f"{slot}[{i}]")
                    for i, entry in enumerate(getattr(config, slot))
                ]
                for slot in ("pre_batch_filters", "post_batch_filters")
            },
        )
        for line in selection.without_state():
            context.console.note(line)
        text = np.array(known.renderer.render_ids(CANARY_MESSAGES), np.int32)
        await self._actors.start(text, trainer_start(resumed, self._init_from))
        with context.console.waits.wait("the tasks to be set up"):
            runner = await self._actors.start_runner(self._tasks)
        replay = GroupReplay(
            config.replay,
            rollouts_per_step=config.rollouts_per_step,
            seed=config.seed,
            load=resumed is None,
        )
        recorder = config.recorder.build(run_dir=context.run_dir)
        self._to_settle.append(("the recorder", partial(self._close_recorder, recorder)))
        reports = RunReports(
            context,
            metrics=metrics,
            compares_rewards=any(task.algorithm.group_relative for task in tasks.values()),
            validations=(resumed.state.first_validation, resumed.state.last_validation)
            if resumed is not None
            else (),
        )
        picks = {name: groups_per_pick(task) for name, task in tasks.items()}
        stall, alarm = (
            StallDetectors(config.max_drops_in_a_row, picks, context.console.note),
            mismatch_alarm(config),
        )
        profile = StepProfile(
            config.profile_steps, run_dir=context.run_dir, processes=self.supervisor.processes
        )
        watchers: list[RunEvents] = [stall, alarm, profile, reports]
        schedule = Schedule.of_config(config, steps_done=step)
        parts = Parts(
            selection=selection,
            runner=runner,
            policy=self._actors.policy,
            batcher=batcher,
            trainer=self._actors.trainer,
            weights=self._actors.weights,
            ordered=context.ordered,
            ledger=Ledger(self._files["ledger"]),
            recorder=recorder,
            replay=replay,
            generated_tokens=lambda: self._actors.policy.generated_tokens,
        )
        loops = build_loop(schedule, parts, watchers=watchers, on_failure=self._fail)
        rollouts, training, validator = loops.rollouts, loops.training, loops.validator
        self._to_settle.append(("the rollout loop", rollouts.close))
        checkpoints = RunCheckpoints(
            context=context,
            rollouts=rollouts,
            validator=validator,
            stall=stall,
            alarm=alarm,
            trainer=self._actors.trainer,
            metrics=metrics,
            recorder=recorder,
            reports=reports,
        )
        watchers.append(checkpoints)  # a step that could not be reported is not saved
        if resumed is not None:
            await rollouts.restore(resumed.state.rollouts, resumed.groups, step)
            assert resumed.state.rollouts.stall is not None, "every checkpoint has it"
            stall.restore(resumed.state.rollouts.stall)
            validator.restore(resumed.state.validator, step)
            alarm.restore(resumed.state.mismatch)
            checkpoints.resumed(resumed.checkpoint, step)
        self._to_settle += [("the training loop", training.close), ("the profile", profile.close)]
        if self._failure is not None:  # while this was built
            rollouts.fail(self._failure)
        self._built = _Built(training, rollouts, checkpoints, reports, profile)
        return self._built

    async def _user_call(self, build: Callable[[], Any], field: str) -> Any:
        """Return what a config that users may have written builds; an error names its field."""
        timeout_s = self._context.config.user_code.setup_timeout_s
        return await self._context.ordered.call(
            build, owner=f"{field} can't be built", timeout_s=timeout_s
        )

    async def _train(self, built: _Built) -> None:
        training, waits = built.training, self._context.console.waits
        built.reports.begin(training.steps_done, self._context.config.steps)
        await training.run()
        waits.close()
        with waits.wait("the checkpoint to be written"):
            await built.checkpoints.finish()
        if training.steps_done:
            with waits.wait("the policy to be written as a hub folder"):
                folder = await self._actors.trainer.save_final(training.steps_done)
            if folder is not None:
                self._files["policy"] = folder

    async def settle(self) -> list[RunError]:
        """Close what writes the run's files and counts its rollouts. Returns what went wrong, in order."""
        self._context.console.waits.close()
        if self._built is not None:
            # One that is being written must not appear when the run is built again from the one before.
            lost = self.supervisor.lost is not None
            limit_s = self._context.config.supervision.slow_work_s if lost else PART_TIMEOUT_S
            await self._closing.close(
                "the checkpoints", self._built.checkpoints.close, timeout_s=limit_s
            )
        for name, close in reversed(self._to_settle):
            await self._closing.close(name, close)
        return self._closing.faults

    async def _close_recorder(self, recorder: RolloutRecorder) -> None:
        await asyncio.to_thread(recorder.close)
        if recorder.not_recorded:
            logger.warning(
                "%d rollouts are not in %s", recorder.not_recorded, self._files["records"]
            )

    async def close(self) -> list[RunError]:
        """Close what was built and ``settle`` has left, users of a part before the part itself. A second call does nothing.

        Returns:
            What went wrong since the parts ended, in order.
        """
        closing, parts = self._closing, self._to_close
        if parts:
            self._to_close = []
            await closing.close("the tasks", self._tasks.close, timeout_s=None)
            await asyncio.gather(*(closing.close(*part) for part in parts))
        return closing.faults

    def summary(
        self, *, wall_time_s: float, stopped_by: str | None, checkpoint: Path | None
    ) -> RunSummary:
        """
        Args:
            checkpoint: what the run can go on from, unless it has taken another since.
        """
        built, first, last, more = self._built, None, None, {"checkpoint": checkpoint}
        if built is not None:
            first, last = built.reports.first_and_last_validation()
            more = {
                "batch": self._actors.trainer.failed_batch,
                "profile": built.profile.file,
                "checkpoint": built.checkpoints.newest,
            }
        return RunSummary(
            steps=self.steps_done,
            total_steps=self._context.config.steps,
            wall_time_s=wall_time_s,
            start_val_reward=first,
            final_val_reward=last,
            ledger={} if built is None else built.rollouts.ledger.counts(),
            files=self._files | {name: path for name, path in more.items() if path is not None},
            stopped_by=stopped_by,
            not_saved=None if built is None else built.checkpoints.failure,
            run_dir=self._context.run_dir,
            val_examples=None if built is None else built.reports.validation_examples,
        )
